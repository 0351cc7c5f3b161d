"""The PTX that reads packed MXFP4 weights, run on a CPU, gives the numbers that were packed."""

from __future__ import annotations

import pytest
import torch

from raycache.layers.mx_packing import last_planes_ptx, pack, pack_scales, plane_ptx
from tests.oracle.ptx import bfloat16, run
from tests.oracle.weights import E2M1

NUM_OUTPUTS, NUM_INPUTS = 6, 256


def packed() -> tuple[torch.Tensor, list[list[int]], list[list[int]]]:
    """Numbers [O, K] that codes and scales stand for, and of each output feature and span its words and scales."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (NUM_OUTPUTS, NUM_INPUTS), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(1, 129, (NUM_OUTPUTS, NUM_INPUTS // 32), generator=generator, dtype=torch.uint8)
    factors = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
    numbers = torch.tensor(E2M1, dtype=torch.float64)[codes.long()] * factors
    halves = pack(codes).long() & 0xFFFF  # [S, O, 32]
    words = halves[..., 0::2] | halves[..., 1::2] << 16
    scales = pack_scales(exponents).long() & 0xFFFFFFFF
    return numbers, words.transpose(0, 1).tolist(), scales.T.tolist()


@pytest.mark.parametrize("span", range(NUM_INPUTS // 128))
@pytest.mark.parametrize("feature", range(NUM_OUTPUTS // 2))
def test_numbers_are_those_that_were_packed(span: int, feature: int) -> None:
    numbers, words, scales = packed()
    first, second = feature, feature + NUM_OUTPUTS // 2
    for j in range(16):
        own = [words[at][span][j] for at in (first, second)]
        factors = [scales[at][span] for at in (first, second)]
        for plane in range(3):
            for at, word, factor in zip((first, second), own, factors, strict=True):
                (found,) = run(plane_ptx(plane), [word, factor], num_outputs=1)
                check(found, numbers[at], 128 * span + 32 * plane + 2 * j)
        # Triton passes an operand of 32 bits once per number, and two numbers at a time.
        operands = [*own, factors[0], factors[0], factors[1], factors[1]]
        for at, found in zip((first, second), run(last_planes_ptx(), operands, num_outputs=2), strict=True):
            check(found, numbers[at], 128 * span + 96 + 2 * j)


def check(found: int, numbers: torch.Tensor, at: int) -> None:
    """Compare two numbers of bfloat16 with those at two places."""
    assert [bfloat16(found & 0xFFFF), bfloat16(found >> 16)] == numbers[at : at + 2].tolist(), at
