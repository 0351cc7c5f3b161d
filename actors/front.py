"""The engine actor as the HTTP server sees it: an `AsyncEngine` that outlives the actor and the nodes of its ranks.

One task receives the actor's messages and dispatches them to open requests, so that a step costs one message, not one
per request. When the actor dies, its supervisor starts another, which continues all open requests after the tokens that
their clients already have; clients see only a pause.

    generate -> Streams -> submit -> EngineActor -> receive -> Streams -> client
                   ` - - - - - - -> the next one, when it died
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from actors.answers import ActorLostError
from actors.engine import Message
from actors.node_watch import NodeWatch
from actors.placement import Placement
from actors.progress import OnProgress
from actors.streams import Streams
from actors.supervisor import Supervisor
from raycache.config import Config
from raycache.errors import EngineStoppedError, RayCacheError
from raycache.host.commands import STORAGE_FIRST, is_for_storage, with_storage
from raycache.types import (
    CacheAction,
    CacheCommand,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    RequestOutput,
    StreamState,
)

_log = logging.getLogger(__name__)
_FIGURES_TIMEOUT_S = 60.0
"""Timeout of storage counters at startup."""
_EXPIRE_S = 0.1
"""Interval of checks for expired requests while no engine is running."""


class RayEngine:
    """Client of successive engine actors.

    Args:
        device: "cpu" or "cuda".
        placement: where the ranks run; the engine releases it.
        replica: name of this engine's replica.

    Attributes:
        streams: all open requests.
        away: why no engine is available right now; empty if one is.
    """

    def __init__(self, config: Config, *, device: str, placement: Placement, replica: str = "0") -> None:
        self._supervisor = Supervisor(config, device=device, placement=placement, replica=replica)
        self._nodes = NodeWatch(self._supervisor, drain_timeout_s=config.drain_timeout_s)
        self._replacing = ThreadPoolExecutor(1, f"supervisor of {replica}")
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self.streams = Streams()
        self.away = ""

    def wait_ready(self, *, timeout_s: float, on_progress: OnProgress) -> EngineInfo:
        """Wait until the ranks run.

        Args:
            timeout_s: time limit of the start.
            on_progress: called with phase and fraction.
        Raises:
            RayCacheError: the start failed.
        """
        info = self._supervisor.wait_ready(timeout_s=timeout_s, on_progress=on_progress)
        return _with_storage_facts(info, self._supervisor.arenas.status_now(timeout_s=_FIGURES_TIMEOUT_S))

    async def info(self) -> EngineInfo:
        info: EngineInfo = await self._ask("info")
        return _with_storage_facts(info, await self._supervisor.arenas.status())

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._ask("stats")
        tiers = with_storage(stats.tiers, await self._supervisor.arenas.status())
        return replace(stats, tiers=tiers, engines_lost=self._supervisor.num_lost)

    async def stream_states(self, request_ids: Sequence[str]) -> Mapping[str, StreamState]:
        found: Mapping[str, StreamState] = await self._ask("stream_states", request_ids)
        return found

    async def check(self) -> None:
        """Assert that the engine's pages, slots and locks balance."""
        await self._ask("check")

    async def admin(self, command: CacheCommand) -> Mapping[str, Any]:
        arenas, done = self._supervisor.arenas, dict[str, Any]()
        if command.kind in STORAGE_FIRST:
            done = await arenas.carry_out(command)
        if command.kind is CacheAction.SCRUB:
            return done  # it may take hours, and does not involve the decider
        self._require_engine()
        done |= await self._supervisor.engine.admin(command)
        if is_for_storage(command) and command.kind not in STORAGE_FIRST:
            done |= await arenas.carry_out(command)
        if command.kind is CacheAction.STATUS:
            done["tiers"] = with_storage(done["tiers"], await arenas.status())
        return done

    async def watch(self) -> None:
        """Wait until there is no engine left.

        Raises:
            EngineStoppedError: the engine has ended for good.
        """
        # Shielded: a cancelled wait here must not cancel the receiving.
        await asyncio.shield(self._start_tasks())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        self._start_tasks()
        stream = self.streams.open(request)
        if not self.away:
            self._supervisor.engine.submit(stream.request)
        is_over = False
        try:
            while not is_over:
                message = await stream.unread.get()
                is_over = isinstance(message, RayCacheError) or message.finish_reason is not None
                if isinstance(message, RayCacheError):
                    raise message
                yield message
        finally:
            self.streams.close(stream)
            if not is_over:
                self._supervisor.engine.cancel(request.request_id)

    def stop(self) -> None:
        """Stop engine, ranks and host tier; returns when they are gone, or after a deadline."""
        self._is_stopping = True
        self._supervisor.stop()

    def _start_tasks(self) -> asyncio.Task[None]:
        """Start receiving and watching nodes; returns the receiving task."""
        if not self._tasks or self._tasks[0].done():
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._receive()), loop.create_task(self._nodes.run())]
            self._tasks[0].add_done_callback(self._on_receiving_over)
        return self._tasks[0]

    async def _receive(self) -> None:
        while True:
            try:
                messages = await self._supervisor.engine.receive()
            except ActorLostError as error:
                if self._is_stopping:
                    raise
                await self._replace_engine(error)
            else:
                self._take(messages)

    def _take(self, messages: list[Message]) -> None:
        told = []
        for request_id, message in messages:
            match message:
                case str():
                    _log.warning("%s", message)
                    continue
                case RequestOutput() if message.token_ids:
                    self._supervisor.note_token()
            told.append((request_id, message))
        for request in self.streams.take(told):
            self._supervisor.engine.submit(request)

    async def _replace_engine(self, error: RayCacheError) -> None:
        """Start another engine and resume all open requests on it; meanwhile, requests whose deadline passes end."""

        def tell(phase: str, share: float) -> None:
            self.away = f"recovering, {phase}"

        _log.warning("%s; starting another one for %d open requests", error, len(self.streams))
        tell(str(error), 0.0)
        replaced = asyncio.get_running_loop().run_in_executor(
            self._replacing, partial(self._supervisor.replace_engine, error, on_progress=tell)
        )
        while not replaced.done():
            self.streams.expire()
            await asyncio.wait([replaced], timeout=_EXPIRE_S)
        replaced.result()
        # At once with resuming: what comes from here on is submitted by who opens it.
        self.away = ""
        for request in self.streams.resume():
            self._supervisor.engine.submit(request)

    def _on_receiving_over(self, task: asyncio.Task[None]) -> None:
        """Fail all open requests once receiving has ended for any reason."""
        self._tasks[1].cancel()
        error = None if task.cancelled() else task.exception()
        self.streams.fail(EngineStoppedError(str(error or "the server is stopping")))

    async def _ask(self, method: str, *arguments: object) -> Any:
        self._require_engine()
        return await self._supervisor.engine.ask(method, *arguments)

    def _require_engine(self) -> None:
        if self.away:
            raise EngineStoppedError(self.away)


def _with_storage_facts(info: EngineInfo, storage: Mapping[str, Any]) -> EngineInfo:
    if not storage:
        return info
    facts = {"name": storage["name"], "bytes": storage["bytes_limit"]}
    return replace(info, tiers={**info.tiers, "storage": facts})
