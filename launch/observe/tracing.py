"""Exports a trace per request to an OpenTelemetry collector.

    POST /v1/chat/completions   server span; continues the client's trace (W3C traceparent); usage of all choices
      |- queue                  until the request starts to run
      |- prefill                until its first token: prompt tokens, cached tokens by tier, miss reason
      `- decode                 until its last token: output tokens, finish reason

Each choice of a request has these three spans. A background thread sends spans in batches. The server span has the
attributes of OpenTelemetry's GenAI conventions (1.42, in development); the usage is there alone, as readers add up what
the spans of a trace have.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette._utils import get_route_path

from raycache.errors import ConfigError
from raycache.types import GenerateRequest, RequestOutput

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span
    from starlette.types import Scope

_FLUSH_MS = 5000
_TIMEOUT_S = 10.0
_PATH = "/v1/traces"
_USAGE = "raycache.usage"
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
_OPERATIONS |= {"/v1/responses": "chat", "/v1/messages": "chat"}


class Tracer:
    """Creates and exports spans.

    Args:
        endpoint: URL of the collector; /v1/traces is appended if it has no path.
        model: name that clients use.
        kept_page_size: tokens of a page; 0: prompts are not kept.
    Raises:
        ConfigError: the endpoint is not an HTTP URL, or a package is not installed.
    """

    def __init__(self, endpoint: str, *, model: str, kept_page_size: int = 0) -> None:
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"otlp_endpoint={endpoint!r} is not an HTTP URL; write it as http://HOST:4318")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as cause:
            raise ConfigError(
                f"otlp_endpoint needs packages that are not installed ({cause}); pip install 'raycache[tracing]'"
            ) from cause
        target = endpoint if url.path.strip("/") else endpoint.rstrip("/") + _PATH
        self._provider = TracerProvider(resource=Resource.create({"service.name": "raycache"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(target, timeout=_TIMEOUT_S)))
        self._tracer = self._provider.get_tracer("raycache")
        self._model, self._kept_page_size = model, kept_page_size

    @contextmanager
    def serve(self, scope: Scope) -> Iterator[ServerSpan | None]:
        """Open the server span of an HTTP request; yields None unless it is a POST to /v1."""
        if not get_route_path(scope).startswith("/v1/") or scope["method"] != "POST":
            yield None
            return
        from opentelemetry.context import attach, detach, set_value
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        facts = {"http.request.method": scope["method"], "url.path": scope["path"]}
        if operation := _OPERATIONS.get(get_route_path(scope)):
            facts |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "raycache"}
            facts |= {"gen_ai.request.model": self._model}
        with self._tracer.start_as_current_span(
            f"{scope['method']} {scope['path']}",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            attributes=facts,
        ) as span:
            usage = _Usage(self._kept_page_size)
            token = attach(set_value(_USAGE, usage))
            try:
                yield ServerSpan(span)
            finally:
                detach(token)
                if usage.is_known:
                    span.set_attributes(usage.facts())

    def begin(self, request: GenerateRequest) -> RequestTrace:
        """Start tracing one choice, within the current server span."""
        from opentelemetry.context import get_current

        return RequestTrace(self, request, get_current())

    def add(
        self,
        name: str,
        *,
        within: Context,
        start_ns: int,
        end_ns: int,
        facts: dict[str, str | int],
        events: list[tuple[str, int]],
        error: str = "",
    ) -> None:
        """Add a completed span; times in nanoseconds since the epoch."""
        from opentelemetry.trace import Status, StatusCode

        span = self._tracer.start_span(name, context=within, start_time=start_ns, attributes=facts)
        for event, at_ns in events:
            span.add_event(event, timestamp=at_ns)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_time=end_ns)

    def close(self) -> None:
        """Send pending spans; those not delivered within a few seconds are dropped."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


class _Usage:
    """What the choices of one HTTP request used.

    Args:
        kept_page_size: tokens of a page; 0: prompts are not kept.
    """

    def __init__(self, kept_page_size: int) -> None:
        self._kept_page_size = kept_page_size
        self._prompts: list[Sequence[int]] = []
        self._num_input = self._num_read = self._num_written = self._num_output = 0
        self._reasons: list[str] = []

    @property
    def is_known(self) -> bool:
        """Whether any choice got a token."""
        return bool(self._prompts)

    def take_first(self, request: GenerateRequest, first: RequestOutput) -> None:
        """Record a choice that got its first token; choices of the same prompt share its usage."""
        if any(prompt is request.prompt for prompt in self._prompts):
            return
        self._prompts.append(request.prompt)
        num_tokens, page = len(request.prompt), self._kept_page_size
        self._num_input += num_tokens
        self._num_read += first.cached_tokens
        self._num_written += max(0, (num_tokens // page * page if page else 0) - first.cached_tokens)

    def take_end(self, num_tokens: int, reason: str) -> None:
        """Record the end of a choice."""
        self._num_output += num_tokens
        self._reasons.append(reason)

    def facts(self) -> dict[str, int | list[str]]:
        """Attributes of the server span."""
        facts: dict[str, int | list[str]] = {
            "gen_ai.usage.input_tokens": self._num_input,
            "gen_ai.usage.output_tokens": self._num_output,
            "gen_ai.usage.cache_read.input_tokens": self._num_read,
            "gen_ai.usage.cache_creation.input_tokens": self._num_written,
        }
        return facts | ({"gen_ai.response.finish_reasons": self._reasons} if any(self._reasons) else {})


class ServerSpan:
    """The open span of an HTTP request."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def answered(self, status: int, request_id: str) -> None:
        """Record the response."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("http.response.status_code", status)
        if request_id:
            self._span.set_attribute("raycache.request_id", request_id)
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR, f"HTTP {status}"))


class RequestTrace:
    """Traces one choice of a request; an `Observation` of raycache/observe/metrics.py."""

    def __init__(self, tracer: Tracer, request: GenerateRequest, within: Context) -> None:
        self._tracer, self._request, self._within = tracer, request, within
        usage = within.get(_USAGE)
        self._usage = usage if isinstance(usage, _Usage) else None
        self._start_ns = self._last_ns = time.time_ns()
        self._first: RequestOutput | None = None
        self._first_ns = 0
        self._num_tokens = 0
        self._num_starts = 1
        self._reason = ""
        self._events: list[tuple[str, int]] = []

    def take(self, output: RequestOutput) -> None:
        """Record an increment."""
        self._last_ns = time.time_ns()
        if output.num_starts > self._num_starts:
            self._num_starts = output.num_starts
            self._events.append(("restarted after a preemption or a loss of ranks", self._last_ns))
        self._num_tokens += len(output.token_ids)
        self._reason = str(output.finish_reason or "")
        if self._first is None and output.token_ids:
            self._first, self._first_ns = output, self._last_ns
            self._add_prefill(output)

    def end(self, error: BaseException | None) -> None:
        """Add the last span."""
        text = "" if error is None or isinstance(error, GeneratorExit) else f"{type(error).__name__}: {error}"
        if self._first is None:
            self._add("queue", self._start_ns, time.time_ns(), {}, error=text)
            return
        if self._usage is not None:
            self._usage.take_end(self._num_tokens, self._reason)
        facts: dict[str, str | int] = {"raycache.output_tokens": self._num_tokens}
        if self._reason:
            facts["raycache.finish_reason"] = self._reason
        self._add("decode", self._first_ns, time.time_ns(), facts, error=text)

    def _add_prefill(self, first: RequestOutput) -> None:
        if self._usage is not None:
            self._usage.take_first(self._request, first)
        begin_ns = min(self._start_ns + int(1e9 * first.queued_s), self._first_ns)
        self._add("queue", self._start_ns, begin_ns, {})
        facts: dict[str, str | int] = {
            "raycache.prompt_tokens": len(self._request.prompt),
            "raycache.cached_tokens": first.cached_tokens,
            **{f"raycache.cached_tokens.{tier}": count for tier, count in first.cached_by_tier.items()},
        }
        if first.miss:
            facts["raycache.miss"] = str(first.miss)
        if first.cut_by:
            facts["raycache.cut_by"] = first.cut_by
        self._add("prefill", begin_ns, self._first_ns, facts)

    def _add(self, name: str, start_ns: int, end_ns: int, facts: dict[str, str | int], *, error: str = "") -> None:
        facts = {"raycache.request_id": self._request.request_id, **facts}
        self._tracer.add(
            name,
            within=self._within,
            start_ns=start_ns,
            end_ns=end_ns,
            facts=facts,
            events=[] if name == "queue" else self._events,
            error=error,
        )
        if name != "queue":
            self._events = []
