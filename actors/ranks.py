"""The rank actors of a gang: creates them, asks all of them at once, and ends them.

Ranks can stand by for a gang that runs: their processes have imported all they need, hold no resources of Ray's and
nothing on a GPU, and wait. They become the next gang when that one is lost.

The engine creates them before it imports torch itself, so nothing here imports it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayTaskError

from actors.answers import ActorLostError, ours
from actors.placement import Placement
from actors.progress import OnProgress
from actors.rank import Gpus, RankActor
from raycache.config import Config
from raycache.errors import ConfigError, RankLostError
from raycache.host.directory import DirectoryGoneError

if TYPE_CHECKING:
    from raycache.gang.meeting import Meeting
    from raycache.parallel.board import AckBoard

_log = logging.getLogger(__name__)
_PROBE_S = 10.0
"""How long a rank that stands by may take to respond; an import in one of its threads can hold it up for seconds."""


class Ranks:
    """The actors of a gang, by rank. Their processes start, and import what they need, as soon as this exists.

    Args:
        config: of the service.
        epoch: of the gang.
        replica: whose ranks they are.
        on_progress: called while the gang starts; an exception from it aborts the start.
        gpus: of each rank of the running gang that these stand by for; empty: Ray gives them their own.
    Attributes:
        ready: ranks that stand by and have responded since they started.
    """

    def __init__(
        self,
        config: Config,
        *,
        placement: Placement,
        epoch: int,
        replica: str,
        on_progress: OnProgress,
        gpus: Sequence[Gpus] = (),
    ) -> None:
        self._config, self._on_progress = config, on_progress
        self._placement, self._epoch, self._replica, self._gpus = placement, epoch, replica, gpus
        self._seats = [f"{placement.group.id.hex()}-{rank}" for rank in range(config.world_size)]
        self._running: list[Any] = []
        self._actors = [self._new_actor(rank) for rank in range(config.world_size)]
        self._probes: dict[int, tuple[Any, float]] = {}  # rank -> unanswered call, and since when
        self.ready: set[int] = set()

    def _new_actor(self, rank: int) -> Any:
        options = self._placement.options(rank, stands_by=bool(self._gpus))
        gpus = self._gpus[rank] if self._gpus else None
        start = ray.remote(RankActor).options(**options).remote
        return start(self._config, rank, epoch=self._epoch, replica=self._replica, gpus=gpus)

    def replace_lost(self, *, waits: bool) -> bool:
        """Replace ranks that stand by and have died, or no longer respond; returns whether there were any.

        Args:
            waits: whether to wait for their responses, for up to `_PROBE_S`; else those to the calls before count.
        """
        lost = self._lost(timeout_s=0.0)
        for rank, actor in enumerate(self._actors):
            if rank not in self._probes and rank not in lost:
                self._probes[rank] = actor.__ray_ready__.remote(), time.monotonic()
        if waits:
            lost |= self._lost(timeout_s=_PROBE_S)
        for rank, how in lost.items():
            self._replace(rank, how)
        return bool(lost)

    def _replace(self, rank: int, how: str) -> None:
        _log.warning("the spare of rank %d is replaced: %s", rank, how)
        ray.kill(self._actors[rank])
        self._actors[rank] = self._new_actor(rank)
        self._probes.pop(rank, None)
        self.ready.discard(rank)

    def _lost(self, *, timeout_s: float) -> dict[int, str]:
        """Those that have died, or have not responded in time: rank -> cause."""
        if not self._probes:
            return {}
        if ready := [ref for rank, (ref, _) in self._probes.items() if rank in self.ready]:
            ray.wait(ready, num_returns=len(ready), timeout=timeout_s)
        refs = [ref for ref, _ in self._probes.values()]
        ended, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        found = {}
        for rank, (ref, since_s) in self._probes.items():
            if ref in ended:
                found[rank] = _how(ref)
            elif rank in self.ready and time.monotonic() - since_s >= _PROBE_S:  # others still import
                found[rank] = f"it has not responded for {_PROBE_S:.0f} s"
        self._probes = {rank: probe for rank, probe in self._probes.items() if rank not in found}
        self.ready |= {rank for rank, how in found.items() if not how}
        return {rank: how for rank, how in found.items() if how}

    def where(self) -> list[dict[str, Any]]:
        """Where all ranks are, once those before them have ended.

        Ranks that stood by and turn out to be dead only now are replaced, each of them once; the deadline begins anew.
        """
        calls = [actor.where.remote(seat) for actor, seat in zip(self._actors, self._seats, strict=True)]
        replaceable = set(range(len(calls))) if self._gpus else set()
        while True:
            try:
                return self._results(calls, phase="starting ranks")
            except RankLostError as lost:
                if lost.rank not in replaceable:
                    raise
                replaceable.remove(lost.rank)
                self._replace(lost.rank, lost.cause)
                calls[lost.rank] = self._actors[lost.rank].where.remote(self._seats[lost.rank])

    def ask(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]] = (),
        *,
        phase: str,
        board: AckBoard | None = None,
        **same: Any,
    ) -> list[Any]:
        """Results of all ranks, within the start's deadline.

        Args:
            method: name of the actor method.
            arguments: one per rank.
            phase: phase of the start, for progress.
            board: where they post how much they have loaded.
            same: arguments by name, the same for all.
        """
        each = arguments or [()] * len(self._actors)
        calls = [
            getattr(actor, method).remote(*values, **same) for actor, values in zip(self._actors, each, strict=True)
        ]
        return self._results(calls, phase=phase, board=board)

    def boards(self, meeting: Meeting, nodes: Sequence[str]) -> dict[str, Path]:
        """Make the boards of the other nodes; node -> where its ranks find theirs."""
        # The decider's loses its name at once, so that nothing is left of it even if this process is killed.
        here = {ray.get_runtime_context().get_node_id(): meeting.board.share()}
        calls = [self._actors[rank].new_board.remote() for rank in meeting.leaders]
        others = self._results(calls, phase="making boards")
        return {**here, **{nodes[rank]: path for rank, path in zip(meeting.leaders, others, strict=True)}}

    def run(self) -> None:
        """Start the main loops, which execute plans."""
        self._running = [actor.run.remote() for actor in self._actors]

    def wait(self) -> Mapping[int, str]:
        """Wait until some have ended: rank -> cause; "" for one that ended because it lost a peer."""
        ended, others = ray.wait(self._running, num_returns=1)
        ended += ray.wait(others, num_returns=len(others), timeout=0)[0] if others else []
        return {rank: _how(run) for rank, run in enumerate(self._running) if run in ended}

    def join(self, timeout_s: float) -> None:
        """Wait for all of them to end after their last plan."""
        ray.wait(self._running, num_returns=len(self._running), timeout=timeout_s)

    def end(self) -> None:
        """Kill all actors."""
        for actor in self._actors:
            ray.kill(actor)

    def _results(self, refs: list[Any], *, phase: str, board: AckBoard | None = None) -> list[Any]:
        begin = time.monotonic()
        pending = list(refs)
        while pending:
            self._tell(phase, board)
            ended, pending = ray.wait(pending, num_returns=len(pending), timeout=0.5)
            for ref in ended:
                try:
                    ray.get(ref)
                except RayTaskError as cause:
                    if isinstance(cause.cause, DirectoryGoneError):  # its owner died; the next engine has another made
                        raise ActorLostError(f"rank {refs.index(ref)}, {phase}: {cause.cause}") from cause
                    raise ours(cause) from cause
                except (RayActorError, ActorUnschedulableError) as cause:
                    rank = refs.index(ref)
                    coords = str(self._config.split.coords(rank))
                    raise RankLostError(rank, coords, 0, f"it died while {phase}") from cause
            waited = time.monotonic() - begin
            if waited > self._config.start_timeout_s:
                late = [refs.index(ref) for ref in pending]
                raise ConfigError(f"ranks {late} are still {phase} after {waited:.0f} s; see --start-timeout-s")
        try:
            return ray.get(refs, timeout=60)
        except GetTimeoutError as cause:
            raise RankLostError(-1, "unknown", 0, f"answers were lost while {phase}") from cause

    def _tell(self, phase: str, board: AckBoard | None) -> None:
        """Report phase and fraction; for weights also bytes, once all ranks know their totals."""
        loaded, to_load = (0, 0) if board is None else board.loaded()
        if to_load and not self._config.dummy_weights:
            from raycache.deployment.memory_use import human_bytes

            phase += f": {human_bytes(loaded)} of {human_bytes(to_load)}"
        self._on_progress(phase, loaded / max(to_load, 1))


def _how(run: Any) -> str:
    """How a rank ended that was not told to exit; "" if it did not fail."""
    try:
        ray.get(run)
    except (RayActorError, ActorUnschedulableError) as cause:
        return f"its actor died: {str(cause).strip().splitlines()[0]}"
    except RayTaskError as cause:
        return "" if isinstance(cause.cause, RankLostError) else repr(cause.cause)
    return ""
