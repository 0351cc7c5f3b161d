"""Ranks that are killed or frozen at bad moments, with ranks that stand by for them."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from actors.cluster import Cluster
from raycache.llm import LLM
from tests.actors.faults import FAULTS, Fault, Moment, lose_ranks, lose_spare_ranks

OFTEN = [Fault(signal.SIGKILL, Moment.LOAD, 0), Fault(signal.SIGSTOP, Moment.PREFILL, 1)]


@pytest.mark.parametrize(
    ("split", "faults"),
    [
        ({"tp": 2}, OFTEN),
        pytest.param({"tp": 2}, FAULTS, marks=pytest.mark.long),
        pytest.param({"cp": 2}, FAULTS, marks=pytest.mark.long),
    ],
    ids=["tp=2", "tp=2 all", "cp=2 all"],
)
def test_answers_are_those_without_the_fault(
    cluster: Cluster, model: Path, split: dict[str, int], faults: list[Fault]
) -> None:
    with LLM(str(model), device="cpu", page_size=16, num_pages=256) as oracle:
        asyncio.run(asyncio.wait_for(lose_ranks(model, faults, doubt=0.0, oracle=oracle, **split), 500))


@pytest.mark.long
def test_ranks_that_stood_by_and_died_are_replaced(cluster: Cluster, model: Path) -> None:
    asyncio.run(asyncio.wait_for(lose_spare_ranks(model, tp=2), 300))
