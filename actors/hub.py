"""An actor that owns the engines of a service, and its client for front ends in other processes.

    front end: HubClient --submit--> HubActor: Replicas ---> RayEngine 0 ---> ...
                        <---poll----                    `--> RayEngine 1 ---> ...

One process thus knows the cache and load of every replica, for any number of front ends. A front end polls for all its
requests together: an engine's step costs one call per front end instead of one per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.answers import answer
from actors.authentication import require_token
from actors.cluster import device_type
from actors.inlined import inlined, joined
from actors.metrics import publishing
from actors.replicas import Replicas
from actors.starter import Starter
from actors.unread import Unread
from raycache.api.replicas import ReplicaCommand
from raycache.config import Config
from raycache.errors import EngineStoppedError, RayCacheError
from raycache.observe.metrics import Metrics
from raycache.types import CacheCommand, EngineInfo, EngineStats, GenerateRequest, RequestOutput, StreamState

Message = tuple[str, RequestOutput | RayCacheError]
"""Request id, and an increment or the error that ended the request."""

_log = logging.getLogger(__name__)
_HUB = "the hub actor"
_POLL_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 60.0
_COMMAND_TIMEOUT_S = 660.0
"""For a cache command, in addition to its own timeout; longer than any wait inside."""
_CHANGE_TIMEOUT_S = 4 * 3600.0
"""For a command to replicas, which can start many one after another."""
_SILENT_S = 30.0
"""A front end that has not polled for this long counts as lost, and its requests are cancelled."""


@dataclass
class _Client:
    """A front end.

    Attributes:
        life: random; a new one if the front end was dropped and has come back.
    """

    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    has_messages: asyncio.Event = field(default_factory=asyncio.Event)
    seen_s: float = field(default_factory=time.monotonic)
    life: str = field(default_factory=lambda: uuid.uuid4().hex)

    def tell(self, message: Message) -> None:
        self.messages.append(message)
        self.has_messages.set()


class HubActor:
    """All replicas of a service."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._replicas: Replicas | None = None
        self._progress = ("starting", 0.0)
        self._starter: Starter | None = None
        self._clients: dict[str, _Client] = {}
        self._watching: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Name in the Ray dashboard and in logs."""
        return "engines"

    async def start(self) -> EngineInfo:
        """Start the replicas and wait until they serve.

        Raises:
            RayCacheError: a replica failed to start.
        """
        address = ray.get_runtime_context().gcs_address  # `raycache launch` checks too, but `serve deploy` does not
        await asyncio.to_thread(require_token, address, is_insecure_allowed=self._config.insecure_cluster)
        self._starter = Starter(self._config, device=device_type(self._config))
        started = await asyncio.to_thread(self._starter.start_all, on_progress=self._note)
        self._replicas = Replicas(self._config, self._starter, started)
        self._watching = asyncio.create_task(self._replicas.watch())
        self._publishing = asyncio.create_task(self._publish(self._replicas))
        return await self._replicas.info()

    async def progress(self) -> tuple[str, float]:
        """Current phase of the start, and the fraction of it that is done."""
        return self._progress

    async def check_health(self) -> None:
        """Check that the service has not failed.

        Raises:
            EngineStoppedError: no engine is left.
        """
        if self._watching is not None and self._watching.done():
            self._watching.result()

    async def info(self) -> EngineInfo:
        return await self._ready().info()

    async def stats(self) -> EngineStats:
        return await self._ready().stats()

    async def stream_states(self, request_ids: Sequence[str]) -> Mapping[str, StreamState]:
        return await self._ready().stream_states(request_ids)

    async def admin(self, command: CacheCommand) -> Mapping[str, Any]:
        return await self._ready().admin(command)

    async def carry_out(self, command: ReplicaCommand) -> Mapping[str, Any]:
        return await self._ready().carry_out(command)

    async def submit(self, client: str, rest: GenerateRequest, *parts: bytes) -> None:
        """Start a request, given as `inlined` returns it; `poll` returns its output."""
        request = joined(rest, parts)
        of = self._clients.setdefault(client, _Client())
        of.running[request.request_id] = asyncio.create_task(self._run(request, of))

    async def cancel(self, client: str, request_id: str, submitted: None) -> None:
        """Cancel a request; no more messages about it follow.

        Args:
            submitted: reference to the result of `submit`, which Ray then waits for. Otherwise the cancel of a very
                long prompt could overtake its request, if that goes through the object store (inlined.py).
        """
        if client in self._clients and (task := self._clients[client].running.pop(request_id, None)):
            task.cancel()

    async def poll(self, client: str) -> tuple[str, list[Message]]:
        """Return the messages since the last poll; waits up to a few seconds for the first one.

        Returns:
            The client's `life`, which changes if its requests were cancelled for its silence, and the messages.
        """
        of = self._clients.setdefault(client, _Client())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_TIMEOUT_S):
                await of.has_messages.wait()
        of.seen_s = time.monotonic()
        of.has_messages.clear()
        messages, of.messages = of.messages, []
        return of.life, messages

    async def stop(self) -> None:
        """Stop all engines; returns when they have ended, or after a timeout."""
        if self._starter is not None:
            await asyncio.to_thread(self._starter.stop)

    async def _run(self, request: GenerateRequest, client: _Client) -> None:
        try:
            async with aclosing(self._ready().generate(request)) as outputs:
                async for output in outputs:
                    client.tell((request.request_id, output))
        except RayCacheError as error:
            client.tell((request.request_id, error))
        except Exception as error:  # last resort: the client must be told
            _log.exception("request %s failed", request.request_id)
            client.tell((request.request_id, EngineStoppedError(f"{type(error).__name__}: {error}")))
        finally:
            client.running.pop(request.request_id, None)

    async def _publish(self, replicas: Replicas) -> None:
        """Publish Ray metrics, and drop front ends that no longer poll."""
        async with publishing(replicas, Metrics(self._config.model_name), has_front=False):
            while True:
                await asyncio.sleep(_POLL_TIMEOUT_S)
                silent = [name for name, each in self._clients.items() if time.monotonic() - each.seen_s > _SILENT_S]
                for name in silent:
                    for task in self._clients.pop(name).running.values():
                        task.cancel()

    def _ready(self) -> Replicas:
        if self._replicas is None:
            raise EngineStoppedError(f"the engines are not ready: {self._progress[0]}")
        return self._replicas

    def _note(self, phase: str, share: float) -> None:
        self._progress = (phase, share)


class HubClient:
    """The engines of a hub as an `AsyncEngine`, for use in one event loop.

    Args:
        hub: actor handle of a `HubActor`.
    """

    def __init__(self, hub: Any) -> None:
        self._hub = hub
        self._name = uuid.uuid4().hex
        self._open: dict[str, Unread] = {}
        self._polling: asyncio.Task[None] | None = None

    def follow(self, hub: Any) -> None:
        """Switch to another hub; requests open at the former one fail once its loss is noticed."""
        self._hub = hub

    async def info(self) -> EngineInfo:
        info: EngineInfo = await self._ask(self._hub.info)
        return info

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._ask(self._hub.stats)
        return stats

    async def stream_states(self, request_ids: Sequence[str]) -> Mapping[str, StreamState]:
        found: Mapping[str, StreamState] = await self._ask(self._hub.stream_states, request_ids)
        return found

    async def admin(self, command: CacheCommand) -> Mapping[str, Any]:
        timeout_s = command.timeout_s + _COMMAND_TIMEOUT_S
        done: Mapping[str, Any] = await self._ask(self._hub.admin, command, timeout_s=timeout_s)
        return done

    async def carry_out(self, command: ReplicaCommand) -> Mapping[str, Any]:
        done: Mapping[str, Any] = await self._ask(self._hub.carry_out, command, timeout_s=_CHANGE_TIMEOUT_S)
        return done

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        self._start_polling()
        unread = self._open[request.request_id] = Unread()
        hub = self._hub  # `follow` may change it meanwhile
        rest, parts = inlined(request)
        submitted = _call(hub.submit, self._name, rest, *parts)
        is_over = False
        try:
            while not is_over:
                message = await unread.get()
                if isinstance(message, RayCacheError):
                    raise message
                is_over = message.finish_reason is not None
                yield message
        finally:
            del self._open[request.request_id]
            if not is_over:
                _call(hub.cancel, self._name, request.request_id, submitted)

    def _start_polling(self) -> None:
        if self._polling is None or self._polling.done():
            self._polling = asyncio.get_running_loop().create_task(self._poll())
            self._polling.add_done_callback(self._on_polling_over)

    async def _poll(self) -> None:
        life = ""
        while True:
            now, messages = await self._ask(self._hub.poll, self._name)
            if life and now != life:
                self._fail("this front end did not poll for too long; its requests were cancelled")
            life = now
            for request_id, message in messages:
                if request_id in self._open:
                    self._open[request_id].put(message)

    def _on_polling_over(self, task: asyncio.Task[None]) -> None:
        """Fail open requests, whatever ended the polling: none may wait for ever."""
        error = None if task.cancelled() else task.exception()
        self._fail(str(error or "the server is stopping"))

    def _fail(self, why: str) -> None:
        for unread in self._open.values():
            unread.put(EngineStoppedError(why))

    async def _ask(self, method: Any, *arguments: object, timeout_s: float = _ANSWER_TIMEOUT_S) -> Any:
        return await answer(_call(method, *arguments), of=_HUB, timeout_s=timeout_s)


def _call(method: Any, *arguments: object) -> Any:
    """Call the hub, whatever becomes of the caller.

    Behind Ray Serve a request is a Ray task, which is cancelled when its client goes away, and with it every call that
    it has made and that is not over. That would be our own `cancel` of the request, and the poll for the requests of
    all clients if this one's was the first. Ray knows the caller by a context variable, which is unset here.
    """
    return Context().run(method.remote, *arguments)


def start_hub(config: Config) -> Any:
    """Create a `HubActor`; call its `start` next."""
    options: dict[str, Any] = {"enable_task_events": False}  # there is a call per step
    return ray.remote(num_cpus=0, max_restarts=0, **options)(HubActor).remote(config)
