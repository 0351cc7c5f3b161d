"""What is measured: one table, from which /metrics, Ray's metrics, the dashboard, the alerts and the docs are made.

    EngineStats -> samples -> [ metric, labels, value ] -> /metrics (metrics.py), Ray (actors/metrics.py)

Names begin with raycache_; a counter's ends with _total. Ray puts ray_ before them.
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
"""Between tiers: (tier whose figures have them, bytes moved, seconds)."""

Values = Iterable[tuple[tuple[str, ...], float]]
"""Values of a metric, each with those of its own labels."""


class Kind(StrEnum):
    """As Prometheus knows them."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
        name: without the prefix, and without _total.
        kind: gauge, counter or histogram.
        text: what it counts.
        read: its values in the engine's figures; nothing for what the front end counts.
        labels: its own, beside model_name and, if it is of an engine, replica.
        bounds: upper bounds of a histogram's buckets.
    """

    name: str
    kind: Kind
    text: str
    read: Callable[[EngineStats], Values] = lambda stats: ()
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As it is asked for; a histogram has _bucket, _sum and _count behind it."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


@dataclass(frozen=True)
class Sample:
    """A value to show.

    Attributes:
        metric: whose.
        labels: values of replica and of the metric's own labels.
        value: now; a counter's since its engine began.
    """

    metric: Metric
    labels: tuple[str, ...]
    value: float


def samples(stats: EngineStats) -> Iterator[Sample]:
    """All values of all replicas."""
    for replica, own in (stats.replicas or {"0": stats}).items():
        for metric in ENGINE:
            for labels, value in metric.read(own):
                yield Sample(metric, (replica, *labels), value)


def _one(read: Callable[[EngineStats], float]) -> Callable[[EngineStats], Values]:
    return lambda stats: [((), read(stats))]


def _by(
    read: Callable[[EngineStats], Mapping[Any, int]], *, known: Sequence[str] = ()
) -> Callable[[EngineStats], Values]:
    """Counts by name. Known names start at 0: Prometheus sees no increase in a series whose first value is 1."""
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
        "Requests that were refused because the queue was full.",
        _one(lambda s: s.refused),
    ),
    Metric("preemptions", Kind.COUNTER, "Preemptions of running requests.", _one(lambda s: s.preemptions)),
    Metric("steps", Kind.COUNTER, "Steps planned.", _one(lambda s: s.steps)),
    Metric(
        "prompt_tokens",
        Kind.COUNTER,
        "Prompt tokens of requests that got their first token.",
        _one(lambda s: s.prompt_tokens),
    ),
    Metric(
        "drafted_tokens",
        Kind.COUNTER,
        "Draft tokens that were checked, by their position after the last known token.",
        _by(lambda s: s.drafted, known=["1"]),
        ("position",),
    ),
    Metric(
        "accepted_draft_tokens",
        Kind.COUNTER,
        "Draft tokens that were accepted, by their position.",
        _by(lambda s: s.accepted, known=["1"]),
        ("position",),
    ),
    Metric(
        "cached_prompt_tokens", Kind.COUNTER, "Prompt tokens that came from the cache.", _one(lambda s: s.cached_tokens)
    ),
    Metric(
        "computed_tokens",
        Kind.COUNTER,
        "Tokens that the ranks were asked to compute.",
        _one(lambda s: s.computed_tokens),
    ),
    Metric("output_tokens", Kind.COUNTER, "Tokens generated.", _one(lambda s: s.output_tokens)),
)
_DEVICE = (
    Metric("pages", Kind.GAUGE, "Pages of the device pool.", _one(lambda s: s.pages_total)),
    Metric("pages_free", Kind.GAUGE, "Free pages.", _one(lambda s: s.pages_free)),
    Metric("pages_in_use", Kind.GAUGE, "Pages that running requests own.", _one(lambda s: s.pages_in_use)),
    Metric("pages_cached", Kind.GAUGE, "Pages of cached prefixes.", _one(lambda s: s.pages_cached)),
    Metric("pages_locked", Kind.GAUGE, "Cached pages that running requests use.", _one(lambda s: s.pages_locked)),
    Metric("pages_used_share", Kind.GAUGE, "Share of the pages that running requests own or use.", _one(_used_share)),
    Metric("evicted_pages", Kind.COUNTER, "Cached pages that were evicted.", _one(lambda s: s.evicted_pages)),
    Metric(
        "restore_points",
        Kind.GAUGE,
        "Positions that hybrid models can continue cached prefixes from.",
        _one(lambda s: s.restore_points),
    ),
    Metric(
        "evicted_restore_points",
        Kind.COUNTER,
        "Restore points that were evicted.",
        _one(lambda s: s.evicted_restore_points),
    ),
    Metric(
        "component_units",
        Kind.GAUGE,
        "Pages, or slots of states, of each kind of state.",
        _units(0),
        ("tier", "component"),
    ),
    Metric("component_units_free", Kind.GAUGE, "Free units of each kind of state.", _units(1), ("tier", "component")),
)
_HITS = (
    Metric(
        "cached_prompt_tokens_by_tier",
        Kind.COUNTER,
        "Prompt tokens from the cache by the tier that they came from.",
        _by(lambda s: s.cached_by_tier),
        ("tier",),
    ),
    Metric(
        "cached_prompt_share",
        Kind.GAUGE,
        "Share of all prompt tokens that came from the cache.",
        _one(lambda s: s.cached_tokens / max(s.prompt_tokens, 1)),
    ),
    Metric(
        "cache_misses",
        Kind.COUNTER,
        "Requests that could not reuse their whole prompt, by reason.",
        _by(lambda s: s.misses, known=[reason for reason in Miss if reason]),
        ("reason",),
    ),
    Metric(
        "cache_warnings",
        Kind.GAUGE,
        "Active warnings; /cache has their texts.",
        _one(lambda s: len(s.warnings)),
    ),
)
_MOVES = (
    Metric(
        "move_bytes",
        Kind.COUNTER,
        "Bytes moved between tiers, over all ranks.",
        _moved(1),
        ("lane",),
    ),
    Metric(
        "move_seconds",
        Kind.COUNTER,
        "Duration of transfers: of the slowest rank for save and load, of all calls for prefetch and persist.",
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
    "pages_moving": ("tier_pages_moving", "Pages that are being copied.", Kind.GAUGE),
    "saved_pages": ("tier_saved_pages", "Pages copied down to the tier.", Kind.COUNTER),
    "persisted_pages": ("tier_persisted_pages", "Pages copied from the host to the tier.", Kind.COUNTER),
    "loaded_pages": ("tier_loaded_pages", "Pages copied up from the tier.", Kind.COUNTER),
    "prefetched_pages": ("tier_prefetched_pages", "Pages fetched from the tier ahead of their use.", Kind.COUNTER),
    "evicted_pages": ("tier_evicted_pages", "Pages that were evicted.", Kind.COUNTER),
    "evicted_unsaved_pages": ("tier_evicted_unsaved_pages", "Evicted pages that no lower tier has.", Kind.COUNTER),
    "failed_saves": ("tier_failed_saves", "Copies down that failed.", Kind.COUNTER),
    "failed_loads": ("tier_failed_loads", "Copies up that failed; their tokens were recomputed.", Kind.COUNTER),
    "objects": ("tier_objects", "Objects stored.", Kind.GAUGE),
    "bytes_used": ("tier_used_bytes", "Bytes on the medium.", Kind.GAUGE),
    "bytes_limit": ("tier_limit_bytes", "Limit of bytes on the medium; 0: none is set here.", Kind.GAUGE),
    "stored": ("tier_objects_stored", "Objects written.", Kind.COUNTER),
    "known": ("tier_objects_known", "Writes of objects that were there already.", Kind.COUNTER),
    "hits": ("tier_object_hits", "Objects found.", Kind.COUNTER),
    "missing": ("tier_object_misses", "Objects that were not found.", Kind.COUNTER),
    "corrupt": ("tier_objects_corrupt", "Objects with a wrong checksum.", Kind.COUNTER),
    "foreign": ("tier_objects_foreign", "Objects of another length or format.", Kind.COUNTER),
    "evicted": ("tier_objects_evicted", "Objects that were evicted.", Kind.COUNTER),
    "refused": ("tier_objects_refused", "Objects larger than the bound allows.", Kind.COUNTER),
    "disk_full": ("tier_objects_disk_full", "Objects not stored because the medium is full.", Kind.COUNTER),
    "io_errors": ("tier_io_errors", "Objects whose read or write failed.", Kind.COUNTER),
    "unavailable": ("tier_unavailable", "Objects read or written while the tier was unavailable.", Kind.COUNTER),
    "unavailable_requests": ("tier_unavailable_requests", "Calls to the tier while it was unavailable.", Kind.COUNTER),
}
_SHOWN = {*_FIGURES, *(name for _, *names in LANES.values() for name in names)}
_TIERS = tuple(Metric(name, kind, text, _tier(what), ("tier",)) for what, (name, text, kind) in _FIGURES.items())
_GANG = (
    Metric("epoch", Kind.GAUGE, "Number of the gang of ranks that runs.", _one(lambda s: s.epoch)),
    Metric("rebuilds", Kind.COUNTER, "Gangs of ranks that were lost and replaced.", _one(lambda s: s.rebuilds)),
    Metric("engines_lost", Kind.COUNTER, "Engines that were lost and replaced.", _one(lambda s: s.engines_lost)),
)
OTHERS = Metric("tier", Kind.GAUGE, "Other figures of a tier.", _others, ("tier", "what"))

ENGINE = (*_REQUESTS, *_DEVICE, *_HITS, *_MOVES, *_TIERS, OTHERS, *_GANG)
"""What engines count; each has the labels model_name and replica, and its own."""

_TOKENS = tuple(2.0**power for power in range(0, 21, 2))
FIRST_TOKEN = Metric(
    "time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "From arrival.",
    bounds=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)
BETWEEN_TOKENS = Metric(
    "inter_token_latency_seconds",
    Kind.HISTOGRAM,
    "Between two tokens of a request.",
    bounds=(0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5),
)
DURATION = Metric(
    "request_duration_seconds",
    Kind.HISTOGRAM,
    "From arrival to the last token.",
    bounds=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
QUEUED = Metric(
    "queue_time_seconds",
    Kind.HISTOGRAM,
    "From arrival at the engine until it begins to run.",
    bounds=(0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)
PROMPT_LEN = Metric("request_prompt_tokens", Kind.HISTOGRAM, "Prompt tokens of a request.", bounds=_TOKENS)
OUTPUT_LEN = Metric("request_generation_tokens", Kind.HISTOGRAM, "Tokens generated for a request.", bounds=_TOKENS)
READY = Metric("ready", Kind.GAUGE, "1 if the engine answers, 0 while it starts anew or is lost.")
RESPONSES = Metric("http_responses", Kind.COUNTER, "Answers of the server by HTTP status.", labels=("status",))

FRONT = (FIRST_TOKEN, BETWEEN_TOKENS, DURATION, QUEUED, PROMPT_LEN, OUTPUT_LEN, READY, RESPONSES)
"""What the front end sees; each has the label model_name, and its own."""
