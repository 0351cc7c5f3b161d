"""The engine actor as the HTTP server sees it: an `AsyncEngine`, that outlives the actor.

One task polls the actor and hands its messages to the requests that wait for them, so that a step costs one call and
not one per request. When the actor dies, another takes its place and goes on with all open requests, each after the
tokens that its client has; a client sees a pause.

    generate -> Streams -> submit -> EngineActor -> poll -> Streams -> client
                   ` - - - - - - -> the next one, when it died
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.answers import ActorLostError, answer, answer_now
from actors.arena import OWNER, node_of, start_arena, stop_arena
from actors.engine import EngineActor, Message
from actors.streams import Streams
from raycache.config import Config
from raycache.errors import ConfigError, EngineStoppedError, RankLostError, RayCacheError
from raycache.types import TIERS, CacheAction, CacheOrder, EngineInfo, EngineStats, GenerateRequest, RequestOutput

_log = logging.getLogger(__name__)
_POLL_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 60.0
"""For any answer of the engine actor; it has threads that do not wait for a step."""
_STOP_TIMEOUT_S = 15.0
_STATUS_TIMEOUT_S = 1.0
"""For figures of the storage, without which an answer on health does as well."""
_MAX_LOSSES = 4
"""Engines that may be lost one after another without a token in between, before the service gives up."""
_EPOCHS_PER_ENGINE = 1_000_000
_ENGINE = "the engine actor"


class RayEngine:
    """Client of the engine actors that live one after another.

    Args:
        config: of the service.
        device: "cpu" or "cuda".
        places: for the ranks.
    Raises:
        ConfigError: the host tier does not suit the places.

    Attributes:
        streams: all open requests.
    """

    def __init__(self, config: Config, *, device: str, places: PlacementGroup) -> None:
        self._config, self._device, self._places = config, device, places
        self.streams = Streams()
        self._polling: asyncio.Task[None] | None = None
        self._away = ""  # why there is no engine to ask right now
        self._is_stopping = False
        self._num_engines = self._losses = 0
        self._node = node_of(places) if config.has_host_tier else ""
        self._arena = start_arena(config, node=self._node) if config.has_host_tier else None
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
                if self._arena is None:
                    return info
                storage = answer_now(self._arena.status.remote(), of=OWNER, timeout_s=_ANSWER_TIMEOUT_S)
                return _with_storage_facts(info, storage)
            time.sleep(0.2)
        raise ConfigError(_late(phase, timeout_s))

    async def info(self) -> EngineInfo:
        info: EngineInfo = await self._ask(self._actor.info)
        return _with_storage_facts(info, await self._storage_status())

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._ask(self._actor.stats)
        storage = await self._storage_status()
        return replace(stats, tiers=_with_storage(stats.tiers, storage)) if storage else stats

    async def check(self) -> None:
        """Assert all balances of the engine."""
        await self._ask(self._actor.check)

    async def admin(self, order: CacheOrder) -> Mapping[str, Any]:
        if order.kind in (CacheAction.ATTACH, CacheAction.RESIZE, CacheAction.SCRUB):
            first = await self._order_storage(order)
            # Reading a whole storage does not concern the decider, and may take hours.
            return first if order.kind is CacheAction.SCRUB else {**first, **await self._ask(self._actor.admin, order)}
        done: dict[str, Any] = await self._ask(self._actor.admin, order)
        match order.kind:
            case CacheAction.DETACH:
                return {**done, **await self._order_storage(order)}
            case CacheAction.CLEAR if "storage" in (order.tiers or TIERS) and self._arena is not None:
                return {**done, **await self._order_storage(order)}
            case CacheAction.STATUS if storage := await self._storage_status():
                return {**done, "tiers": _with_storage(done["tiers"], storage)}
        return done

    async def watch(self) -> None:
        """Wait as long as there is an engine.

        Raises:
            EngineStoppedError: there is none any more, for good.
        """
        # Not the polling itself: whoever gives up waiting here must not end it.
        await asyncio.shield(self._start_polling())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        self._start_polling()
        stream = self.streams.open(request)
        if not self._away:
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
        if self._arena is not None:
            stop_arena(self._arena, timeout_s=_STOP_TIMEOUT_S)
        remove_placement_group(self._places)

    # --- the engine's messages, and its death -------------------------------------------------------------------------

    def _start_polling(self) -> asyncio.Task[None]:
        if self._polling is None or self._polling.done():
            self._polling = asyncio.get_running_loop().create_task(self._poll())
            self._polling.add_done_callback(self._on_polling_over)
        return self._polling

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
        while True:
            self._away = f"recovering, {error}"
            self._losses += 1
            if self._losses > _MAX_LOSSES:
                raise error
            _log.warning("%s; starting another one for %d open requests", error, len(self.streams))
            ray.kill(self._actor)  # one that only says nothing must not come back
            self._actor = self._new_engine()
            try:
                await self._until_ready()
                break
            except (ActorLostError, RankLostError) as cause:
                error = cause
        self._away = ""
        for request in self.streams.resume():
            self._actor.submit.remote(request)

    async def _until_ready(self) -> None:
        timeout_s = self._config.start_timeout_s
        deadline = time.monotonic() + timeout_s
        phase = "not heard of"
        while phase != "ready":
            if time.monotonic() > deadline:
                raise ConfigError(_late(phase, timeout_s))
            phase, _ = await answer(self._actor.progress.remote(), of=_ENGINE, timeout_s=timeout_s)
            self._away = f"recovering, {phase}"
            self.streams.expire()
            await asyncio.sleep(0.1)

    def _new_engine(self) -> Any:
        """The next engine actor. It has to wait for its ranks' places: Ray ends those of a lost engine."""
        # Submits and cancels stay in order; polls and questions do not wait for each other.
        options: dict[str, Any] = {"concurrency_groups": {"order": 1, "poll": 1, "ask": 3, "admin": 1}}
        if self._node:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._node, soft=False)
        epoch = self._num_engines * _EPOCHS_PER_ENGINE
        self._num_engines += 1
        kind = ray.remote(num_cpus=0, max_restarts=0, **options)(EngineActor)
        return kind.remote(self._config, self._device, self._places, arena=self._arena, epoch=epoch)

    def _on_polling_over(self, task: asyncio.Task[None]) -> None:
        """Whatever ended the polling, nobody may wait for ever."""
        error = None if task.cancelled() else task.exception()
        self.streams.fail(EngineStoppedError(str(error or "the server is stopping")))

    # --- questions and orders -----------------------------------------------------------------------------------------

    async def _ask(self, method: Any, *arguments: object) -> Any:
        if self._away:
            raise EngineStoppedError(self._away)
        return await answer(method.remote(*arguments), of=_ENGINE, timeout_s=_ANSWER_TIMEOUT_S)

    async def _order_storage(self, order: CacheOrder) -> dict[str, Any]:
        if self._arena is None:
            raise ConfigError(
                f"{order.kind} needs a host tier, through which all that is stored goes; start the server with "
                "--host-memory"
            )
        match order.kind:
            case CacheAction.ATTACH:
                return {"storage": await self._tell_arena(self._arena.attach.remote(order.url))}
            case CacheAction.RESIZE:
                await self._tell_arena(self._arena.resize.remote(order.size))
                return {"bytes_limit": order.size}
            case CacheAction.DETACH:
                return {"detached": await self._tell_arena(self._arena.detach.remote())}
            case CacheAction.SCRUB:
                found: dict[str, Any] = await self._tell_arena(self._arena.scrub.remote())
                return found
        await self._tell_arena(self._arena.clear.remote())
        return {}

    async def _tell_arena(self, ref: Any) -> Any:
        try:
            return await answer(ref, of=OWNER, timeout_s=None)
        except ActorLostError as cause:
            raise ConfigError(f"{cause}; another one is on its way, try again") from cause

    async def _storage_status(self) -> dict[str, Any]:
        """Figures of the storage; none while its owner is away."""
        if self._arena is None:
            return {}
        try:
            found: dict[str, Any] = await answer(self._arena.status.remote(), of=OWNER, timeout_s=_STATUS_TIMEOUT_S)
        except ActorLostError:
            return {}
        return found


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
