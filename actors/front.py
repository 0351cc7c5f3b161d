"""The engine actor as the HTTP server sees it: an `AsyncEngine`, that outlives the actor and the nodes of its ranks.

One task polls the actor and hands its messages to the requests that wait for them, so that a step costs one call and
not one per request. When the actor dies, another takes its place and goes on with all open requests, each after the
tokens that its client has; a client sees a pause. A second task watches the nodes: when one is lost the engine is ended
at once, when one drains it is ended once its cache is saved, and the next one gets places elsewhere.

    generate -> Streams -> submit -> EngineActor -> poll -> Streams -> client
                   ` - - - - - - -> the next one, when it died
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.answers import ActorLostError, answer, answer_now
from actors.arena import Arenas
from actors.drain import Leaving, can_move, leaving
from actors.engine import EngineActor, Message
from actors.fetch import fetch_on
from actors.placement import Places
from actors.streams import Streams
from raycache.config import Config
from raycache.errors import ConfigError, EngineStoppedError, RankLostError, RayCacheError
from raycache.host.directory import DirectoryGoneError
from raycache.types import TIERS, CacheAction, CacheCommand, EngineInfo, EngineStats, GenerateRequest, RequestOutput

_log = logging.getLogger(__name__)
_POLL_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 60.0
"""For any answer of the engine actor; it has threads that do not wait for a step."""
_STOP_TIMEOUT_S = 15.0
_MAX_LOSSES = 4
"""Engines that may be lost one after another, none of which ran for long or gave a token, before the service ends."""
_STEADY_S = 120.0
"""An engine that has run for so long was not lost by its own start."""
_MOVE_S = 5.0
"""Before a draining node's end, when its ranks leave it whether or not there is room elsewhere."""
_PAST_S = 10.0
"""Taken for a draining node whose end is past when it is first heard of: the clock of who has set it may be wrong."""
_LOOK_S = 1.0
"""Between two looks at the nodes, and for room elsewhere."""
_SCRUB_TIMEOUT_S = 3600.0
_EPOCHS_PER_ENGINE = 1_000_000
_ENGINE = "the engine actor"

T = TypeVar("T")


class RayEngine:
    """Client of the engine actors that live one after another.

    Args:
        config: of the service.
        device: "cpu" or "cuda".
        places: for the ranks; this engine's own from now on, as are those that come after them.
        replica: name of this engine among others.

    Attributes:
        streams: all open requests.
        away: why there is no engine to ask right now; empty if there is one.
    """

    def __init__(self, config: Config, *, device: str, places: Places, replica: str = "0") -> None:
        self._config, self._device, self._places, self._replica = config, device, places, replica
        self.streams = Streams()
        self.away = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._num_engines = self._losses = 0
        self._ready_s = time.monotonic()
        self._arenas = Arenas.start(config, places.nodes, replica=replica) if config.has_host_tier else None
        self._actor = self._new_engine()

    def wait_ready(self, *, timeout_s: float, on_progress: Callable[[str, float], None]) -> EngineInfo:
        """Wait until the ranks run.

        Args:
            timeout_s: after which the start has failed.
            on_progress: told phase and share.
        Raises:
            RayCacheError: why the start failed.
        """
        deadline = time.monotonic() + timeout_s
        phase = "not heard of"
        while (left_s := deadline - time.monotonic()) > 0:
            phase, share = answer_now(self._actor.progress.remote(), of=_ENGINE, timeout_s=left_s)
            on_progress(phase, share)
            if phase == "ready":
                info: EngineInfo = answer_now(self._actor.info.remote(), of=_ENGINE, timeout_s=_ANSWER_TIMEOUT_S)
                # The pool must not change under requests that were accepted for it.
                self._config = replace(self._config, num_pages=info.num_pages)
                if self._arenas is None:
                    return info
                return _with_storage_facts(info, self._arenas.status_now(timeout_s=_ANSWER_TIMEOUT_S))
            time.sleep(0.2)
        raise ConfigError(_late(phase, timeout_s))

    async def info(self) -> EngineInfo:
        info: EngineInfo = await self._ask(self._actor.info)
        return _with_storage_facts(info, await self._storage_status())

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._ask(self._actor.stats)
        storage = await self._storage_status()
        stats = replace(stats, engines_lost=self._num_engines - 1)
        return replace(stats, tiers=_with_storage(stats.tiers, storage)) if storage else stats

    async def check(self) -> None:
        """Assert all balances of the engine."""
        await self._ask(self._actor.check)

    async def admin(self, command: CacheCommand) -> Mapping[str, Any]:
        if command.kind in (CacheAction.ATTACH, CacheAction.RESIZE, CacheAction.SCRUB):
            first = await self._command_storage(command)
            # Reading a whole storage does not concern the decider, and may take hours.
            return (
                first if command.kind is CacheAction.SCRUB else {**first, **await self._ask(self._actor.admin, command)}
            )
        if command.kind is CacheAction.FLUSH:
            flushed: dict[str, Any] = await self._ask(self._actor.flush, command, timeout_s=command.timeout_s)
            return flushed
        done: dict[str, Any] = await self._ask(self._actor.admin, command)
        match command.kind:
            case CacheAction.DETACH:
                return {**done, **await self._command_storage(command)}
            case CacheAction.CLEAR if "storage" in (command.tiers or TIERS) and self._arenas is not None:
                await self._arenas.clear()
                return done
            case CacheAction.STATUS if storage := await self._storage_status():
                return {**done, "tiers": _with_storage(done["tiers"], storage)}
        return done

    async def watch(self) -> None:
        """Wait as long as there is an engine.

        Raises:
            EngineStoppedError: there is none any more, for good.
        """
        # Not the polling itself: whoever gives up waiting here must not end it.
        await asyncio.shield(self._start_tasks())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        self._start_tasks()
        stream = self.streams.open(request)
        if not self.away:
            self._actor.submit.remote(stream.request)
        is_over = False
        try:
            while not is_over:
                message = await stream.messages.get()
                is_over = isinstance(message, RayCacheError) or message.finish_reason is not None
                if isinstance(message, RayCacheError):
                    raise message
                yield message
        finally:
            self.streams.close(stream)
            if not is_over:
                self._actor.cancel.remote(request.request_id)

    def stop(self) -> None:
        """End engine, ranks and host tier; returns when they are gone, or after a deadline."""
        self._is_stopping = True
        # An actor that is gone, or does not end in time, is killed.
        with contextlib.suppress(ActorLostError):
            answer_now(self._actor.stop.remote(_STOP_TIMEOUT_S), of=_ENGINE, timeout_s=_STOP_TIMEOUT_S + 5)
        ray.kill(self._actor)
        self._end_tiers()

    # --- the engine's messages, and its death -------------------------------------------------------------------------

    def _start_tasks(self) -> asyncio.Task[None]:
        """Poll, and watch the nodes; the task that polls."""
        if not self._tasks or self._tasks[0].done():
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._poll()), loop.create_task(self._watch_nodes())]
            self._tasks[0].add_done_callback(self._on_polling_over)
        return self._tasks[0]

    async def _poll(self) -> None:
        while True:
            try:
                ref = self._actor.poll.remote(_POLL_TIMEOUT_S)
                messages: list[Message] = await answer(ref, of=_ENGINE, timeout_s=_ANSWER_TIMEOUT_S)
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
                    self._losses = 0
            told.append((request_id, message))
        for request in self.streams.take(told):
            self._actor.submit.remote(request)

    async def _replace_engine(self, error: RayCacheError) -> None:
        """Start engines until one is ready, and let it go on with all open requests.

        Raises:
            RayCacheError: too many were lost, or it cannot start any more.
        """
        if time.monotonic() - self._ready_s > _STEADY_S:
            self._losses = 0
        must_fetch = False
        while True:
            await asyncio.to_thread(self._end_if_stopping)
            self.away = f"recovering, {error}"
            _log.warning("%s; starting another one for %d open requests", error, len(self.streams))
            ray.kill(self._actor)  # one that only says nothing must not come back
            has_moved = await self._find_places()
            if not has_moved:
                self._losses += 1
            if self._losses > _MAX_LOSSES:
                raise error
            try:
                must_fetch = must_fetch or has_moved
                if must_fetch:
                    await self._expiring(asyncio.to_thread(self._fetch))
                    must_fetch = False
                self._actor = self._new_engine()
                await asyncio.to_thread(self._end_if_stopping)
                await self._until_ready()
                break
            except (ActorLostError, RankLostError, DirectoryGoneError) as cause:
                error = cause
        self.away, self._ready_s = "", time.monotonic()
        for request in self.streams.resume():
            self._actor.submit.remote(request)

    async def _until_ready(self) -> None:
        timeout_s = self._config.start_timeout_s
        deadline = time.monotonic() + timeout_s
        phase = "not heard of"
        while phase != "ready":
            if time.monotonic() > deadline:
                raise ConfigError(_late(phase, timeout_s))
            asked = answer(self._actor.progress.remote(), of=_ENGINE, timeout_s=timeout_s)
            phase, _ = await self._expiring(asked)
            self.away = f"recovering, {phase}"
            await asyncio.sleep(0.1)

    # --- nodes that leave ---------------------------------------------------------------------------------------------

    async def _find_places(self) -> bool:
        """Other places, if a node of the present ones leaves; whether it does.

        Raises:
            ConfigError: there are none within start_timeout_s.
            EngineStoppedError: `stop` came meanwhile.
        """
        try:
            left = await self._expiring(asyncio.to_thread(leaving, self._places.nodes))
        except OSError as cause:
            _log.warning("%s", cause)
            return False
        if not left:
            return False
        await self._expiring(asyncio.to_thread(self._move, left))
        return True

    def _move(self, left: Leaving) -> None:
        """Take places elsewhere, and have the host tier there; blocks."""
        self._places = self._places.again(excluding=left.lost | left.draining, on_wait=self._on_wait)
        self._end_if_stopping()
        for line in self._places.warnings:
            _log.warning("%s", line)
        if self._arenas is not None:
            self._arenas = self._arenas.moved(self._places.nodes, timeout_s=_STOP_TIMEOUT_S)
            self._end_if_stopping()

    def _fetch(self) -> None:
        """Have the models on the nodes of new places; blocks."""

        def tell(phase: str, share: float) -> None:
            self._end_if_stopping()
            self.away = f"recovering, {phase}"

        fetch_on(self._places.nodes, self._config, on_progress=tell)

    def _end_if_stopping(self) -> None:
        """End what was made after `stop` has looked.

        Raises:
            EngineStoppedError: it was called.
        """
        if self._is_stopping:
            ray.kill(self._actor)
            self._end_tiers()
            raise EngineStoppedError("the server is stopping")

    def _end_tiers(self) -> None:
        if self._arenas is not None:
            self._arenas.close(timeout_s=_STOP_TIMEOUT_S)
        self._places.remove()

    def _on_wait(self, lacks: str) -> None:
        if self._is_stopping:
            raise EngineStoppedError("the server is stopping")
        self.away = f"recovering, waiting for room: {lacks}"

    async def _expiring(self, work: Coroutine[Any, Any, T]) -> T:
        """What some work gives; requests whose time is over end meanwhile."""
        task = asyncio.ensure_future(work)
        while not task.done():
            self.streams.expire()
            await asyncio.wait([task], timeout=0.1)
        return task.result()

    async def _watch_nodes(self) -> None:
        """End the engine when its gang loses a node, or has to leave one; polling it, that is noticed."""
        ended = None
        while True:
            await asyncio.sleep(_LOOK_S)
            actor = self._actor
            try:
                if actor is not ended and await self._has_to_end(actor):
                    ray.kill(actor)
                    ended = actor  # the next one gets places elsewhere
            except OSError:
                continue  # the head is away; it may come back
            except Exception:  # the last resort: without this watch, requests would hang on a lost node
                _log.exception("the nodes could not be looked at; trying again")

    async def _has_to_end(self, actor: Any) -> bool:
        """Look at an engine's nodes; one that has to leave them is stopped.

        Raises:
            OSError: nobody can say what they do.
        """
        places = self._places
        left = await asyncio.to_thread(leaving, places.nodes)
        if left.draining and not left.lost and self._is_current(actor):
            left = await self._leave(left, actor)
        if left.lost and actor is self._actor:
            _log.warning("node %s is lost", ", ".join(places.addresses.get(node, node) for node in left.lost))
            return True
        if not left or not self._is_current(actor):
            return False  # a next one gets places elsewhere anyway
        with contextlib.suppress(ActorLostError):  # in good order, so that its ranks let go of the host tier
            await answer(actor.stop.remote(_STOP_TIMEOUT_S), of=_ENGINE, timeout_s=_STOP_TIMEOUT_S + 5)
        return self._is_current(actor)

    def _is_current(self, actor: Any) -> bool:
        return actor is self._actor and not self.away

    async def _leave(self, left: Leaving, actor: Any) -> Leaving:
        """Save the cache, and wait for room elsewhere as long as the node lets us; requests go on meanwhile.

        Returns:
            Which nodes leave in the end: one may be lost before.
        """
        places, left_s = self._places, left.left_s
        who = ", ".join(places.addresses.get(node, node) for node in left.draining)
        _log.warning("node %s drains%s", who, f" in {left_s:.0f} s" if math.isfinite(left_s) else "")
        if left_s <= 0:
            left_s = _PAST_S
            _log.warning("that is past: taking %.0f s; the clocks of these machines may differ", left_s)
        end_s = time.monotonic() + left_s - _MOVE_S
        saving = asyncio.create_task(self._save(who, timeout_s=max(0.0, left_s - _MOVE_S)))
        try:
            while self._is_current(actor) and not left.lost and time.monotonic() < end_s:
                await asyncio.sleep(_LOOK_S)
                with contextlib.suppress(OSError):
                    left = await asyncio.to_thread(leaving, places.nodes) or left
                    if saving.done() and await asyncio.to_thread(can_move, places):
                        break
            if self._is_current(actor) and not left.lost:
                await asyncio.wait([saving], timeout=_LOOK_S)  # its time is over as well
        finally:
            saving.cancel()
        return left

    async def _save(self, who: str, *, timeout_s: float) -> None:
        try:
            command = CacheCommand(CacheAction.FLUSH, timeout_s=min(self._config.drain_timeout_s, timeout_s))
            done = await self.admin(command)
            _log.warning("before node %s goes: %s", who, ", ".join(f"{name} {value}" for name, value in done.items()))
        except RayCacheError as cause:
            _log.warning("node %s goes without its cache being saved: %s", who, cause)

    # --- engines one after another ------------------------------------------------------------------------------------

    def _new_engine(self) -> Any:
        """The next engine actor. It has to wait for its ranks' places: Ray ends those of a lost engine."""
        # Submits and cancels stay in command; polls and questions do not wait for each other.
        options: dict[str, Any] = {"concurrency_groups": {"submit": 1, "poll": 1, "ask": 3, "admin": 1, "flush": 2}}
        # With the first ranks: the catalog of the host tier is in the arena there.
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._places.nodes[0], soft=False)
        epoch = self._num_engines * _EPOCHS_PER_ENGINE
        self._num_engines += 1
        # Of its calls, a poll for every step, which Ray's GCS would gather by the ten thousand.
        options["enable_task_events"] = False
        kind = ray.remote(num_cpus=0, max_restarts=0, **options)(EngineActor)
        return kind.remote(
            self._config, self._device, self._places, arenas=self._arenas, epoch=epoch, replica=self._replica
        )

    def _on_polling_over(self, task: asyncio.Task[None]) -> None:
        """Whatever ended the polling, nobody may wait for ever."""
        self._tasks[1].cancel()
        error = None if task.cancelled() else task.exception()
        self.streams.fail(EngineStoppedError(str(error or "the server is stopping")))

    # --- questions and commands ---------------------------------------------------------------------------------------

    async def _ask(self, method: Any, *arguments: object, timeout_s: float = 0.0) -> Any:
        """An answer of the engine, for which it may take `timeout_s` on top of what any answer may take."""
        if self.away:
            raise EngineStoppedError(self.away)
        return await answer(method.remote(*arguments), of=_ENGINE, timeout_s=_ANSWER_TIMEOUT_S + timeout_s)

    async def _command_storage(self, command: CacheCommand) -> dict[str, Any]:
        if self._arenas is None:
            raise ConfigError(
                f"{command.kind} needs a host tier, through which all that is stored goes; start the server with "
                "--host-memory"
            )
        match command.kind:
            case CacheAction.ATTACH:
                return await self._arenas.attach(command.url)
            case CacheAction.RESIZE:
                return await self._arenas.resize(command.size)
            case CacheAction.DETACH:
                return await self._arenas.detach()
        return await self._arenas.scrub(timeout_s=command.timeout_s or _SCRUB_TIMEOUT_S)

    async def _storage_status(self) -> dict[str, Any]:
        """Figures of the storage; none while an owner is away."""
        return {} if self._arenas is None else await self._arenas.status()


def _with_storage_facts(info: EngineInfo, storage: Mapping[str, Any]) -> EngineInfo:
    if not storage:
        return info
    facts = {"name": storage["name"], "bytes": storage["bytes_limit"]}
    return replace(info, tiers={**info.tiers, "storage": facts})


def _with_storage(tiers: Mapping[str, Mapping[str, Any]], storage: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    figures = {name: float(value) for name, value in storage.items() if name != "name"}
    return {**tiers, "storage": {**tiers.get("storage", {}), **figures}}


def _late(phase: str, timeout_s: float) -> str:
    return f"the ranks are not ready after {timeout_s:.0f} s ({phase}); see --start-timeout-s"
