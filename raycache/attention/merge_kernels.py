"""Triton kernels that merge partial results by log-sum-exp, and what such kernels are made of. Imported only where they
run.

Two numbers of 2 bytes are a word of 4. In kernels a row is a head of a token: R of them, of W words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.attention.merge import Part
from raycache.parallel.devices import early
from raycache.parallel.peer_kernels import high_of, low_of, pair_of
from raycache.rounding import ceil_div, power_of_2

WORD = torch.int32
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
HEADS_AT_ONCE = 4
"""Heads of a program."""


def merge_apart(one: Part, other: Part, others: Part, sinks: Tensor | None) -> Tensor:
    """Merge parts that are not packed, as `merge.merge` does; log-sum-exps are to base 2.

    Args:
        one, other: [T, H, D] and [T, H] float32.
        others: P more parts, [P, T, H, D] and [P, T, H] float32, each part contiguous.
        sinks: [H], contiguous weights, which no kernel writes; or None.
    Returns:
        [T, H, D]; 0 where no part has keys.
    """
    (out, lse), (other_out, other_lse) = ([each.contiguous() for each in part] for part in (one, other))
    assert others[0][0].is_contiguous() and others[1][0].is_contiguous()
    num_tokens, num_heads, dim = out.shape
    merged = torch.empty_like(out)
    if not num_tokens:
        return merged
    outs, lses = (each.view(WORD) for each in others)
    _merge_apart[(num_tokens, ceil_div(num_heads, HEADS_AT_ONCE))](
        out.view(WORD),
        lse.view(WORD),
        other_out.view(WORD),
        other_lse.view(WORD),
        outs,
        lses,
        out if sinks is None else sinks,
        merged.view(WORD),
        outs.stride(0),
        lses.stride(0),
        NUM_PARTS=len(outs),
        NUM_HEADS=num_heads,
        NUM_WORDS=dim // 2,
        WORDS=power_of_2(dim // 2),
        HEADS=HEADS_AT_ONCE,
        DTYPE=DTYPES[out.dtype],
        HAS_SINKS=sinks is not None,
        num_warps=2,
        **early(out.device),
    )
    return merged


@triton.jit  # type: ignore[untyped-decorator]
def part_of(
    out: tl.tensor,
    lse: tl.tensor,
    row: tl.tensor,
    word: tl.tensor,
    mask: tl.tensor,
    is_row: tl.tensor,
    NUM_WORDS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Words [R, W] of some rows of this rank's results, and their log-sum-exps [R]."""
    words = tl.load(out + row[:, None] * NUM_WORDS + word, mask=mask, other=0)
    return words, tl.load(lse + row, mask=is_row, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def no_part(
    sinks: tl.tensor, is_row: tl.tensor, ROWS: tl.constexpr, WORDS: tl.constexpr, HAS_SINKS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """What parts are added to: both numbers of each word [R, W], the highest score and the weights [R]."""
    most = tl.full([ROWS], -1e30, tl.float32)  # finite, so that a row without keys has weights of 0
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        most = tl.load(sinks, mask=is_row, other=-1e30).to(tl.float32) * 1.4426950408889634
        total += 1.0
    low = tl.zeros([ROWS, WORDS], tl.float32)
    high = tl.zeros([ROWS, WORDS], tl.float32)
    return low, high, most, total


@triton.jit  # type: ignore[untyped-decorator]
def add_part(
    found: tl.tensor,
    lse: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    DTYPE: tl.constexpr,
    LOG2: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Add a part to what was merged: words [R, W], of which `low` and `high` are the numbers, and log-sum-exps [R]."""
    score = lse.to(tl.float32, bitcast=True) * LOG2
    new = tl.maximum(most, score)
    before, weight = tl.exp2(most - new), tl.exp2(score - new)
    # What a part without keys holds may be anything finite.
    low = low * before[:, None] + low_of(found, DTYPE) * weight[:, None]
    high = high * before[:, None] + high_of(found, DTYPE) * weight[:, None]
    return low, high, new, total * before + weight


@triton.jit  # type: ignore[untyped-decorator]
def merged_words(low: tl.tensor, high: tl.tensor, total: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Words [R, W] of the mean, 0 without keys."""
    inverse = tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
    return pair_of(low * inverse, high * inverse, DTYPE)


@triton.jit(do_not_specialize=["outs_stride", "lses_stride"])  # type: ignore[untyped-decorator]
def _merge_apart(
    one_out: tl.tensor,
    one_lse: tl.tensor,
    other_out: tl.tensor,
    other_lse: tl.tensor,
    outs: tl.tensor,
    lses: tl.tensor,
    sinks: tl.tensor,
    merged: tl.tensor,
    outs_stride: tl.tensor,
    lses_stride: tl.tensor,
    NUM_PARTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token and HEADS heads. Strides are those of parts, in words."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    word = tl.arange(0, WORDS)[None, :]
    is_head = head < NUM_HEADS
    mask = is_head[:, None] & (word < NUM_WORDS)
    row = tl.program_id(0).to(tl.int64) * NUM_HEADS + head
    low, high, most, total = no_part(sinks + head, is_head, HEADS, WORDS, HAS_SINKS)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    found, lse = part_of(one_out, one_lse, row, word, mask, is_head, NUM_WORDS)
    low, high, most, total = add_part(found, lse, low, high, most, total, DTYPE, 1.0)
    found, lse = part_of(other_out, other_lse, row, word, mask, is_head, NUM_WORDS)
    low, high, most, total = add_part(found, lse, low, high, most, total, DTYPE, 1.0)
    for part in tl.static_range(NUM_PARTS):
        part_out = outs + tl.cast(outs_stride, tl.int64) * part
        part_lse = lses + tl.cast(lses_stride, tl.int64) * part
        found, lse = part_of(part_out, part_lse, row, word, mask, is_head, NUM_WORDS)
        low, high, most, total = add_part(found, lse, low, high, most, total, DTYPE, 1.0)
    tl.store(merged + row[:, None] * NUM_WORDS + word, merged_words(low, high, total, DTYPE), mask=mask)
