"""Triton kernels for experts with bfloat16 weights. Imported only where they run, on Hopper.

    up       gathers tokens by expert, multiplies, adds the bias and activates, all in float32
    down     multiplies, adds the bias and writes in the order of (token, choice) pairs

Rows are sorted by expert, and each program finds its expert and rows on the device, so that steps can be captured in
CUDA graphs. Nothing is added up by atomic operations: a token's result does not depend on the order of programs.

Shapes in this file: T tokens, k experts per token, P = T * k rows sorted by expert, E experts, N output features, K
input features, C hidden size, I inner features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.layers.activation import Recipe
from raycache.layers.fused_experts import FusedExperts
from raycache.layers.kernels import active, early
from raycache.layers.routing_kernels import Routes, combine, find, num_blocks


@dataclass(frozen=True)
class Tile:
    """Tile of a program: `rows` of one expert by `size` output features, `depth` input features at a time."""

    rows: int
    size: int
    depth: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tiles:
    """Tiles of gated and plain products for up to `most` rows per expert on average."""

    most: float
    gated: Tile
    plain: Tile


TILES: Sequence[Tiles] = (
    Tiles(1, Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 3)),
    Tiles(16, Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4)),
    Tiles(64, Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4)),
    Tiles(math.inf, Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 4)),
)
"""Fastest on an H200 (docs/adr/0020)."""


def run_experts(x: Tensor, weights: Tensor, ids: Tensor, matrices: FusedExperts) -> Tensor:
    """Weighted sums of the experts' outputs; see `RoutedExperts`. Choices from E on contribute nothing."""
    num_experts = len(matrices.down)
    routes = Routes.of(ids, num_experts) if len(x) > 1 else None
    average = ids.numel() / num_experts
    tiles = next(tiles for tiles in TILES if average <= tiles.most)
    recipe = matrices.recipe
    inner = _multiply(
        x,
        (matrices.gate, matrices.up, matrices.up_bias),
        ids,
        routes,
        tiles.gated if recipe.is_gated else tiles.plain,
        recipe=recipe,
    )
    parts = _multiply(inner, (matrices.down, matrices.down, matrices.down_bias), ids, routes, tiles.plain, recipe=None)
    return combine(parts, weights, ids, num_experts)


def _multiply(
    x: Tensor,
    matrices: tuple[Tensor, Tensor, Tensor | None],
    ids: Tensor,
    routes: Routes | None,
    tile: Tile,
    *,
    recipe: Recipe | None,
) -> Tensor:
    """Multiply each row with the matrix of its expert.

    Args:
        x: tokens [T, K] with a recipe, else sorted rows [P, K].
        matrices: of the gate, without a gate, and bias.
        ids: [T, k].
        routes: None for one token, whose rows are not sorted.
        recipe: of the activation that follows; None for none.
    Returns:
        [P, N], sorted rows with a recipe, else in the order of pairs.
    """
    gate, up, bias = matrices
    num_experts, size, depth = gate.shape
    out = x.new_empty(ids.numel(), size)
    if routes is None:
        mode, blocks, order, ends, experts = "pairs", len(out), ids, ids, ids
    else:
        order, ends, experts = routes.order, routes.ends, routes.experts
        is_sparse = len(out) <= num_experts
        mode, blocks = ("rows", len(out)) if is_sparse else ("blocks", num_blocks(routes, tile.rows))
    numbers = Recipe("none") if recipe is None else recipe
    sizes: dict[str, Any] = {"N": size, "K": depth, "BM": tile.rows, "BN": tile.size, "BK": tile.depth}
    _product[(triton.cdiv(size, tile.size), blocks)](
        x,
        gate,
        up,
        gate if bias is None else bias,
        order,
        ends,
        experts,
        out,
        num_experts,
        numbers.alpha,
        numbers.limit,
        x.stride(0),
        *gate.stride()[:2],
        **sizes,
        MODE=mode,
        EXPERTS=triton.next_power_of_2(num_experts),
        CHOSEN=ids.shape[1],
        KIND=numbers.kind,
        IS_GATED=recipe is not None and recipe.is_gated,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **early(x.device),
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _rows(
    ends: tl.tensor,
    experts: tl.tensor,
    block: tl.tensor,
    num_experts: tl.tensor,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    MODE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(expert of a block, its first row, end of the expert's rows); without rows if there is no such block.

    MODE is "pairs" for the rows of one token, "rows" for a block per row, those inside of another block without rows,
    and "blocks" for consecutive blocks.
    """
    if MODE == "blocks":
        expert, first, last = find(ends, block, num_experts, EXPERTS, BM)
    else:
        expert, first = tl.load(experts + block).to(tl.int32), block
        last = block + 1
        if MODE == "rows":
            is_here = expert < num_experts
            start = tl.load(ends + expert - 1, mask=is_here & (expert > 0), other=0)
            last = tl.load(ends + expert, mask=is_here, other=0)
            last = tl.where((block - start) % BM == 0, last, first)
    return expert, first, tl.where(expert < num_experts, last, first)


@triton.jit  # type: ignore[untyped-decorator]
def _accumulate(
    x_at: tl.tensor,
    gate_at: tl.tensor,
    up_at: tl.tensor,
    is_row: tl.tensor,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Products with both matrices, [BM, BN]; the pointers are of the first BK input features."""
    k = tl.arange(0, BK)
    gate, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        if K % BK == 0:
            left = tl.load(x_at, mask=is_row[:, None], other=0.0)
            gate = tl.dot(left, tl.load(gate_at), gate)
            if IS_GATED:
                up = tl.dot(left, tl.load(up_at), up)
        else:
            is_k = k < K - start
            left = tl.load(x_at, mask=is_row[:, None] & is_k[None, :], other=0.0)
            gate = tl.dot(left, tl.load(gate_at, mask=is_k[:, None], other=0.0), gate)
            if IS_GATED:
                up = tl.dot(left, tl.load(up_at, mask=is_k[:, None], other=0.0), up)
        x_at += BK
        gate_at += BK
        up_at += BK
    return gate, up


@triton.jit  # type: ignore[untyped-decorator]
def _product(
    x: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    num_experts: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    x_stride: tl.tensor,
    of_expert: tl.tensor,
    of_feature: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    MODE: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    if IS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    expert, first, last = _rows(ends, experts, tl.program_id(1), num_experts, EXPERTS, BM, MODE)
    if first >= last:
        return
    row, n = first + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    is_row, inside, k = row < last, n % N, tl.arange(0, BK)
    pair = row if MODE == "pairs" else tl.load(order + row, mask=is_row, other=0)
    source = (row if KIND == "none" else pair // CHOSEN).to(tl.int64)
    at = expert.to(tl.int64) * of_expert + inside[None, :].to(tl.int64) * of_feature + k[:, None]
    x_at = x + source[:, None] * x_stride + k[None, :]
    total, other = _accumulate(x_at, gate + at, up + at, is_row, K, BM, BN, BK, IS_GATED)
    if HAS_BIAS:
        bias_at = bias + expert.to(tl.int64) * (2 * N if IS_GATED else N) + inside
        total += tl.load(bias_at)[None, :].to(tl.float32)
        if IS_GATED:
            other += tl.load(bias_at + N)[None, :].to(tl.float32)
    if KIND != "none":
        total = active(total, other, alpha, limit, KIND)
    target = (pair if KIND == "none" else row).to(tl.int64)
    kept = is_row[:, None] & (n < N)[None, :]
    tl.store(out + target[:, None] * N + n[None, :], total.to(tl.bfloat16), mask=kept)
