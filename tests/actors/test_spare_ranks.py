"""Ranks that stand by and are lost before they are used."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.cluster import Cluster
from actors.placement import reserve
from actors.rank import Gpus
from actors.ranks import Ranks
from raycache.config import Config
from tests.actors.faults import spare_ranks, until_there_are


@pytest.fixture
def spares(cluster: Cluster, model: Path) -> Iterator[Ranks]:
    """Two ranks that stand by and have imported everything."""
    config = Config(model=str(model), device="cpu", tp=2)
    placement = reserve(config, device="cpu", on_wait=lambda missing: None)
    ranks = Ranks(
        config,
        placement=placement,
        epoch=1,
        replica="0",
        on_progress=lambda phase, share: None,
        gpus=[Gpus(), Gpus()],
    )
    until(lambda: len(spare_ranks()) == 2)
    until(lambda: not ranks.replace_lost(waits=False) and ranks.ready == {0, 1})
    yield ranks
    ranks.end()
    placement.remove()
    asyncio.run(until_there_are(0, spare_ranks))


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_ones_are_replaced_before_they_are_used(spares: Ranks, how: signal.Signals) -> None:
    victim = spare_ranks()[0].pid
    os.kill(victim, how)
    begin_s = time.monotonic()
    assert spares.replace_lost(waits=True)
    assert time.monotonic() - begin_s < 20
    assert len(spares.where()) == 2
    assert not spares.replace_lost(waits=True)
    until(lambda: victim not in {spare.pid for spare in spare_ranks()})


def test_a_dead_one_is_replaced_without_waiting(spares: Ranks) -> None:
    victim = spare_ranks()[0].pid
    os.kill(victim, signal.SIGKILL)

    def has_replaced() -> bool:
        begin_s = time.monotonic()
        found = spares.replace_lost(waits=False)
        assert time.monotonic() - begin_s < 1
        return found

    until(has_replaced)
    until(lambda: len(spare_ranks()) == 2)
    assert not spares.replace_lost(waits=False)
    assert len(spares.where()) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_those_whose_death_is_not_known_yet_are_replaced_when_they_are_asked(spares: Ranks, count: int) -> None:
    before = [spare.pid for spare in spare_ranks()]
    victims, left = before[:count], before[count:]
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    assert len(spares.where()) == 2
    until(lambda: len(spare_ranks()) == 2)
    assert set(left) == set(before) & {spare.pid for spare in spare_ranks()}
