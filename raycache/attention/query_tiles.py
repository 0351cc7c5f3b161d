"""What programs of the kernels of short steps do: tiles of queries, parts of their keys. Planned on the host.

Queries of a row are taken in tiles: some tokens, with all query heads of a key head. The keys of a tile are split into
parts, so that a long prefix keeps the whole device busy; what the parts give is merged.

    row of 20 queries, 4 query heads per key head     [ tokens 0 .. 15 ] [ 16 .. 19 ]        64 queries, and 16
    keys of the first tile, 3 parts                   [ 0 .. 4095 ] [ 4096 .. 8191 ] [ 8192 .. 8207 ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.memory.streams import PinnedUse
from raycache.parallel.uploads import upload
from raycache.step.inputs import Pages

QUERIES = 64
"""Queries of a tile."""
KEYS = 64
"""Keys of a block. Parts consist of whole blocks, but for the end of a row."""
_LEAST_BLOCKS = 4
"""Fewest blocks of a part, if there are several: merging costs about as much."""
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
        group: query heads per key head, at most `QUERIES`.
        num_programs: per key head, that run at once.
        window: number of keys that a query attends to, including itself; 0 for no limit.
        buffer: uint8, for partial results; its contents may be overwritten.
    Attributes:
        parts, tiles, ids: int32, on the device.
        partial: the buffer, float32.
    """

    def __init__(
        self, num_tokens: int, *, max_pages: int, group: int, num_programs: int, window: int, buffer: Tensor
    ) -> None:
        device = buffer.device
        self.window, self.partial = window, buffer.view(torch.float32)
        self._per_tile, self._num_programs = QUERIES // group, max(num_programs, 1)
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
            upload(self._host[:used], self._device[:used])

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
        begins = np.maximum(before - self.window + 1, 0) // KEYS if self.window else np.zeros_like(before)
        blocks = -(-(before + tokens) // KEYS) - begins
        num_parts, per_part = self._split(blocks)
        is_split = num_parts > 1
        places = np.cumsum(num_parts * is_split) - num_parts * is_split
        of_tile, number = _numbered(num_parts)
        begin = begins[of_tile] + number * per_part
        end = np.minimum((begin + per_part) * KEYS, (before + tokens)[of_tile])
        parts = np.zeros((len(of_tile), _PART), np.int32)
        columns = (
            first_pages[of_row][of_tile],
            (firsts[of_row] + behind)[of_tile],
            tokens[of_tile],
            before[of_tile],
            begin * KEYS,
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
        least = max(-(-int(blocks.sum()) // self._num_programs), _LEAST_BLOCKS)
        low, high = 1, -(-longest // least)  # parts of the longest tile: few enough, and perhaps too many
        while low < high:
            middle = (low + high + 1) // 2
            fits = (-(-blocks // -(-longest // middle))).sum() <= self._num_programs
            low, high = (middle, high) if fits else (low, middle - 1)
        per_part = max(-(-longest // low), _LEAST_BLOCKS)
        return np.maximum(-(-blocks // per_part), 1), per_part


def _numbered(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each of sum(counts) items its group, and its number within it."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - (counts.cumsum() - counts)[group]
