"""Triton kernels around the exchange of partial results in decode steps under cp. Imported only where they run.

A result [D] of 2 bytes each and its log-sum-exp of 4 bytes travel as one row of D / 2 + 1 words:

    [T, H, D] and [T, H]  -- pack, exchange -->  [cp, T, H / cp, D / 2 + 1]  -- merge -->  [T, H / cp, D]

Shapes in this file: T tokens, H heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.parallel.devices import early

_WORD = torch.int32
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_HEADS = 4
"""Heads of a program."""


def takes(out: Tensor, lse: Tensor) -> bool:
    """Whether there are kernels for these results."""
    is_plain = out.is_contiguous() and lse.is_contiguous()
    return is_plain and out.dtype in _DTYPES and lse.dtype == torch.float32 and out.shape[2] % 2 == 0


def pack(out: Tensor, lse: Tensor, *, size: int) -> Tensor:
    """Results of all heads, for each of `size` ranks those of its heads.

    Args:
        out: [T, H, D], contiguous.
        lse: [T, H] float32, contiguous.
    Returns:
        Words [size, T, H / size, D / 2 + 1].
    """
    num_tokens, num_heads, dim = out.shape
    share, words = num_heads // size, dim // 2
    packed = torch.empty((size, num_tokens, share, words + 1), dtype=_WORD, device=out.device)
    _pack[(num_tokens, triton.cdiv(num_heads, _HEADS))](
        out.view(_WORD),
        lse.view(_WORD),
        packed,
        num_tokens,
        NUM_HEADS=num_heads,
        SHARE=share,
        NUM_WORDS=words,
        WORDS=triton.next_power_of_2(words),
        HEADS=_HEADS,
        num_warps=2,
        **early(out.device),
    )
    return packed


def merge(packed: Tensor, sinks: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    """Merge what all ranks have for this rank's heads, as `merge.merge` does.

    Args:
        packed: words [parts, T, H, D / 2 + 1].
        sinks: [H], contiguous weights, which no kernel writes; or None.
    Returns:
        [T, H, D]; 0 where no part has keys.
    """
    num_parts, num_tokens, num_heads, words = packed.shape
    out = torch.empty((num_tokens, num_heads, 2 * (words - 1)), dtype=dtype, device=packed.device)
    _merge[(num_tokens, triton.cdiv(num_heads, _HEADS))](
        packed,
        packed if sinks is None else sinks,
        out.view(_WORD),
        num_tokens,
        NUM_PARTS=num_parts,
        NUM_HEADS=num_heads,
        NUM_WORDS=words - 1,
        WORDS=triton.next_power_of_2(words - 1),
        HEADS=_HEADS,
        DTYPE=_DTYPES[dtype],
        HAS_SINKS=sinks is not None,
        num_warps=2,
        **early(packed.device),
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _pack(
    out: tl.tensor,
    lse: tl.tensor,
    packed: tl.tensor,
    num_tokens: tl.tensor,
    NUM_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token and HEADS heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    word = tl.arange(0, WORDS)[None, :]
    is_head = head < NUM_HEADS
    mask = is_head[:, None] & (word < NUM_WORDS)
    if IS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = packed + ((head // SHARE * num_tokens + token) * SHARE + head % SHARE) * (NUM_WORDS + 1)
    found = tl.load(out + (token * NUM_HEADS + head)[:, None] * NUM_WORDS + word, mask=mask, other=0)
    tl.store(row[:, None] + word, found, mask=mask)
    tl.store(row + NUM_WORDS, tl.load(lse + token * NUM_HEADS + head, mask=is_head, other=0), mask=is_head)


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _merge(
    packed: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    NUM_PARTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token and HEADS heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    word = tl.arange(0, WORDS)[None, :]
    is_head = head < NUM_HEADS
    mask = is_head[:, None] & (word < NUM_WORDS)
    most = tl.full([HEADS], -1e30, tl.float32)  # finite, so that a row without keys has weights of 0
    total = tl.zeros([HEADS], tl.float32)
    low = tl.zeros([HEADS, WORDS], tl.float32)
    high = tl.zeros([HEADS, WORDS], tl.float32)
    if HAS_SINKS:
        most = tl.load(sinks + head, mask=is_head, other=-1e30).to(tl.float32)
        total += 1.0
    if IS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    for part in tl.static_range(NUM_PARTS):
        row = packed + ((part * num_tokens + token) * NUM_HEADS + head) * (NUM_WORDS + 1)
        found = tl.load(row[:, None] + word, mask=mask, other=0)
        lse = tl.load(row + NUM_WORDS, mask=is_head, other=0).to(tl.float32, bitcast=True)
        new = tl.maximum(most, lse)
        before, weight = tl.exp(most - new), tl.exp(lse - new)
        total = total * before + weight
        first = (found & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
        second = ((found >> 16) & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
        # What a part without keys holds may be anything finite.
        low = low * before[:, None] + first * weight[:, None]
        high = high * before[:, None] + second * weight[:, None]
        most = new
    inverse = tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
    first = (low * inverse).to(DTYPE).to(tl.uint16, bitcast=True).to(tl.int32)
    second = (high * inverse).to(DTYPE).to(tl.uint16, bitcast=True).to(tl.int32)
    tl.store(out + (token * NUM_HEADS + head)[:, None] * NUM_WORDS + word, first | (second << 16), mask=mask)
