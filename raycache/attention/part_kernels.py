"""Triton kernels that exchange and merge partial results under cp. Imported only where they run.

A result [D] of 2 bytes each and its log-sum-exp of 4 bytes travel as D / 2 + 1 words, as `StepLayout` sends them
without kernels, so that a rank that has none receives what it expects:

    all tokens on every rank   [T, H, D], [T, H]  -- pack, exchange -->  [cp, T, H / cp, D / 2 + 1]   -- merge -->
    tokens split over cp       [T, H, D], [T, H]  -- pack, exchange -->  [cp, T_padded, H, D / 2 + 1]  -- merge -->

In the first case one kernel does it all where there is peer memory. What copy engines bring is merged as it is
(merge_kernels.py).

Shapes in this file: T tokens, T_local of this rank, H heads, D head size. In kernels a row is a head of a token: R of
them, of W words.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.attention.merge import Part
from raycache.attention.merge_kernels import (
    DTYPES,
    HEADS_AT_ONCE,
    WORD,
    add_part,
    merged_words,
    no_part,
    part_of,
)
from raycache.parallel.collectives import Group
from raycache.parallel.devices import early
from raycache.parallel.peer_kernels import receive, send
from raycache.parallel.peer_memory import PROGRAMS, WORDS, PeerMemory
from raycache.rounding import ceil_div, power_of_2
from raycache.step.exchange import TokenExchange

_LOG2_E = math.log2(math.e)


def takes(out: Tensor, lse: Tensor) -> bool:
    """Whether there are kernels for these results."""
    is_even = out.shape[2] % 2 == 0 and out.shape[2] // 2 < WORDS
    return is_even and out.dtype in DTYPES and lse.dtype == torch.float32


def scatter(part: Part, sinks: Tensor | None, *, cp: Group, is_log2: bool) -> Tensor:
    """Merge what all cp ranks have for this rank's heads. Collective over cp.

    Args:
        part: this rank's results, [T, H, D] and [T, H] float32.
        sinks: [H / cp] of this rank's heads, or None; no kernel writes them.
        is_log2: whether log-sum-exps are to base 2.
    Returns:
        [T, H / cp, D]; 0 where no rank has keys.
    """
    out, lse = (each.contiguous() for each in part)
    if (memory := cp.peer_memory((out.nbytes + lse.nbytes) // cp.size)) is not None:
        return _scatter_at_once(out, lse, sinks, memory=memory, is_log2=is_log2)
    packed = pack(out, lse, size=cp.size, is_log2=is_log2)
    return merge(cp.all_to_all(packed), sinks, dtype=out.dtype)


def give_back(part: Part, own: Part | None, sinks: Tensor | None, *, exchange: TokenExchange, is_log2: bool) -> Tensor:
    """Merge what all cp ranks have for this rank's tokens. Collective over cp.

    Args:
        part: this rank's results for all tokens, [T, H, D] and [T, H] float32.
        own: one more part of this rank's tokens, [T_local, H, D] and [T_local, H] float32; or None.
        sinks: [H], or None; no kernel writes them.
        is_log2: whether log-sum-exps are to base 2.
    Returns:
        [T_local, H, D]; 0 where no part has keys.
    """
    (packed,) = pack(*part, size=1, is_log2=is_log2, tokens=exchange.what)
    every = exchange.cp.all_to_all(packed.unflatten(0, (exchange.cp.size, exchange.padded_len)))
    return merge(every, sinks, dtype=part[0].dtype, num_tokens=exchange.num_local, own=own, is_log2=is_log2)


def _scatter_at_once(out: Tensor, lse: Tensor, sinks: Tensor | None, *, memory: PeerMemory, is_log2: bool) -> Tensor:
    """`scatter` in one kernel; out and lse are contiguous."""
    num_tokens, num_heads, dim = out.shape
    share, words = num_heads // memory.size, dim // 2
    num_rows = num_tokens * share
    # As many rows per program as let all be taken in one turn, if there is room.
    rows = min(power_of_2(ceil_div(num_rows, PROGRAMS)), _power_below(WORDS // (words + 1)))
    merged = torch.empty((num_tokens, share, dim), dtype=out.dtype, device=out.device)
    _exchange_and_merge[(min(ceil_div(num_rows, rows), PROGRAMS),)](
        out.view(WORD),
        lse.view(WORD),
        out if sinks is None else sinks,
        merged.view(WORD),
        memory.peers,
        memory.numbers,
        memory.rank,
        num_rows,
        memory.limit_ns,
        SHARE=share,
        NUM_WORDS=words,
        ROW_WORDS=power_of_2(words),
        ROWS=rows,
        DTYPE=DTYPES[out.dtype],
        HAS_SINKS=sinks is not None,
        LOG2=1.0 if is_log2 else _LOG2_E,
        SIZE=memory.size,
        PROGRAMS=PROGRAMS,
        WORDS=WORDS,
        num_warps=min(max(rows * power_of_2(words) // 128, 1), 8),
        **early(out.device),
    )
    return merged


def _power_below(number: int) -> int:
    """The largest power of two that is not above it."""
    return 1 << (number.bit_length() - 1)


def pack(out: Tensor, lse: Tensor, *, size: int, is_log2: bool, tokens: Tensor | None = None) -> Tensor:
    """Results of all heads, for each of `size` ranks those of its heads.

    Args:
        out: [T, H, D].
        lse: [T, H] float32.
        is_log2: whether it is to base 2; what is packed is not.
        tokens: int64 [N], those that are packed, in this order; None for all.
    Returns:
        Words [size, N, H / size, D / 2 + 1].
    """
    num_heads, dim = out.shape[1:]
    num_tokens, words = len(out) if tokens is None else len(tokens), dim // 2
    packed = torch.empty((size, num_tokens, num_heads // size, words + 1), dtype=WORD, device=out.device)
    _pack[(num_tokens, ceil_div(num_heads, HEADS_AT_ONCE))](
        out.contiguous().view(WORD),
        lse.contiguous().view(WORD),
        packed if tokens is None else tokens,
        packed,
        num_tokens,
        NUM_HEADS=num_heads,
        SHARE=num_heads // size,
        NUM_WORDS=words,
        WORDS=power_of_2(words),
        HEADS=HEADS_AT_ONCE,
        HAS_TOKENS=tokens is not None,
        IS_LOG2=is_log2,
        num_warps=2,
        **early(out.device),
    )
    return packed


def merge(
    packed: Tensor,
    sinks: Tensor | None,
    *,
    dtype: torch.dtype,
    num_tokens: int | None = None,
    own: Part | None = None,
    is_log2: bool = False,
) -> Tensor:
    """Merge parts, as `merge.merge` does.

    Args:
        packed: words [parts, T, H, D / 2 + 1].
        sinks: [H], contiguous weights, which no kernel writes; or None.
        num_tokens: the first ones that are merged; None for all.
        own: one more part, of these tokens, [num_tokens, H, D] and [num_tokens, H] float32; or None.
        is_log2: whether the log-sum-exps of `own` are to base 2; those of `packed` never are.
    Returns:
        [num_tokens, H, D]; 0 where no part has keys.
    """
    num_parts, num_packed, num_heads, words = packed.shape
    num_tokens = num_packed if num_tokens is None else num_tokens
    out = torch.empty((num_tokens, num_heads, 2 * (words - 1)), dtype=dtype, device=packed.device)
    if not num_tokens:
        return out
    own_out, own_lse = (packed, packed) if own is None else (part.contiguous().view(WORD) for part in own)
    _merge[(num_tokens, ceil_div(num_heads, HEADS_AT_ONCE))](
        packed,
        own_out,
        own_lse,
        packed if sinks is None else sinks,
        out.view(WORD),
        num_packed,
        NUM_PARTS=num_parts,
        NUM_HEADS=num_heads,
        NUM_WORDS=words - 1,
        WORDS=power_of_2(words - 1),
        HEADS=HEADS_AT_ONCE,
        DTYPE=DTYPES[dtype],
        HAS_OWN=own is not None,
        OWN_LOG2=1.0 if is_log2 else _LOG2_E,
        HAS_SINKS=sinks is not None,
        num_warps=2,
        **early(packed.device),
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _pack(
    out: tl.tensor,
    lse: tl.tensor,
    tokens: tl.tensor,
    packed: tl.tensor,
    num_tokens: tl.tensor,
    NUM_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    IS_LOG2: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per packed token and HEADS heads."""
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    word = tl.arange(0, WORDS)[None, :]
    is_head = head < NUM_HEADS
    mask = is_head[:, None] & (word < NUM_WORDS)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = place
    if HAS_TOKENS:
        token = tl.load(tokens + place)
    found, scores = part_of(out, lse, token * NUM_HEADS + head, word, mask, is_head, NUM_WORDS)
    if IS_LOG2:
        scores = (scores.to(tl.float32, bitcast=True) * 0.6931471805599453).to(tl.int32, bitcast=True)
    row = packed + ((head // SHARE * num_tokens + place) * SHARE + head % SHARE) * (NUM_WORDS + 1)
    tl.store(row[:, None] + word, found, mask=mask)
    tl.store(row + NUM_WORDS, scores, mask=is_head)


@triton.jit(do_not_specialize=["num_packed"])  # type: ignore[untyped-decorator]
def _merge(
    packed: tl.tensor,
    own_out: tl.tensor,
    own_lse: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    num_packed: tl.tensor,
    NUM_PARTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_OWN: tl.constexpr,
    OWN_LOG2: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token and HEADS heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    word = tl.arange(0, WORDS)[None, :]
    is_head = head < NUM_HEADS
    mask = is_head[:, None] & (word < NUM_WORDS)
    low, high, most, total = no_part(sinks + head, is_head, HEADS, WORDS, HAS_SINKS)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if HAS_OWN:
        found, lse = part_of(own_out, own_lse, token * NUM_HEADS + head, word, mask, is_head, NUM_WORDS)
        low, high, most, total = add_part(found, lse, low, high, most, total, DTYPE, OWN_LOG2)
    for part in tl.static_range(NUM_PARTS):
        row = packed + ((part * num_packed + token) * NUM_HEADS + head) * (NUM_WORDS + 1)
        found = tl.load(row[:, None] + word, mask=mask, other=0)
        lse = tl.load(row + NUM_WORDS, mask=is_head, other=0)
        low, high, most, total = add_part(found, lse, low, high, most, total, DTYPE, 1.4426950408889634)
    words = merged_words(low, high, total, DTYPE)
    tl.store(out + (token * NUM_HEADS + head)[:, None] * NUM_WORDS + word, words, mask=mask)


@triton.jit(do_not_specialize=["rank", "num_rows"])  # type: ignore[untyped-decorator]
def _exchange_and_merge(
    out: tl.tensor,
    lse: tl.tensor,
    sinks: tl.tensor,
    merged: tl.tensor,
    peers: tl.tensor,
    numbers: tl.tensor,
    rank: tl.tensor,
    num_rows: tl.tensor,
    limit_ns: tl.tensor,
    SHARE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    LOG2: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per ROWS rows, which are tokens and heads of a rank, in turns; see parallel/peer_kernels.py."""
    program = tl.program_id(0)
    local = tl.arange(0, ROWS)
    word = tl.arange(0, ROW_WORDS)[None, :]
    place = local[:, None] * NUM_WORDS + word
    lse_place = ROWS * NUM_WORDS + local
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.load(numbers + program)
    for block in range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        number += 1
        row = block * ROWS + local
        is_row = row < num_rows
        mask = is_row[:, None] & (word < NUM_WORDS)
        head = row % SHARE
        first = (row // SHARE * SIZE).to(tl.int64) * SHARE + head  # of rank 0
        for step in tl.static_range(1, SIZE):
            to = (rank + step) % SIZE
            words, bits = part_of(out, lse, first + to * SHARE, word, mask, is_row, NUM_WORDS)
            send(words, peers, to, rank, number, place, mask, SIZE, PROGRAMS, WORDS)
            send(bits, peers, to, rank, number, lse_place, is_row, SIZE, PROGRAMS, WORDS)
        low, high, most, total = no_part(sinks + head, is_row, ROWS, ROW_WORDS, HAS_SINKS)
        words, bits = part_of(out, lse, first + rank * SHARE, word, mask, is_row, NUM_WORDS)
        low, high, most, total = add_part(words, bits, low, high, most, total, DTYPE, LOG2)
        for step in tl.static_range(1, SIZE):
            sender = (rank + step) % SIZE
            # Words last: all warps wait for each other there. Before that, none may send what replaces them.
            bits = receive(peers, sender, rank, number, lse_place, is_row, limit_ns, SIZE, PROGRAMS, WORDS)
            words = receive(peers, sender, rank, number, place, mask, limit_ns, SIZE, PROGRAMS, WORDS)
            low, high, most, total = add_part(words, bits, low, high, most, total, DTYPE, LOG2)
        at = row.to(tl.int64)[:, None] * NUM_WORDS + word
        tl.store(merged + at, merged_words(low, high, total, DTYPE), mask=mask)
    tl.store(numbers + program, number)
