"""Prometheus metrics of one server: what its engines count, and what its front end sees.

All names begin with raycache_ and stand in figures.py; some are shown again by the names of other servers (aliases.py).
Each server has its own registry.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from raycache.observe import figures
from raycache.observe.aliases import aliases
from raycache.observe.figures import PREFIX, Kind, Metric
from raycache.types import EngineStats, FinishReason, GenerateRequest, RequestOutput

_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TIMEOUT)
_STATUSES = (200, 429, 500, 503)
"""Shown before they are counted: Prometheus sees no increase in a series that begins with 1."""


class Observation(Protocol):
    """One request, watched by somebody else too."""

    def take(self, output: RequestOutput) -> None:
        """An increment came."""
        ...

    def end(self, error: BaseException | None) -> None:
        """It is over; `error` is what ended it, GeneratorExit or CancelledError when its client went."""
        ...


class Observer(Protocol):
    """Watches requests, such as for traces."""

    def begin(self, request: GenerateRequest) -> Observation:
        """A request goes to an engine."""
        ...


class Metrics:
    """The registry of one server.

    Args:
        model_name: value of the label model_name.
        observer: of all requests, or None.
    """

    def __init__(self, model_name: str, *, observer: Observer | None = None) -> None:
        self._registry = CollectorRegistry()
        self._model_name, self._observer = model_name, observer
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        self.first_token_s = self._histogram(figures.FIRST_TOKEN)
        self.between_tokens_s = self._histogram(figures.BETWEEN_TOKENS)
        self.duration_s = self._histogram(figures.DURATION)
        self.queued_s = self._histogram(figures.QUEUED)
        self.prompt_tokens = self._histogram(figures.PROMPT_LEN)
        self.output_tokens = self._histogram(figures.OUTPUT_LEN)
        ready = figures.READY
        gauge = prometheus_client.Gauge(ready.full_name, ready.text, ["model_name"], registry=self._registry)
        self._ready = gauge.labels(model_name=model_name)
        answers = figures.RESPONSES
        self._responses = prometheus_client.Counter(
            answers.full_name, answers.text, ["model_name", *answers.labels], registry=self._registry
        )
        for status in _STATUSES:
            self._responses.labels(model_name=model_name, status=str(status))

    def watch(self, request: GenerateRequest) -> RequestWatch:
        """Start the clock of a request; use it as a context that lasts as long as the request."""
        return RequestWatch(self, request, None if self._observer is None else self._observer.begin(request))

    def count_response(self, status: int) -> None:
        """The server has answered with an HTTP status."""
        self._responses.labels(model_name=self._model_name, status=str(status)).inc()

    def show(self, stats: EngineStats | None) -> None:
        """Take in the engine's figures now; None while it does not answer: the last ones stay."""
        self._ready.set(stats is not None)
        if stats is not None:
            self._engine.stats = stats

    def families(self, *, of_engines: bool = True, of_front: bool = True) -> list[Family]:
        """Metrics of figures.py that have values: those of engines, those that the front end sees, or both."""
        chosen = {PREFIX + metric.name for metric in (*figures.ENGINE, figures.READY)} if of_engines else set()
        chosen |= (
            {PREFIX + metric.name for metric in figures.FRONT if metric is not figures.READY} if of_front else set()
        )
        return [family for family in self._registry.collect() if family.name in chosen]

    def render(self) -> bytes:
        """The text that Prometheus reads."""
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
    """Times of one request, as its client sees them."""

    def __init__(self, metrics: Metrics, request: GenerateRequest, observation: Observation | None) -> None:
        self._metrics = metrics
        self._observation = observation
        self._prompt_len = len(request.prompt)
        self._start_s = self._last_s = time.monotonic()
        self._num_tokens = 0
        self._is_ended = False

    def __enter__(self) -> RequestWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The request ended, in whatever way; one that was refused, failed or left by its client has no duration."""
        if error is None or self._is_ended:
            self._metrics.duration_s.observe(time.monotonic() - self._start_s)
            self._metrics.prompt_tokens.observe(self._prompt_len)
            self._metrics.output_tokens.observe(self._num_tokens)
        if self._observation is not None:
            self._observation.end(error)

    def take(self, output: RequestOutput) -> None:
        """An increment came, with or without tokens."""
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
        else:
            for _ in range(count):
                self._metrics.between_tokens_s.observe(since_s / count)
        self._last_s = now_s
        self._num_tokens += count


class _EngineCollector(Collector):
    """Shows the latest EngineStats."""

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


class _Given(Collector):
    """Shows what it was given."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> list[Family]:
        return self._families
