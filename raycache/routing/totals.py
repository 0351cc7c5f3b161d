"""Figures of several replicas as those of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from raycache.types import EngineInfo, EngineStats


def total_stats(by_replica: Mapping[str, EngineStats]) -> EngineStats:
    """Sums, with each replica's own figures in `replicas`; those of "0" alone as they are.

    A single one of another name keeps it: the others may be back soon, and series must not change their labels.

    Args:
        by_replica: name of the replica -> its figures; at least one.
    """
    if list(by_replica) == ["0"]:
        return by_replica["0"]
    values = {
        item.name: total([getattr(stats, item.name) for stats in by_replica.values()])
        for item in dataclasses.fields(EngineStats)
    }
    values["epoch"] = max(stats.epoch for stats in by_replica.values())
    values["warnings"] = tuple(
        f"replica {name}: {text}" for name, stats in by_replica.items() for text in stats.warnings
    )
    return EngineStats(**{**values, "replicas": dict(by_replica)})


def total_info(by_replica: Mapping[str, EngineInfo]) -> EngineInfo:
    """The first one's facts, with the ranks of all; each row of a rank names its replica."""
    ranks = tuple({"replica": name, **row} for name, info in by_replica.items() for row in info.ranks)
    return dataclasses.replace(next(iter(by_replica.values())), ranks=ranks)


def total_answer(by_replica: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Answers to an operator's command: those of a single one as they are, else sums, and each in "replicas"."""
    if len(by_replica) == 1:
        return next(iter(by_replica.values()))
    return {**total(list(by_replica.values())), "replicas": dict(by_replica)}


def total(values: Sequence[Any]) -> Any:
    """Numbers add up, mappings by name, tuples of numbers by place, other sequences one after the other; of the rest
    the first one counts."""
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
            return tuple(sum(places) for places in zip(*values, strict=True))
        case list() | tuple():
            return type(first)(item for value in values for item in value)
    return first
