"""Findings for a trace of conversations, of which it is known what each request shares with any before it."""

from __future__ import annotations

import pytest

from benchmarks.divergence import check
from benchmarks.trace import synthetic_trace
from raycache.divergence.cause import Cause


@pytest.mark.parametrize(("num_pages", "seed"), [(10**6, 0), (300, 1)])
def test_no_finding_is_wrong(num_pages: int, seed: int) -> None:
    outcome = check(synthetic_trace(600, seed=seed), num_pages=num_pages)
    assert outcome.wrong == []
    assert outcome.causes[Cause.NEW] > 100
    assert (outcome.causes[Cause.CAPACITY] > 20) == (num_pages == 300)
