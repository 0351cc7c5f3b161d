"""Triton kernels that select the best scored keys; launched by sparse_kernels.py, which describes the scheme."""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST_SCORE = tl.constexpr(-(1 << 31))  # sortable bits of padding, below those of any score
_LOWEST = tl.constexpr(-(1 << 63))  # sortable of padding, below that of any token


@triton.jit(do_not_specialize=["first", "page_size", "offset"])  # type: ignore[untyped-decorator]
def choose_keys(
    scores: tl.tensor,
    ids: tl.tensor,
    begins: tl.tensor,
    lens: tl.tensor,
    listed: tl.tensor,
    out: tl.tensor,
    sortables: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    num_listed: tl.tensor,
    count: tl.tensor,
    page_size: tl.tensor,
    offset: tl.tensor,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
    HAS_SORTABLES: tl.constexpr,
) -> None:
    """One program per query and BLOCK keys, of all keys of its row or of the listed ones; writes the best, in order."""
    query, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seen = tl.load(lens + first + query)
    place = tile * BLOCK + tl.arange(0, BLOCK)
    if IS_FIRST:
        key, is_key = place, place < seen
    else:
        key = tl.load(listed + query * num_listed + place, mask=place < num_listed, other=-1)
        is_key = key >= 0
    is_scored = (seen > count) | HAS_SORTABLES
    score = tl.load(scores + query * width + key, mask=is_key & is_scored, other=0.0)
    bits = score.to(tl.int32, bitcast=True)
    # Negative numbers with larger bits are lower.
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    value = tl.where(is_key, rising, _LOWEST_SCORE)
    last = tl.full((), _LOWEST_SCORE + 1, tl.int32)
    # If there are few keys, all are selected. This is common: CUDA graphs are sized for the longest rows.
    if tl.sum(is_key.to(tl.int32), 0) > count:
        last = _reached(value, count, _LOWEST_SCORE, 32)
    # Keys above the last one, then keys equal to it up to `count`; both are counted in one sum, up to BLOCK of each.
    is_above, is_equal = value > last, value == last
    ranks = tl.cumsum((is_above.to(tl.int32) << 16) + is_equal.to(tl.int32), 0)
    room = count - tl.sum(is_above.to(tl.int32), 0)
    is_chosen = is_above | (is_equal & ((ranks & 0xFFFF) <= room))
    rank = (ranks >> 16) + tl.minimum(ranks & 0xFFFF, room) - 1
    total = tl.sum(is_chosen.to(tl.int32), 0)
    if IS_LAST:
        start = (first + query) * count
        page = tl.load(ids + tl.load(begins + first + query) + key // SHARE, mask=is_chosen, other=0)
        tl.store(out + start + rank, page * SHARE + key % SHARE, mask=is_chosen)
    else:
        start = (query * tl.num_programs(1) + tile) * count
        tl.store(out + start + rank, key, mask=is_chosen)
    rest = total + tl.arange(0, BLOCK)
    tl.store(out + start + rest, -1, mask=rest < count)
    if HAS_SORTABLES and IS_LAST:
        position = key // SHARE * page_size + offset + key % SHARE
        sortable = (rising.to(tl.int64) << 32) | (0x7FFFFFFF - position).to(tl.int64)
        tl.store(sortables + start + rank, sortable, mask=is_chosen)
        tl.store(sortables + start + rest, _LOWEST, mask=rest < count)


@triton.jit(do_not_specialize=["rank_stride", "top_k"])  # type: ignore[untyped-decorator]
def find_last_chosen(
    candidates: tl.tensor,
    last: tl.tensor,
    rank_stride: tl.tensor,
    total: tl.tensor,
    count: tl.tensor,
    top_k: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per query."""
    query = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    where = (place // count).to(tl.int64) * rank_stride + query * count + place % count
    values = tl.load(candidates + where, mask=place < total, other=_LOWEST)
    tl.store(last + query, _reached(values, top_k, _LOWEST, 64))


@triton.jit  # type: ignore[untyped-decorator]
def _reached(values: tl.tensor, count: tl.tensor, LOWEST: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """The largest number that `count` values reach, found bit by bit from the highest; always above LOWEST."""
    # The highest bit is the sign.
    lowest, zero = tl.full((), LOWEST, values.dtype), tl.full((), 0, values.dtype)
    found = tl.where(tl.sum((values >= 0).to(tl.int32), 0) >= count, zero, lowest)
    for bit in range(1, BITS):
        higher = found | (tl.full((), 1, values.dtype) << (BITS - 1 - bit))
        found = tl.where(tl.sum((values >= higher).to(tl.int32), 0) >= count, higher, found)
    return tl.maximum(found, lowest + 1)


@triton.jit  # type: ignore[untyped-decorator]
def keep_chosen(
    slots: tl.tensor,
    candidates: tl.tensor,
    last: tl.tensor,
    kept: tl.tensor,
    lengths: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per query."""
    query = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    sortable = tl.load(candidates + query * count + place, mask=place < count, other=_LOWEST)
    slot = tl.load(slots + query * count + place, mask=place < count, other=-1)
    is_kept = sortable >= tl.load(last + query)
    rank = tl.cumsum(is_kept.to(tl.int32), 0)
    length = tl.sum(is_kept.to(tl.int32), 0)
    tl.store(kept + query * count + rank - 1, slot, mask=is_kept)
    tl.store(kept + query * count + place, -1, mask=(place >= length) & (place < count))
    tl.store(lengths + query, length)
