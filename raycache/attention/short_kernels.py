"""Triton kernels for steps of few tokens: causal attention of rows of any length to their pages. Imported only where it
runs.

Queries of a row are taken in tiles: some tokens, with all query heads of a key head. The keys of a tile are split into
parts, so that a long prefix keeps the whole device busy, and a second launch merges what programs found.

    row of 20 queries, 4 query heads per key head     [ tokens 0 .. 15 ] [ 16 .. 19 ]        64 queries, and 16
    keys of the first tile, 3 parts                   [ 0 .. 4095 ] [ 4096 .. 8191 ] [ 8192 .. 8207 ]

What programs do is read from a table on the device, so a CUDA graph can be replayed with other rows.

Shapes in this file: T tokens, H query heads, Hkv key heads, D head size, P pages, R tokens of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from raycache.memory.streams import PinnedUse
from raycache.step.inputs import Pages

_ROWS = 64
"""Queries of a tile."""
_KEYS = 64
"""Keys that a program takes at once."""
_LEAST_BLOCKS = 4
"""Fewest blocks of keys of a part, if there are several: merging costs about as much."""
_PER_PROCESSOR = 2
"""Programs that a multiprocessor runs at once."""
_MERGED = 16
"""Queries that a program merges."""
_PART, _TILE = 8, 4
"""Numbers per part and per tile in the table."""


@dataclass(frozen=True, slots=True)
class TileRow:
    """New tokens of a row.

    Attributes:
        first: the first of them, among all.
        count: number of them.
        start: keys before the first one, from the row's first page on; -count for tokens that attend to nothing.
    """

    first: int
    count: int
    start: int


class QueryTiles:
    """Tiles and parts of one step, at fixed addresses, on the device and in pinned memory.

        [ parts, 8 each ][ tiles, 4 each ][ page ids ... ]

    Args:
        num_tokens: T, at most.
        max_pages: of all rows.
        group: query heads per key head.
        num_key_heads: Hkv.
        window: number of keys that a query attends to, including itself; 0 for no limit.
        buffer: uint8, for partial results; its contents may be overwritten.
    Attributes:
        parts, tiles, ids: int32, on the device.
    """

    def __init__(
        self, num_tokens: int, *, max_pages: int, group: int, num_key_heads: int, window: int, buffer: Tensor
    ) -> None:
        device = buffer.device
        self.window, self.partial = window, buffer.view(torch.float32)
        self._per_tile, self._num_tokens = _ROWS // group, num_tokens
        programs = _PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        self._num_programs = max(1, programs // num_key_heads)
        sizes = [_PART * (num_tokens + self._num_programs), _TILE * num_tokens, max_pages]
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._filling = PinnedUse(device)
        parts, tiles, self.ids = self._device.split(sizes)
        self.parts, self.tiles = parts.view(-1, _PART), tiles.view(-1, _TILE)
        parts, tiles, self._ids = self._host.split(sizes)
        self._parts, self._tiles = parts.view(-1, _PART).numpy(), tiles.view(-1, _TILE).numpy()

    def fill(self, rows: Sequence[TileRow], pages: Pages) -> None:
        """Copy the tiles and pages of a step to the device.

        Args:
            rows: of all tokens; those that attend to nothing come last.
            pages: of the rows that attend to something.
        """
        with self._filling:
            parts, tiles = self._planned(rows, pages)
            self._parts[: len(parts)], self._parts[len(parts) :] = parts, 0
            self._tiles[: len(tiles)], self._tiles[len(tiles) :] = tiles, 0
            self._ids[: len(pages.ids)] = torch.from_numpy(pages.ids)
            used = self._parts.size + self._tiles.size + len(pages.ids)
            self._device[:used].copy_(self._host[:used], non_blocking=True)

    def _planned(self, rows: Sequence[TileRow], pages: Pages) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Parts (first page, first token, tokens, keys before the first token, first key, end, place of its results or
        -1, 0), and tiles (first token, tokens, place of the first results, number of parts or 0)."""
        firsts, counts, starts = np.array([(row.first, row.count, row.start) for row in rows], np.int64).T
        first_pages = np.zeros(len(rows), np.int64)
        first_pages[: len(pages.indptr) - 1] = pages.indptr[:-1]
        of_row, behind = _numbered(-(-counts // self._per_tile))
        behind *= self._per_tile
        tokens = np.minimum(counts[of_row] - behind, self._per_tile)
        before = starts[of_row] + behind
        before[starts[of_row] < 0] = -tokens[starts[of_row] < 0]
        begins = np.maximum(before - self.window + 1, 0) // _KEYS if self.window else np.zeros_like(before)
        blocks = -(-(before + tokens) // _KEYS) - begins
        num_parts, per_part = self._split(blocks)
        is_split = num_parts > 1
        places = np.cumsum(num_parts * is_split) - num_parts * is_split
        of_tile, number = _numbered(num_parts)
        begin = begins[of_tile] + number * per_part
        end = np.minimum((begin + per_part) * _KEYS, (before + tokens)[of_tile])
        parts = np.zeros((len(of_tile), _PART), np.int32)
        columns = (
            first_pages[of_row][of_tile],
            (firsts[of_row] + behind)[of_tile],
            tokens[of_tile],
            before[of_tile],
            begin * _KEYS,
            end,
            np.where(is_split[of_tile], places[of_tile] + number, -1),
        )
        for place, column in enumerate(columns):
            parts[:, place] = column
        tiles = np.stack([firsts[of_row] + behind, tokens, places, num_parts * is_split], axis=1)
        return parts, tiles.astype(np.int32)

    def _split(self, blocks: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Parts of tiles with so many blocks of keys, and the blocks of a part: as many as run at once."""
        longest = max(int(blocks.max()), 1)
        per_part = max(-(-int(blocks.sum()) // self._num_programs), _LEAST_BLOCKS)
        for most in range(-(-longest // per_part), 0, -1):
            per_part = max(-(-longest // most), _LEAST_BLOCKS)
            num_parts = -(-blocks // per_part)
            if num_parts.sum() <= self._num_programs:
                break
        return np.maximum(num_parts, 1), per_part


def _numbered(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each of sum(counts) items its group, and its number within it."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - (counts.cumsum() - counts)[group]


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
    sizes = {"DIM": dim, "NUM_KEY_HEADS": num_keys, "NUM_QUERIES": num_heads // num_keys, "ROWS": _ROWS}
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
        KEYS=_KEYS,
        WINDOW=tiles.window,
        **sizes,
    )
    merged = triton.next_power_of_2(min(_MERGED, _ROWS))
    _merge[num_tokens, num_keys, _ROWS // merged](out, given, tiles.tiles, tiles.partial, SOME=merged, **sizes)
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
    """One program per part and key head."""
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
    factor = scale * 1.4426950408889634
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
    """One program per tile, key head and some queries; tiles of one part have nothing to merge."""
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
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
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
