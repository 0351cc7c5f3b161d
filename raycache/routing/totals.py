"""Aggregates the statistics of several replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from raycache.types import EngineInfo, EngineStats


def total_stats(by_replica: Mapping[str, EngineStats]) -> EngineStats:
    """Sum up statistics, keeping each replica's own in `replicas`; a single replica "0" is returned unchanged.

    A single replica of another name keeps its entry: others may return, and time series must not change labels.

    Args:
        by_replica: replica name -> its statistics; at least one.
    """
    if list(by_replica) == ["0"]:
        return by_replica["0"]
    values = {
        item.name: total([getattr(stats, item.name) for stats in by_replica.values()])
        for item in dataclasses.fields(EngineStats)
    }
    values["epoch"] = max(stats.epoch for stats in by_replica.values())
    latest = max(by_replica.values(), key=lambda stats: stats.lost_at)
    values |= {"lost_at": latest.lost_at, "rebuild_s": latest.rebuild_s}
    values["warnings"] = tuple(
        f"replica {name}: {text}" for name, stats in by_replica.items() for text in stats.warnings
    )
    return EngineStats(**{**values, "replicas": dict(by_replica)})


def total_info(by_replica: Mapping[str, EngineInfo]) -> EngineInfo:
    """Return the first replica's info with the ranks of all; each rank's row names its replica."""
    ranks = tuple({"replica": name, **row} for name, info in by_replica.items() for row in info.ranks)
    return dataclasses.replace(next(iter(by_replica.values())), ranks=ranks)


def total_answer(by_replica: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Combine the replies to a command: sums, and each reply in "replicas"; a single reply is returned unchanged."""
    if len(by_replica) == 1:
        return next(iter(by_replica.values()))
    return {**total(list(by_replica.values())), "replicas": dict(by_replica)}


def total(values: Sequence[Any]) -> Any:
    """Add numbers, mappings by name and tuples of numbers by position, and concatenate other sequences; of any other
    type, return the first value."""
    first = values[0]
    match first:
        case bool() | str():
            return first
        case int() | float():
            return sum(values)
        case Mapping():
            names = dict.fromkeys(name for value in values for name in value)
            return {name: total([value[name] for value in values if name in value]) for name in names}
        case tuple() if first and all(isinstance(item, int | float) for item in first):
            return tuple(sum(column) for column in zip(*values, strict=True))
        case list() | tuple():
            return type(first)(item for value in values for item in value)
    return first
