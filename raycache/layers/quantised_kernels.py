"""Triton kernels for weights that stay quantised on the device. Imported only where they run, on Hopper.

    FP8      weights and activations are multiplied in FP8; each product over 128 input features is multiplied by both
             scales and accumulated in float32
    MXFP4    weights are converted exactly to bfloat16 in registers and multiplied with bfloat16 activations; they are
             the left factor, which Hopper's matrix units can read from registers

Products are grouped: rows are sorted by expert, and each program finds its expert and rows on the device, so that steps
can be captured in CUDA graphs.

Shapes in this file: T tokens, k experts per token, P = T * k rows sorted by expert, E experts, N output features, K
input features in G groups or S spans of 128.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from raycache.layers.routing_kernels import Routes, find, num_blocks

GROUP = 128
"""Input features that share a scale in FP8; input features of a span of MXFP4 codes."""


@dataclass(frozen=True)
class _Tile:
    """Tile of a program: `rows` of one expert by `size` output features."""

    rows: int
    size: int
    num_warps: int
    num_stages: int


# Fastest on an H200 for up to this many rows per expert on average (docs/adr/0016).
_FP8_TILES = ((8, _Tile(16, 128, 4, 4)), (48, _Tile(32, 128, 4, 4)), (math.inf, _Tile(64, 256, 8, 3)))
_MX_TILES = ((16, _Tile(16, 64, 4, 3)), (math.inf, _Tile(64, 128, 8, 4)))


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
    grid = (num_rows, triton.cdiv(len(scales), 8))
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
    _, size, num_columns = codes.shape
    return _product(
        _fp8_product,
        _tile(_FP8_TILES, routes),
        (x, x_scales, codes, scales, codes if bias is None else bias),
        routes,
        (x.shape[0], scales.shape[1]),
        IS_INPUT=is_input,
        HAS_BIAS=bias is not None,
        N=size,
        K=num_columns,
        ROWS=rows_per_scale,
        BK=GROUP,
    )


def mx_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    routes: Routes,
    *,
    offset: int,
    bias: Tensor | None,
    is_input: bool,
) -> Tensor:
    """Multiply each row with the MXFP4 matrix of its expert; see `fp8_product`.

    Args:
        x: tokens [T, K] with `is_input`, else sorted rows [P, K], bfloat16.
        codes: [E, S, N, 32] int16, code 32 p + j of a span in bits 4 p to 4 p + 3 of word j.
        scales: [E, 4 S, N] uint8, exponents plus 127; at most 128.
        offset: position of the first input feature in the first span.
    """
    _, num_spans, size, _ = codes.shape
    return _product(
        _mx_product,
        _tile(_MX_TILES, routes),
        (x, codes, scales, x if bias is None else bias),
        routes,
        (x.stride(0),),
        IS_INPUT=is_input,
        HAS_BIAS=bias is not None,
        N=size,
        K=x.shape[1],
        SPANS=num_spans,
        OFFSET=offset,
    )


def _product(
    kernel: Any, tile: _Tile, inputs: Sequence[Tensor], routes: Routes, numbers: Sequence[int], **sizes: int
) -> Tensor:
    """Launch either product; their kernels take the same arguments except for `inputs`, `numbers` and `sizes`."""
    size, num_experts = sizes["N"], len(routes.ends)
    out = torch.empty(len(routes.order), size, dtype=torch.bfloat16, device=inputs[0].device)
    kernel[(triton.cdiv(size, tile.size), num_blocks(routes, tile.rows))](
        *inputs,
        routes.order,
        routes.ends,
        out,
        num_experts,
        *numbers,
        EXPERTS=triton.next_power_of_2(num_experts),
        CHOSEN=routes.num_chosen,
        BN=tile.size,
        BM=tile.rows,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **sizes,
    )
    return out


def _tile(tiles: Sequence[tuple[float, _Tile]], routes: Routes) -> _Tile:
    """Choose a tile by the number of rows, which is fixed in a CUDA graph."""
    average = len(routes.order) / len(routes.ends)
    return next(tile for most, tile in tiles if average <= most)


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


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(words: tl.tensor) -> Any:
    """Convert the four E2M1 codes of each word to bfloat16, times 2^-126."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        shl.b32 a, $4, 12;
        shl.b32 b, $4, 6;
        lop3.b32 a, a, b, 0x80008000, 0xe4;
        and.b32 $0, a, 0x81c081c0;
        shl.b32 a, $4, 8;
        shl.b32 b, $4, 2;
        lop3.b32 a, a, b, 0x80008000, 0xe4;
        and.b32 $1, a, 0x81c081c0;
        shl.b32 a, $4, 4;
        shr.b32 b, $4, 2;
        lop3.b32 a, a, b, 0x80008000, 0xe4;
        and.b32 $2, a, 0x81c081c0;
        shr.b32 b, $4, 6;
        lop3.b32 a, $4, b, 0x80008000, 0xe4;
        and.b32 $3, a, 0x81c081c0;
        }
        """,
        "=r,=r,=r,=r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _factor(exponents: tl.tensor) -> tl.tensor:
    """2^126 times the scale of each stored exponent, in bfloat16."""
    return ((exponents.to(tl.uint16) + 126) << 7).to(tl.bfloat16, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _mx_product(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    num_experts: tl.tensor,
    x_stride: tl.tensor,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    IS_INPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPANS: tl.constexpr,
    OFFSET: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
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
    j = tl.arange(0, 32)
    code_at = codes + expert * (SPANS * N * 32) + inside[:, None] * 32 + j[None, :]
    scale_at = scales + expert * (SPANS * 4 * N) + inside
    x_at = x + source[None, :] * x_stride + (j - OFFSET)[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    for span in range(SPANS):
        weights = _numbers(tl.load(code_at + span * (N * 32)))
        for p in tl.static_range(4):
            group = 4 * span + p
            k = 32 * group + j - OFFSET
            right = tl.load(x_at + 32 * group, mask=((k >= 0) & (k < K))[:, None], other=0.0)
            total = tl.dot(weights[p] * _factor(tl.load(scale_at + group * N))[:, None], right, total)
    if HAS_BIAS:
        total += tl.load(bias + expert * N + inside)[:, None].to(tl.float32)
    target = row.to(tl.int64) if IS_INPUT else pair
    kept = is_row[:, None] & (n < N)[None, :]
    tl.store(out + target[:, None] * N + n[None, :], tl.trans(total).to(tl.bfloat16), mask=kept)


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
