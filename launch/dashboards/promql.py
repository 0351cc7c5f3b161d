"""Expressions of Prometheus over the metrics of raycache/observe/figures.py. A name that is not there is refused."""

from __future__ import annotations

from raycache.observe.figures import ENGINE, FRONT, Kind

_KNOWN = {metric.name: metric for metric in (*ENGINE, *FRONT)}
_OF_ENGINES = {metric.name for metric in ENGINE}
WINDOW = "$__rate_interval"
"""Grafana's: long enough for the interval between two scrapes."""


def series(name: str, *, suffix: str = "", where: str = "", is_filtered: bool = True) -> str:
    """The series of a metric, of the model and the replicas that are chosen.

    Args:
        name: in figures.py.
        suffix: of a histogram: bucket, sum or count.
        where: another condition on its labels.
        is_filtered: whether only what is chosen in the dashboard is wanted.
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
    """A gauge, summed up."""
    return f"{_sum(by)}({series(name, where=where)})"


def rate(name: str, *by: str, where: str = "") -> str:
    """What a counter gains per second, summed up."""
    return f"{_sum(by)}(rate({series(name, where=where)}[{WINDOW}]))"


def share(part: str, whole: str, *by: str) -> str:
    """What one counter gains of what another one does, 0 to 1; nothing while that gains nothing."""
    return f"{rate(part, *by)} / ({rate(whole, *by)} > 0)"


def quantile(name: str, at: float) -> str:
    """Of what a histogram has counted lately; nothing if that is nothing."""
    buckets = f"sum by (le) (rate({series(name, suffix='bucket')}[{WINDOW}]))"
    return f"histogram_quantile({at}, {buckets})"


def _sum(by: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(by)}) " if by else "sum"
