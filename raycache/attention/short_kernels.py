"""Triton kernels for steps of few tokens: causal attention of rows of any length to their pages. Imported only where it
runs.

Programs take the parts of a table on the device (query_tiles.py), so a CUDA graph can be replayed with other rows; a
second launch merges what they found.

Shapes in this file: T tokens, H query heads, Hkv key heads, D head size, P pages, R tokens of a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from raycache.attention.query_tiles import KEYS, QUERIES, QueryTiles

_MERGED = 16
"""Queries that a program merges."""
_LOG2_E = tl.constexpr(1.4426950408889634)


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: QueryTiles, *, scale: float, sinks: Tensor | None) -> Tensor:
    """Causal attention of all tokens to the keys of their row's pages, which include those of the new tokens.

    Args:
        q: [T, H, D], contiguous in the last dimension.
        k, v: [P, R, Hkv, D], contiguous.
        sinks: [H], scores of the sinks; None for none.
    Returns:
        New [T, H, D].
    """
    (num_tokens, num_heads, dim), (_, page, num_keys, _) = q.shape, k.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    given = q if sinks is None else sinks
    sizes = {"DIM": dim, "NUM_KEY_HEADS": num_keys, "NUM_QUERIES": num_heads // num_keys, "ROWS": QUERIES}
    sizes |= {"HAS_SINKS": sinks is not None}
    _attend[len(tiles.parts), num_keys](
        q,
        k,
        v,
        given,
        out,
        tiles.parts,
        tiles.ids,
        tiles.partial,
        scale,
        *q.stride()[:2],
        PAGE=page,
        KEYS=KEYS,
        WINDOW=tiles.window,
        **sizes,
    )
    _merge[num_tokens, num_keys, QUERIES // _MERGED](out, given, tiles.tiles, tiles.partial, SOME=_MERGED, **sizes)
    return out


# Names that begin with NUM are exact; other sizes in capitals are powers of two, as Triton requires.


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    ids: tl.tensor,
    partial: tl.tensor,
    scale: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """One program per part, a row of the table of 8 numbers, and key head."""
    part, key_head = parts + tl.program_id(0) * 8, tl.program_id(1)
    first, count, position = tl.load(part + 1), tl.load(part + 2), tl.load(part + 3)
    if count == 0:
        return
    pages, begin, end, place = ids + tl.load(part), tl.load(part + 4), tl.load(part + 5), tl.load(part + 6)
    row, feature = tl.arange(0, ROWS), tl.arange(0, DIM)
    token, head = row // NUM_QUERIES, key_head * NUM_QUERIES + row % NUM_QUERIES
    is_row = token < count
    from_ = q + (first + token).to(tl.int64)[:, None] * q_token + head[:, None] * q_head + feature[None, :]
    queries = tl.load(from_, mask=is_row[:, None], other=0.0)
    factor = scale * _LOG2_E
    most, total = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIM], tl.float32)
    seen_by_all, late = tl.minimum(end, (position + 1) // KEYS * KEYS), begin
    if WINDOW > 0:  # blocks that some query does not see at all, or not as a whole
        late = tl.minimum(tl.maximum(begin, tl.cdiv(position + count - WINDOW, KEYS) * KEYS), end)
        result, most, total = _with_some_keys(
            result, most, total, queries, k, v, pages, begin, late, position + token, key_head, factor,
            DIM, PAGE, NUM_KEY_HEADS, KEYS, WINDOW,
        )  # fmt: skip
    result, most, total = _with_all_keys(
        result, most, total, queries, k, v, pages, late, seen_by_all, key_head, factor, DIM, PAGE, NUM_KEY_HEADS, KEYS
    )
    late = tl.maximum(late, seen_by_all)
    result, most, total = _with_some_keys(
        result, most, total, queries, k, v, pages, late, end, position + token, key_head, factor,
        DIM, PAGE, NUM_KEY_HEADS, KEYS, WINDOW,
    )  # fmt: skip
    if place < 0:
        _store(
            result, most, total, sinks, out, first + token, head, is_row, feature,
            DIM, NUM_KEY_HEADS * NUM_QUERIES, HAS_SINKS,
        )  # fmt: skip
    else:
        found = partial + (place * NUM_KEY_HEADS + key_head).to(tl.int64) * (ROWS * (DIM + 2))
        tl.store(found + row[:, None] * DIM + feature[None, :], result, mask=is_row[:, None])
        tl.store(found + ROWS * DIM + row, most, mask=is_row)
        tl.store(found + ROWS * (DIM + 1) + row, total, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _with_all_keys(
    result: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    queries: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    key_head: tl.tensor,
    factor: tl.tensor,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the keys of whole blocks, which all queries see, to sums of values [Q, D], highest scores and sums of weights
    [Q]."""
    feature, key = tl.arange(0, DIM), tl.arange(0, KEYS)
    for start in tl.range(begin, end, KEYS, num_stages=3):
        at = _places(pages, start, key, key_head, feature, DIM, PAGE, NUM_KEY_HEADS, KEYS)
        scores = tl.dot(queries, tl.trans(tl.load(k + at)))
        new = tl.maximum(most, tl.max(scores, 1) * factor)
        shares = tl.exp2(scores * factor - new[:, None])
        before = tl.exp2(most - new)
        total = total * before + tl.sum(shares, 1)
        values = tl.load(v + at)
        result = tl.dot(shares.to(values.dtype), values, acc=result * before[:, None])
        most = new
    return result, most, total


@triton.jit  # type: ignore[untyped-decorator]
def _with_some_keys(
    result: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    queries: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    position: tl.tensor,
    key_head: tl.tensor,
    factor: tl.tensor,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add keys, of which queries at their positions [Q] may see some, to sums of values [Q, D], highest scores and sums
    of weights [Q]."""
    feature = tl.arange(0, DIM)
    for start in tl.range(begin, end, KEYS, num_stages=1):
        place = start + tl.arange(0, KEYS)
        is_key = place < end
        page = tl.load(pages + place // PAGE, mask=is_key, other=0).to(tl.int64)
        at = ((page * PAGE + place % PAGE) * NUM_KEY_HEADS + key_head)[:, None] * DIM + feature[None, :]
        keys = tl.load(k + at, mask=is_key[:, None], other=0.0)
        values = tl.load(v + at, mask=is_key[:, None], other=0.0)
        is_seen = (place[None, :] <= position[:, None]) & is_key[None, :]
        if WINDOW > 0:
            is_seen = is_seen & (place[None, :] > position[:, None] - WINDOW)
        scores = tl.where(is_seen, tl.dot(queries, tl.trans(keys)) * factor, -1e30)
        new = tl.maximum(most, tl.max(scores, 1))
        shares = tl.where(is_seen, tl.exp2(scores - new[:, None]), 0.0)
        before = tl.exp2(most - new)
        total = total * before + tl.sum(shares, 1)
        result = tl.dot(shares.to(values.dtype), values, acc=result * before[:, None])
        most = new
    return result, most, total


@triton.jit  # type: ignore[untyped-decorator]
def _places(
    pages: tl.tensor,
    start: tl.tensor,
    key: tl.tensor,
    key_head: tl.tensor,
    feature: tl.tensor,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """Where the features of a whole block of keys of a row are, [K, D]."""
    if PAGE % KEYS == 0:
        page = tl.load(pages + start // PAGE).to(tl.int64)
        place = page * PAGE + start % PAGE + key
    else:
        page = tl.load(pages + (start + key) // PAGE).to(tl.int64)
        place = page * PAGE + (start + key) % PAGE
    return (place * NUM_KEY_HEADS + key_head)[:, None] * DIM + feature[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    out: tl.tensor,
    sinks: tl.tensor,
    tiles: tl.tensor,
    partial: tl.tensor,
    DIM: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    SOME: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """One program per tile, a row of 4 numbers, key head and some queries; tiles of one part have nothing to merge."""
    tile, key_head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    first, count, place, num_parts = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    row, feature = tl.program_id(2) * SOME + tl.arange(0, SOME), tl.arange(0, DIM)
    if (num_parts == 0) | (tl.program_id(2) * SOME >= count * NUM_QUERIES):
        return
    token, head = row // NUM_QUERIES, key_head * NUM_QUERIES + row % NUM_QUERIES
    is_row = token < count
    most = tl.full([SOME], -1e30, tl.float32)
    total = tl.zeros([SOME], tl.float32)
    result = tl.zeros([SOME, DIM], tl.float32)
    for number in tl.range(0, num_parts, num_stages=3):
        found = partial + ((place + number) * NUM_KEY_HEADS + key_head).to(tl.int64) * (ROWS * (DIM + 2))
        score = tl.load(found + ROWS * DIM + row, mask=is_row, other=-1e30)
        weight = tl.load(found + ROWS * (DIM + 1) + row, mask=is_row, other=0.0)
        values = tl.load(found + row[:, None] * DIM + feature[None, :], mask=is_row[:, None], other=0.0)
        new = tl.maximum(most, score)
        before, share = tl.exp2(most - new), tl.exp2(score - new)
        result = result * before[:, None] + values * share[:, None]
        total = total * before + weight * share
        most = new
    _store(
        result, most, total, sinks, out, first + token, head, is_row, feature,
        DIM, NUM_KEY_HEADS * NUM_QUERIES, HAS_SINKS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    result: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    is_row: tl.tensor,
    feature: tl.tensor,
    DIM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Divide sums of values [Q, D] by the sums of their weights [Q], whose highest score is `most`."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
        highest = tl.maximum(most, sink)
        less = tl.exp2(most - highest)
        result, total = result * less[:, None], total * less + tl.exp2(sink - highest)
    inverse = tl.where(total > 0.0, 1.0 / total, 0.0)
    at = token.to(tl.int64) * NUM_HEADS + head
    tl.store(
        out + at[:, None] * DIM + feature[None, :],
        (result * inverse[:, None]).to(out.dtype.element_ty),
        mask=is_row[:, None],
    )
