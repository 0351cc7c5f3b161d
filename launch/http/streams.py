"""GET /streams: the requests in progress, the oldest first, and how many more there are.

A tenant sees its own, a key with the right "admin" those of all. There is nothing of prompts or outputs in it but their
lengths.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.http.auth import check_operator, tenant_of
from launch.http.keys import ADMIN
from launch.http.wire import json_response, number
from raycache.api.engine import AsyncEngine
from raycache.api.prepare import Choice, Generation
from raycache.api.run import Follow, Follower
from raycache.config import Config
from raycache.errors import EngineStoppedError
from raycache.types import GenerateRequest, RequestOutput, StreamPhase, StreamState

STREAMS_PATH = "/streams"
MAX_STREAMS = 200
_DEFAULT_STREAMS = 20
_TIMEOUT_S = 2.0
"""Without a reply from the engine, streams are listed without their states."""


@dataclass(slots=True, eq=False)
class _Stream:
    """A request in progress, as its client sees it.

    Attributes:
        start_s: when it arrived; first_s: when its first token came, 0 before. Both on the monotonic clock.
    """

    request: GenerateRequest
    tenant: str
    start_s: float
    first_s: float = 0.0
    num_tokens: int = 0
    cached_by_tier: Mapping[str, int] | None = None

    def take(self, output: RequestOutput) -> None:
        """Note an increment."""
        if output.token_ids:
            if not self.num_tokens:
                self.first_s = time.monotonic()
                self.cached_by_tier = output.cached_by_tier
            self.num_tokens += len(output.token_ids)

    def facts(self, state: StreamState | None, *, is_known: bool, now_s: float) -> dict[str, Any]:
        """For JSON.

        Args:
            state: None if the engine does not have the request.
            is_known: whether the engine has replied.
        """
        cached = self.cached_by_tier or (state.cached_by_tier if state else {})
        generating_s = now_s - self.first_s if self.num_tokens > 1 else 0.0
        return {
            "id": self.request.request_id,
            "tenant": self.tenant,
            "replica": state.replica if state else "",
            "state": self._phase(state) if is_known else None,
            "age_s": round(now_s - self.start_s, 3),
            "prompt_tokens": len(self.request.prompt),
            "computed_tokens": state.computed_tokens if state else 0,
            "cached_by_tier": dict(cached),
            "output_tokens": self.num_tokens,
            "tokens_per_s": round((self.num_tokens - 1) / generating_s, 2) if generating_s else 0.0,
        }

    def _phase(self, state: StreamState | None) -> StreamPhase:
        if state is not None:
            return state.phase
        # Not yet with an engine, or its last tokens are on their way to the client.
        return StreamPhase.RUNNING if self.num_tokens else StreamPhase.WAITING


class StreamsApi:
    """The endpoint, and the list of the requests of this process."""

    def __init__(self, engine: AsyncEngine, *, config: Config, model: str) -> None:
        self._engine, self._config, self._model = engine, config, model
        self._streams: dict[str, _Stream] = {}  # by request id, the oldest first

    def routes(self) -> list[Route]:
        """Routes for the application."""
        return [Route(STREAMS_PATH, self.show)]

    async def show(self, request: Request) -> Response:
        """Return the oldest streams that the caller may see."""
        check_operator(request, self._config)
        limit = number(request.query_params, "limit", default=_DEFAULT_STREAMS, most=MAX_STREAMS)
        tenant = tenant_of(request)
        is_all = ADMIN in tenant.rights
        visible = [stream for stream in self._streams.values() if is_all or stream.tenant == tenant.name]
        shown = visible[:limit]
        states = await self._states([stream.request.request_id for stream in shown])
        now_s = time.monotonic()
        rows = [
            stream.facts((states or {}).get(stream.request.request_id), is_known=states is not None, now_s=now_s)
            for stream in shown
        ]
        return json_response({"model": self._model, "streams": rows, "others": len(visible) - len(rows)})

    async def _states(self, request_ids: list[str]) -> Mapping[str, StreamState] | None:
        if not request_ids:
            return {}
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._engine.stream_states(request_ids)
        except (EngineStoppedError, TimeoutError):
            return None

    def follow(self, request: Request) -> Follow:
        """What lists the streams of an HTTP request while they run."""
        tenant = tenant_of(request).name

        def begin(generation: Generation, choice: Choice) -> AbstractContextManager[Follower]:
            return self._listed(_Stream(choice.request, tenant, time.monotonic()))

        return begin

    @contextmanager
    def _listed(self, stream: _Stream) -> Iterator[_Stream]:
        request_id = stream.request.request_id
        self._streams[request_id] = stream
        try:
            yield stream
        finally:
            del self._streams[request_id]
