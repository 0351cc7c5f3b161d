"""Sparse indexer on CUDA: selects the tokens that each query attends to, as slots of this rank's cache.

Makes the same selection as sparse.py without a tensor of queries x keys x heads, in blocks of bounded memory:

    cp = 1   scores of a block of queries -> top_k of each (of equal scores, the earlier token's wins) -> slots
    cp > 1   1. all queries on this rank's keys: scores -> best candidates of each, as one sortable int64 per token
             2. candidates are sent to the queries' ranks, which find the last selected one of each query
             3. it is sent to all ranks, and each keeps the candidates that are not below it

New tokens are written to the cache before they are scored, so the query at position p attends to the first p + 1 tokens
of its sequence. The order of summation of a score does not depend on the split or the rest of the batch.

    sortable = bits of the score, mapped to sort as integers << 32  |  2^31 - 1 - position

Shapes in this file: T new tokens of all cp ranks, n queries, L keys, Hi index heads, D their size, K slots per query.
Imports Triton: only what runs on CUDA may import this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.attention.layout import StepLayout
from raycache.attention.sparse_choice_kernels import choose_keys, find_last_chosen, keep_chosen
from raycache.attention.sparse_score_kernels import score_keys
from raycache.memory.views import IndexView
from raycache.parallel.owned_tokens import owned_prefix_lens
from raycache.rounding import ceil_div, power_of_2
from raycache.step.inputs import Places, StepInputs

SCORE_BYTES = 256 << 20  # of float32 scores held at once
MAX_TOP_K = 2048  # far fewer than what a program selects from, so that few rounds are needed
MAX_HEADS, MAX_DIM = 128, 256  # of one query that a multiprocessor can hold together with a tile of keys

_ALIGNED = 64  # widths are multiples of it, for wide loads
_COLUMNS, _KEYS_PER_TILE = 128, 128  # queries x heads, and keys, of one matrix product
_PROGRAMS = 1024  # a few for each multiprocessor, because their work is not even
_NUM_WARPS, _NUM_STAGES = 4, 2
_CHOSEN_FROM, _KEYS_PER_WARP = 8192, 512  # keys that one program chooses from: what fits into its registers


@dataclass(frozen=True, slots=True)
class SlotSelection:
    """The tokens in this rank's cache that each query attends to.

    Attributes:
        slots: int32 [T, K], page id * (page_size / cp) + offset, oldest token first; padded with -1.
        lengths: int32 [T].
    """

    slots: Tensor
    lengths: Tensor


def missing_kernel(view: IndexView, q: Tensor, *, top_k: int) -> str:
    """Why `KernelIndexer` does not support a layer, or ""; q as in AttentionStep.select."""
    heads, dim = q.shape[1:]
    if q.dtype not in (torch.bfloat16, torch.float16) or view.key.dtype != q.dtype:
        return f"index queries of {q.dtype} with keys of {view.key.dtype}: both must be bfloat16 or float16"
    if top_k > MAX_TOP_K:
        return f"top_k={top_k} of an indexer is over {MAX_TOP_K}"
    if heads > MAX_HEADS or dim > MAX_DIM:
        return f"{heads} index heads of {dim} features are over {MAX_HEADS} of {MAX_DIM}"
    return ""


class KernelIndexer:
    """Selection plan of all layers with an indexer of one component space.

    Args:
        max_len: maximum tokens of a row at later `replan`s, 0 for none. With decode batches, `select` can then be
            captured in a CUDA graph.
    """

    def __init__(self, layout: StepLayout, places: Places, *, max_len: int = 0) -> None:
        inputs = layout.inputs
        assert not max_len or inputs.is_decode, "other batches are not recorded"
        self._inputs = inputs
        self._longest_row = max_len or max(row.start + len(row.tokens) for row in inputs.rows)
        # The same width on every rank; the first rank holds the most tokens of a row.
        longest, cp_size = np.array([self._longest_row]), places.cp_size
        (most,) = owned_prefix_lens(longest, page_size=places.page_size, cp_rank=0, cp_size=cp_size).tolist()
        self._widest = _aligned(most, _ALIGNED)
        self._tables = _Tables(inputs, places, capacity=inputs.num_tokens * -(-max_len // places.page_size))
        widest = self._widest if max_len else 0
        self._spans = tuple(piece for span in _spans(inputs, places, widest=widest) for piece in span.cut())

    def replan(self, inputs: StepInputs, places: Places) -> None:
        """Plan the next replay of a CUDA graph with the same number of other rows; `inputs` has the same tensors."""
        self._tables.fill(inputs, places)

    def select(self, view: IndexView, q: Tensor, k: Tensor, weights: Tensor, *, top_k: int) -> SlotSelection:
        """Implements `AttentionStep.select`; only where `missing_kernel` returns ""."""
        exchange, places = self._inputs.exchange, self._inputs.places[view.space]
        every_q, keys, every_weights = _gathered(self._inputs, q, k, weights)
        view.write(places.slots, keys[places.owned])
        width = min(top_k, self._widest)
        asked = _Asked(
            keys=view.key,
            q=every_q,
            weights=every_weights,
            tables=self._tables,
            page_size=places.page_size,
            offset=places.cp_rank * view.key.shape[1],
        )
        slots = torch.empty((self._inputs.num_tokens, width), dtype=torch.int32, device=q.device)
        # Other ranks need not be consulted if all of a row is here, or if queries attend to all of it.
        is_alone = places.cp_size == 1 or self._longest_row <= top_k
        candidates = None if is_alone else torch.empty(slots.shape, dtype=torch.int64, device=q.device)
        for span in self._spans:
            asked.choose(asked.score(span, more_than=top_k if is_alone else 0), span, slots, candidates)
        if candidates is None:
            return SlotSelection(slots, self._tables.lens.clamp(max=width))
        last = _last_chosen(exchange.give_back(candidates), top_k=top_k)
        return _keep(slots, candidates, exchange.gather(last))


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive queries that are scored together.

    Attributes:
        queries: among all T.
        width: of their scores; no query attends to more keys on this rank.
        is_chunk: whether they belong to one row of the plan; otherwise each has its own.
    """

    queries: range
    width: int
    is_chunk: bool

    def cut(self) -> Iterator[_Span]:
        """Split into pieces whose scores fit into SCORE_BYTES."""
        most = max(1, SCORE_BYTES // (4 * self.width))
        for first in range(self.queries.start, self.queries.stop, most):
            yield _Span(range(first, min(first + most, self.queries.stop)), self.width, self.is_chunk)


class _Tables:
    """Tables of a plan for the kernels, at a fixed address.

    Attributes:
        begins: int32 [T], start in `ids` of the pages of each query's row.
        lens: int32 [T], keys on this rank that each query attends to.
        ids: int32 page ids of all rows.
    """

    def __init__(self, inputs: StepInputs, places: Places, *, capacity: int) -> None:
        # Each table is aligned to 16 bytes for any number of queries, so that kernels are not recompiled.
        self._stride = _aligned(inputs.num_tokens, 4)
        size = 2 * self._stride + max(capacity, len(places.pages.ids))
        self._all = torch.empty(size, dtype=torch.int32, device=inputs.ctx.device)
        self.begins, self.lens = self._all[: 2 * self._stride].view(2, -1)[:, : inputs.num_tokens]
        self.ids = self._all[2 * self._stride :]
        self.fill(inputs, places)

    def fill(self, inputs: StepInputs, places: Places) -> None:
        """Copy the tables of a plan."""
        counts = [len(row.tokens) for row in inputs.rows]
        columns = np.zeros((2, self._stride), np.int32)
        columns[0, : inputs.num_tokens] = np.repeat(places.pages.indptr[:-1], counts)
        columns[1, : inputs.num_tokens] = _seen(inputs, places)
        numbers = np.concatenate([columns.ravel(), places.pages.ids])
        self._all[: len(numbers)].copy_(inputs.ctx.on_device(numbers))


@dataclass(frozen=True, slots=True)
class _Asked:
    """One layer's keys and queries.

    Attributes:
        keys: [P, page_size / cp, D], of the cache.
        q: [T, Hi, D].
        weights: [T, Hi].
        tables: of the plan.
        page_size, offset: tokens of a page, and where this rank's begin in it.
    """

    keys: Tensor
    q: Tensor
    weights: Tensor
    tables: _Tables
    page_size: int
    offset: int

    def score(self, span: _Span, *, more_than: int) -> Tensor:
        """Scores of queries for the keys that they attend to: float32 [n, width], padded with arbitrary values.

        Args:
            more_than: queries with at most this many keys are not scored.
        """
        heads, dim = self.q.shape[1:]
        block_heads = max(16, power_of_2(heads))
        block = max(1, _COLUMNS // block_heads) if span.is_chunk else 1
        scores = torch.empty((len(span.queries), span.width), dtype=torch.float32, device=self.q.device)
        if span.width <= more_than:
            return scores
        blocks, tiles = ceil_div(len(span.queries), block), ceil_div(span.width, _KEYS_PER_TILE)
        score_keys[(blocks, min(tiles, ceil_div(_PROGRAMS, blocks)))](
            self.q,
            self.weights,
            self.keys,
            self.tables.ids,
            self.tables.begins,
            self.tables.lens,
            scores,
            span.queries.start,
            span.queries.stop,
            more_than,
            span.width,
            HEADS=heads,
            DIM=dim,
            SHARE=self.keys.shape[1],
            BLOCK_HEADS=block_heads,
            BLOCK_DIM=max(16, power_of_2(dim)),
            BLOCK_QUERIES=block,
            BLOCK_KEYS=_KEYS_PER_TILE,
            NUM_STAGES=_NUM_STAGES,
            num_warps=_NUM_WARPS,
        )
        return scores

    def choose(self, scores: Tensor, span: _Span, slots: Tensor, sortables: Tensor | None = None) -> None:
        """Write the best keys of each query, given its scores [n, width].

        The keys of a row are distributed over programs, and their best keys again, until one program has all of them.

        Args:
            scores: of the span; ignored for queries with at most K keys.
            slots: int32 [T, K], padded with -1.
            sortables: int64 [T, K] of the same keys, padded with the lowest number; or None.
        """
        listed, width, count, tiles = slots, span.width, slots.shape[1], 0
        while tiles != 1:
            # At least MAX_TOP_K, so that there are few kernels, and each can hold K keys.
            block = min(_CHOSEN_FROM, power_of_2(max(width, MAX_TOP_K)))
            is_first, tiles = tiles == 0, ceil_div(width, block)
            out = slots if tiles == 1 else slots.new_empty(len(scores), tiles * count)
            choose_keys[(len(scores), tiles)](
                scores,
                self.tables.ids,
                self.tables.begins,
                self.tables.lens,
                listed,
                out,
                slots if sortables is None else sortables,
                span.queries.start,
                span.width,
                width,
                count,
                self.page_size,
                self.offset,
                SHARE=self.keys.shape[1],
                BLOCK=block,
                IS_FIRST=is_first,
                IS_LAST=tiles == 1,
                HAS_SORTABLES=sortables is not None,
                num_warps=max(4, block // _KEYS_PER_WARP),
            )
            listed, width = out, tiles * count


def _gathered(inputs: StepInputs, q: Tensor, k: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Those of all tokens, each contiguous but for k; in a decode step by one transfer, with weights as bits."""
    if inputs.is_decode:
        every_q, every_k, bits = inputs.exchange.gather_parts(q, k, weights.view(q.dtype))
        return every_q.contiguous(), every_k, bits.contiguous().view(weights.dtype)
    every_q, every_k, every_weights = (inputs.exchange.gather(part) for part in (q, k, weights))
    return every_q.contiguous(), every_k, every_weights.contiguous()


def _spans(inputs: StepInputs, places: Places, *, widest: int) -> Iterator[_Span]:
    """A span per chunk, and per run of consecutive single tokens; all of this width unless it is 0."""
    seen = _seen(inputs, places)
    # The key of a chunk is its first token, that of all single tokens is -1.
    for chunk, rows in groupby(inputs.rows, lambda row: row.tokens.start if len(row.tokens) > 1 else -1):
        tokens = [row.tokens for row in rows]
        queries = range(tokens[0].start, tokens[-1].stop)
        most = widest or int(seen[queries.start : queries.stop].max())
        yield _Span(queries, _aligned(most, _ALIGNED), is_chunk=chunk >= 0)


def _seen(inputs: StepInputs, places: Places) -> NDArray[np.int64]:
    """Number of keys on this rank that each query attends to, [T]."""
    if inputs.is_decode:  # rows of a CUDA graph have no start
        return places.pages.total.astype(np.int64)
    counts = np.array([len(row.tokens) for row in inputs.rows])
    starts = np.array([row.start - row.tokens.start for row in inputs.rows])
    prefix = np.repeat(starts, counts) + np.arange(1, inputs.num_tokens + 1)
    pages, rest = np.divmod(prefix, places.page_size)
    share = places.page_size // places.cp_size
    seen: NDArray[np.int64] = pages * share + np.clip(rest - places.cp_rank * share, 0, share)
    return seen


def _aligned(number: int, multiple: int) -> int:
    """Round up to a multiple, at least one."""
    return max(1, -(-number // multiple)) * multiple


def _last_chosen(candidates: Tensor, *, top_k: int) -> Tensor:
    """The lowest of the top_k sortables of each query, [cp, n, K] -> [n]; below all tokens if there are not more."""
    size, queries, count = candidates.shape
    last = candidates.new_empty(queries)
    if queries:
        block = power_of_2(size * count)
        find_last_chosen[(queries,)](
            candidates,
            last,
            candidates.stride(0),
            size * count,
            count,
            top_k,
            BLOCK=block,
            num_warps=min(16, max(4, block // 1024)),
        )
    return last


def _keep(slots: Tensor, candidates: Tensor, last: Tensor) -> SlotSelection:
    """Keep the slots [T, K] whose sortables [T, K] are not below the last selected one of their query [T]."""
    kept, lengths = torch.empty_like(slots), slots.new_empty(len(slots))
    block = power_of_2(slots.shape[1])
    keep_chosen[(len(slots),)](slots, candidates, last, kept, lengths, slots.shape[1], BLOCK=block)
    return SlotSelection(kept, lengths)
