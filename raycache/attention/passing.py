"""How the chunks of a step meet cached tokens on other cp ranks.

    pass keys      the row's cached keys are gathered; each rank has its own queries attend to all of them
    pass queries   the row's queries are gathered; each rank has all of them attend to its own cached keys, and partial
                   results go back to be merged

("Context Parallelism for Scalable Million-Token Inference", arXiv 2411.01783, calls them pass-KV and pass-Q.) Each row
goes the way that moves fewer bytes. Single tokens pass queries, and so do decode steps.

The keys of all chunks are in one buffer of pages on every rank, each chunk's in the order of its sequence:

    of cp rank 0          of cp rank 1          new tokens of all ranks        for padding
    [ a0 a2 | b0 b2 ]     [ a1 a3 | b1 b3 ]     [ a4 a5 | b4 | c0 c1 c2 ]      [ . ]

    chunk a has the pages a0 a1 a2 a3 a4 a5, and chunk c, which passes queries, only those of its new tokens

A page of the buffer has as many tokens as a rank holds of a page. New tokens fill the last page of the cached ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.attention.layout import Chunk, StepLayout
from raycache.attention.merge import Part, merge
from raycache.parallel.collectives import Started
from raycache.step.exchange import TokenExchange
from raycache.step.inputs import Pages, StepInputs

Ints = NDArray[np.int32]

_COPIES_SHARE = 4
"""Bytes that copy engines exchange beside attention count a quarter of others: results are still merged afterwards."""


@dataclass(frozen=True, slots=True)
class PassedBytes:
    """Bytes that a token of a layer takes between ranks.

    Attributes:
        query: queries and their partial results with log-sum-exps.
        key: keys and values.
        copied_from: new tokens of a chunk from which on queries are exchanged beside attention; 0 for never.
    """

    query: int
    key: int
    copied_from: int = 0

    @classmethod
    def of(cls, *, queries: int, dim: int, value_dim: int, key: int, dtype: torch.dtype) -> PassedBytes:
        """Of `queries` heads, and `key` features of keys and values."""
        lse = torch.promote_types(dtype, torch.float32).itemsize
        return cls(queries * ((dim + value_dim) * dtype.itemsize + lse), key * dtype.itemsize)

    def with_copies(self, *, least_tokens: int) -> PassedBytes:
        """The same where the queries of chunks with so many tokens are exchanged beside attention."""
        return replace(self, copied_from=least_tokens)

    def passes_keys(self, *, num_new: int, num_cached: int) -> bool:
        """Whether passing keys costs no more than passing queries. The same on every rank."""
        query_bytes = num_new * self.query
        if self.copied_from and num_new >= self.copied_from:
            query_bytes //= _COPIES_SHARE
        return num_cached * self.key <= query_bytes


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """The keys of a chunk on every rank.

    Attributes:
        num_cached: how many cached tokens are before the new ones; 0 if queries are passed.
        pages: int32, in the order of the sequence.
    """

    chunk: Chunk
    num_cached: int
    pages: Ints

    def slots(self, page_len: int) -> NDArray[np.int64]:
        """Slots of all keys, in order."""
        return self._slots(0, page_len)

    def new_slots(self, page_len: int) -> NDArray[np.int64]:
        """Slots of the new keys, in order."""
        return self._slots(self.num_cached, page_len)

    def _slots(self, first: int, page_len: int) -> NDArray[np.int64]:
        count = self.chunk.tokens.stop - self.chunk.tokens.start
        page, offset = np.divmod(np.arange(first, self.num_cached + count), page_len)
        return self.pages[page].astype(np.int64) * page_len + offset


class Passing:
    """How the rows of a step with chunks are passed, for layers of one component space; cp is more than 1.

    Args:
        space: of the layers.
        moved: of a layer; None if chunks always pass keys.
    Attributes:
        keys: of each chunk.
        page_len: tokens per page of the buffer.
        num_pages: of the buffer.
        exchange: of the step.
        asking: the rows that pass queries, as a step of their own; None for none. The same rows on every rank.
    """

    def __init__(self, layout: StepLayout, space: str, moved: PassedBytes | None) -> None:
        inputs, places = layout.inputs, layout.inputs.places[space]
        assert isinstance(inputs.exchange, TokenExchange), "a step with chunks splits tokens over cp"
        self.exchange, self._places = inputs.exchange, places
        self.page_len = places.page_size // places.cp_size
        with_keys = [chunk for chunk in layout.chunks if _passes_keys(chunk, places.pages, places.page_size, moved)]
        sent = [_cached_pages(chunk, places.pages, places.page_size) for chunk in with_keys]
        self._num_sent = sum(map(len, sent))
        self._reads_new = any(inputs.rows[chunk.row].is_continued for chunk in with_keys)
        self._sent = inputs.ctx.on_device(np.concatenate([np.empty(0, np.int64), *sent]))
        self.keys, self.num_pages = self._laid_out(layout.chunks, with_keys, [len(ids) for ids in sent])
        self._slots = inputs.ctx.on_device(self._slots_of_new())
        self._owned = inputs.exchange.where[places.owned]
        rows = {chunk.row for chunk in with_keys}
        asking = [row for row in range(len(inputs.rows)) if row not in rows]
        self.asking: StepInputs | None = inputs.some(asking) if asking else None
        self._are_all_asking = len(asking) == len(inputs.rows)
        self._asked = layout.on_device([token for row in asking for token in inputs.rows[row].local])

    def gather(
        self, new: Sequence[Tensor], pack: Callable[[Tensor, Tensor], None], write: Callable[[Tensor], None]
    ) -> Tensor:
        """Fill the buffer. Collective over cp.

        Cached keys are packed while new ones are under way, and new ones are written while cached ones are, unless a
        row attends to what an earlier row of the step writes.

        Args:
            new: keys, values and the like of this rank's new tokens, [T_local, H, D] each.
            pack: (ids [n], to [n, page_len, sum of H, D]): copies pages of this rank.
            write: ([owned, sum of H, D]): writes the new tokens that this rank stores.
        Returns:
            [num_pages, page_len, sum of H, D].
        """
        every, has_new = self.exchange.start(*new)
        return self.fill(every, has_new, pack, write)

    def fill(
        self,
        every: Tensor,
        has_new: Callable[[], None],
        pack: Callable[[Tensor, Tensor], None],
        write: Callable[[Tensor], None],
    ) -> Tensor:
        """`gather` with new tokens that are on their way: [cp * padded_len, sum of H, D], as `TokenExchange.start` has
        them, complete when `has_new` was called."""
        buffer = every.new_empty((self.num_pages, self.page_len, *every.shape[1:]))
        if self._reads_new:
            has_new()
            write(every[self._owned])
            self._start_cached(buffer, pack)()
        else:
            has_cached = self._start_cached(buffer, pack)
            has_new()
            write(every[self._owned])
            has_cached()
        buffer.flatten(0, 1).index_copy_(0, self._slots, every)
        return buffer

    def asked(self, local: Tensor) -> Tensor:
        """Of this rank's tokens [T_local, ...] those of the rows that pass queries."""
        return local if self._are_all_asking else local[self._asked]

    def answered(
        self, part: Part, cached: Part, asking: StepLayout, sinks: Tensor | None, *, is_log2: bool = False
    ) -> Tensor:
        """Merge results over cp for the rows that pass queries. Collective over cp.

        Args:
            part: this rank's queries against the buffer, [T_local, H, D].
            cached: all queries of those rows against this rank's pages.
            asking: layout of those rows.
            sinks: [H] or None.
            is_log2: whether log-sum-exps are to base 2.
        Returns:
            [T_local, H, D]
        """
        own = self.asked(part[0]), self.asked(part[1])
        return self.settled(part, asking.combine(cached, own, sinks, is_log2=is_log2), sinks, is_log2=is_log2)

    def settled(self, part: Part, answers: Tensor, sinks: Tensor | None, *, is_log2: bool) -> Tensor:
        """Put the results of the rows that pass queries, merged, beside those of the other rows.

        Args:
            part: this rank's queries against the buffer, [T_local, H, D]; may be written.
            answers: for `asked` tokens.
            sinks: [H] or None.
            is_log2: whether log-sum-exps are to base 2.
        Returns:
            [T_local, H, D]
        """
        if self._are_all_asking:
            return answers
        out, lse = part
        if sinks is not None:
            out = merge([out], (lse * math.log(2) if is_log2 else lse)[None], sinks)
        out[self._asked] = answers
        return out

    def _start_cached(self, buffer: Tensor, pack: Callable[[Tensor, Tensor], None]) -> Started:
        size = self._places.cp_size
        if not self._num_sent:
            return Started(lambda: None, lambda: True)
        sent = buffer.new_empty((self._num_sent, *buffer.shape[1:]))
        pack(self._sent, sent)
        return self.exchange.cp.iall_gather(sent, out=buffer[: size * self._num_sent].unflatten(0, (size, -1)))

    def _laid_out(
        self, chunks: Sequence[Chunk], with_keys: Sequence[Chunk], num_sent: Sequence[int]
    ) -> tuple[tuple[ChunkKeys, ...], int]:
        """Pages of each chunk, and of the buffer."""
        size, page_size, pages = self._places.cp_size, self._places.page_size, self._places.pages
        of_ranks = np.arange(size, dtype=np.int32) * self._num_sent
        counts = {chunk.row: count for chunk, count in zip(with_keys, num_sent, strict=True)}
        found, first, end = [], 0, size * self._num_sent
        for chunk in chunks:
            count = counts.get(chunk.row, 0)
            num_cached = chunk.start - int(pages.first[chunk.row]) * page_size if count else 0
            cached = (np.arange(first, first + count, dtype=np.int32)[:, None] + of_ranks).ravel()
            num_keys = num_cached + chunk.tokens.stop - chunk.tokens.start
            num_new = max(-(-num_keys // self.page_len) - len(cached), 0)
            new = np.arange(end, end + num_new, dtype=np.int32)
            found.append(ChunkKeys(chunk, num_cached, np.concatenate([cached, new])))
            first, end = first + count, end + num_new
        return tuple(found), end + 1

    def _slots_of_new(self) -> NDArray[np.int64]:
        """Slot of each gathered new token; those of padding and of single tokens share the last page."""
        exchange = self.exchange
        slots = np.full(exchange.cp.size * exchange.padded_len, (self.num_pages - 1) * self.page_len, np.int64)
        for keys in self.keys:
            slots[exchange.order[keys.chunk.tokens]] = keys.new_slots(self.page_len)
        return slots


def _passes_keys(chunk: Chunk, pages: Pages, page_size: int, moved: PassedBytes | None) -> bool:
    if moved is None:
        return True
    num_cached = len(_cached_pages(chunk, pages, page_size)) * page_size
    return moved.passes_keys(num_new=chunk.tokens.stop - chunk.tokens.start, num_cached=num_cached)


def _cached_pages(chunk: Chunk, pages: Pages, page_size: int) -> NDArray[np.int64]:
    """Pages with tokens before the chunk that it attends to; the same number on every rank."""
    begin, first = int(pages.indptr[chunk.row]), int(pages.first[chunk.row])
    ids: NDArray[np.int64] = pages.ids[begin : begin - (-chunk.start // page_size) - first].astype(np.int64)
    assert not len(ids) or ids.min() >= 0, "a page that a query attends to is no longer held"
    return ids
