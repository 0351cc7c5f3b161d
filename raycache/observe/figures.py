"""The table of metrics behind /metrics, Ray's metrics, the dashboard, the alerts and the reference.

    EngineStats -> samples -> [ metric, labels, value ] -> /metrics (metrics.py), Ray (actors/metrics.py)

Names start with raycache_; those of counters end with _total. In Ray's metrics they are prefixed with ray_.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from raycache.types import EngineStats, FinishReason, Miss

PREFIX = "raycache_"
LANES = {
    "save": ("host", "saved_bytes", "save_s"),
    "load": ("host", "loaded_bytes", "load_s"),
    "prefetch": ("storage", "prefetched_bytes", "prefetch_s"),
    "persist": ("storage", "persisted_bytes", "persist_s"),
}
"""Transfers between tiers: (tier whose statistics have them, counter of bytes, counter of seconds)."""

_CACHE_INFO = ("page_size", "pages", "host_pages", "prefix_cache")

Values = Iterable[tuple[tuple[str, ...], float]]
"""(label values, value) of each series of a metric."""


class Kind(StrEnum):
    """Prometheus metric type."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
        name: without prefix and _total.
        text: help text.
        read: extracts the values from an engine's statistics; none for metrics of the front end.
        labels: besides model_name and, for engine metrics, replica.
        bounds: upper bounds of histogram buckets.
    """

    name: str
    kind: Kind
    text: str
    read: Callable[[EngineStats], Values] = lambda stats: ()
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """Name in queries; for a histogram, without _bucket, _sum or _count."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


@dataclass(frozen=True)
class Sample:
    """Current value of a series.

    Attributes:
        labels: values of replica and the metric's own labels.
        value: counters start at 0 with their engine.
    """

    metric: Metric
    labels: tuple[str, ...]
    value: float


def samples(stats: EngineStats) -> Iterator[Sample]:
    """Iterate over all engine metrics of all replicas."""
    for replica, own in (stats.replicas or {"0": stats}).items():
        for metric in ENGINE:
            for labels, value in metric.read(own):
                yield Sample(metric, (replica, *labels), value)


def _one(read: Callable[[EngineStats], float]) -> Callable[[EngineStats], Values]:
    return lambda stats: [((), read(stats))]


def _by(
    read: Callable[[EngineStats], Mapping[Any, int]], *, known: Sequence[str] = ()
) -> Callable[[EngineStats], Values]:
    """Counts by name. Known names start at 0, since Prometheus sees no increase in a series whose first value is 1."""
    return lambda stats: [((str(key),), count) for key, count in {**dict.fromkeys(known, 0), **read(stats)}.items()]


def _tier(figure: str) -> Callable[[EngineStats], Values]:
    def read(stats: EngineStats) -> Values:
        return [((tier,), figures[figure]) for tier, figures in stats.tiers.items() if figure in figures]

    return read


def _moved(index: int) -> Callable[[EngineStats], Values]:
    def read(stats: EngineStats) -> Values:
        for lane, names in LANES.items():
            figures, name = stats.tiers.get(names[0], {}), names[index]
            if name in figures:
                yield (lane,), figures[name]

    return read


def _others(stats: EngineStats) -> Values:
    for tier, figures in stats.tiers.items():
        for name, value in figures.items():
            if name not in _SHOWN:
                yield (tier, name), value


def _units(index: int) -> Callable[[EngineStats], Values]:
    def read(stats: EngineStats) -> Values:
        for tier, spaces in stats.components.items():
            for space, counts in spaces.items():
                yield (tier, space), counts[index]

    return read


def _used_share(stats: EngineStats) -> float:
    return (stats.pages_in_use + stats.pages_locked) / max(stats.pages_total, 1)


_REQUESTS = (
    Metric("requests_running", Kind.GAUGE, "Requests in the batch.", _one(lambda s: s.running)),
    Metric("requests_waiting", Kind.GAUGE, "Requests in the queue.", _one(lambda s: s.waiting)),
    Metric(
        "requests_finished",
        Kind.COUNTER,
        "Requests that ended.",
        _by(lambda s: s.finished, known=list(FinishReason)),
        ("reason",),
    ),
    Metric(
        "requests_refused",
        Kind.COUNTER,
        "Requests rejected because the queue was full.",
        _one(lambda s: s.refused),
    ),
    Metric("preemptions", Kind.COUNTER, "Preemptions of running requests.", _one(lambda s: s.preemptions)),
    Metric("steps", Kind.COUNTER, "Steps planned.", _one(lambda s: s.steps)),
    Metric(
        "prompt_tokens",
        Kind.COUNTER,
        "Prompt tokens of requests that have generated a token.",
        _one(lambda s: s.prompt_tokens),
    ),
    Metric(
        "drafted_tokens",
        Kind.COUNTER,
        "Draft tokens verified, by position after the last known token.",
        _by(lambda s: s.drafted, known=["1"]),
        ("position",),
    ),
    Metric(
        "accepted_draft_tokens",
        Kind.COUNTER,
        "Draft tokens accepted, by position after the last known token.",
        _by(lambda s: s.accepted, known=["1"]),
        ("position",),
    ),
    Metric(
        "cached_prompt_tokens", Kind.COUNTER, "Prompt tokens reused from the cache.", _one(lambda s: s.cached_tokens)
    ),
    Metric(
        "computed_tokens",
        Kind.COUNTER,
        "Tokens scheduled for computation.",
        _one(lambda s: s.computed_tokens),
    ),
    Metric("output_tokens", Kind.COUNTER, "Tokens generated.", _one(lambda s: s.output_tokens)),
)
_DEVICE = (
    Metric("pages", Kind.GAUGE, "Capacity of the device pool in pages.", _one(lambda s: s.pages_total)),
    Metric("pages_free", Kind.GAUGE, "Free pages.", _one(lambda s: s.pages_free)),
    Metric("pages_in_use", Kind.GAUGE, "Pages owned by running requests.", _one(lambda s: s.pages_in_use)),
    Metric("pages_cached", Kind.GAUGE, "Pages of cached prefixes.", _one(lambda s: s.pages_cached)),
    Metric("pages_locked", Kind.GAUGE, "Cached pages used by running requests.", _one(lambda s: s.pages_locked)),
    Metric("pages_used_share", Kind.GAUGE, "Fraction of pages owned or used by running requests.", _one(_used_share)),
    Metric("evicted_pages", Kind.COUNTER, "Cached pages evicted from the device.", _one(lambda s: s.evicted_pages)),
    Metric(
        "restore_points",
        Kind.GAUGE,
        "Positions from which hybrid models can resume a cached prefix.",
        _one(lambda s: s.restore_points),
    ),
    Metric(
        "evicted_restore_points",
        Kind.COUNTER,
        "Restore points evicted from the device.",
        _one(lambda s: s.evicted_restore_points),
    ),
    Metric(
        "component_units",
        Kind.GAUGE,
        "Capacity per component, in pages or state slots.",
        _units(0),
        ("tier", "component"),
    ),
    Metric(
        "component_units_free", Kind.GAUGE, "Free pages or state slots per component.", _units(1), ("tier", "component")
    ),
)
_HITS = (
    Metric(
        "cached_prompt_tokens_by_tier",
        Kind.COUNTER,
        "Prompt tokens reused from the cache, by the tier that held them.",
        _by(lambda s: s.cached_by_tier),
        ("tier",),
    ),
    Metric(
        "cached_prompt_share",
        Kind.GAUGE,
        "Fraction of all prompt tokens reused from the cache.",
        _one(lambda s: s.cached_tokens / max(s.prompt_tokens, 1)),
    ),
    Metric(
        "cache_misses",
        Kind.COUNTER,
        "Requests that did not reuse their whole prompt, by reason.",
        _by(lambda s: s.misses, known=[reason for reason in Miss if reason]),
        ("reason",),
    ),
    Metric(
        "cache_info",
        Kind.GAUGE,
        "1; the labels have the sizes of the cache.",
        lambda stats: [(tuple(stats.cache_info[name] for name in _CACHE_INFO), 1)] if stats.cache_info else [],
        _CACHE_INFO,
    ),
    Metric(
        "cache_warnings",
        Kind.GAUGE,
        "Active warnings; /cache returns their texts.",
        _one(lambda s: len(s.warnings)),
    ),
)
_MOVES = (
    Metric(
        "move_bytes",
        Kind.COUNTER,
        "Bytes moved between tiers by all ranks.",
        _moved(1),
        ("lane",),
    ),
    Metric(
        "move_seconds",
        Kind.COUNTER,
        "Time spent in transfers: of the slowest rank for save and load, of all calls for prefetch and persist.",
        _moved(2),
        ("lane",),
    ),
)
# Counter or gauge of a tier -> metric, help text, kind.
_FIGURES = {
    "tokens": ("tier_tokens", "Capacity in tokens.", Kind.GAUGE),
    "pages_total": ("tier_pages", "Capacity in pages.", Kind.GAUGE),
    "pages_free": ("tier_pages_free", "Free pages.", Kind.GAUGE),
    "pages_cached": ("tier_pages_cached", "Pages of cached prefixes.", Kind.GAUGE),
    "pages_moving": ("tier_pages_moving", "Pages being copied.", Kind.GAUGE),
    "saved_pages": ("tier_saved_pages", "Pages copied to the tier from the one above.", Kind.COUNTER),
    "persisted_pages": ("tier_persisted_pages", "Pages copied from the host to the tier.", Kind.COUNTER),
    "loaded_pages": ("tier_loaded_pages", "Pages copied from the tier to the one above.", Kind.COUNTER),
    "prefetched_pages": ("tier_prefetched_pages", "Pages fetched from the tier ahead of use.", Kind.COUNTER),
    "evicted_pages": ("tier_evicted_pages", "Pages evicted from the tier.", Kind.COUNTER),
    "evicted_unsaved_pages": ("tier_evicted_unsaved_pages", "Evicted pages that no lower tier holds.", Kind.COUNTER),
    "failed_saves": ("tier_failed_saves", "Failed copies to the tier.", Kind.COUNTER),
    "failed_loads": ("tier_failed_loads", "Failed copies from the tier; their tokens were recomputed.", Kind.COUNTER),
    "objects": ("tier_objects", "Objects stored.", Kind.GAUGE),
    "bytes_used": ("tier_used_bytes", "Bytes used on the medium.", Kind.GAUGE),
    "bytes_limit": ("tier_limit_bytes", "Size limit in bytes; 0: none set by RayCache.", Kind.GAUGE),
    "stored": ("tier_objects_stored", "Objects written.", Kind.COUNTER),
    "known": ("tier_objects_known", "Writes of objects that were already stored.", Kind.COUNTER),
    "hits": ("tier_object_hits", "Objects found.", Kind.COUNTER),
    "missing": ("tier_object_misses", "Objects not found.", Kind.COUNTER),
    "corrupt": ("tier_objects_corrupt", "Objects with a wrong checksum.", Kind.COUNTER),
    "foreign": ("tier_objects_foreign", "Objects with an unexpected length or format.", Kind.COUNTER),
    "evicted": ("tier_objects_evicted", "Objects evicted.", Kind.COUNTER),
    "refused": (
        "tier_objects_refused",
        "Objects rejected because they exceed the limit or everything else is being written.",
        Kind.COUNTER,
    ),
    "disk_full": ("tier_objects_disk_full", "Objects rejected because the medium was full.", Kind.COUNTER),
    "io_errors": ("tier_io_errors", "Objects whose read or write failed.", Kind.COUNTER),
    "unavailable": ("tier_unavailable", "Objects read or written while the tier was unavailable.", Kind.COUNTER),
    "unavailable_requests": ("tier_unavailable_requests", "Calls to the tier while it was unavailable.", Kind.COUNTER),
}
_SHOWN = {*_FIGURES, *(name for _, *names in LANES.values() for name in names)}
_TIERS = tuple(Metric(name, kind, text, _tier(what), ("tier",)) for what, (name, text, kind) in _FIGURES.items())
_GANG = (
    Metric("epoch", Kind.GAUGE, "Number of the current gang of ranks.", _one(lambda s: s.epoch)),
    Metric("rebuilds", Kind.COUNTER, "Gangs of ranks lost and replaced.", _one(lambda s: s.rebuilds)),
    Metric("engines_lost", Kind.COUNTER, "Engines lost and replaced.", _one(lambda s: s.engines_lost)),
)
OTHERS = Metric("tier", Kind.GAUGE, "Other statistics of a tier, by name.", _others, ("tier", "what"))

ENGINE = (*_REQUESTS, *_DEVICE, *_HITS, *_MOVES, *_TIERS, OTHERS, *_GANG)
"""Metrics of engines, with the labels model_name and replica besides their own."""

_TOKENS = tuple(2.0**power for power in range(0, 21, 2))
FIRST_TOKEN = Metric(
    "time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "From a request's arrival at the server to its first token.",
    bounds=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)
BETWEEN_TOKENS = Metric(
    "inter_token_latency_seconds",
    Kind.HISTOGRAM,
    "Between consecutive tokens of a request.",
    bounds=(0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5),
)
PREFILL = Metric(
    "prefill_time_seconds",
    Kind.HISTOGRAM,
    "From a request's start in the engine to its first token.",
    bounds=FIRST_TOKEN.bounds,
)
PER_TOKEN = Metric(
    "time_per_output_token_seconds",
    Kind.HISTOGRAM,
    "Mean time between the tokens of a request.",
    bounds=BETWEEN_TOKENS.bounds,
)
DURATION = Metric(
    "request_duration_seconds",
    Kind.HISTOGRAM,
    "From a request's arrival at the server to its last token.",
    bounds=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
DECODE = Metric(
    "decode_time_seconds", Kind.HISTOGRAM, "From a request's first token to its last.", bounds=DURATION.bounds
)
QUEUED = Metric(
    "queue_time_seconds",
    Kind.HISTOGRAM,
    "From a request's arrival at the engine until it starts to run.",
    bounds=(0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)
PROMPT_LEN = Metric("request_prompt_tokens", Kind.HISTOGRAM, "Prompt tokens per request.", bounds=_TOKENS)
OUTPUT_LEN = Metric("request_generation_tokens", Kind.HISTOGRAM, "Generated tokens per request.", bounds=_TOKENS)
READY = Metric("ready", Kind.GAUGE, "1 if the engine responds, 0 while it restarts or is lost.")
RESPONSES = Metric("http_responses", Kind.COUNTER, "HTTP responses by status.", labels=("status",))
TENANT_PROMPT = Metric(
    "tenant_prompt_tokens",
    Kind.COUNTER,
    "Prompt tokens by tenant; a prompt with several choices counts once.",
    labels=("tenant",),
)
TENANT_CACHED = Metric(
    "tenant_cached_prompt_tokens",
    Kind.COUNTER,
    "Prompt tokens by tenant that were reused from the cache.",
    labels=("tenant",),
)
TENANT_NEW = Metric(
    "tenant_new_prompt_tokens",
    Kind.COUNTER,
    "Prompt tokens by tenant that a cache without limits would have computed too (estimated).",
    labels=("tenant",),
)
TENANT_LOST = Metric(
    "tenant_lost_prompt_tokens",
    Kind.COUNTER,
    "Prompt tokens by tenant and cause that only a cache without limits would have reused (estimated).",
    labels=("tenant", "cause"),
)
ACHIEVABLE = Metric(
    "achievable_prompt_share",
    Kind.GAUGE,
    "Fraction of all prompt tokens that a cache without limits would have reused (estimated).",
)
ACHIEVABLE_ERROR = Metric(
    "achievable_prompt_share_error", Kind.GAUGE, "Half of the 95 % interval of achievable_prompt_share."
)
DOUBLING_GAIN = Metric(
    "tier_doubling_gain",
    Kind.GAUGE,
    "What twice the tier would add to the fraction of prompt tokens reused (estimated).",
    labels=("tier",),
)
REUSE = (TENANT_PROMPT, TENANT_CACHED, TENANT_NEW, TENANT_LOST, ACHIEVABLE, ACHIEVABLE_ERROR, DOUBLING_GAIN)
"""Metrics of what caches of other sizes would have reused (raycache/achievable)."""

FRONT = (
    FIRST_TOKEN,
    BETWEEN_TOKENS,
    PER_TOKEN,
    DURATION,
    QUEUED,
    PREFILL,
    DECODE,
    PROMPT_LEN,
    OUTPUT_LEN,
    READY,
    RESPONSES,
    *REUSE,
)
"""Metrics of the front end, with the label model_name besides their own."""
