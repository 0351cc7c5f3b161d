"""Prometheus metrics of one server: what the engine counts, and the latencies that its front end sees.

All names begin with raycache_ and carry the label model_name. Each server has its own registry.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raycache.types import EngineStats

_GAUGES = {
    "running": ("requests_running", "Requests in the batch."),
    "waiting": ("requests_waiting", "Requests that wait."),
    "pages_total": ("pages", "Pages of the device pool."),
    "pages_free": ("pages_free", "Pages that hold nothing."),
    "pages_in_use": ("pages_in_use", "Pages that running requests own."),
    "pages_cached": ("pages_cached", "Pages of cached prefixes."),
    "pages_locked": ("pages_locked", "Cached pages that running requests hold."),
    "restore_points": ("restore_points", "Positions that hybrid models can continue cached prefixes from."),
}
_COUNTERS = {
    "steps": ("steps", "Steps planned."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that got their first token."),
    "cached_tokens": ("cached_prompt_tokens", "Prompt tokens that came from the cache."),
    "computed_tokens": ("computed_tokens", "Tokens that the ranks were asked to compute."),
    "output_tokens": ("output_tokens", "Tokens generated."),
    "preemptions": ("preemptions", "Times that a running request gave its pages back."),
    "evicted_pages": ("evicted_pages", "Cached pages freed to make room."),
    "evicted_restore_points": ("evicted_restore_points", "Restore points given up to make room."),
}
# What a tier counts -> metric, its text, whether it only grows. Others are shown as raycache_tier{what=...}.
_TIER_FIGURES = {
    "tokens": ("tier_tokens", "Tokens that the tier has room for.", False),
    "pages_total": ("tier_pages", "Pages of the tier.", False),
    "pages_free": ("tier_pages_free", "Pages that hold nothing.", False),
    "pages_cached": ("tier_pages_cached", "Pages of cached prefixes.", False),
    "pages_moving": ("tier_pages_moving", "Pages that are being copied.", False),
    "saved_pages": ("tier_saved_pages", "Pages copied down to the tier.", True),
    "loaded_pages": ("tier_loaded_pages", "Pages copied up from the tier.", True),
    "prefetched_pages": ("tier_prefetched_pages", "Pages fetched from the tier ahead of their use.", True),
    "evicted_pages": ("tier_evicted_pages", "Pages freed to make room.", True),
    "evicted_unsaved_pages": ("tier_evicted_unsaved_pages", "Those that no lower tier has.", True),
    "failed_loads": ("tier_failed_loads", "Copies up that failed; their tokens were recomputed.", True),
    "objects": ("tier_objects", "Objects stored.", False),
    "bytes_used": ("tier_used_bytes", "Bytes on the medium.", False),
    "bytes_limit": ("tier_limit_bytes", "Most bytes on the medium; 0: no bound of ours.", False),
    "stored": ("tier_objects_stored", "Objects taken in.", True),
    "known": ("tier_objects_known", "Objects that were there already.", True),
    "hits": ("tier_object_hits", "Objects found.", True),
    "missing": ("tier_object_misses", "Objects asked for that are not there.", True),
    "corrupt": ("tier_objects_corrupt", "Objects whose bytes were not those stored.", True),
    "foreign": ("tier_objects_foreign", "Objects of another length or format.", True),
    "evicted": ("tier_objects_evicted", "Objects given up to make room.", True),
    "refused": ("tier_objects_refused", "Objects larger than the bound allows.", True),
    "disk_full": ("tier_objects_disk_full", "Objects not stored because the medium is full.", True),
    "io_errors": ("tier_io_errors", "Objects whose read or write failed.", True),
    "unavailable": ("tier_unavailable", "Objects asked for or put while the tier was away.", True),
}
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN_TOKENS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_DURATION_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = tuple(2**power for power in range(0, 21, 2))


class Metrics:
    """The registry of one server.

    Args:
        model_name: value of the label model_name.
    """

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        self._model_name = model_name
        self.first_token_s = self._histogram("time_to_first_token_seconds", "From arrival.", _FIRST_TOKEN_S)
        self.between_tokens_s = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", _BETWEEN_TOKENS_S
        )
        self.duration_s = self._histogram("request_duration_seconds", "From arrival to the last token.", _DURATION_S)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_tokens = self._histogram("request_generation_tokens", "Tokens generated for a request.", _TOKENS)

    def watch(self, prompt_len: int) -> RequestWatch:
        """Start the clock of a request of so many prompt tokens."""
        return RequestWatch(self, prompt_len)

    def render(self, stats: EngineStats) -> bytes:
        """The text that Prometheus reads.

        Args:
            stats: the engine's counters now.
        """
        self._engine.stats = stats
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"raycache_{name}", text, ["model_name"], registry=self._registry, buckets=buckets)
        return metric.labels(model_name=self._model_name)


class RequestWatch:
    """Times of one request, as its client sees them."""

    def __init__(self, metrics: Metrics, prompt_len: int) -> None:
        self._metrics = metrics
        self._prompt_len = prompt_len
        self._start_s = self._last_s = time.monotonic()
        self._num_tokens = 0

    def tokens(self, count: int) -> None:
        """So many tokens came; none is allowed."""
        if not count:
            return
        now_s = time.monotonic()
        since_s = now_s - self._last_s
        if not self._num_tokens:
            self._metrics.first_token_s.observe(since_s)
        else:
            for _ in range(count):
                self._metrics.between_tokens_s.observe(since_s / count)
        self._last_s = now_s
        self._num_tokens += count

    def finish(self) -> None:
        """The request ended, in whatever way."""
        self._metrics.duration_s.observe(time.monotonic() - self._start_s)
        self._metrics.prompt_tokens.observe(self._prompt_len)
        self._metrics.output_tokens.observe(self._num_tokens)


class _EngineCollector(Collector):
    """Shows the latest EngineStats."""

    def __init__(self, model_name: str) -> None:
        self.stats = EngineStats()
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        values = dataclasses.asdict(self.stats)
        for field, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"raycache_{name}", text, labels=["model_name"])
            gauge.add_metric(self._labels, values[field])
            yield gauge
        for field, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"raycache_{name}", text, labels=["model_name"])
            counter.add_metric(self._labels, values[field])
            yield counter
        for index, (name, text) in enumerate((("slots", "in all"), ("slots_free", "that nobody holds"))):
            gauge = GaugeMetricFamily(
                f"raycache_{name}", f"Window pages and recurrent states {text}.", labels=["model_name", "component"]
            )
            for space, counts in self.stats.spaces.items():
                gauge.add_metric([*self._labels, space], counts[index])
            yield gauge
        finished = CounterMetricFamily(
            "raycache_requests_finished", "Requests that ended.", labels=["model_name", "reason"]
        )
        for reason, count in self.stats.finished.items():
            finished.add_metric([*self._labels, reason], count)
        yield finished
        yield from self._cache()

    def _cache(self) -> Iterator[Metric]:
        """Where cached tokens came from, why no more did, and what the tiers count."""
        tokens = self._family("cached_prompt_tokens_by_tier", "Those by the tier that they came from.", True, "tier")
        for tier, count in self.stats.cached_by_tier.items():
            tokens.add_metric([*self._labels, tier], count)
        yield tokens
        misses = self._family("cache_misses", "Requests whose reuse ended early, by the reason.", True, "reason")
        for miss, count in self.stats.misses.items():
            misses.add_metric([*self._labels, miss], count)
        yield misses
        warnings = self._family("cache_warnings", "Warnings that hold now; /cache has their texts.", False)
        warnings.add_metric(self._labels, len(self.stats.warnings))
        yield warnings
        yield from self._tiers()

    def _tiers(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        others = self._family("tier", "Other figures of a tier.", False, "tier", "what")
        for tier, figures in self.stats.tiers.items():
            for what, value in figures.items():
                if what not in _TIER_FIGURES:
                    others.add_metric([*self._labels, tier, what], value)
                    continue
                if what not in families:
                    name, text, only_grows = _TIER_FIGURES[what]
                    families[what] = self._family(name, text, only_grows, "tier")
                families[what].add_metric([*self._labels, tier], value)
        yield from (*families.values(), others)

    def _family(self, name: str, text: str, only_grows: bool, *labels: str) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if only_grows else GaugeMetricFamily
        return kind(f"raycache_{name}", text, labels=["model_name", *labels])
