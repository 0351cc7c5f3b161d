"""Queries and keys of rows in the layout of FlashInfer's kernels.

    all tokens       [ row 0 ][ row 1      ][ row 2 ][ row 3      ]
    rows 1 and 3              [ 0 1 2 3 4 5 ]        [ 6 7 8 9 10 ]      tokens: an index
    rows 1 and 2              [ 0 1 2 3 4 5 ][ 6 ]                       tokens: a slice, since they are consecutive

All arrays are on the host, where kernels are planned.

Shapes in this file: n rows of one kernel, T tokens of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.attention.layout import Chunk
from raycache.attention.passing import ChunkKeys
from raycache.step.inputs import Pages, RowInputs

Ints = NDArray[np.int32]

Tokens = slice | Tensor
"""A selection of tokens, as an index into their dimension."""


PassedRun = tuple[ChunkKeys, slice, range]
"""The keys of a chunk, and a run of it with its slice of this rank's tokens."""


@dataclass(frozen=True, slots=True)
class Table:
    """Queries and pages of n rows.

    Attributes:
        tokens: the queries among all tokens.
        queries: int32 [n + 1], start of each row's queries.
        indptr: int32 [n + 1]; row i has the pages ids[indptr[i]:indptr[i + 1]], without empty ones.
        ids: int32.
        lens: int32 [n], keys of each row.
        page_len: tokens per page.
        begins: int32 [n], keys of each row before its window; None for none.
    """

    tokens: Tokens
    queries: Ints
    indptr: Ints
    ids: Ints
    lens: Ints
    page_len: int
    begins: Ints | None = None

    @property
    def last(self) -> Ints:
        """Keys in each row's last page, int32 [n]; 0 for rows without keys."""
        full = np.maximum(np.diff(self.indptr) - 1, 0) * self.page_len
        rest: Ints = (self.lens - full).astype(np.int32)
        return rest


@dataclass(frozen=True, slots=True)
class Segments:
    """Queries of n rows and their keys, both packed.

    Attributes:
        tokens: the queries among all tokens.
        queries, keys: int32 [n + 1], start of each row's queries and keys. Unused keys between two rows form a row
            without queries.
    """

    tokens: Tokens
    queries: Ints
    keys: Ints


@dataclass(frozen=True, slots=True)
class Piece:
    """Cached tokens of some rows.

    Attributes:
        segments: the rows' queries, with these tokens as keys.
        slots: int64, of these tokens.
    """

    segments: Segments
    slots: NDArray[np.int64]


def page_table(pages: Pages, rows: Sequence[int], lens: Ints, *, queries: Sequence[range], page_len: int) -> Table:
    """Make the table of some rows.

    Args:
        pages: of all rows.
        rows: indices, ascending.
        lens: int32, number of keys of each of all rows.
        queries: of each of all rows, among the tokens that the kernel is given.
        page_len: tokens per page.
    """
    begins, starts = pages.begins, pages.indptr[:-1]
    if len(rows) < len(queries):
        lens, begins, starts = (column[list(rows)] for column in (lens, begins, starts))
    chosen = [queries[row] for row in rows]
    indptr, ids = _attended(pages, starts, lens, page_len)
    starts_of_queries = starts_of([len(some) for some in chosen])
    return Table(together(chosen), starts_of_queries, indptr, ids, lens.astype(np.int32), page_len, begins)


def decode_table(pages: Pages, lens: Ints, *, page_len: int) -> Table:
    """Make the table of all rows, which have one query each; else as `page_table`."""
    count = len(lens)
    indptr, ids = _attended(pages, pages.indptr[:-1], lens, page_len)
    queries = np.arange(count + 1, dtype=np.int32)
    return Table(slice(0, count), queries, indptr, ids, lens.astype(np.int32), page_len, pages.begins)


def passed_table(runs: Sequence[PassedRun], *, page_len: int) -> Table:
    """Make the table of this rank's queries of some chunks and the gathered keys of those chunks, a row per run.

    The keys of a run are those of the chunk up to the run's end, so its queries are the last of them.

    Args:
        page_len: tokens per page of the keys.
    """
    lens = np.array([keys.num_cached + run.stop for keys, _, run in runs], np.int32)
    ids = [keys.pages[: -(-int(count) // page_len)] for (keys, _, _), count in zip(runs, lens, strict=True)]
    queries = [range(local.start, local.stop) for _, local, _ in runs]
    indptr = starts_of([len(some) for some in ids])
    return Table(
        together(queries), starts_of([len(some) for some in queries]), indptr, np.concatenate(ids), lens, page_len
    )


def run_segments(chunks: Sequence[Chunk]) -> Iterator[Segments]:
    """Causal attention of this rank's queries of some chunks to their new keys, one Segments per run of a chunk.

    The keys of a run are those of the chunk up to the run's end, so its queries are the last of them.
    """
    for number in range(max((len(chunk.runs) for chunk in chunks), default=0)):
        queries, spans = [0], []
        keys: list[int] = []
        for chunk in chunks:
            if number >= len(chunk.runs):
                continue
            local, run = list(chunk.local_runs())[number]
            begin = chunk.tokens.start
            # A row without queries for unused keys before these.
            if keys:
                queries.append(queries[-1])
            queries.append(queries[-1] + len(run))
            keys += [begin, begin + run.stop]
            spans.append(range(local.start, local.stop))
        yield Segments(together(spans), np.array(queries, np.int32), np.array(keys, np.int32))


def pieces(
    pages: Pages, rows: Sequence[int], *, inputs: Sequence[RowInputs], page_len: int, length: int
) -> Iterator[Piece]:
    """Cached tokens of some rows in pieces of at most `length` tokens; several short rows share a piece.

    Args:
        pages: of all rows.
        rows: indices, ascending.
        inputs: of all rows.
        page_len: tokens per page.
    """
    taken: list[tuple[int, int, int]] = []
    missing = length
    for row in rows:
        first, left = 0, int(pages.cached[row])
        while left:
            count = min(missing, left)
            taken.append((row, first, count))
            first, left, missing = first + count, left - count, missing - count
            if not missing:
                yield _piece(pages, taken, inputs, page_len)
                taken, missing = [], length
    if taken:
        yield _piece(pages, taken, inputs, page_len)


def cached_slots(pages: Pages, row: int, tokens: range, *, page_len: int) -> NDArray[np.int64]:
    """Slots of some tokens in a row's pages, counted from its first page."""
    page, offset = np.divmod(np.arange(tokens.start, tokens.stop), page_len)
    slots: NDArray[np.int64] = pages.ids[pages.indptr[row] + page].astype(np.int64) * page_len + offset
    return slots


def together(spans: Sequence[range]) -> Tokens:
    """The tokens of some spans, in order."""
    if all(one.stop == other.start for one, other in itertools.pairwise(spans)):
        return slice(spans[0].start, spans[-1].stop)
    return torch.from_numpy(np.concatenate([np.arange(span.start, span.stop) for span in spans]))


def are_all(tokens: Tokens, count: int) -> bool:
    """Whether a selection is all of `count` tokens, in order."""
    return isinstance(tokens, slice) and tokens == slice(0, count)


def is_partition(selections: Sequence[Tokens], count: int) -> bool:
    """Whether the selections are slices that cover each of `count` tokens exactly once."""
    spans = sorted((one.start, one.stop) for one in selections if isinstance(one, slice))
    starts, stops = [start for start, _ in spans], [stop for _, stop in spans]
    return len(spans) == len(selections) and [0, *stops] == [*starts, count]


def starts_of(counts: Sequence[int] | NDArray[np.integer]) -> Ints:
    """Cumulative sums with a leading 0: [n] -> int32 [n + 1]."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _attended(pages: Pages, starts: Ints, lens: Ints, page_len: int) -> tuple[Ints, Ints]:
    """The pages that hold the keys of rows whose pages begin at `starts`: indptr and ids of a table."""
    indptr = starts_of(-(-lens // page_len))
    ids = pages.ids
    if indptr[-1] < len(ids):
        # Empty pages at the end are dropped: the fill of the last page determines the end of a row.
        ids = ids[np.repeat(starts - indptr[:-1], np.diff(indptr)) + np.arange(indptr[-1])]
    assert not len(ids) or ids.min() >= 0, "a page that a query attends to is no longer held"
    return indptr, ids


def _piece(pages: Pages, taken: Sequence[tuple[int, int, int]], inputs: Sequence[RowInputs], page_len: int) -> Piece:
    spans = [inputs[row].tokens for row, _, _ in taken]
    segments = Segments(
        together(spans), starts_of([len(span) for span in spans]), starts_of([count for _, _, count in taken])
    )
    slots = [cached_slots(pages, row, range(first, first + count), page_len=page_len) for row, first, count in taken]
    return Piece(segments, np.concatenate(slots))
