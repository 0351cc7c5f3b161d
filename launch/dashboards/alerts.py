"""Prometheus alert rules. Each says what the operator can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launch.dashboards.promql import series


@dataclass(frozen=True)
class Alert:
    """One rule.

    Attributes:
        expression: PromQL; the alert fires while it returns values.
        for_s: seconds that it must hold before the alert fires.
        is_urgent: whether its severity is critical instead of warning.
        text: what is wrong and what to do.
    """

    name: str
    expression: str
    for_s: int
    is_urgent: bool
    text: str


def _more(name: str, *, within: str, above: float = 0, where: str = "", by: str = "model_name, replica") -> str:
    """Whether a counter has increased by more than `above`."""
    return f"sum by ({by}) (increase({_of(name, where=where)}[{within}])) > {above:g}"


def _of(name: str, *, suffix: str = "", where: str = "") -> str:
    return series(name, suffix=suffix, where=where, is_filtered=False)


def _share(name: str, *, where: str, by: str, above: float, least: float) -> str:
    """Whether the fraction of a counter's increase in 5 minutes that matches `where` exceeds `above`.

    Never true if the whole increase is at most `least`: too few events to tell.
    """
    part, whole = (f"sum by ({by}) (increase({_of(name, where=chosen)}[5m]))" for chosen in (where, ""))
    return f"{part} / ({whole} > {least:g}) > {above:g}"


ALERTS = (
    Alert(
        "RayCacheNotReady",
        f"min by (model_name) ({_of('ready')}) == 0",
        60,
        True,
        "No engine of {{ $labels.model_name }} responds. `raycache status` shows its state, the log why the last one "
        "was lost.",
    ),
    Alert(
        "RayCacheGone",
        f"max by (model_name) (max_over_time({_of('ready')}[1h])) unless max by (model_name) ({_of('ready')})",
        60,
        True,
        "{{ $labels.model_name }} has stopped reporting metrics within the last hour: `raycache launch` has ended, or "
        "cannot be reached. `raycache status` on its machine shows which; silence this alert if it was stopped on "
        "purpose.",
    ),
    Alert(
        "RayCacheRanksLost",
        _more("rebuilds", within="5m"),
        0,
        False,
        "Ranks of {{ $labels.model_name }}, replica {{ $labels.replica }}, were lost and replaced; open requests "
        "continued. The log names the rank and its node.",
    ),
    Alert(
        "RayCacheRanksLostRepeatedly",
        _more("rebuilds", within="30m", above=3),
        0,
        True,
        "Ranks of {{ $labels.model_name }}, replica {{ $labels.replica }}, are lost repeatedly. Look for a faulty node "
        "or GPU in the log, and exclude it with --placement.",
    ),
    Alert(
        "RayCacheEngineLost",
        _more("engines_lost", within="5m"),
        0,
        True,
        "The engine of {{ $labels.model_name }}, replica {{ $labels.replica }}, died and was replaced.",
    ),
    Alert(
        "RayCacheQueueFull",
        _more("requests_refused", within="5m"),
        0,
        True,
        "{{ $labels.model_name }} rejects requests because its queue is full. Add replicas, or raise --max-queue.",
    ),
    Alert(
        "RayCacheRequestsFail",
        _share("requests_finished", where='reason=~"error|timeout"', by="model_name", above=0.05, least=10),
        60,
        True,
        "More than 5 % of the requests to {{ $labels.model_name }} fail or time out.",
    ),
    Alert(
        "RayCacheServerErrors",
        _share("http_responses", where='status=~"5.."', by="model_name", above=0.01, least=10),
        60,
        True,
        "More than 1 % of the responses of {{ $labels.model_name }} are server errors (5xx).",
    ),
    Alert(
        "RayCacheSlowFirstToken",
        "histogram_quantile(0.99, sum by (model_name, le) (rate("
        f"{_of('time_to_first_token_seconds', suffix='bucket')}[5m]))) > 10",
        300,
        False,
        "1 % of the requests to {{ $labels.model_name }} wait more than 10 s for their first token. Check the queue "
        "and the cache hit rate.",
    ),
    Alert(
        "RayCacheTierNeverHits",
        f"max by (model_name, replica) ({_of('cache_warnings')}) > 0",
        1800,
        False,
        "A cache tier of {{ $labels.model_name }} stores pages but never hits; `raycache cache status` shows why.",
    ),
    Alert(
        "RayCacheTierUnavailable",
        _more("tier_unavailable_requests", within="5m"),
        60,
        True,
        "The storage of {{ $labels.model_name }} cannot be reached; prompts are recomputed instead. Check the storage "
        "and `raycache cache status`.",
    ),
    Alert(
        "RayCacheStorageCorrupt",
        _more("tier_objects_corrupt", within="15m"),
        0,
        False,
        "The storage of {{ $labels.model_name }} returns damaged objects, which are not used. Run `raycache cache "
        "scrub`, and check the medium.",
    ),
    Alert(
        "RayCacheStorageFull",
        _more("tier_objects_disk_full", within="15m"),
        0,
        False,
        "The storage medium of {{ $labels.model_name }} is full before the size limit is reached; free space, or lower "
        "the limit with `raycache cache resize`.",
    ),
    Alert(
        "RayCacheMovesFail",
        f"{_more('tier_failed_loads', within='15m')} or {_more('tier_failed_saves', within='15m')}",
        0,
        False,
        "Pages of {{ $labels.model_name }} cannot be copied to or from the host tier; the ranks' logs say why.",
    ),
    Alert(
        "RayCachePreempts",
        _more("preemptions", within="10m", above=60),
        600,
        False,
        "Requests to {{ $labels.model_name }} preempt each other and recompute what they lose. Raise --kv-memory, or "
        "lower --max-running.",
    ),
)


def rules() -> dict[str, Any]:
    """Return the rules in the structure of a Prometheus rule file."""
    return {
        "groups": [
            {
                "name": "raycache",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expression,
                        "for": f"{alert.for_s}s",
                        "labels": {"severity": "critical" if alert.is_urgent else "warning"},
                        "annotations": {"summary": alert.text},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }
