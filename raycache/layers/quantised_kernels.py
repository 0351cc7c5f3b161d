"""Triton kernels for weights that stay in FP8 on the device. Imported only where they run, on Hopper.

Weights and activations are multiplied in FP8; each product over 128 input features is multiplied by both scales and
accumulated in float32. Products are grouped: rows are sorted by expert, and each program finds its expert and rows on
the device, so that steps can be captured in CUDA graphs.

Shapes in this file: T tokens, k experts per token, P = T * k rows sorted by expert, E experts, N output features, K
input features in G groups of 128.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from raycache.layers.routing_kernels import Routes, find, num_blocks
from raycache.rounding import ceil_div, power_of_2

GROUP = 128
"""Input features that share a scale."""


@dataclass(frozen=True)
class _Tile:
    """Tile of a program: `rows` of one expert by `size` output features."""

    rows: int
    size: int
    num_warps: int
    num_stages: int


# Fastest on an H200 for up to this many rows per expert on average (docs/adr/0016).
_TILES = ((8, _Tile(16, 128, 4, 4)), (48, _Tile(32, 128, 4, 4)), (math.inf, _Tile(64, 256, 8, 3)))


def quantise(x: Tensor, *, num_rows: int, num_columns: int, offset: int) -> tuple[Tensor, Tensor]:
    """Quantise activations to FP8 with a scale per row and group, padded with zeros.

    Args:
        x: [T, K], contiguous in the last dimension.
        num_rows: T or more.
        num_columns: a multiple of GROUP.
        offset: column of the first feature.
    Returns:
        Codes [num_rows, num_columns] and scales [G, num_rows], float32.
    """
    codes = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_columns // GROUP, num_rows, dtype=torch.float32, device=x.device)
    grid = (num_rows, ceil_div(len(scales), 8))
    sizes = {"K": x.shape[1], "COLUMNS": num_columns, "OFFSET": offset, "SIZE": GROUP, "WIDE": 8}
    _quantise[grid](x, codes, scales, len(x), num_rows, x.stride(0), **sizes)
    return codes, scales


def fp8_product(
    x: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    routes: Routes,
    *,
    rows_per_scale: int,
    bias: Tensor | None,
    is_input: bool,
) -> Tensor:
    """Multiply each row with the FP8 matrix of its expert.

    Args:
        x: FP8 codes of tokens [T, K] with `is_input`, else of sorted rows [P, K].
        x_scales: [G, T] or [G, P].
        codes: [E, N, K].
        scales: [E, N / rows_per_scale, G].
        bias: [E, N], or None.
        is_input: take tokens and return rows sorted by expert; else take sorted rows and return them in the order of
            (token, choice) pairs.
    Returns:
        [P, N] in bfloat16.
    """
    num_experts, size, num_columns = codes.shape
    average = len(routes.order) / num_experts  # rows per expert, fixed in a CUDA graph
    tile = next(tile for most, tile in _TILES if average <= most)
    out = torch.empty(len(routes.order), size, dtype=torch.bfloat16, device=x.device)
    _fp8_product[(ceil_div(size, tile.size), num_blocks(len(routes.order), num_experts, tile.rows))](
        x,
        x_scales,
        codes,
        scales,
        codes if bias is None else bias,
        routes.order,
        routes.ends,
        out,
        num_experts,
        x.shape[0],
        scales.shape[1],
        EXPERTS=power_of_2(num_experts),
        CHOSEN=routes.num_chosen,
        IS_INPUT=is_input,
        HAS_BIAS=bias is not None,
        N=size,
        K=num_columns,
        ROWS=rows_per_scale,
        BN=tile.size,
        BM=tile.rows,
        BK=GROUP,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@triton.jit(do_not_specialize=["num_x"])  # type: ignore[untyped-decorator]
def _fp8_product(
    x: tl.tensor,
    x_scales: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    num_experts: tl.tensor,
    num_x: tl.tensor,
    scale_rows: tl.tensor,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    IS_INPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    expert, first, last = find(ends, tl.program_id(1), num_experts, EXPERTS, BM)
    if expert >= num_experts:
        return
    expert = expert.to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n % N
    row = first + tl.arange(0, BM)
    is_row = row < last
    pair = tl.load(order + row, mask=is_row, other=0)
    source = tl.where(is_row, pair // CHOSEN if IS_INPUT else row, 0).to(tl.int64)
    k = tl.arange(0, BK)
    code_at = codes + expert * N * K + inside[None, :].to(tl.int64) * K + k[:, None]
    x_at = x + source[:, None] * K + k[None, :]
    scale_at = scales + (expert * scale_rows + inside // ROWS) * (K // BK)
    total = tl.zeros((BM, BN), tl.float32)
    for group in range(K // BK):
        product = tl.dot(tl.load(x_at), tl.load(code_at))
        total += product * tl.load(x_scales + group * num_x + source)[:, None] * tl.load(scale_at + group)[None, :]
        code_at += BK
        x_at += BK
    if HAS_BIAS:
        total += tl.load(bias + expert * N + inside)[None, :].to(tl.float32)
    target = row.to(tl.int64) if IS_INPUT else pair
    kept = is_row[:, None] & (n < N)[None, :]
    tl.store(out + target[:, None] * N + n[None, :], total.to(tl.bfloat16), mask=kept)


# Not specialised for the number of tokens, which differs from step to step.
@triton.jit(do_not_specialize=["num_tokens", "num_rows"])  # type: ignore[untyped-decorator]
def _quantise(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    OFFSET: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    k = column - OFFSET
    is_in = (k >= 0) & (k < K) & (row < num_tokens)
    value = tl.load(x + row * x_stride + k, mask=is_in, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1), 1e-12) / 448.0
    tl.store(codes + row * COLUMNS + column, (value / scale[:, None]).to(tl.float8e4nv), mask=column < COLUMNS)
    tl.store(scales + group * num_rows + row, scale, mask=group * SIZE < COLUMNS)
