"""Triton kernel for the product of a matrix with one token. Imported only where it runs.

A product with one token is as fast as its weights are read. Kernels of cuBLAS begin to read when the kernel before them
has ended; with programmatic dependent launch this one begins while that one is still running.

Shapes in this file: I input features, O output features.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.parallel.devices import early
from raycache.rounding import ceil_div, power_of_2

MOST_WEIGHTS = {4096: 2**26, 6144: 2**25, 8192: 2**24}
"""Input features at most -> weights at most. Others are read as fast by cuBLAS (on an H200)."""
_WARPS = 4
"""Of a program, which holds whole rows in registers."""


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `multiply` supports these tensors, and is faster than cuBLAS for them; arguments as there."""
    given = (x, weight) if bias is None else (x, weight, bias)
    if any(each.dtype != torch.bfloat16 or each.data_ptr() % 16 or each.stride(-1) != 1 for each in given):
        return False
    most = next((most for features, most in MOST_WEIGHTS.items() if weight.shape[-1] <= features), 0)
    is_aligned = all(stride % 8 == 0 for stride in weight.stride()[:-1])
    return 0 < weight.numel() <= most and is_aligned and bool(early(x.device)["IS_EARLY"])


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[1, I] -> new [1, O], summed in float32.

    Args:
        x: [1, I].
        weight: [O, I], or its output features in blocks, [B, O / B, I].
        bias: [O], or None.
    """
    blocks = weight if weight.dim() == 3 else weight[None]
    size, depth = blocks.shape[0] * blocks.shape[1], blocks.shape[2]
    features, rest, rows = _tile(depth)
    out = x.new_empty(1, size)
    _multiply[(ceil_div(size, rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        size,
        blocks.shape[1],
        blocks.stride(0),
        blocks.stride(1),
        NUM_FEATURES=depth,
        FEATURES=features,
        REST=rest,
        ROWS=rows,
        HAS_BIAS=bias is not None,
        num_warps=_WARPS,
        **early(x.device),
    )
    return out


@cache
def _tile(depth: int) -> tuple[int, int, int]:
    """Input features of a program, as two powers of two, and output features: the fastest on an H200, or nearly."""
    if depth <= 4096:
        return power_of_2(depth), 0, 4
    return (4096, power_of_2(depth - 4096), 2) if depth <= 6144 else (power_of_2(depth), 0, 2)


# A matrix of any number of rows is multiplied by the same kernel; strides are multiples of 8, not always of 16.
@triton.jit(do_not_specialize=["size", "block_size", "block_stride", "stride"])  # type: ignore[untyped-decorator]
def _multiply(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    block_size: tl.tensor,
    block_stride: tl.tensor,
    stride: tl.tensor,
    NUM_FEATURES: tl.constexpr,
    FEATURES: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per ROWS output features, with FEATURES + REST input features, not less than there are."""
    row, feature = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, FEATURES)
    is_row, is_feature = row < size, feature < NUM_FEATURES
    block, own = (row // block_size).to(tl.int64), (row % block_size).to(tl.int64)
    begin = block * tl.multiple_of(block_stride, 8) + own * tl.multiple_of(stride, 8)
    at = weight + begin[:, None] + feature[None, :]
    weights = tl.load(at, mask=is_row[:, None] & is_feature[None, :], other=0.0)
    if REST > 0:
        last = FEATURES + tl.arange(0, REST)
        is_last = last < NUM_FEATURES
        more = tl.load(weight + begin[:, None] + last[None, :], mask=is_row[:, None] & is_last[None, :], other=0.0)
    added = tl.load(bias + row, mask=is_row & HAS_BIAS, other=0.0).to(tl.float32)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.load(x + feature, mask=is_feature, other=0.0).to(tl.float32)
    total = tl.sum(weights.to(tl.float32) * token[None, :], 1) + added
    if REST > 0:
        token = tl.load(x + last, mask=is_last, other=0.0).to(tl.float32)
        total += tl.sum(more.to(tl.float32) * token[None, :], 1)
    tl.store(out + row, total.to(tl.bfloat16), mask=is_row)
