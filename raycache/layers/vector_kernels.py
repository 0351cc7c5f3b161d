"""Triton kernel for the product of a matrix with one or two tokens. Imported only where it runs.

Such a product is as fast as its weights are read. Kernels of cuBLAS begin to read when the kernel before them
has ended; with programmatic dependent launch this one begins while that one is still running.

Shapes in this file: T tokens, one or two, I input features, O output features.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.parallel.devices import early
from raycache.rounding import ceil_div, power_of_2

MOST_FEATURES = 32768
"""Input features at most: a program holds whole rows of the matrix in registers."""


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `multiply` supports these tensors; arguments as there."""
    given = (x, weight) if bias is None else (x, weight, bias)
    if any(each.dtype != torch.bfloat16 or each.data_ptr() % 16 or each.stride(-1) != 1 for each in given):
        return False
    strides = *weight.stride()[:-1], *(x.stride()[:1] if len(x) == 2 else ())
    fits = len(x) in (1, 2) and len(weight) > 0 and 0 < weight.shape[-1] <= MOST_FEATURES
    return fits and all(stride % 8 == 0 for stride in strides) and bool(early(x.device)["IS_EARLY"])


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[T, I] -> new [T, O], summed in float32.

    Args:
        x: [T, I].
        weight: [O, I], or its output features in blocks, [B, O / B, I].
        bias: [O], or None.
    """
    blocks = weight if weight.dim() == 3 else weight[None]
    size, depth = blocks.shape[0] * blocks.shape[1], blocks.shape[2]
    tile = _tile(depth, len(x))
    out = x.new_empty(len(x), size)
    _multiply[(ceil_div(size, tile.rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        size,
        x.stride(0),
        blocks.shape[1],
        blocks.stride(0),
        blocks.stride(1),
        TOKENS=len(x),
        NUM_FEATURES=depth,
        FEATURES=tile.features,
        REST=tile.rest,
        ROWS=tile.rows,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        **early(x.device),
    )
    return out


class _Tile(NamedTuple):
    """Of a program: `features` + `rest` input features, both powers of two, of some output features."""

    features: int
    rest: int
    rows: int
    num_warps: int


@cache
def _tile(depth: int, num_tokens: int) -> _Tile:
    """The fastest tile for `depth` input features on an H200, or nearly (docs/adr/0021)."""
    features = power_of_2(depth + 1) // 2
    rest = max(256, power_of_2(depth - features)) if depth > features else 0
    if rest >= features:
        features, rest = 2 * features, 0
    held = features + rest
    if held < 4096:
        return _Tile(features, rest, rows=2 if num_tokens == 1 and held >= 2048 else 4, num_warps=4)
    if held <= 12288:
        return _Tile(features, rest, rows=2, num_warps=8 // num_tokens)
    return _Tile(features, rest, rows=1, num_warps=8)


# A matrix of any number of rows is multiplied by the same kernel. Strides are multiples of 8, not always of 16; what
# `tl.multiple_of` says of arguments is lost, and each number would be loaded by itself.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["size", "token_stride", "block_size", "block_stride", "stride"]
)
def _multiply(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    token_stride: tl.tensor,
    block_size: tl.tensor,
    block_stride: tl.tensor,
    stride: tl.tensor,
    TOKENS: tl.constexpr,
    NUM_FEATURES: tl.constexpr,
    FEATURES: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per ROWS output features, with FEATURES + REST input features, not less than there are."""
    row, token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, TOKENS)[None, :]
    feature = tl.arange(0, FEATURES)[None, None, :]
    is_row, is_feature = row < size, feature < NUM_FEATURES
    block, own = (row // block_size).to(tl.int64), (row % block_size).to(tl.int64)
    begin = (block * (block_stride // 8 * 8) + own * (stride // 8 * 8))[:, :, None]
    weights = tl.load(weight + begin + feature, mask=is_row[:, :, None] & is_feature, other=0.0)
    if REST > 0:
        last = FEATURES + tl.arange(0, REST)[None, None, :]
        is_last = last < NUM_FEATURES
        more = tl.load(weight + begin + last, mask=is_row[:, :, None] & is_last, other=0.0)
    added = tl.load(bias + row, mask=is_row & HAS_BIAS, other=0.0).to(tl.float32)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    tokens = x + (token * (token_stride // 8 * 8))[:, :, None]
    found = tl.load(tokens + feature, mask=is_feature, other=0.0)
    total = tl.sum(weights.to(tl.float32) * found.to(tl.float32), 2) + added
    if REST > 0:
        found = tl.load(tokens + last, mask=is_last, other=0.0)
        total += tl.sum(more.to(tl.float32) * found.to(tl.float32), 2)
    tl.store(out + token * size + row, total.to(tl.bfloat16), mask=is_row)
