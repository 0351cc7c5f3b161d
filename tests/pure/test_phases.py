"""Seconds of phases add up to the time that has passed."""

from __future__ import annotations

import time

import pytest

from raycache.observe.phases import Phases, slowest
from raycache.routing.totals import total_stats
from raycache.types import EngineStats


def test_phases_and_their_parts_add_up() -> None:
    begin = time.monotonic()
    phases = Phases()
    time.sleep(0.02)
    phases.end("first")
    time.sleep(0.03)
    phases.end("second", of_it={"part": 0.01})
    time.sleep(0.01)
    phases.end("first")
    assert sum(phases.seconds.values()) == pytest.approx(time.monotonic() - begin, abs=0.005)
    assert phases.seconds["first"] >= 0.03 and phases.seconds["second"] >= 0.02 and phases.seconds["part"] == 0.01
    time.sleep(0.02)
    phases.skip()
    phases.end("third")
    assert phases.seconds["third"] < 0.02


def test_ranks_are_as_slow_as_the_slowest_of_each_phase() -> None:
    assert slowest([{"a": 1.0, "b": 5.0}, {"a": 2.0, "c": 3.0}]) == {"a": 2.0, "b": 5.0, "c": 3.0}


def test_of_several_replicas_the_last_loss_is_told() -> None:
    early, late = (
        EngineStats(lost_at=5.0, rebuild_s={"weights": 1.0}),
        EngineStats(lost_at=7.0, rebuild_s={"groups": 2.0}),
    )
    found = total_stats({"0": late, "1": early, "2": EngineStats()})
    assert (found.lost_at, found.rebuild_s) == (7.0, {"groups": 2.0})
