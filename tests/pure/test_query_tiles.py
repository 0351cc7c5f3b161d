"""Tiles and parts of short steps: every query gets each of its keys once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from raycache.attention.query_tiles import KEYS, QUERIES, QueryTiles, TileRow
from raycache.step.inputs import Pages

NUM_TOKENS = 256


def drawn_rows(rng: np.random.Generator, *, window: int) -> list[tuple[int, int]]:
    """(new tokens, tokens before them), of at most NUM_TOKENS tokens; with a window, of rows shorter than it."""
    rows, left = [], int(rng.integers(1, NUM_TOKENS + 1))
    while left:
        count = int(min(left, rng.choice([1, 1, 1, 2, 5, 30, 100]), window - 1 if window else left))
        rows.append((count, int(rng.choice([0, 1, 63, 64, 300, 5000, 100_000])) + int(rng.integers(50))))
        left -= count
    return rows


@pytest.mark.parametrize("window", [0, 64, 100, 1024])
@pytest.mark.parametrize("group", [1, 4, 7, 64])
@pytest.mark.parametrize("page_size", [16, 48, 128])
def test_every_query_gets_each_of_its_keys_once(window: int, group: int, page_size: int) -> None:
    rng = np.random.default_rng(window + group + page_size)
    for num_programs in (1, 8, 33, 264):
        rows = drawn_rows(rng, window=window)
        first = [max(start - window + 1, 0) // page_size if window else 0 for _, start in rows]
        pages = [-(-(start + count) // page_size) - begin for (count, start), begin in zip(rows, first, strict=True)]
        indptr, nothing = np.array([0, *np.cumsum(pages)], np.int32), np.zeros(len(rows), np.int32)
        tiles = QueryTiles(
            NUM_TOKENS,
            max_pages=int(indptr[-1]),
            group=group,
            num_programs=num_programs,
            window=window,
            buffer=torch.zeros(16, dtype=torch.uint8),
        )
        ends = np.cumsum([count for count, _ in rows]).tolist()
        given = [
            TileRow(end - count, count, start - begin * page_size)
            for (count, start), end, begin in zip(rows, ends, first, strict=True)
        ]
        if (rest := NUM_TOKENS - ends[-1]) > 0:
            given.append(TileRow(ends[-1], rest, -rest))
        ids = rng.permutation(int(indptr[-1])).astype(np.int32)
        tiles.fill(given, Pages(indptr, ids, np.array(first, np.int32), nothing, nothing, nothing))
        assert (tiles.ids[: len(ids)].numpy() == ids).all()
        check(tiles, given, indptr, window=window, group=group)


def check(tiles: QueryTiles, rows: list[TileRow], indptr: np.ndarray, *, window: int, group: int) -> None:
    parts = [part for part in tiles.parts.tolist() if part[2]]
    places = sorted(part[6] for part in parts if part[6] >= 0)
    assert places == list(range(len(places))), "partial results lie beside each other"
    merged = {first + i: (place, count) for first, num, place, count in tiles.tiles.tolist() for i in range(num)}
    seen: dict[int, list[range]] = {}
    for page, first, count, position, begin, end, place, _ in parts:
        assert count <= QUERIES // group and begin % KEYS == 0
        for i in range(count):
            start, num_parts = merged[first + i]
            assert start <= place < start + num_parts if num_parts else place == -1
            seen.setdefault(first + i, []).append(range(begin, end))
        row = next(row for row in rows if row.first <= first < row.first + row.count)
        if row.start >= 0:
            assert page == indptr[rows.index(row)] and position == row.start + first - row.first
    for row in rows:
        for i in range(row.count):
            found = sorted(seen[row.first + i], key=lambda part: part.start)
            if row.start < 0:
                assert not any(map(len, found)), "padding sees nothing"
                continue
            own = row.start + i
            assert found[0].start <= (max(own - window + 1, 0) if window else 0) and found[-1].stop > own
            assert all(one.stop == other.start for one, other in pairwise(found))
