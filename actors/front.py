"""The engine actor as the HTTP server sees it: an `AsyncEngine`.

One task polls the actor and hands its messages to the requests that wait for them, so that a step costs one call and
not one per
request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.engine import EngineActor, Message
from raycache.config import Config
from raycache.errors import ConfigError, EngineStoppedError, RayCacheError
from raycache.types import EngineInfo, EngineStats, GenerateRequest, RequestOutput

_POLL_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 60.0
"""For any answer of the engine actor; it has threads that do not wait for a step."""
_STOP_TIMEOUT_S = 15.0


class RayEngine:
    """Client of one engine actor.

    Args:
        config: of the service.
        device: "cpu" or "cuda".
        places: for the ranks.
    """

    def __init__(self, config: Config, *, device: str, places: PlacementGroup) -> None:
        self._places = places
        self._queues: dict[str, asyncio.Queue[RequestOutput | RayCacheError]] = {}
        self._polling: asyncio.Task[None] | None = None
        # Submits and cancels stay in order; polls and questions do not wait for each other.
        options: dict[str, Any] = {"concurrency_groups": {"order": 1, "poll": 1, "ask": 3}}
        self._actor: Any = ray.remote(num_cpus=0, max_restarts=0, **options)(EngineActor).remote(config, device, places)

    def wait_ready(self, *, timeout_s: float, on_progress: Callable[[str, float], None]) -> EngineInfo:
        """Wait until the ranks run.

        Args:
            timeout_s: after which the start has failed.
            on_progress: told phase and share.
        Raises:
            RayCacheError: why the start failed.
        """
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            phase, share = self._ask("progress", timeout_s=left_s)
            on_progress(phase, share)
            if phase == "ready":
                info: EngineInfo = self._ask("info", timeout_s=_ANSWER_TIMEOUT_S)
                return info
            time.sleep(0.2)
        raise ConfigError(f"the ranks are not ready after {timeout_s:.0f} s ({phase}); see --start-timeout-s")

    async def info(self) -> EngineInfo:
        info: EngineInfo = await self._await(self._actor.info.remote())
        return info

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._await(self._actor.stats.remote())
        return stats

    async def check(self) -> None:
        """Assert all balances of the engine."""
        await self._await(self._actor.check.remote())

    async def watch(self) -> None:
        """Wait as long as the engine lives.

        Raises:
            EngineStoppedError: it has ended, for good.
        """
        # Not the polling itself: whoever gives up waiting here must not end it.
        await asyncio.shield(self._start_polling())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        self._start_polling()
        queue: asyncio.Queue[RequestOutput | RayCacheError] = asyncio.Queue()
        self._queues[request.request_id] = queue
        self._actor.submit.remote(request)
        is_over = False
        try:
            while not is_over:
                message = await queue.get()
                is_over = isinstance(message, RayCacheError) or message.finish_reason is not None
                if isinstance(message, RayCacheError):
                    raise message
                yield message
        finally:
            del self._queues[request.request_id]
            if not is_over:
                self._actor.cancel.remote(request.request_id)

    def stop(self) -> None:
        """End engine and ranks; returns when they are gone, or after a deadline."""
        # An actor that is gone, or does not end in time, is killed.
        with contextlib.suppress(RayActorError, GetTimeoutError):
            ray.get(self._actor.stop.remote(_STOP_TIMEOUT_S), timeout=_STOP_TIMEOUT_S + 5)
        ray.kill(self._actor)
        remove_placement_group(self._places)

    def _start_polling(self) -> asyncio.Task[None]:
        if self._polling is None or self._polling.done():
            self._polling = asyncio.get_running_loop().create_task(self._poll())
            self._polling.add_done_callback(self._on_polling_over)
        return self._polling

    async def _poll(self) -> None:
        while True:
            messages: list[Message] = await self._await(self._actor.poll.remote(_POLL_TIMEOUT_S))
            for request_id, message in messages:
                queue = self._queues.get(request_id)
                if queue is not None:
                    queue.put_nowait(message)

    def _on_polling_over(self, task: asyncio.Task[None]) -> None:
        """Whatever ended the polling, nobody may wait for ever."""
        error = None if task.cancelled() else task.exception()
        for queue in self._queues.values():
            queue.put_nowait(EngineStoppedError(str(error or "the server is stopping")))

    def _ask(self, method: str, *, timeout_s: float) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(), timeout=timeout_s)
        except GetTimeoutError as error:
            raise EngineStoppedError(_silent(timeout_s)) from error
        except RayTaskError as error:
            raise _ours(error) from error
        except RayActorError as error:
            raise EngineStoppedError(_died(error)) from error

    async def _await(self, ref: Any) -> Any:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return await ref
        except TimeoutError as error:
            raise EngineStoppedError(_silent(_ANSWER_TIMEOUT_S)) from error
        except RayTaskError as error:
            raise _ours(error) from error
        except RayActorError as error:
            raise EngineStoppedError(_died(error)) from error


def _silent(timeout_s: float) -> str:
    return f"the engine actor has not answered for {timeout_s:.0f} s"


def _died(error: RayActorError) -> str:
    """One line: Ray adds the actor's ids, and the whole log of a constructor that failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"the engine actor died: {lines[0] if len(lines) == 1 else f'{lines[0]} {lines[-1]}'}"


def _ours(error: RayTaskError) -> Exception:
    return error.cause if isinstance(error.cause, RayCacheError) else error
