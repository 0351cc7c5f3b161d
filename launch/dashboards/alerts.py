"""Alert rules for Prometheus. Each names what an operator can do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launch.dashboards.promql import series


@dataclass(frozen=True)
class Alert:
    """One rule.

    Attributes:
        name: of it.
        expression: what is wrong while it has values.
        for_s: seconds that it has to hold.
        is_urgent: whether somebody has to look at once.
        text: what is the matter, and what to do.
    """

    name: str
    expression: str
    for_s: int
    is_urgent: bool
    text: str


def _more(name: str, *, within: str, above: float = 0, where: str = "", by: str = "model_name, replica") -> str:
    """A counter has grown."""
    return f"sum by ({by}) (increase({_of(name, where=where)}[{within}])) > {above:g}"


def _of(name: str, *, suffix: str = "", where: str = "") -> str:
    return series(name, suffix=suffix, where=where, is_filtered=False)


def _share(name: str, *, where: str, by: str, above: float, least: float) -> str:
    """Of what a counter has gained in 5 minutes: the share of some of it, if it is enough to be told."""
    part, whole = (f"sum by ({by}) (increase({_of(name, where=chosen)}[5m]))" for chosen in (where, ""))
    return f"{part} / ({whole} > {least:g}) > {above:g}"


ALERTS = (
    Alert(
        "RayCacheNotReady",
        f"min by (model_name) ({_of('ready')}) == 0",
        60,
        True,
        "{{ $labels.model_name }} has no engine that answers. `raycache status` says what it is doing, the log why the "
        "last one was lost.",
    ),
    Alert(
        "RayCacheGone",
        f"max by (model_name) (max_over_time({_of('ready')}[1h])) unless max by (model_name) ({_of('ready')})",
        60,
        True,
        "{{ $labels.model_name }} was there within the last hour, and tells nothing any more: the process of `raycache "
        "launch` has ended, or cannot be reached. `raycache status` on its machine says which; silence this if it was "
        "stopped on purpose.",
    ),
    Alert(
        "RayCacheRanksLost",
        _more("rebuilds", within="5m"),
        0,
        False,
        "Ranks of {{ $labels.model_name }}, replica {{ $labels.replica }}, were lost and replaced; open requests went "
        "on. The log names the rank and its node.",
    ),
    Alert(
        "RayCacheRanksLostAgainAndAgain",
        _more("rebuilds", within="30m", above=3),
        0,
        True,
        "Ranks of {{ $labels.model_name }}, replica {{ $labels.replica }}, are lost again and again. Look for a bad "
        "node or GPU in the log, and take it out with --placement.",
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
        "{{ $labels.model_name }} refuses requests, its queue is full. Add replicas, or raise --max-queue.",
    ),
    Alert(
        "RayCacheRequestsFail",
        _share("requests_finished", where='reason=~"error|timeout"', by="model_name", above=0.05, least=10),
        60,
        True,
        "More than 5 % of the requests to {{ $labels.model_name }} fail or are late.",
    ),
    Alert(
        "RayCacheServerErrors",
        _share("http_responses", where='status=~"5.."', by="model_name", above=0.01, least=10),
        60,
        True,
        "More than 1 % of the answers of {{ $labels.model_name }} are errors of the server.",
    ),
    Alert(
        "RayCacheSlowFirstToken",
        "histogram_quantile(0.99, sum by (model_name, le) (rate("
        f"{_of('time_to_first_token_seconds', suffix='bucket')}[5m]))) > 10",
        300,
        False,
        "1 % of the requests to {{ $labels.model_name }} wait more than 10 s for their first token. Look at the queue "
        "and at the share of cached tokens.",
    ),
    Alert(
        "RayCacheTierNeverHits",
        f"max by (model_name, replica) ({_of('cache_warnings')}) > 0",
        1800,
        False,
        "A tier of {{ $labels.model_name }} stores and never hits; `raycache cache status` says why.",
    ),
    Alert(
        "RayCacheTierUnavailable",
        _more("tier_unavailable_requests", within="5m"),
        60,
        True,
        "The storage of {{ $labels.model_name }} cannot be reached. Requests are computed instead; check the medium "
        "and `raycache cache status`.",
    ),
    Alert(
        "RayCacheStorageCorrupt",
        _more("tier_objects_corrupt", within="15m"),
        0,
        False,
        "The storage of {{ $labels.model_name }} gives back other bytes than were stored; they are not used. Run "
        "`raycache cache scrub`, and check the medium.",
    ),
    Alert(
        "RayCacheStorageFull",
        _more("tier_objects_disk_full", within="15m"),
        0,
        False,
        "The medium of the storage of {{ $labels.model_name }} is full before its bound is reached; free some of it, "
        "or lower the bound with `raycache cache resize`.",
    ),
    Alert(
        "RayCacheMovesFail",
        f"{_more('tier_failed_loads', within='15m')} or {_more('tier_failed_saves', within='15m')}",
        0,
        False,
        "Pages of {{ $labels.model_name }} cannot be copied to or from the host tier; the log of the ranks says why.",
    ),
    Alert(
        "RayCachePreempts",
        _more("preemptions", within="10m", above=60),
        600,
        False,
        "Requests to {{ $labels.model_name }} take each other's pages, and compute again what they lose. Raise "
        "--kv-memory, or lower --max-running.",
    ),
)


def rules() -> dict[str, Any]:
    """As Prometheus reads them from YAML."""
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
