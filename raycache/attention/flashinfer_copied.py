"""Attention of chunks that pass queries under cp, with exchanges by copy engines beside it (FlashInfer).

Copy engines need no multiprocessor (parallel/copy_exchange.py), so attention goes on meanwhile. Per layer:

    attention                                               beside it
    this rank's queries, its cached pages                   queries and new keys go to all other ranks
    each other rank's queries, this rank's cached pages     results for the rank before
    this rank's queries, causally, the buffer of new keys   results for the last one
    all results of this rank's queries are merged

Before the second line new tokens are written to pages. Rows that attend to them there (single tokens, and rows that
continue one of this step) come after that in the first line, too. Queries against cached pages stay in the order in
which their rank has them, as none of them comes before a key.

Short steps, layers with windows, latents, indexers and groups without peer memory are left to NCCL
(flashinfer_passed.py).

Shapes in this file: T_local new tokens of this rank, T_r of rank r, both in rows that pass queries; H heads, D head
size, Dv of values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from torch import Tensor

from raycache.attention.flashinfer_full import Layers, Planned
from raycache.attention.flashinfer_kernels import FEW_QUERIES, KernelCache
from raycache.attention.flashinfer_tables import are_all, page_table
from raycache.attention.layout import merge_parts
from raycache.attention.merge import Part, no_keys
from raycache.attention.passing import Passing
from raycache.memory.views import KVView
from raycache.parallel.collectives import Group
from raycache.parallel.copy_exchange import CopyExchange, sent_bytes
from raycache.step.exchange import TokenExchange
from raycache.step.inputs import StepInputs

LEAST_BYTES = 4 << 20
"""Queries of a rank that are worth the launches; fewer are exchanged by NCCL."""
_UNEVEN = 64
"""A rank's tokens above its share of a step: a row's are divided up to two tokens evenly."""


def copies_of(layers: Layers, cp: Group, *, max_tokens: int) -> CopyExchange | None:
    """Exchange by copy engines for rows that pass queries, in the largest step; None if there is none, or it never
    pays. The same on all ranks. Collective when a kind of layer comes for the first time, so that its memory is taken
    at the start (rank/peak.py).

    Args:
        max_tokens: largest number of new tokens of a step; 0 for None.
    """
    most = _most_tokens(cp.size, max_tokens)
    if layers.window or not max_tokens or most < least_tokens(layers):
        return None
    return cp.copies(_area_bytes(layers, most))


def least_tokens(layers: Layers) -> int:
    """Tokens of a rank from which on copies pay."""
    heads = layers.heads
    return -(-LEAST_BYTES // (heads.queries * heads.dim * heads.dtype.itemsize))


def takes(layers: Layers, passing: Passing, *, max_tokens: int) -> bool:
    """Whether a step's rows that pass queries use copies. The same on all ranks."""
    if passing.asking is None or passing.exchange.padded_len > _most_tokens(passing.exchange.cp.size, max_tokens):
        return False
    assert isinstance(passing.asking.exchange, TokenExchange)
    return passing.asking.exchange.padded_len >= least_tokens(layers)


def _most_tokens(size: int, max_tokens: int) -> int:
    return -(-max_tokens // size) + _UNEVEN


def _area_bytes(layers: Layers, num_tokens: int) -> int:
    """Bytes that a rank sends to another at once, with so many tokens."""
    heads, size = layers.heads, layers.heads.dtype.itemsize
    keys = heads.keys * (heads.dim + heads.value_dim) * size
    asked = sent_bytes(num_tokens * heads.queries * heads.dim * size, num_tokens * keys)
    answered = sent_bytes(num_tokens * heads.queries * heads.value_dim * size, num_tokens * heads.queries * 4)
    return max(asked, answered)


class CopiedQueries:
    """Plan of the rows that pass queries, and their exchange. `start`, `attend_early`, `arrive`, `attend_rest` and
    `merge` are called once per layer, in this order, by all ranks."""

    def __init__(self, kernels: KernelCache, layers: Layers, passing: Passing, copies: CopyExchange) -> None:
        step = passing.asking
        assert step is not None and isinstance(step.exchange, TokenExchange) and not layers.window
        self._kernels, self._layers, self._copies = kernels, layers, copies
        self._every, self._asking = passing.exchange, step.exchange
        self._rank = step.ctx.cp.rank
        rows = list(enumerate(step.rows))
        late = {i for i, row in rows if len(row.tokens) == 1 or row.is_continued}
        self._early = self._planned(step, self._rank, [i for i, _ in rows if i not in late], "early")
        self._late = self._planned(step, self._rank, sorted(late), "late")
        self._of_others = {rank: self._planned(step, rank, range(len(rows)), "of others") for rank in copies.others}

    def start(self, q: Tensor, every: Tensor) -> None:
        """Send this rank's queries and new keys.

        Args:
            q: [T_local, H, D].
            every: keys and values of all new tokens, in which this rank's are placed (`TokenExchange.placed`).
        """
        q, own = q.contiguous(), every[self._rank, : self._every.num_local]
        for rank in self._copies.others:
            self._copies.send(rank, q, own)

    def attend_early(self, view: KVView, q: Tensor) -> Part:
        """This rank's queries [T_local, H, D] against those of its cached pages that are not written in this step."""
        return _attended(self._early, view, q)

    def arrive(self, every: Tensor) -> None:
        """Wait for the other ranks' queries and new keys, and put their keys beside this rank's."""
        self._copies.receive()
        for rank in self._copies.others:
            count = self._every.num_tokens(rank)
            every[rank, :count] = self._queries_and_keys(rank)[1]

    def attend_rest(self, view: KVView, q: Tensor, part: Part) -> Part:
        """Attend to this rank's cached pages with its other queries and those of all other ranks, to which results are
        sent.

        Args:
            part: of `attend_early`; may be written.
        Returns:
            This rank's results [T_local, H, Dv], and log-sum-exps [T_local, H] to base 2.
        """
        _add(self._late, view, q, part)
        queries = {rank: self._queries_and_keys(rank)[0] for rank in self._copies.others}
        for rank, theirs in queries.items():
            self._copies.send(rank, *_attended(self._of_others[rank], view, theirs))
        return part

    def merge(self, cached: Part, new: Part, sinks: Tensor | None) -> Tensor:
        """Wait for the other ranks' results, and merge all of this rank's queries.

        Args:
            cached: of `attend_rest`.
            new: against new keys, [T_local, H, Dv] and [T_local, H] to base 2.
            sinks: [H] or None.
        Returns:
            [T_local, H, Dv]
        """
        self._copies.receive()
        out, lse = cached
        outs, lses = self._copies.received_of_all((tuple(out.shape), out.dtype), (tuple(lse.shape), lse.dtype))
        return merge_parts(cached, new, (outs, lses), sinks)

    def _queries_and_keys(self, rank: int) -> tuple[Tensor, ...]:
        """What a rank has sent: [T_r, H, D], and keys beside values [its new tokens, 2 Hkv, D]."""
        heads = self._layers.heads
        return self._copies.received(
            rank,
            ((self._asking.num_tokens(rank), heads.queries, heads.dim), heads.dtype),
            ((self._every.num_tokens(rank), 2 * heads.keys, heads.dim), heads.dtype),
        )

    def _planned(self, step: StepInputs, rank: int, rows: Iterable[int], name: str) -> list[Planned]:
        """Plans of a rank's queries of some rows against this rank's cached pages."""
        places, exchange, kernels = step.places[self._layers.space], self._asking, self._kernels
        starts = itertools.accumulate(map(len, exchange.locals_[rank]), initial=0)
        queries = [range(first, last) for first, last in itertools.pairwise(starts)]
        by_queries: dict[bool, list[int]] = {}
        for row in rows:
            if places.pages.cached[row] and (count := len(queries[row])):
                by_queries.setdefault(count < FEW_QUERIES, []).append(row)
        found = []
        for is_few, some in by_queries.items():
            page_len = places.page_size // places.cp_size
            table = page_table(places.pages, some, places.pages.cached, queries=queries, page_len=page_len)
            kernel = kernels.paged((self._layers, name, rank), self._layers.heads, is_few=is_few)
            kernel.plan(table, self._layers.heads, is_causal=False, window=0)
            found.append(Planned(kernels.tokens(table.tokens), kernel))
        return found


def _attended(plans: Sequence[Planned], view: KVView, q: Tensor) -> Part:
    """Queries [T, H, D] against this rank's pages, without keys where there is no plan."""
    if len(plans) == 1 and are_all(plans[0].tokens, len(q)):
        out, lse = plans[0].kernel.run(q, view.k, view.v, lse_base="log2")
        assert lse is not None
        return out, lse
    part = no_keys(q, q.shape[2])
    _add(plans, view, q, part)
    return part


def _add(plans: Sequence[Planned], view: KVView, q: Tensor, part: Part) -> None:
    """Write the results of the queries that are planned into those of all."""
    for planned in plans:
        tokens = planned.tokens
        out, lse = planned.kernel.run(q[tokens], view.k, view.v, lse_base="log2")
        assert lse is not None
        part[0][tokens], part[1][tokens] = out, lse
