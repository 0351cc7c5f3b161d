"""The replicas of a service: which there are, and how more are started, drained, restarted and, when lost, replaced.

A drained replica takes no new requests, ends those that it has, saves its pages to the storage and stops.
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
"""Between two attempts to start a replica again."""


@dataclass(eq=False)
class Member:
    """A replica that serves, or is being drained.

    Attributes:
        name: in use once at a time.
        is_leaving: takes no new requests.
    """

    name: str
    engine: RayEngine
    is_leaving: bool = False

    async def drain(self, *, timeout_s: float) -> dict[str, Any]:
        """Take no new requests, let open ones end, hand the others back, and save the cache; says what was done.

        Args:
            timeout_s: for open requests to end, and then for saving.
        """
        self.is_leaving = True
        deadline = time.monotonic() + timeout_s
        streams = self.engine.streams
        while len(streams) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        num_moved = len(streams)
        streams.fail(EngineStoppedError(f"replica {self.name} is drained"))
        return {"name": self.name, "moved_requests": num_moved, "saved": await self._save(timeout_s)}

    async def _save(self, timeout_s: float) -> Mapping[str, Any]:
        try:
            return await self.engine.admin(CacheCommand(CacheAction.FLUSH, timeout_s=timeout_s))
        except ConfigError:
            return {}  # there is no storage
        except RayCacheError as error:
            _log.warning("pages of replica %s are not saved: %s", self.name, error)
            return {"error": str(error)}


class Members:
    """The replicas that there are. All but the constructor belongs to one event loop.

    Args:
        router: told of those that come and go.
        started: name -> engine that serves, and its facts.
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
        """Whether there will, or may, be one more before long."""
        return bool(self._starting) or self._is_changing

    def watch(self) -> asyncio.Future[None]:
        """Watch those that are not watched yet, and start again what is lost.

        Returns:
            Fails with EngineStoppedError when no replica is left.
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
            raise ConfigError("the replicas are being changed already; wait until that is done")
        # An operator who does not wait for the end must not leave a replica half drained.
        self._change = asyncio.create_task(self._changed(command))
        return await asyncio.shield(self._change)

    # --- who is there -------------------------------------------------------------------------------------------------

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
        self._replacing.add(task)  # or it could be collected while it runs
        task.add_done_callback(self._replacing.discard)

    async def _replaced(self, member: Member, error: BaseException) -> None:
        """Start a lost replica again, as long as there are others; a service that has none left is better started anew
        by whoever started it."""
        pause_s = _FIRST_PAUSE_S
        while self._members or self._starting:
            _log.warning("replica %s is lost: %s; starting it again in %.0f s", member.name, error, pause_s)
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
        """One more replica; its name."""
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

    # --- an operator's changes ----------------------------------------------------------------------------------------

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
        """One after the other, so that there is room for all but one, or for one more."""
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
                    self._replace(member, cause)  # or there would be one less for ever
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
