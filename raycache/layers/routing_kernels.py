"""Triton kernels that sort tokens by expert and combine the experts' outputs. Imported only where they run.

Of values on the host, only the number of tokens is used, so that steps can be captured in CUDA graphs.

Shapes in this file: T tokens, k experts per token, P = T * k rows sorted by expert, E experts, C features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_COUNTED = 4096
"""Up to this many rows, positions are counted in one launch that compares all pairs; sorting takes several launches."""


@dataclass(frozen=True)
class Routes:
    """Assignment of rows to experts.

    Attributes:
        order: [P] int64, indices of (token, choice) pairs, sorted by expert.
        ends: [E] int32, end of each expert's rows.
        num_chosen: k.
    """

    order: Tensor
    ends: Tensor
    num_chosen: int

    @classmethod
    def of(cls, ids: Tensor, num_experts: int) -> Routes:
        """Sort by expert, given the chosen experts [T, k]."""
        if ids.numel() <= _COUNTED:
            return cls(*_counted_routes(ids, num_experts), ids.shape[1])
        chosen, order = ids.flatten().sort(stable=True)
        held = torch.arange(num_experts, device=ids.device)
        return cls(order, torch.searchsorted(chosen, held, right=True).to(torch.int32), ids.shape[1])


def num_blocks(routes: Routes, num_at_once: int) -> int:
    """Upper bound of the number of blocks of `num_at_once` rows of one expert."""
    num_rows = len(routes.order)
    return min(len(routes.ends), num_rows) + num_rows // num_at_once


def combine(parts: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of the experts' outputs, accumulated in float32: [T * k, C] and [T, k] -> [T, C]."""
    num_tokens, num_chosen = weights.shape
    out = parts.new_empty(num_tokens, parts.shape[1])
    grid = (num_tokens, triton.cdiv(parts.shape[1], 1024))
    _combine[grid](parts, weights.contiguous(), out, SIZE=parts.shape[1], CHOSEN=num_chosen, BLOCK=1024)
    return out


def _counted_routes(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Compute `order` and `ends` of routes by counting."""
    order = torch.empty(ids.numel(), dtype=torch.int64, device=ids.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    rows, experts = triton.cdiv(ids.numel(), 64), triton.cdiv(num_experts, 64)
    _route[(rows + experts,)](ids.contiguous(), order, ends, ids.numel(), num_experts, rows, BLOCK=64)
    return order, ends


@triton.jit  # type: ignore[untyped-decorator]
def find(
    ends: tl.tensor,
    block: tl.tensor,
    num_experts: tl.tensor,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(expert of a block, its first row, end of the expert's rows); past the last block the expert is num_experts."""
    e = tl.arange(0, EXPERTS)
    stop = tl.load(ends + e, mask=e < num_experts, other=0)
    start = tl.load(ends + e - 1, mask=(e > 0) & (e < num_experts), other=0)
    blocks = (stop - start + BM - 1) // BM
    expert = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
    before = tl.sum(tl.where(e < expert, blocks, 0), 0)
    first = tl.sum(tl.where(e == expert, start, 0), 0) + (block - before) * BM
    return expert, first, tl.sum(tl.where(e == expert, stop, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _route(
    ids: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """The first num_blocks programs count the rows before each of theirs, the others the rows up to each expert."""
    is_rows = tl.program_id(0) < num_blocks
    mine = (tl.program_id(0) - tl.where(is_rows, 0, num_blocks)) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(ids + mine, mask=is_rows & (mine < num_rows), other=0)
    own = tl.where(is_rows, own, mine)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        other = tl.load(ids + row, mask=row < num_rows, other=num_experts)[None, :]
        is_same = (other == own[:, None]) & ((row[None, :] < mine[:, None]) | ~is_rows)
        is_before = (other < own[:, None]) | is_same
        count += tl.sum((is_before & (row < num_rows)[None, :]).to(tl.int32), 1)
    tl.store(order + count, mine.to(tl.int64), mask=is_rows & (mine < num_rows))
    tl.store(ends + mine, count, mask=(~is_rows) & (mine < num_experts))


@triton.jit  # type: ignore[untyped-decorator]
def _combine(
    parts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(CHOSEN):
        part = tl.load(parts + (token * CHOSEN + choice) * SIZE + c, mask=c < SIZE, other=0.0).to(tl.float32)
        total += part * tl.load(weights + token * CHOSEN + choice).to(tl.float32)
    tl.store(out + token * SIZE + c, total.to(out.dtype.element_ty), mask=c < SIZE)
