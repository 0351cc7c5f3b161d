"""Triton kernels for experts with MXFP4 weights. Imported only where they run, on Hopper.

    up       gathers tokens by expert, multiplies, adds the bias and activates
    down     multiplies, adds the bias and writes in the order of (token, choice) pairs

Weights are converted exactly to bfloat16 in registers and multiplied with bfloat16 activations; they are the left
factor, which Hopper's matrix units can read from registers. Output features n and n + N / 2 share words, so a program
computes a tile of both halves; before a gated activation these are gate and up. Each program finds its expert and rows
on the device, so that steps can be captured in CUDA graphs.

Shapes in this file: T tokens, k experts per token, P = T * k rows sorted by expert, E experts, N output features, of
which a gated activation makes one of two, K input features in S spans of 128.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.layers.activation import Recipe
from raycache.layers.kernels import active
from raycache.layers.mx_packing import last_planes_ptx, plane_ptx
from raycache.layers.routing_kernels import Routes, num_blocks, rows_of
from raycache.parallel.devices import early
from raycache.rounding import ceil_div, power_of_2


@dataclass(frozen=True)
class _Tile:
    """Tile of a program: `rows` of one expert by `size` output features, half of them from each half of N.

    Attributes:
        summands: programs that share the input features of a tile; their results are summed later.
        max_registers: of a thread, so that a multiprocessor runs two or three programs; 0 for no limit.
    """

    rows: int
    size: int
    num_warps: int
    num_stages: int
    summands: int = 1
    max_registers: int = 0


@dataclass(frozen=True)
class _Tiles:
    """Tiles of both products for up to `most` rows per expert on average; with at most one, each row starts a block."""

    most: float
    up: _Tile
    down: _Tile

    @property
    def mode(self) -> str:
        """How rows are divided, see `rows_of`."""
        return "rows" if self.most <= 1 else "blocks"


_TILES: Sequence[_Tiles] = (
    _Tiles(1 / 8, _Tile(8, 32, 1, 4), _Tile(8, 32, 1, 3, summands=4)),
    _Tiles(1, _Tile(8, 64, 2, 3), _Tile(8, 64, 2, 4, summands=2)),
    _Tiles(12, _Tile(16, 64, 2, 3), _Tile(16, 128, 2, 3)),
    _Tiles(24, _Tile(32, 128, 4, 3), _Tile(32, 128, 4, 3)),
    _Tiles(200, _Tile(64, 128, 4, 3, max_registers=168), _Tile(64, 128, 4, 3, max_registers=168)),
    _Tiles(math.inf, _Tile(128, 128, 4, 3), _Tile(128, 128, 4, 3)),
)
"""Chosen on an H200 with 32 experts (docs/adr/0016): the first ones were timed with one token only."""


@dataclass(frozen=True)
class _Kind:
    """What does not change between calls of a product.

    Attributes:
        num_experts, num_spans, size: E, S, N.
        num_inputs: K.
        offset: position of the first input feature in the first span.
        x_stride: of rows of the input.
        num_chosen: k.
        recipe: of the activation that follows; None for none.
        is_input: see `mx_product`.
        has_bias: whether a bias is added.
        device: that has the matrices.
    """

    num_experts: int
    num_spans: int
    size: int
    num_inputs: int
    offset: int
    x_stride: int
    num_chosen: int
    recipe: Recipe | None
    is_input: bool
    has_bias: bool
    device: torch.device

    @property
    def is_gated(self) -> bool:
        """Whether the first half is the gate of the second."""
        return self.recipe is not None and self.recipe.is_gated

    def tile(self, tiles: _Tiles) -> _Tile:
        """The tile of this product."""
        return tiles.up if self.is_input else tiles.down

    def numbers(self) -> Sequence[float]:
        """Arguments after the tensors."""
        recipe = self.recipe or Recipe("none")
        return self.num_experts, recipe.alpha, recipe.limit, self.x_stride

    def sizes(self, tile: _Tile, mode: str) -> dict[str, Any]:
        """Arguments that are compiled into the kernel."""
        limit = {"maxnreg": tile.max_registers} if tile.max_registers else {}
        return {
            "HALF": self.size // 2,
            "K": self.num_inputs,
            "SPANS": self.num_spans,
            "OFFSET": self.offset,
            "SUMMANDS": tile.summands,
            "BM": tile.rows,
            "BN": tile.size // 2,
            "MODE": mode,
            "EXPERTS": power_of_2(self.num_experts),
            "CHOSEN": self.num_chosen,
            "KIND": "none" if self.recipe is None else self.recipe.kind,
            "IS_GATED": self.is_gated,
            "IS_INPUT": self.is_input,
            "HAS_BIAS": self.has_bias,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            **limit,
            **early(self.device),
        }


def mx_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    routes: Routes,
    *,
    offset: int,
    bias: Tensor | None,
    recipe: Recipe | None,
    is_input: bool,
) -> Tensor:
    """Multiply each row with the MXFP4 matrix of its expert.

    Args:
        x: tokens [T, K] with `is_input`, else sorted rows [P, K], bfloat16.
        codes: [E, S, N, 32] int16, see `mx_packing.pack`; N is even.
        scales: [E, S, N] int32, see `mx_packing.pack_scales`.
        offset: position of the first input feature in the first span.
        bias: [E, N] contiguous, or None.
        recipe: of the activation that follows, gate first; None for none.
        is_input: take tokens and return rows sorted by expert; else take sorted rows and return them in the order of
            (token, choice) pairs.
    Returns:
        [P, N] in bfloat16, [P, N / 2] after a gated activation; or several float32 summands of each row [P, n, N].
    """
    num_experts, num_spans, size, _ = codes.shape
    kind = _Kind(
        num_experts,
        num_spans,
        size,
        num_inputs=x.shape[1],
        offset=offset,
        x_stride=x.stride(0),
        num_chosen=routes.num_chosen,
        recipe=recipe,
        is_input=is_input,
        has_bias=bias is not None,
        device=x.device,
    )
    _compile(kind)
    tiles = _tiles_of(len(routes.order), num_experts)
    tile = kind.tile(tiles)
    mode = tiles.mode if routes.is_sorted else "pairs"
    blocks = num_blocks(len(routes.order), num_experts, tile.rows) if mode == "blocks" else len(routes.order)
    out = torch.empty(_shape(kind, tile, len(routes.order)), dtype=_dtype(tile), device=x.device)
    tensors = x, codes, scales, x if bias is None else bias, routes.order, routes.ends, routes.experts, out
    grid = ceil_div(size, tile.size), blocks, tile.summands
    _product[grid](*tensors, *kind.numbers(), **kind.sizes(tile, mode))
    return out


def _tiles_of(num_rows: int, num_experts: int) -> _Tiles:
    return next(tiles for tiles in _TILES if num_rows <= tiles.most * num_experts)


def _shape(kind: _Kind, tile: _Tile, num_rows: int) -> tuple[int, ...]:
    """Of what `mx_product` returns."""
    size = kind.size // 2 if kind.is_gated else kind.size
    return (num_rows, size) if tile.summands == 1 else (num_rows, tile.summands, size)


def _dtype(tile: _Tile) -> torch.dtype:
    return torch.bfloat16 if tile.summands == 1 else torch.float32


@cache
def _compile(kind: _Kind) -> None:
    """Compile all kernels of a product, so that none is compiled behind a request."""
    x, codes, scales, pair, index = map(
        triton.MockTensor, (torch.bfloat16, torch.int16, torch.int32, torch.int64, torch.int32)
    )
    of_token = _tiles_of(kind.num_chosen, kind.num_experts)
    for mode, tiles in (("pairs", of_token), *((tiles.mode, tiles) for tiles in _TILES)):
        tile = kind.tile(tiles)
        own = (pair, pair) if mode == "pairs" else (index, index)
        tensors = x, codes, scales, x, pair, *own, triton.MockTensor(_dtype(tile))
        _product.warmup(*tensors, *kind.numbers(), grid=(1,), **kind.sizes(tile, mode))


_PLANE_0, _PLANE_1, _PLANE_2 = (tl.constexpr(plane_ptx(plane)) for plane in range(3))
_LAST_PLANES = tl.constexpr(last_planes_ptx())


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(words: tl.tensor, exponents: tl.tensor, PLANE: tl.constexpr) -> tl.tensor:
    """Scaled numbers of one of the first three planes."""
    CODE: tl.constexpr = _PLANE_0 if PLANE == 0 else _PLANE_1 if PLANE == 1 else _PLANE_2
    return tl.inline_asm_elementwise(CODE, "=r,r,r,r", [words, exponents], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit  # type: ignore[untyped-decorator]
def _last_numbers(words: tl.tensor, others: tl.tensor, exponents: tl.tensor, other_exponents: tl.tensor) -> Any:
    """Scaled numbers of the last plane of both halves."""
    return tl.inline_asm_elementwise(
        _LAST_PLANES,
        "=r,=r,r,r,r,r,r,r",
        [words, others, exponents, other_exponents],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _accumulate(
    x_at: tl.tensor,
    code_at: tl.tensor,
    scale_at: tl.tensor,
    is_row: tl.tensor,
    K: tl.constexpr,
    SPANS: tl.constexpr,
    OFFSET: tl.constexpr,
    HALF: tl.constexpr,
    SUMMANDS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Products of both halves over the spans of a program, [BN, BM] each; the pointers are of the first span."""
    total, other_total = tl.zeros((BN, BM), tl.float32), tl.zeros((BN, BM), tl.float32)
    start, stop = 0, SPANS
    if SUMMANDS > 1:
        start = tl.program_id(2) * SPANS // SUMMANDS
        stop = (tl.program_id(2) + 1) * SPANS // SUMMANDS
    for span in range(start, stop):
        exponents = tl.load(scale_at + span * (2 * HALF))[:, None]
        other_exponents = tl.load(scale_at + (span * 2 + 1) * HALF)[:, None]
        words = tl.load(code_at + span * (64 * HALF))
        others = tl.load(code_at + (span * 2 + 1) * (32 * HALF))
        for p in tl.static_range(4):
            if OFFSET == 0 and K % 32 == 0:  # whole planes need no mask: weights past K are zero
                right = tl.load(x_at + tl.minimum(128 * span + 32 * p, K - 32), mask=is_row[None, :], other=0.0)
            else:
                k = 128 * span + 32 * p + tl.arange(0, 32) - OFFSET
                is_in = ((k >= 0) & (k < K))[:, None] & is_row[None, :]
                right = tl.load(x_at + (128 * span + 32 * p), mask=is_in, other=0.0)
            if p < 3:
                total = tl.dot(_numbers(words, exponents, p), right, total)
                other_total = tl.dot(_numbers(others, other_exponents, p), right, other_total)
            else:
                last, other_last = _last_numbers(words, others, exponents, other_exponents)
                total = tl.dot(last, right, total)
                other_total = tl.dot(other_last, right, other_total)
    return total, other_total


@triton.jit  # type: ignore[untyped-decorator]
def _biased(total: tl.tensor, bias_at: tl.tensor, SUMMANDS: tl.constexpr) -> tl.tensor:
    """Add the bias [BN] of a product [BN, BM], in the first summand only."""
    bias = tl.load(bias_at).to(tl.float32)
    if SUMMANDS > 1:
        bias = tl.where(tl.program_id(2) == 0, bias, 0.0)
    return total + bias[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _write(
    out_at: tl.tensor,
    total: tl.tensor,
    other: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    kept: tl.tensor,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> None:
    """Activate and write products [BM, BN] of both halves."""
    if IS_GATED:
        tl.store(out_at, active(total, other, alpha, limit, KIND), mask=kept)
    else:
        if KIND != "none":
            total, other = active(total, total, alpha, limit, KIND), active(other, other, alpha, limit, KIND)
        tl.store(out_at, total, mask=kept)
        tl.store(out_at + HALF, other, mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def _product(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    num_experts: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    x_stride: tl.tensor,
    HALF: tl.constexpr,
    K: tl.constexpr,
    SPANS: tl.constexpr,
    OFFSET: tl.constexpr,
    SUMMANDS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MODE: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_INPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per BN features of each half and BM rows of an expert."""
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert, first, last = rows_of(ends, experts, tl.program_id(1), num_experts, EXPERTS, BM, MODE)
    if first >= last:
        return
    expert = expert.to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n % HALF
    row = first + tl.arange(0, BM)
    is_row = row < last
    pair = row if MODE == "pairs" else tl.load(order + row, mask=is_row, other=0)
    source = tl.where(is_row, pair // CHOSEN if IS_INPUT else row, 0).to(tl.int64)
    j = tl.arange(0, 32)
    code_at = codes + expert * (SPANS * HALF * 64) + inside[:, None] * 32 + j[None, :]
    scale_at = scales + expert * (SPANS * HALF * 2) + inside
    x_at = x + source[None, :] * x_stride + (j - OFFSET)[:, None]
    total, other = _accumulate(x_at, code_at, scale_at, is_row, K, SPANS, OFFSET, HALF, SUMMANDS, BN, BM)
    if HAS_BIAS:
        bias_at = bias + expert * (2 * HALF) + inside
        total, other = _biased(total, bias_at, SUMMANDS), _biased(other, bias_at + HALF, SUMMANDS)
    WIDTH: tl.constexpr = HALF if IS_GATED else 2 * HALF
    target = (row if IS_INPUT else pair).to(tl.int64) * SUMMANDS + (tl.program_id(2) if SUMMANDS > 1 else 0)
    out_at = out + target[:, None] * WIDTH + n[None, :]
    kept = is_row[:, None] & (n < HALF)[None, :]
    _write(out_at, tl.trans(total), tl.trans(other), alpha, limit, kept, HALF, KIND, IS_GATED)
