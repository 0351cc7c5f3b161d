"""Builds PromQL over the metrics of raycache/observe/figures.py; unknown names raise KeyError."""

from __future__ import annotations

from raycache.observe.figures import ENGINE, FRONT, Kind

_KNOWN = {metric.name: metric for metric in (*ENGINE, *FRONT)}
_OF_ENGINES = {metric.name for metric in ENGINE}
WINDOW = "$__rate_interval"
"""Grafana's variable: always spans several scrapes."""


def series(name: str, *, suffix: str = "", where: str = "", is_filtered: bool = True) -> str:
    """Selector of a metric's series.

    Args:
        name: in figures.py.
        suffix: "bucket", "sum" or "count" for a histogram; else empty.
        where: additional label matcher.
        is_filtered: whether to select only the model and replicas chosen in the dashboard.
    """
    metric = _KNOWN[name]
    assert bool(suffix) == (metric.kind is Kind.HISTOGRAM), f"{name} is a {metric.kind}"
    conditions = []
    if is_filtered:
        conditions.append('model_name=~"$model"')
        if name in _OF_ENGINES:
            conditions.append('replica=~"$replica"')
    conditions += [where] if where else []
    chosen = f"{{{','.join(conditions)}}}" if conditions else ""
    return f"{metric.full_name}{'_' if suffix else ''}{suffix}{chosen}"


def now(name: str, *by: str, where: str = "") -> str:
    """Sum of a gauge."""
    return f"{_sum(by)}({series(name, where=where)})"


def rate(name: str, *by: str, where: str = "") -> str:
    """Sum of a counter's increase per second."""
    return f"{_sum(by)}(rate({series(name, where=where)}[{WINDOW}]))"


def share(part: str, whole: str, *by: str) -> str:
    """Ratio of the increases of two counters, 0 to 1; no value while `whole` does not increase."""
    return f"{rate(part, *by)} / ({rate(whole, *by)} > 0)"


def quantile(name: str, at: float) -> str:
    """Quantile of a histogram's recent observations; no value without any."""
    buckets = f"sum by (le) (rate({series(name, suffix='bucket')}[{WINDOW}]))"
    return f"histogram_quantile({at}, {buckets})"


def _sum(by: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(by)}) " if by else "sum"
