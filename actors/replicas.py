"""Several engines behind one endpoint: an `AsyncEngine` over the `RayEngine` of each replica.

    generate -> Router -> RayEngine of replica 0 -> engine actor -> ranks
                     `--> RayEngine of replica 1 -> ...

A request belongs to one replica. If that is drained, or lost for good (a RayEngine replaces its engine actor, up to a
limit), the request continues on another one after the tokens that its client has received.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from actors.front import RayEngine
from actors.members import Member, Members
from actors.starter import REPLICA, Started, Starter, check_storage
from actors.streams import Stream, Streams
from raycache.api.replicas import ReplicaCommand
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
    StreamState,
)

T = TypeVar("T")

_LOOK_S = 0.05
_REPLY_TIMEOUT_S = 4.0
"""For the statistics of one of several replicas; without a reply, only the others' are reported."""

Refusals = dict[Member, RayCacheError]
"""Replicas that have refused a request, and why."""


class Replicas:
    """The replicas of a service as one `AsyncEngine`.

    Everything but the constructor and `stop` belongs to one event loop.

    Args:
        started: name -> (running engine, its info).
    """

    def __init__(self, config: Config, starter: Starter, started: Mapping[str, Started]) -> None:
        self._starter = starter
        self._router = Router(config.routing, page_size=config.page_size)
        self._members = Members(config, starter, self._router, started)
        self._streams = Streams()

    async def watch(self) -> None:
        """Wait until no replica is left.

        Raises:
            EngineStoppedError: all replicas are lost for good.
        """
        await asyncio.shield(self._members.watch())

    async def info(self) -> EngineInfo:
        return total_info(await self._ask(lambda engine: engine.info()))

    async def stats(self) -> EngineStats:
        return total_stats(await self._ask(lambda engine: engine.stats()))

    async def stream_states(self, request_ids: Sequence[str]) -> Mapping[str, StreamState]:
        replies = await self._ask(lambda engine: engine.stream_states(request_ids))
        if list(replies) == ["0"]:
            return replies["0"]
        return {
            request_id: replace(state, replica=name)
            for name, states in replies.items()
            for request_id, state in states.items()
        }

    async def check(self) -> None:
        """Assert that pages, slots and locks of all engines balance."""
        for member in self._members:
            await member.engine.check()

    async def admin(self, command: CacheCommand) -> Mapping[str, Any]:
        members = [one for one in self._members if command.replica in ("", one.name)]
        if not members:
            names = ", ".join(one.name for one in self._members) or "none"
            raise ConfigError(f"there is no replica {command.replica!r}; replicas: {names}")
        if command.kind is CacheAction.ATTACH and len(members) > 1:
            check_storage(command.url)
        done = await asyncio.gather(
            *(one.engine.admin(replace(command, url=command.url.replace(REPLICA, one.name))) for one in members)
        )
        if command.kind is CacheAction.CLEAR and "device" in (command.tiers or TIERS):
            for member in members:
                self._router.clear(member.name)
        return total_answer({member.name: one for member, one in zip(members, done, strict=True)})

    async def carry_out(self, command: ReplicaCommand) -> Mapping[str, Any]:
        return await self._members.carry_out(command)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        self._members.watch()
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
                            yield stream.note(output)
                except (QueueFullError, EngineStoppedError) as refusal:
                    refusals[member] = refusal
                    stream.is_resumed |= isinstance(refusal, EngineStoppedError)
                finally:
                    self._router.end(route)
        finally:
            self._streams.close(stream)

    def stop(self) -> None:
        """Stop all engines; blocks until they have ended, up to a timeout."""
        self._starter.stop()

    async def _candidates(self, stream: Stream, refusals: Refusals) -> list[str]:
        """Return the names of replicas that can take a request; waits for one that is starting.

        Raises:
            RayCacheError: there is none.
        """
        while True:
            members = [one for one in self._members if not one.is_leaving]
            if names := [one.name for one in members if one not in refusals]:
                # Recovering replicas are used only if all are recovering.
                return [name for name in names if not self._members[name].engine.away] or names
            was_taken = any(isinstance(error, EngineStoppedError) for error in refusals.values())
            full = [one for one, error in refusals.items() if isinstance(error, QueueFullError)]
            if was_taken and full:
                for member in full:  # retry: their queues shrink as other requests end
                    del refusals[member]
            elif not (self._members.is_one_coming and (was_taken or not members)):
                raise list(refusals.values())[-1] if refusals else EngineStoppedError("no replica is serving")
            if stream.deadline is not None and stream.deadline < time.monotonic():
                raise RequestTimeoutError("no replica was ready before the request's deadline")
            await asyncio.sleep(_LOOK_S)

    async def _ask(self, question: Callable[[RayEngine], Awaitable[T]]) -> dict[str, T]:
        """Return replies by replica, of those that reply.

        Raises:
            EngineStoppedError: none does.
        """
        members = list(self._members)
        if len(members) == 1:
            return {members[0].name: await question(members[0].engine)}
        found = await asyncio.gather(*(_within(question(one.engine)) for one in members))
        replies = {one.name: each for one, each in zip(members, found, strict=True) if not isinstance(each, str)}
        if not replies:
            raise EngineStoppedError("; ".join(map(str, found)) or "no replica is serving")
        return replies


async def _within(reply: Awaitable[T]) -> T | str:
    """Return the reply, or the reason why there is none."""
    try:
        async with asyncio.timeout(_REPLY_TIMEOUT_S):
            return await reply
    except TimeoutError:
        return f"no reply within {_REPLY_TIMEOUT_S:.0f} s"
    except EngineStoppedError as error:
        return str(error)
