"""Watches the nodes of an engine's ranks, and stops an engine that cannot stay there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time

from actors.drain import DepartingNodes, can_move, departing_nodes
from actors.handle import EngineHandle
from actors.supervisor import Supervisor
from raycache.errors import RayCacheError
from raycache.types import CacheAction, CacheCommand

_log = logging.getLogger(__name__)
_MOVE_S = 5.0
"""How long before a draining node's deadline its ranks leave, even without resources elsewhere."""
_PAST_S = 10.0
"""Assumed for a draining node whose deadline has already passed: the clocks may differ."""
_LOOK_S = 1.0
"""Polling interval."""


class NodeWatch:
    """Stops an engine when a node of its ranks is lost or drains; its front end then has it replaced.

    Args:
        drain_timeout_s: limit for saving the cache before leaving a draining node.
    """

    def __init__(self, supervisor: Supervisor, *, drain_timeout_s: float) -> None:
        self._supervisor = supervisor
        self._drain_timeout_s = drain_timeout_s

    async def run(self) -> None:
        """Watch the supervisor's current engine until cancelled."""
        ended = None
        while True:
            await asyncio.sleep(_LOOK_S)
            engine = self._supervisor.engine
            try:
                if engine is not ended and await self._has_ended(engine):
                    ended = engine
            except OSError:
                continue  # the head is unreachable; it may come back
            except Exception:  # last resort: without this watch, requests would hang on a lost node
                _log.exception("could not check the nodes; retrying")

    async def _has_ended(self, engine: EngineHandle) -> bool:
        """Stop an engine if it has to leave a node; returns whether it had to.

        Raises:
            OSError: the state of the nodes is unknown.
        """
        placement = engine.placement
        departing = await asyncio.to_thread(departing_nodes, placement.nodes)
        if departing.draining and not departing.lost and self._supervisor.is_serving(engine):
            departing = await self._save_and_wait(engine, departing)
        if departing.lost and engine is self._supervisor.engine:
            _log.warning("node %s was lost", ", ".join(placement.addresses.get(node, node) for node in departing.lost))
            engine.kill()
            return True
        if not departing or not self._supervisor.is_serving(engine):
            return False  # its successor is placed elsewhere anyway
        await asyncio.to_thread(engine.stop)
        return True

    async def _save_and_wait(self, engine: EngineHandle, departing: DepartingNodes) -> DepartingNodes:
        """Save the cache, and wait for resources elsewhere until the node's deadline; requests continue meanwhile.

        Returns:
            The departing nodes afterwards; one may have been lost in the meantime.
        """
        placement, left_s = engine.placement, departing.left_s
        who = ", ".join(placement.addresses.get(node, node) for node in departing.draining)
        _log.warning("node %s is draining%s", who, f", {left_s:.0f} s left" if math.isfinite(left_s) else "")
        if left_s <= 0:
            left_s = _PAST_S
            _log.warning("its deadline has passed; assuming %.0f s, since the clocks may differ", left_s)
        end_s = time.monotonic() + left_s - _MOVE_S
        saving = asyncio.create_task(self._save(engine, who, timeout_s=max(0.0, left_s - _MOVE_S)))
        try:
            while self._supervisor.is_serving(engine) and not departing.lost and time.monotonic() < end_s:
                await asyncio.sleep(_LOOK_S)
                with contextlib.suppress(OSError):
                    departing = await asyncio.to_thread(departing_nodes, placement.nodes) or departing
                    if saving.done() and await asyncio.to_thread(can_move, placement):
                        break
            if self._supervisor.is_serving(engine) and not departing.lost:
                await asyncio.wait([saving], timeout=_LOOK_S)  # its time limit is over, too
        finally:
            saving.cancel()
        return departing

    async def _save(self, engine: EngineHandle, who: str, *, timeout_s: float) -> None:
        try:
            flush = CacheCommand(CacheAction.FLUSH, timeout_s=min(self._drain_timeout_s, timeout_s))
            done = await engine.admin(flush)
            _log.warning(
                "flushed before leaving node %s: %s", who, ", ".join(f"{name} {value}" for name, value in done.items())
            )
        except RayCacheError as cause:
            _log.warning("could not save the cache before leaving node %s: %s", who, cause)
