"""A draw on a GPU is that on the CPU, and one without filters asks the device nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from raycache.rank.sampler import SampleRow, sample
from raycache.types import SamplingParams

pytestmark = pytest.mark.gpu

VOCAB, ROWS = 151_936, 96


def drawn(device: str, wanted: Mapping[str, Any], *, masks: Sequence[bytes] = (b"",)) -> torch.Tensor:
    logits = 2.5 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = [SampleRow(SamplingParams(**wanted), seed=7, position=i, mask=masks[i % len(masks)]) for i in range(ROWS)]
    return sample(logits.to(device), rows).cpu()


@pytest.mark.parametrize(
    "wanted", [{}, {"temperature": 0.5}, {"top_k": 40}, {"top_p": 0.9}, {"top_p": 0.999, "min_p": 1e-4}], ids=str
)
def test_draws_are_those_of_the_cpu(wanted: Mapping[str, Any]) -> None:
    assert (drawn("cuda", wanted) == drawn("cpu", wanted)).sum() >= ROWS - 1  # rounding may move a border


@pytest.mark.parametrize("wanted", [{"temperature": 0}, {}, {"top_k": 40, "top_p": 0.9}], ids=str)
def test_masked_draws_are_those_of_the_cpu(wanted: Mapping[str, Any]) -> None:
    masks = [np.random.default_rng(i).bytes(VOCAB // 8) for i in range(ROWS)]
    tokens = drawn("cuda", wanted, masks=masks)
    for token, mask in zip(tokens.tolist(), masks, strict=True):
        assert mask[token // 8] >> token % 8 & 1
    assert (tokens == drawn("cpu", wanted, masks=masks)).sum() >= ROWS - 1
    few = [b"", np.packbits(np.arange(VOCAB) == 9, bitorder="little").tobytes()]
    mixed = drawn("cuda", wanted, masks=few).tolist()
    assert mixed[::2] == drawn("cuda", wanted).tolist()[::2]
    assert set(mixed[1::2]) == {9}


@pytest.mark.parametrize("mask", [b"", b"\xf0" * (VOCAB // 8)], ids=["free", "masked"])
def test_a_draw_without_filters_does_not_wait_for_the_device(mask: bytes) -> None:
    logits = torch.randn(ROWS, VOCAB, device="cuda")
    rows = [SampleRow(SamplingParams(temperature=0.8), seed=7, position=i, mask=mask) for i in range(ROWS)]
    sample(logits, rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
