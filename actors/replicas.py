"""Several engines behind one endpoint: an `AsyncEngine` over the `RayEngine` of each replica.

    generate -> Router -> RayEngine of replica 0 -> engine actor -> ranks
                     `--> RayEngine of replica 1 -> ...

A request belongs to one replica. It goes on at another one, after the tokens that its client has, when its replica is
lost for good (a RayEngine replaces its engine actor itself, and gives up in the end) or drained. A lost replica is
started again. A drained one takes no new requests, ends those that it has, saves its pages to the storage and stops.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

from actors.front import RayEngine
from actors.starter import REPLICA, Started, Starter, check_replicas, check_storage
from actors.streams import Stream, Streams
from raycache.api.replicas import ReplicaAction, ReplicaCommand
from raycache.config import Config
from raycache.errors import ConfigError, EngineStoppedError, QueueFullError, RayCacheError, RequestTimeoutError
from raycache.routing.choice import Router
from raycache.routing.totals import total_answer, total_info, total_stats
from raycache.types import (
    TIERS,
    CacheAction,
    CacheCommand,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    RequestOutput,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)
_LOOK_S = 0.05
_ANSWER_TIMEOUT_S = 4.0
"""For figures of one of several replicas; those of the others do without it."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Between two attempts to start a replica again."""


@dataclass(eq=False)
class _Member:
    """A replica that serves, or is being drained.

    Attributes:
        name: in use once at a time.
        engine: of it.
        is_leaving: takes no new requests.
    """

    name: str
    engine: RayEngine
    is_leaving: bool = False


Refusals = dict[_Member, RayCacheError]
"""Replicas that one request cannot go to, and why."""


class Replicas:
    """The replicas of a service as one `AsyncEngine`. All but the constructor and `stop` belongs to one event loop.

    Args:
        config: of the service.
        starter: for more replicas.
        started: name -> engine that serves, and its facts.
    """

    def __init__(self, config: Config, starter: Starter, started: Mapping[str, Started]) -> None:
        self._config, self._starter = config, starter
        self._router = Router(config.routing, page_size=config.page_size)
        self._members: dict[str, _Member] = {}
        self._starting: set[str] = set()
        self._wanted = len(started)
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watches: dict[_Member, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[None] | None = None
        self._streams = Streams()
        for name, (engine, info) in started.items():
            self._join(name, engine, info)

    async def watch(self) -> None:
        """Wait as long as there is a replica, or one to come.

        Raises:
            EngineStoppedError: there is none any more, for good.
        """
        await asyncio.shield(self._watch_members())

    async def info(self) -> EngineInfo:
        return total_info(await self._ask(lambda engine: engine.info()))

    async def stats(self) -> EngineStats:
        return total_stats(await self._ask(lambda engine: engine.stats()))

    async def check(self) -> None:
        """Assert all balances of all engines."""
        for member in list(self._members.values()):
            await member.engine.check()

    async def admin(self, command: CacheCommand) -> Mapping[str, Any]:
        members = [one for one in self._members.values() if command.replica in ("", one.name)]
        if not members:
            raise ConfigError(
                f"there is no replica {command.replica!r}; there are {', '.join(self._members) or 'none'}"
            )
        if command.kind is CacheAction.ATTACH and len(members) > 1:
            check_storage(command.url)
        done = await asyncio.gather(
            *(one.engine.admin(replace(command, url=command.url.replace(REPLICA, one.name))) for one in members)
        )
        if command.kind is CacheAction.CLEAR and "device" in (command.tiers or TIERS):
            for member in members:
                self._router.clear(member.name)
        return total_answer({member.name: one for member, one in zip(members, done, strict=True)})

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        self._watch_members()
        stream = self._streams.open(request)
        refusals: Refusals = {}
        try:
            while not stream.is_ended:
                names = await self._candidates(stream, refusals)
                rest = stream.rest(time.monotonic())
                route = self._router.choose(rest, names)
                member = self._members[route.replica]
                try:
                    async with aclosing(member.engine.generate(rest)) as outputs:
                        async for output in outputs:
                            self._router.note(route, output)
                            stream.take(output)
                            message = stream.messages.get_nowait()
                            assert isinstance(message, RequestOutput), "take puts what it was given"
                            yield message
                except (QueueFullError, EngineStoppedError) as refusal:
                    refusals[member] = refusal
                    stream.is_resumed |= isinstance(refusal, EngineStoppedError)
                finally:
                    self._router.end(route)
        finally:
            self._streams.close(stream)

    async def carry_out(self, command: ReplicaCommand) -> Mapping[str, Any]:
        """See `ReplicaSet.carry_out`."""
        if command.kind is ReplicaAction.STATUS:
            return self._status()
        if self._changing.locked():
            raise ConfigError("the replicas are being changed already; wait until that is done")
        # An operator who does not wait for the end must not leave a replica half drained.
        return await asyncio.shield(self._spawn(self._change(command)))

    def stop(self) -> None:
        """End all engines; blocks until they are gone, or after deadlines."""
        self._starter.stop()

    # --- who takes a request ------------------------------------------------------------------------------------------

    async def _candidates(self, stream: Stream, refusals: Refusals) -> list[str]:
        """Names of the replicas that a request can go to; waits for one to come if that is under way.

        Raises:
            RayCacheError: there is none.
        """
        while True:
            members = [one for one in self._members.values() if not one.is_leaving]
            if names := [one.name for one in members if one not in refusals]:
                # One that recovers takes requests only if all do.
                return [name for name in names if not self._members[name].engine.away] or names
            was_taken = any(isinstance(error, EngineStoppedError) for error in refusals.values())
            full = [one for one, error in refusals.items() if isinstance(error, QueueFullError)]
            is_one_coming = bool(self._starting) or self._changing.locked()
            if was_taken and full:
                for member in full:  # they get room as others end
                    del refusals[member]
            elif not (is_one_coming and (was_taken or not members)):
                raise list(refusals.values())[-1] if refusals else EngineStoppedError("no replica serves")
            if stream.deadline is not None and stream.deadline < time.monotonic():
                raise RequestTimeoutError("no replica was ready before the request's deadline")
            await asyncio.sleep(_LOOK_S)

    async def _ask(self, question: Callable[[RayEngine], Awaitable[T]]) -> dict[str, T]:
        """Answers by replica, of those that answer.

        Raises:
            EngineStoppedError: none does.
        """
        members = list(self._members.values())
        if len(members) == 1:
            return {members[0].name: await question(members[0].engine)}
        found = await asyncio.gather(*(_within(question(one.engine)) for one in members))
        answers = {one.name: each for one, each in zip(members, found, strict=True) if not isinstance(each, str)}
        if not answers:
            raise EngineStoppedError("; ".join(map(str, found)) or "no replica serves")
        return answers

    # --- who is there -------------------------------------------------------------------------------------------------

    def _join(self, name: str, engine: RayEngine, info: EngineInfo) -> None:
        host_tokens = info.tiers.get("host", {}).get("tokens", 0)
        self._router.add(name, num_pages=info.num_pages + host_tokens // info.page_size)
        self._members[name] = _Member(name, engine)
        if self._failure is not None:
            self._watch_members()

    def _leave(self, member: _Member) -> None:
        del self._members[member.name]
        self._router.remove(member.name)
        if watch := self._watches.pop(member, None):
            watch.cancel()

    def _watch_members(self) -> asyncio.Future[None]:
        """Watch those that are not watched yet; what is given fails when no replica is left."""
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
            self._failure.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        for member in self._members.values():
            if member not in self._watches:
                self._watches[member] = asyncio.create_task(member.engine.watch())
                self._watches[member].add_done_callback(partial(self._on_watch_over, member))
        return self._failure

    def _on_watch_over(self, member: _Member, watch: asyncio.Task[None]) -> None:
        error = None if watch.cancelled() else watch.exception()
        if error is not None and self._members.get(member.name) is member and not member.is_leaving:
            self._leave(member)
            self._spawn(self._replace(member, error))

    async def _replace(self, member: _Member, error: BaseException) -> None:
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
        return len(self._starting) + sum(not one.is_leaving for one in self._members.values())

    # --- commands -----------------------------------------------------------------------------------------------------

    async def _change(self, command: ReplicaCommand) -> Mapping[str, Any]:
        async with self._changing:
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
        members = [one for one in self._members.values() if not one.is_leaving]
        members.sort(key=lambda one: self._router.work(one.name))
        return {"drained": await asyncio.gather(*(self._drain(one) for one in members[: max(0, -more)]))}

    async def _restart(self, *, drain_first: bool) -> dict[str, Any]:
        """One after the other, so that there is room for all but one, or for one more."""
        if not drain_first:
            check_replicas(self._config, len(self._members) + 1)
        started, drained = list[str](), list[dict[str, Any]]()
        for member in list(self._members.values()):
            if drain_first:
                drained.append(await self._drain(member))
            try:
                started.append(await self._start())
            except RayCacheError as cause:
                if drain_first:
                    self._spawn(self._replace(member, cause))  # or there would be one less for ever
                raise
            if not drain_first:
                drained.append(await self._drain(member))
        return {"started": started, "drained": drained}

    async def _drain(self, member: _Member) -> dict[str, Any]:
        """Take a replica away: no new requests, time for those that it has, its pages to the storage, its end."""
        member.is_leaving = True
        deadline = time.monotonic() + self._config.drain_timeout_s
        open_ = member.engine.streams
        while len(open_) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        num_moved = len(open_)
        open_.fail(EngineStoppedError(f"replica {member.name} is drained"))
        saved = await self._save(member)
        self._leave(member)
        await asyncio.to_thread(self._starter.end, member.engine)
        return {"name": member.name, "moved_requests": num_moved, "saved": saved}

    async def _save(self, member: _Member) -> Mapping[str, Any]:
        """Hand its pages to the storage, if there is one."""
        command = CacheCommand(CacheAction.FLUSH, timeout_s=self._config.drain_timeout_s)
        try:
            return await member.engine.admin(command)
        except ConfigError:
            return {}  # there is no storage
        except RayCacheError as error:
            _log.warning("pages of replica %s are not saved: %s", member.name, error)
            return {"error": str(error)}

    def _status(self) -> dict[str, Any]:
        rows = [
            {
                "name": one.name,
                "state": "draining" if one.is_leaving else "serving",
                "requests": len(one.engine.streams),
                "work_tokens": self._router.work(one.name),
            }
            for one in self._members.values()
        ]
        rows += [{"name": name, "state": "starting", "requests": 0, "work_tokens": 0} for name in self._starting]
        return {"wanted": self._wanted, "routing": self._config.routing, "replicas": rows}

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # or it could be collected while it runs
        task.add_done_callback(self._tasks.discard)
        return task


async def _within(answer: Awaitable[T]) -> T | str:
    """What is answered, or why there is nothing."""
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            return await answer
    except TimeoutError:
        return f"no answer for {_ANSWER_TIMEOUT_S:.0f} s"
    except EngineStoppedError as error:
        return str(error)
