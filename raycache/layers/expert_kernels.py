"""Triton kernels for experts with bfloat16 weights. Imported only where they run, on Hopper.

    up       gathers tokens by expert, multiplies, adds the bias and activates, all in float32
    down     multiplies, adds the bias and writes in the order of (token, choice) pairs

Rows are sorted by expert, and each program finds its expert and rows on the device, for prompts in a list, so that
steps can be captured in CUDA graphs. Nothing is added up by atomic operations: a token's result does not depend on the
order of programs.

Shapes in this file: T tokens, k experts per token, P = T * k rows sorted by expert, E experts, N output features, K
input features, C hidden size, I inner features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from raycache.layers.activation import Recipe
from raycache.layers.fused_experts import FusedExperts
from raycache.layers.kernels import active
from raycache.layers.routing_kernels import LISTED, Routes, combine, num_blocks, rows_of
from raycache.parallel.devices import early
from raycache.rounding import ceil_div, power_of_2


@dataclass(frozen=True)
class Tile:
    """Tile of a program: rows of one expert by `size` output features, `depth` input features at a time.

    Attributes:
        is_copied: whether the tensor memory accelerator copies the matrices, if it can.
    """

    size: int
    depth: int
    num_warps: int
    num_stages: int
    is_copied: bool = False


@dataclass(frozen=True)
class Tiles:
    """Tiles of `rows` rows for gated and plain products, used up to `most` rows per expert on average.

    With the first ones each row has a block of its own, and there is one expert per row at least.
    """

    most: float
    rows: int
    gated: Tile
    plain: Tile


TILES: Sequence[Tiles] = (
    Tiles(1, 16, Tile(32, 128, 4, 4), Tile(64, 128, 4, 3)),
    Tiles(16, 16, Tile(32, 128, 4, 4), Tile(64, 128, 4, 4)),
    Tiles(64, 64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    Tiles(math.inf, 128, Tile(128, 64, 8, 4, is_copied=True), Tile(256, 64, 8, 4, is_copied=True)),
)
"""Fastest on an H200 (docs/adr/0020)."""


@dataclass(frozen=True)
class _ProductKind:
    """What does not change between calls of a product.

    Attributes:
        num_experts, size, depth: E, N, K.
        of_expert, of_feature: strides of the matrices.
        x_stride: of rows of the input.
        num_chosen: k.
        recipe: of the activation that follows; None for none.
        has_bias: whether a bias is added.
        is_aligned: whether the tensor memory accelerator can copy the matrices.
        device: that has the matrices.
    """

    num_experts: int
    size: int
    depth: int
    of_expert: int
    of_feature: int
    x_stride: int
    num_chosen: int
    recipe: Recipe | None
    has_bias: bool
    is_aligned: bool
    device: torch.device

    @classmethod
    def of(cls, x: Tensor, matrices: Sequence[Tensor], ids: Tensor, *, recipe: Recipe | None, has_bias: bool) -> Self:
        """The product of x [P or T, K] with matrices [E, N, K] that have the same strides."""
        num_experts, size, depth = matrices[0].shape
        return cls(
            num_experts,
            size,
            depth,
            of_expert=matrices[0].stride(0),
            of_feature=matrices[0].stride(1),
            x_stride=x.stride(0),
            num_chosen=ids.shape[1],
            recipe=recipe,
            has_bias=has_bias,
            is_aligned=all(each.data_ptr() % 16 == 0 and each.stride(1) % 8 == 0 for each in matrices),
            device=x.device,
        )

    @property
    def is_gated(self) -> bool:
        """Whether there are two matrices per expert."""
        return self.recipe is not None and self.recipe.is_gated

    def numbers(self) -> Sequence[float]:
        """Arguments after the tensors."""
        recipe = self.recipe or Recipe("none")
        return self.num_experts, recipe.alpha, recipe.limit, self.x_stride, self.of_expert, self.of_feature

    def sizes(self, tiles: Tiles, mode: str) -> dict[str, Any]:
        """Arguments that are compiled into the kernel."""
        tile = self.tile(tiles)
        return {
            "IS_COPIED": self.is_copied(tiles),
            "N": self.size,
            "K": self.depth,
            "BM": tiles.rows,
            "BN": tile.size,
            "BK": tile.depth,
            "MODE": mode,
            "EXPERTS": power_of_2(self.num_experts),
            "CHOSEN": self.num_chosen,
            "KIND": "none" if self.recipe is None else self.recipe.kind,
            "IS_GATED": self.is_gated,
            "HAS_BIAS": self.has_bias,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            **early(self.device),
        }

    def tile(self, tiles: Tiles) -> Tile:
        """The tile of this kind of product."""
        return tiles.gated if self.is_gated else tiles.plain

    def is_copied(self, tiles: Tiles) -> bool:
        """Whether the tensor memory accelerator copies the matrices."""
        return self.tile(tiles).is_copied and self.is_aligned

    def of_kernel(self, matrix: Any, tiles: Tiles) -> Any:
        """A matrix as the kernel takes it."""
        tile = self.tile(tiles)
        shape, strides = [self.num_experts, self.size, self.depth], [self.of_expert, self.of_feature, 1]
        copied = [1, tile.size, tile.depth]
        return TensorDescriptor(matrix, shape, strides, copied) if self.is_copied(tiles) else matrix


def run_experts(x: Tensor, weights: Tensor, ids: Tensor, matrices: FusedExperts) -> Tensor:
    """Weighted sums of the experts' outputs; see `RoutedExperts`. Choices from E on contribute nothing."""
    num_experts = len(matrices.down)
    tiles = next(tiles for tiles in TILES if ids.numel() <= tiles.most * num_experts)
    routes = Routes.of(ids, num_experts, rows_per_block=tiles.rows) if len(x) > 1 else None
    pair = matrices.gate, matrices.up
    inner = _multiply(x, pair, matrices.up_bias, ids, routes, tiles, recipe=matrices.recipe)
    parts = _multiply(inner, (matrices.down, matrices.down), matrices.down_bias, ids, routes, tiles, recipe=None)
    return combine(parts, weights, ids, num_experts)


def _multiply(
    x: Tensor,
    matrices: tuple[Tensor, Tensor],
    bias: Tensor | None,
    ids: Tensor,
    routes: Routes | None,
    tiles: Tiles,
    *,
    recipe: Recipe | None,
) -> Tensor:
    """Multiply each row with the matrix of its expert.

    Args:
        x: tokens [T, K] with a recipe, else sorted rows [P, K].
        matrices: gate and up [E, N, K]; without a gate the same one twice.
        ids: [T, k].
        routes: None for one token, whose rows are not sorted.
        recipe: of the activation that follows; None for none.
    Returns:
        [P, N], sorted rows with a recipe, else in the order of pairs.
    """
    kind = _ProductKind.of(x, matrices, ids, recipe=recipe, has_bias=bias is not None)
    _compile(kind)
    out = x.new_empty(ids.numel(), kind.size)
    if routes is None:
        mode, blocks, order, ends, experts = "pairs", len(out), ids, ids, ids
    else:
        order, ends, experts = routes.order, routes.ends, routes.experts
        mode = _mode(len(out), tiles)
        blocks = len(out) if mode == "rows" else num_blocks(len(out), kind.num_experts, tiles.rows)
        if mode == "listed":
            assert routes.blocks is not None, "blocks of many rows are listed"
            experts = routes.blocks
    gate, up = (kind.of_kernel(matrix, tiles) for matrix in matrices)
    tensors = x, gate, up, matrices[0] if bias is None else bias, order, ends, experts, out
    grid = ceil_div(kind.size, kind.tile(tiles).size), blocks
    _product[grid](*tensors, *kind.numbers(), **kind.sizes(tiles, mode))
    return out


def _mode(num_rows: float, tiles: Tiles) -> str:
    """How the blocks of sorted rows are found, see `rows_of`."""
    if tiles is TILES[0]:
        return "rows"
    return "listed" if num_rows > LISTED else "blocks"


def _modes(num_experts: int) -> Iterator[tuple[str, Tiles]]:
    """All modes that any number of rows may have, with their tiles."""
    yield "pairs", TILES[0]
    yield "rows", TILES[0]
    for smaller, tiles in pairwise(TILES):
        ends = smaller.most * num_experts + 1, tiles.most * num_experts
        for mode in dict.fromkeys(_mode(num_rows, tiles) for num_rows in ends):
            yield mode, tiles


@cache
def _compile(kind: _ProductKind) -> None:
    """Compile all kernels of a product, so that none is compiled behind a request."""
    order, routes, x = (triton.MockTensor(dtype) for dtype in (torch.int64, torch.int32, torch.bfloat16))
    for mode, tiles in _modes(kind.num_experts):
        index = order if mode == "pairs" else routes
        matrix = kind.of_kernel(x, tiles)
        tensors = x, matrix, matrix, x, order, index, index, x
        _product.warmup(*tensors, *kind.numbers(), grid=(1,), **kind.sizes(tiles, mode))


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
def _accumulate_copied(
    x_at: tl.tensor,
    gate: tl.tensor_descriptor,
    up: tl.tensor_descriptor,
    is_row: tl.tensor,
    expert: tl.tensor,
    n: tl.tensor,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Like `_accumulate`; n is the first output feature. What is beyond the end of a matrix is copied as zeros."""
    k = tl.arange(0, BK)
    total, other = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        if K % BK == 0:
            left = tl.load(x_at, mask=is_row[:, None], other=0.0)
        else:
            left = tl.load(x_at, mask=is_row[:, None] & (k < K - start)[None, :], other=0.0)
        total = tl.dot(left, gate.load([expert, n, start]).reshape(BN, BK).T, total)
        if IS_GATED:
            other = tl.dot(left, up.load([expert, n, start]).reshape(BN, BK).T, other)
        x_at += BK
    return total, other


@triton.jit  # type: ignore[untyped-decorator]
def _write(
    x: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
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
    IS_PAIR: tl.constexpr,
    CHOSEN: tl.constexpr,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_COPIED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Write the tile of rows `first` up to `last` of an expert, at most BM."""
    row, n = first + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    is_row, inside, k = row < last, n % N, tl.arange(0, BK)
    pair = row if IS_PAIR else tl.load(order + row, mask=is_row, other=0)
    source = (row if KIND == "none" else pair // CHOSEN).to(tl.int64)
    x_at = x + source[:, None] * x_stride + k[None, :]
    if IS_COPIED:
        n0 = tl.program_id(0) * BN
        total, other = _accumulate_copied(x_at, gate, up, is_row, expert, n0, K, BM, BN, BK, IS_GATED)
    else:
        at = expert.to(tl.int64) * of_expert + inside[None, :].to(tl.int64) * of_feature + k[:, None]
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
    IS_COPIED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per BN output features and BM rows of an expert."""
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert, first, last = rows_of(ends, experts, tl.program_id(1), num_experts, EXPERTS, BM, MODE)
    if first >= last:
        return
    IS_PAIR: tl.constexpr = MODE == "pairs"
    # The last rows of an expert often fit into half a tile.
    if BM == 128 and last - first <= 64:
        _write(
            x, gate, up, bias, order, out, expert, first, last, alpha, limit, x_stride, of_expert, of_feature,
            N, K, 64, BN, BK, IS_PAIR, CHOSEN, KIND, IS_GATED, IS_COPIED, HAS_BIAS,
        )  # fmt: skip
    else:
        _write(
            x, gate, up, bias, order, out, expert, first, last, alpha, limit, x_stride, of_expert, of_feature,
            N, K, BM, BN, BK, IS_PAIR, CHOSEN, KIND, IS_GATED, IS_COPIED, HAS_BIAS,
        )  # fmt: skip
