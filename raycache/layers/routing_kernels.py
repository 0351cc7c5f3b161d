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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.parallel.devices import early
from raycache.rounding import ceil_div, power_of_2

LISTED = 4096
"""Up to this many rows, positions are counted in one launch that compares all pairs; for more in four, which also list
the blocks of rows."""
_CHUNK = 128
"""Rows whose experts one program counts."""


@dataclass(frozen=True)
class Routes:
    """Assignment of rows to experts; the rows of `of_token` are not sorted, and have neither `order` nor `ends`.

    Attributes:
        order: [P] int64, indices of (token, choice) pairs, sorted by expert.
        ends: [E] int32, end of each expert's rows. Rows of experts from E on, if any, come last.
        experts: [P] int32, expert of each row.
        num_chosen: k.
        is_sorted: whether rows are sorted.
        blocks: [num_blocks, 2] int32, expert and first row of each block; E as the expert of those that do not exist.
            None for no list: kernels search them.
    """

    order: Tensor
    ends: Tensor
    experts: Tensor
    num_chosen: int
    is_sorted: bool = True
    blocks: Tensor | None = None

    @classmethod
    def of(cls, ids: Tensor, num_experts: int, *, rows_per_block: int = 0) -> Routes:
        """Sort by expert, given the chosen experts [T, k].

        Args:
            rows_per_block: rows of a block; blocks are listed if there are more than `LISTED` rows. 0 for no list.
        """
        ids, num_rows = ids.contiguous(), ids.numel()
        order = torch.empty(num_rows, dtype=torch.int64, device=ids.device)
        experts = torch.empty(num_rows, dtype=torch.int32, device=ids.device)
        ends = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
        blocks = None
        if num_rows > LISTED and rows_per_block:
            blocks = ends.new_empty(num_blocks(num_rows, num_experts, rows_per_block), 2)
        routes = cls(order, ends, experts, ids.shape[1], blocks=blocks)
        if num_rows > LISTED:
            _sort(ids, routes, rows_per_block)
        else:
            _sort_few(ids, routes)
        return routes

    @classmethod
    def of_token(cls, ids: Tensor) -> Routes:
        """The rows of one token are its pairs, for kernels that take them so; `experts` has the dtype of ids [1, k]."""
        pairs = ids.flatten()
        return cls(pairs, pairs, pairs, len(pairs), is_sorted=False)


def num_blocks(num_rows: int, num_experts: int, rows_per_block: int) -> int:
    """Upper bound of the number of blocks of rows of one expert."""
    return min(num_experts, num_rows) + num_rows // rows_per_block


def combine(parts: Tensor, weights: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    """Weighted sums of the experts' outputs, accumulated in float32.

    Args:
        parts: [T * k, C], or summands of each [T * k, n, C]; those of experts from `num_experts` on do not count,
            whatever they are.
        weights, ids: [T, k].
    Returns:
        [T, C] in bfloat16.
    """
    (num_tokens, num_chosen), size = weights.shape, parts.shape[-1]
    out = parts.new_empty(num_tokens, size, dtype=torch.bfloat16)
    grid = (num_tokens, ceil_div(size, 1024))
    summands = 1 if parts.ndim == 2 else parts.shape[1]
    sizes = {"SIZE": size, "CHOSEN": num_chosen, "SUMMANDS": summands, "BLOCK": 1024}
    _combine[grid](parts, weights.contiguous(), ids.contiguous(), out, num_experts, **sizes, **early(parts.device))
    return out


def _sort_few(ids: Tensor, routes: Routes) -> None:
    """Fill `routes` but for its blocks."""
    num_rows, num_experts = len(routes.order), len(routes.ends)
    rows = ceil_div(num_rows, 64)
    _route[(rows + ceil_div(num_experts, 64),)](
        ids, routes.order, routes.ends, routes.experts, num_rows, num_experts, rows,
        BLOCK=64, WIDE=256, num_warps=8, **early(ids.device),
    )  # fmt: skip


def _sort(ids: Tensor, routes: Routes, rows_per_block: int) -> None:
    """Fill `routes`, with work in proportion to the rows."""
    num_rows, num_experts = len(routes.order), len(routes.ends)
    bins = power_of_2(max(num_experts + 1, 16))
    chunks = ceil_div(num_rows, _CHUNK)
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
    totals = torch.empty(bins, dtype=torch.int32, device=ids.device)
    starts = torch.empty_like(totals)
    blocks = totals[:0] if routes.blocks is None else routes.blocks
    _count[(chunks,)](ids, counts, num_rows, num_experts, BINS=bins, CHUNK=_CHUNK)
    _accumulate[(bins // 16,)](counts, totals, chunks, BINS=bins, WIDE=16, BLOCK=64)
    _divide[(1,)](totals, starts, routes.ends, blocks, num_experts, len(blocks), rows_per_block, BINS=bins, num_warps=8)
    _place[(chunks,)](ids, counts, starts, routes.order, routes.experts, num_rows, num_experts, BINS=bins, CHUNK=_CHUNK)


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
def rows_of(
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
    "blocks" for consecutive blocks, and "listed" for these where `experts` is `Routes.blocks`.
    """
    if MODE == "blocks":
        expert, first, last = find(ends, block, num_experts, EXPERTS, BM)
    elif MODE == "listed":
        expert, first = tl.load(experts + 2 * block), tl.load(experts + 2 * block + 1)
        last = tl.load(ends + expert, mask=expert < num_experts, other=0)
    else:
        expert, first = tl.load(experts + block).to(tl.int32), block
        last = block + 1
        if MODE == "rows":
            is_here = expert < num_experts
            start = tl.load(ends + expert - 1, mask=is_here & (expert > 0), other=0)
            last = tl.load(ends + expert, mask=is_here, other=0)
            last = tl.where((block - start) % BM == 0, last, first)
    return expert, first, tl.where(expert < num_experts, last, first)


# Not specialised for the number of rows, which differs from step to step.
@triton.jit(do_not_specialize=["num_rows", "num_blocks"])  # type: ignore[untyped-decorator]
def _route(
    ids: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    experts: tl.tensor,
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """The first num_blocks programs count the rows before each of theirs, the others the rows up to each expert."""
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    is_rows = tl.program_id(0) < num_blocks
    mine = (tl.program_id(0) - tl.where(is_rows, 0, num_blocks)) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(ids + mine, mask=is_rows & (mine < num_rows), other=0).to(tl.int32)
    own = tl.where(is_rows, own, mine)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, WIDE):
        row = start + tl.arange(0, WIDE)
        other = tl.load(ids + row, mask=row < num_rows, other=num_experts).to(tl.int32)[None, :]
        is_same = (other == own[:, None]) & ((row[None, :] < mine[:, None]) | ~is_rows)
        is_before = (other < own[:, None]) | is_same
        count += tl.sum((is_before & (row < num_rows)[None, :]).to(tl.int32), 1)
    tl.store(order + count, mine.to(tl.int64), mask=is_rows & (mine < num_rows))
    tl.store(experts + count, own, mask=is_rows & (mine < num_rows))
    tl.store(ends + mine, count, mask=(~is_rows) & (mine < num_experts))


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _count(
    ids: tl.tensor,
    counts: tl.tensor,
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Rows of each expert in each chunk; other experts count as expert num_experts, like rows that do not exist."""
    row = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + row, mask=row < num_rows, other=num_experts).to(tl.int32)
    counted = tl.histogram(tl.minimum(expert, num_experts), BINS)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), counted)


@triton.jit(do_not_specialize=["num_chunks"])  # type: ignore[untyped-decorator]
def _accumulate(
    counts: tl.tensor,
    totals: tl.tensor,
    num_chunks: tl.tensor,
    BINS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Replace counts by the rows of the same expert in all chunks before; one program per WIDE experts."""
    expert = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    before = tl.zeros((WIDE,), tl.int32)
    for start in range(0, num_chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        at = counts + chunk[:, None] * BINS + expert[None, :]
        is_in = (chunk < num_chunks)[:, None]
        count = tl.load(at, mask=is_in, other=0)
        tl.store(at, tl.cumsum(count, 0) - count + before[None, :], mask=is_in)
        before += tl.sum(count, 0)
    tl.store(totals + expert, before)


@triton.jit(do_not_specialize=["num_blocks", "size"])  # type: ignore[untyped-decorator]
def _divide(
    totals: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    blocks: tl.tensor,
    num_experts: tl.tensor,
    num_blocks: tl.tensor,
    size: tl.tensor,
    BINS: tl.constexpr,
) -> None:
    """Where each expert's rows begin and end, and their blocks of `size` rows unless that is 0; one program."""
    e = tl.arange(0, BINS)
    total = tl.load(totals + e)
    end = tl.cumsum(total, 0)
    tl.store(starts + e, end - total)
    tl.store(ends + e, end, mask=e < num_experts)
    if size > 0:
        own = tl.where(e < num_experts, (total + size - 1) // size, 0)
        at = blocks + 2 * (tl.cumsum(own, 0) - own)
        for i in range(tl.max(own, 0)):
            tl.store(at + 2 * i, e, mask=i < own)
            tl.store(at + 2 * i + 1, end - total + i * size, mask=i < own)
        for start in range(tl.sum(own, 0), num_blocks, BINS):
            tl.store(blocks + 2 * (start + e), num_experts, mask=start + e < num_blocks)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _place(
    ids: tl.tensor,
    counts: tl.tensor,
    starts: tl.tensor,
    order: tl.tensor,
    experts: tl.tensor,
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Place the rows of a chunk behind those of the same expert in all chunks before."""
    i = tl.arange(0, CHUNK)
    row = tl.program_id(0) * CHUNK + i
    is_row = row < num_rows
    own = tl.minimum(tl.load(ids + row, mask=is_row, other=num_experts).to(tl.int32), num_experts)
    place = tl.load(starts + own) + tl.load(counts + tl.program_id(0) * BINS + own)
    for start in range(0, CHUNK, 64):
        j = start + tl.arange(0, 64)
        other = tl.program_id(0) * CHUNK + j
        theirs = tl.minimum(tl.load(ids + other, mask=other < num_rows, other=num_experts).to(tl.int32), num_experts)
        place += tl.sum(((theirs[None, :] == own[:, None]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    tl.store(order + place, row.to(tl.int64), mask=is_row)
    tl.store(experts + place, own, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(
    parts: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    num_experts: tl.tensor,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    SUMMANDS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        # Outputs that nobody wrote are read as well, so that no load waits for another.
        at = parts + pair * SUMMANDS * SIZE + c
        part = tl.load(at, mask=c < SIZE, other=0.0).to(tl.float32)
        for summand in tl.static_range(1, SUMMANDS):
            part += tl.load(at + summand * SIZE, mask=c < SIZE, other=0.0).to(tl.float32)
        weighted = part * tl.load(weights + pair).to(tl.float32)
        total += tl.where(tl.load(ids + pair) < num_experts, weighted, 0.0)
    tl.store(out + token * SIZE + c, total.to(out.dtype.element_ty), mask=c < SIZE)
