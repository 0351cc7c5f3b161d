"""The set of replicas of a service: starts, drains and restarts them, and replaces lost ones.

A draining replica accepts no new requests, finishes those that it has, saves its pages to storage and stops.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from actors.front import RayEngine
from actors.starter import Started, Starter, check_replicas
from raycache.api.replicas import ReplicaAction, ReplicaCommand
from raycache.config import Config
from raycache.errors import ConfigError, EngineStoppedError, RayCacheError
from raycache.routing.choice import Router
from raycache.types import CacheAction, CacheCommand, EngineInfo

_log = logging.getLogger(__name__)
_LOOK_S = 0.05
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Between two attempts to restart a lost replica."""


@dataclass(eq=False)
class Member:
    """A replica that serves or drains.

    Attributes:
        name: unique among current replicas.
        is_leaving: whether it is draining and accepts no new requests.
    """

    name: str
    engine: RayEngine
    is_leaving: bool = False

    async def drain(self, *, timeout_s: float) -> dict[str, Any]:
        """Accept no new requests, let open ones finish, give the rest to other replicas, and save the cache.

        Args:
            timeout_s: limit for open requests to finish, and again for saving.
        Returns:
            What was done, for the operator.
        """
        self.is_leaving = True
        deadline = time.monotonic() + timeout_s
        streams = self.engine.streams
        while len(streams) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        num_moved = len(streams)
        streams.fail(EngineStoppedError(f"replica {self.name} is draining"))
        return {"name": self.name, "moved_requests": num_moved, "saved": await self._save(timeout_s)}

    async def _save(self, timeout_s: float) -> Mapping[str, Any]:
        try:
            return await self.engine.admin(CacheCommand(CacheAction.FLUSH, timeout_s=timeout_s))
        except ConfigError:
            return {}  # there is no storage
        except RayCacheError as error:
            _log.warning("could not save the pages of replica %s: %s", self.name, error)
            return {"error": str(error)}


class Members:
    """The current replicas. Everything but the constructor belongs to one event loop.

    Args:
        router: notified of added and removed replicas.
        started: name -> (running engine, its info).
    """

    def __init__(self, config: Config, starter: Starter, router: Router, started: Mapping[str, Started]) -> None:
        self._config, self._starter, self._router = config, starter, router
        self._members: dict[str, Member] = {}
        self._starting: set[str] = set()
        self._wanted = len(started)
        self._change: asyncio.Task[Mapping[str, Any]] | None = None
        self._replacing: set[asyncio.Task[None]] = set()
        self._watches: dict[Member, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[None] | None = None
        for name, (engine, info) in started.items():
            self._join(name, engine, info)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    @property
    def is_one_coming(self) -> bool:
        """Whether another replica is starting, or may start before long."""
        return bool(self._starting) or self._is_changing

    def watch(self) -> asyncio.Future[None]:
        """Watch all replicas and restart lost ones.

        Returns:
            A future that fails with EngineStoppedError once no replica is left.
        """
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
            self._failure.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        for member in self:
            if member not in self._watches:
                self._watches[member] = asyncio.create_task(member.engine.watch())
                self._watches[member].add_done_callback(partial(self._on_watch_over, member))
        return self._failure

    async def carry_out(self, command: ReplicaCommand) -> Mapping[str, Any]:
        if command.kind is ReplicaAction.STATUS:
            return self._status()
        if self._is_changing:
            raise ConfigError("another change of the replicas is in progress; try again when it has finished")
        # Runs to its end even if the operator disconnects: no replica may stay half drained.
        self._change = asyncio.create_task(self._changed(command))
        return await asyncio.shield(self._change)

    # --- membership ---------------------------------------------------------------------------------------------------

    def _join(self, name: str, engine: RayEngine, info: EngineInfo) -> None:
        host_tokens = info.tiers.get("host", {}).get("tokens", 0)
        self._router.add(name, num_pages=info.num_pages + host_tokens // info.page_size)
        self._members[name] = Member(name, engine)
        if self._failure is not None:
            self.watch()

    def _leave(self, member: Member) -> None:
        del self._members[member.name]
        self._router.remove(member.name)
        if watch := self._watches.pop(member, None):
            watch.cancel()

    def _on_watch_over(self, member: Member, watch: asyncio.Task[None]) -> None:
        error = None if watch.cancelled() else watch.exception()
        if error is not None and self._members.get(member.name) is member and not member.is_leaving:
            self._leave(member)
            self._replace(member, error)

    def _replace(self, member: Member, error: BaseException) -> None:
        task = asyncio.create_task(self._replaced(member, error))
        self._replacing.add(task)  # keeps a reference: asyncio itself holds only a weak one
        task.add_done_callback(self._replacing.discard)

    async def _replaced(self, member: Member, error: BaseException) -> None:
        """Restart a lost replica while others serve; a service without any is restarted by its supervisor instead."""
        pause_s = _FIRST_PAUSE_S
        while self._members or self._starting:
            _log.warning("replica %s was lost: %s; restarting it in %.0f s", member.name, error, pause_s)
            await asyncio.to_thread(self._starter.end, member.engine)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if self._num_here >= self._wanted:
                return
            try:
                await self._start()
                return
            except RayCacheError as cause:
                error = cause
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(EngineStoppedError(str(error)))

    async def _start(self) -> str:
        """Start another replica; returns its name."""
        name = next(each for each in map(str, count()) if each not in self._members and each not in self._starting)
        self._starting.add(name)
        try:
            engine, info = await asyncio.to_thread(self._starter.start, name, on_progress=lambda phase, share: None)
        finally:
            self._starting.discard(name)
        self._join(name, engine, info)
        return name

    @property
    def _num_here(self) -> int:
        return len(self._starting) + sum(not one.is_leaving for one in self)

    # --- operator commands --------------------------------------------------------------------------------------------

    @property
    def _is_changing(self) -> bool:
        return self._change is not None and not self._change.done()

    async def _changed(self, command: ReplicaCommand) -> Mapping[str, Any]:
        if command.kind is ReplicaAction.SCALE:
            done = await self._scale(command.count)
        else:
            done = await self._restart(drain_first=command.drain_first)
        return {**self._status(), **done}

    async def _scale(self, wanted: int) -> dict[str, Any]:
        check_replicas(self._config, wanted)
        more, self._wanted = wanted - self._num_here, wanted
        if more > 0:
            started = await asyncio.gather(*(self._start() for _ in range(more)), return_exceptions=True)
            if failures := [one for one in started if isinstance(one, BaseException)]:
                self._wanted = self._num_here
                raise failures[0]
            return {"started": started}
        members = [one for one in self if not one.is_leaving]
        members.sort(key=lambda one: self._router.work(one.name))
        return {"drained": await asyncio.gather(*(self._drain(one) for one in members[: max(0, -more)]))}

    async def _restart(self, *, drain_first: bool) -> dict[str, Any]:
        """Replace the replicas one by one: capacity falls by one if `drain_first`, else one more is needed."""
        if not drain_first:
            check_replicas(self._config, len(self._members) + 1)
        started, drained = list[str](), list[dict[str, Any]]()
        for member in self:
            if drain_first:
                drained.append(await self._drain(member))
            try:
                started.append(await self._start())
            except RayCacheError as cause:
                if drain_first:
                    self._replace(member, cause)  # otherwise one would be missing for good
                raise
            if not drain_first:
                drained.append(await self._drain(member))
        return {"started": started, "drained": drained}

    async def _drain(self, member: Member) -> dict[str, Any]:
        done = await member.drain(timeout_s=self._config.drain_timeout_s)
        self._leave(member)
        await asyncio.to_thread(self._starter.end, member.engine)
        return done

    def _status(self) -> dict[str, Any]:
        rows = [
            {
                "name": one.name,
                "state": "draining" if one.is_leaving else "serving",
                "requests": len(one.engine.streams),
                "work_tokens": self._router.work(one.name),
            }
            for one in self
        ]
        rows += [{"name": name, "state": "starting", "requests": 0, "work_tokens": 0} for name in self._starting]
        return {"wanted": self._wanted, "routing": self._config.routing, "replicas": rows}
