"""A draw on a GPU is that on the CPU, and one without filters asks the device nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from raycache.rank.sampler import SampleRow, sample
from raycache.types import SamplingParams

pytestmark = pytest.mark.gpu

VOCAB, ROWS = 151_936, 96


def drawn(device: str, wanted: Mapping[str, Any]) -> torch.Tensor:
    logits = 2.5 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = [SampleRow(SamplingParams(**wanted), seed=7, position=i) for i in range(ROWS)]
    return sample(logits.to(device), rows).cpu()


@pytest.mark.parametrize(
    "wanted", [{}, {"temperature": 0.5}, {"top_k": 40}, {"top_p": 0.9}, {"top_p": 0.999, "min_p": 1e-4}], ids=str
)
def test_draws_are_those_of_the_cpu(wanted: Mapping[str, Any]) -> None:
    assert (drawn("cuda", wanted) == drawn("cpu", wanted)).sum() >= ROWS - 1  # rounding may move a border


def test_a_draw_without_filters_does_not_wait_for_the_device() -> None:
    logits = torch.randn(ROWS, VOCAB, device="cuda")
    rows = [SampleRow(SamplingParams(temperature=0.8), seed=7, position=i) for i in range(ROWS)]
    sample(logits, rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
