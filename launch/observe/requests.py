"""ASGI middleware for metrics, the access log and traces."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from starlette._utils import get_route_path
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launch.observe.tracing import Tracer
from raycache.config import Config
from raycache.observe.metrics import Metrics

_log = logging.getLogger(__name__)
_QUIET = ("/health", "/metrics", "/status")
"""Polled by monitoring, so not logged."""


@dataclass(frozen=True)
class Observed:
    """How a server's requests are observed.

    Attributes:
        has_access_log: whether each request is logged.
    """

    metrics: Metrics
    tracer: Tracer | None = None
    has_access_log: bool = False

    @property
    def middleware(self) -> Middleware:
        """The middleware; must be the outermost one."""
        return Middleware(_Watching, observed=self)


@contextmanager
def observe(config: Config) -> Iterator[Observed]:
    """Set up observation for the `with` block, by the settings log_format and otlp_endpoint.

    Raises:
        ConfigError: the endpoint is invalid, or the tracing packages are not installed.
    """
    kept_page_size = config.page_size if config.prefix_cache else 0
    tracer = None
    if config.otlp_endpoint:
        tracer = Tracer(config.otlp_endpoint, model=config.model_name, kept_page_size=kept_page_size)
    try:
        yield Observed(Metrics(config.model_name, observer=tracer), tracer, has_access_log=config.log_format == "json")
    finally:
        if tracer is not None:
            tracer.close()


class _Watching:
    """Records the response to each request."""

    def __init__(self, app: ASGIApp, *, observed: Observed) -> None:
        self._app = app
        self._observed = observed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = time.monotonic()
        status, request_id = 500, ""  # if an unhandled exception follows

        async def note(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = dict(message.get("headers", ())).get(b"x-request-id", b"").decode("latin-1")
            await send(message)

        tracer = self._observed.tracer
        try:
            with nullcontext() if tracer is None else tracer.serve(scope) as span:
                await self._app(scope, receive, note)
                if span is not None:
                    span.answered(status, request_id)
        finally:
            self._observed.metrics.count_response(status)
            if self._observed.has_access_log and get_route_path(scope) not in _QUIET:
                _tell(scope, status=status, request_id=request_id, seconds=time.monotonic() - start_s)


def _tell(scope: Scope, *, status: int, request_id: str, seconds: float) -> None:
    client = scope.get("client") or ("",)
    fields = {"method": scope["method"], "path": scope["path"], "status": status, "client": client[0]}
    fields |= {"duration_s": round(seconds, 6), **({"request_id": request_id} if request_id else {})}
    _log.info("%s %s %d", scope["method"], scope["path"], status, extra=fields)
