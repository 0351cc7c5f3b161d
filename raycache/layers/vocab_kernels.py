"""Triton kernels for a vocabulary that is split over ranks. Imported only where they run.

Shapes in this file: N tokens, C hidden size, R rows of the vocabulary on this rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.parallel.devices import early
from raycache.rounding import ceil_div, power_of_2

_FEATURES = 1024
"""Features of a program: 16 bytes per load of each of 128 threads."""


def embed(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """Look up token ids; ids of other ranks give zeros.

    Args:
        ids: integers [N].
        weight: [R, C], contiguous.
        first: id of its first row.
    Returns:
        New [N, C].
    """
    (num_rows, size), num_tokens = weight.shape, len(ids)
    out = torch.empty((num_tokens, size), dtype=weight.dtype, device=weight.device)
    if num_tokens:
        grid = num_tokens, ceil_div(size, _FEATURES)
        _embed[grid](ids, weight, out, first, num_rows, SIZE=size, BLOCK=_FEATURES, **early(ids.device))
    return out


def best_of_part(logits: Tensor, tokens: range, *, num_parts: int) -> Tensor:
    """The best of this rank's logits.

    Args:
        logits: [N, R], contiguous in the last dimension.
        tokens: ids of the first columns; the others are beyond the vocabulary.
        num_parts: runs of columns, each for one program; a power of two.
    Returns:
        New int64 [N, num_parts, 2], of each part of the columns the first token with the highest logit, and the bits of
        that logit in float64; -inf for a part without tokens.
    """
    best = torch.empty((len(logits), num_parts, 2), dtype=torch.int64, device=logits.device)
    if len(logits):
        block = power_of_2(ceil_div(max(logits.shape[1], 1), num_parts))
        sizes = {"BLOCK": min(block, 8192), "num_warps": min(max(block // 512, 1), 8)}
        stride = logits.stride(0)
        _best_of_part[len(logits), num_parts](
            logits, best, len(tokens), tokens.start, stride, **sizes, **early(logits.device)
        )
    return best


def best_of_all(best: Tensor) -> Tensor:
    """The first token with the highest logit: of each member [N, parts, 2] as in `best_of_part` -> int64 [N]."""
    members, num_tokens, parts, _ = best.shape
    tokens = torch.empty(num_tokens, dtype=torch.int64, device=best.device)
    if num_tokens:
        sizes = {"MEMBERS": members, "SIZE": power_of_2(members), "PARTS": parts}
        _best_of_all[num_tokens,](best.contiguous(), tokens, num_tokens, **sizes, num_warps=1, **early(best.device))
    return tokens


@triton.jit(do_not_specialize=["first"])  # type: ignore[untyped-decorator]
def _embed(
    ids: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token and BLOCK features."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(ids + token).to(tl.int64) - first
    is_here = (row >= 0) & (row < num_rows) & (feature < SIZE)
    found = tl.load(weight + row * SIZE + feature, mask=is_here, other=0.0)
    tl.store(out + token * SIZE + feature, found, mask=feature < SIZE)


@triton.jit(do_not_specialize=["first"])  # type: ignore[untyped-decorator]
def _best_of_part(
    logits: tl.tensor,
    best: tl.tensor,
    count: tl.tensor,
    first: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per row and part of its columns."""
    row, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    each = tl.cdiv(tl.cdiv(count, num_parts), 8) * 8  # parts begin where 16 bytes begin
    begin, end = part * each, tl.minimum((part + 1) * each, count)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    column = tl.full([BLOCK], 0, tl.int32) + begin
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        found = tl.load(logits + row * stride + place, mask=place < end, other=float("-inf")).to(tl.float32)
        column = tl.where(found > most, place, column)
        most = tl.maximum(most, found)
    highest = tl.max(most, 0)
    token = tl.min(tl.where(most == highest, column, 0x7FFFFFFF), 0)  # some column always is
    to = best + (row * num_parts + part) * 2
    tl.store(to, (first + token).to(tl.int64))
    tl.store(to + 1, highest.to(tl.float64).to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _best_of_all(
    best: tl.tensor,
    tokens: tl.tensor,
    num_tokens: tl.tensor,
    MEMBERS: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    member, part = tl.arange(0, SIZE)[:, None], tl.arange(0, PARTS)[None, :]
    at = best + ((member * num_tokens + row) * PARTS + part) * 2
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    found = tl.load(at, mask=member < MEMBERS, other=0)
    logit = tl.load(at + 1, mask=member < MEMBERS, other=0).to(tl.float64, bitcast=True)
    logit = tl.where(member < MEMBERS, logit, float("-inf"))
    highest = tl.max(tl.max(logit, 1), 0)
    candidate = tl.where((logit == highest) & (member < MEMBERS), found, 0x7FFFFFFFFFFFFFFF)
    tl.store(tokens + row, tl.min(tl.min(candidate, 1), 0))
