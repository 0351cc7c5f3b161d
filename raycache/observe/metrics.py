"""Prometheus metrics of a server: those of its engines and of its front end.

All are listed in figures.py; some are also shown under the names of other servers (aliases.py). Each server has its own
registry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Protocol

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from raycache.observe import figures
from raycache.observe.aliases import aliases
from raycache.observe.figures import PREFIX, Kind, Metric, Sample
from raycache.types import EngineStats, FinishReason, GenerateRequest, RequestOutput

_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TIMEOUT)
_STATUSES = (200, 429, 500, 503)
"""Exported as 0 from the start, since Prometheus sees no increase in a series whose first value is 1."""


class Observation(Protocol):
    """Observes one request."""

    def take(self, output: RequestOutput) -> None:
        """Called with each increment."""
        ...

    def end(self, error: BaseException | None) -> None:
        """Called at the end; `error` is GeneratorExit or CancelledError if the client disconnected."""
        ...


class Observer(Protocol):
    """Observes requests, for example for traces."""

    def begin(self, request: GenerateRequest) -> Observation:
        """Called when a request is sent to an engine."""
        ...


class Metrics:
    """The metrics of one server.

    Args:
        model_name: value of the label model_name.
    """

    def __init__(self, model_name: str, *, observer: Observer | None = None) -> None:
        self._registry = CollectorRegistry()
        self._model_name, self._observer = model_name, observer
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        self._reuse = _ReuseCollector(model_name, self._engine)
        self._registry.register(self._reuse)
        self.first_token_s = self._histogram(figures.FIRST_TOKEN)
        self.between_tokens_s = self._histogram(figures.BETWEEN_TOKENS)
        self.per_token_s = self._histogram(figures.PER_TOKEN)
        self.prefill_s = self._histogram(figures.PREFILL)
        self.decode_s = self._histogram(figures.DECODE)
        self.duration_s = self._histogram(figures.DURATION)
        self.queued_s = self._histogram(figures.QUEUED)
        self.prompt_tokens = self._histogram(figures.PROMPT_LEN)
        self.output_tokens = self._histogram(figures.OUTPUT_LEN)
        ready = figures.READY
        gauge = prometheus_client.Gauge(ready.full_name, ready.text, ["model_name"], registry=self._registry)
        self._ready = gauge.labels(model_name=model_name)
        responses = figures.RESPONSES
        self._responses = prometheus_client.Counter(
            responses.full_name, responses.text, ["model_name", *responses.labels], registry=self._registry
        )
        for status in _STATUSES:
            self._responses.labels(model_name=model_name, status=str(status))

    def watch(self, request: GenerateRequest) -> RequestWatch:
        """Start timing a request; use the result as a context manager around the whole request."""
        return RequestWatch(self, request, None if self._observer is None else self._observer.begin(request))

    def count_response(self, status: int) -> None:
        """Count an HTTP response."""
        self._responses.labels(model_name=self._model_name, status=str(status)).inc()

    def read_reuse(self, read: Callable[[EngineStats], Iterable[Sample]]) -> None:
        """Set what reads the metrics in figures.REUSE at each export; it gets the engine's last statistics."""
        self._reuse.read = read

    def show(self, stats: EngineStats | None) -> None:
        """Set the engine's current statistics; None if it does not respond, which keeps the last ones."""
        self._ready.set(stats is not None)
        if stats is not None:
            self._engine.stats = stats

    def families(self, *, of_engines: bool = True, of_front: bool = True) -> list[Family]:
        """Return metrics that have values: those of engines, of the front end, or both."""
        chosen = {PREFIX + metric.name for metric in (*figures.ENGINE, figures.READY)} if of_engines else set()
        chosen |= (
            {PREFIX + metric.name for metric in figures.FRONT if metric is not figures.READY} if of_front else set()
        )
        return [family for family in self._registry.collect() if family.name in chosen]

    def render(self) -> bytes:
        """Return all metrics and aliases in Prometheus text format."""
        shown = CollectorRegistry()
        shown.register(self._registry)
        shown.register(_Given(aliases(self.families())))
        return generate_latest(shown)

    def _histogram(self, metric: Metric) -> prometheus_client.Histogram:
        found = prometheus_client.Histogram(
            metric.full_name, metric.text, ["model_name"], registry=self._registry, buckets=metric.bounds
        )
        return found.labels(model_name=self._model_name)


class RequestWatch:
    """Times a request, as its client sees it."""

    def __init__(self, metrics: Metrics, request: GenerateRequest, observation: Observation | None) -> None:
        self._metrics = metrics
        self._observation = observation
        self._prompt_len = len(request.prompt)
        self._start_s = self._first_s = self._last_s = time.monotonic()
        self._num_tokens = 0
        self._is_ended = False

    def __enter__(self) -> RequestWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Record the duration, except of requests that were refused, failed or abandoned by their client."""
        if error is None or self._is_ended:
            self._metrics.duration_s.observe(time.monotonic() - self._start_s)
            self._metrics.prompt_tokens.observe(self._prompt_len)
            self._metrics.output_tokens.observe(self._num_tokens)
            self._metrics.decode_s.observe(self._last_s - self._first_s)
            if self._num_tokens > 1:
                self._metrics.per_token_s.observe((self._last_s - self._first_s) / (self._num_tokens - 1))
        if self._observation is not None:
            self._observation.end(error)

    def take(self, output: RequestOutput) -> None:
        """Record an increment, with or without tokens."""
        if self._observation is not None:
            self._observation.take(output)
        self._is_ended = output.finish_reason in _ENDS
        count = len(output.token_ids)
        if not count:
            return
        now_s = time.monotonic()
        since_s = now_s - self._last_s
        if not self._num_tokens:
            self._metrics.first_token_s.observe(since_s)
            self._metrics.queued_s.observe(output.queued_s)
            self._metrics.prefill_s.observe(max(0.0, since_s - output.queued_s))
            self._first_s = now_s
            since_s, count = 0.0, count - 1  # what came with the first token
        for _ in range(count):
            self._metrics.between_tokens_s.observe(since_s / count)
        self._last_s = now_s
        self._num_tokens += len(output.token_ids)


class _EngineCollector(Collector):
    """Exports the latest EngineStats."""

    def __init__(self, model_name: str) -> None:
        self.stats = EngineStats()
        self._model_name = model_name

    def collect(self) -> Iterator[Family]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in figures.samples(self.stats):
            metric = sample.metric
            if metric.name not in families:
                labels = ["model_name", "replica", *metric.labels]
                kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
                families[metric.name] = kind(f"{PREFIX}{metric.name}", metric.text, labels=labels)
            families[metric.name].add_metric([self._model_name, *sample.labels], sample.value)
        yield from families.values()


class _ReuseCollector(Collector):
    """Exports the metrics in figures.REUSE."""

    def __init__(self, model_name: str, engine: _EngineCollector) -> None:
        self.read: Callable[[EngineStats], Iterable[Sample]] = lambda stats: ()
        self._model_name, self._engine = model_name, engine

    def collect(self) -> Iterator[Family]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for metric in figures.REUSE:
            kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            families[metric.name] = kind(PREFIX + metric.name, metric.text, labels=["model_name", *metric.labels])
        for sample in self.read(self._engine.stats):
            families[sample.metric.name].add_metric([self._model_name, *sample.labels], sample.value)
        yield from families.values()


class _Given(Collector):
    """Exports given families."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> list[Family]:
        return self._families
