"""A plan as arrays on one rank: tokens to compute, cache slots to write, pages to read.

    plan rows    [ row 0: 5 new tokens ][ row 1: 1 ][ row 2: 1 ]        all tokens, T of them, row after row
    cp rank 0    [ 0 4             ][ row 1: 0 ]                        local tokens, in this order
    cp rank 1    [ 1 2 3           ][ row 2: 0 ]

exchange.py transfers tokens between cp ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from raycache.parallel.context import ParallelContext
from raycache.parallel.owned_tokens import owned_prefix_lens, owned_slots
from raycache.parallel.uploads import Uploads
from raycache.rounding import power_of_2
from raycache.step import page_tables
from raycache.step.exchange import Exchange, HeadExchange, TokenExchange, among_all
from raycache.wire.plan import StepPlan, is_emitted, local_positions

_LEAST_WANTED = 128
"""Fewer tokens may need kernels that prompts do not. The warm-up runs prompts of every power of two of tokens."""

PageTables = Mapping[str, NDArray[np.int32]]
"""Component space -> ids of the pages of a sequence; -1 for a page that is no longer held."""


@dataclass(frozen=True, slots=True)
class RowInputs:
    """Attention inputs of one row.

    Attributes:
        start: position of its first new token in the sequence.
        tokens: its new tokens, as a range of the step's T tokens.
        local: its new tokens on this rank, as a range of the rank's local tokens.
        runs: its new tokens on this rank, as runs of the chunk in local order; empty for a single token.
        read_state, write_state, draft_states: slots of recurrent states (see plan.Row).
        is_continued: whether a row before it in the step has tokens of the same sequence.
    """

    start: int
    tokens: range
    local: range
    runs: tuple[range, ...]
    read_state: int
    write_state: int
    draft_states: Sequence[int] = ()
    is_continued: bool = False


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached tokens of a row on this rank: those before the chunk; if it has one new token, that too.

    Attributes:
        runs: cache slots as (first, count) runs, oldest token first.
        positions: int64 [L], positions of these tokens in the sequence.
    """

    runs: tuple[tuple[int, int], ...]
    positions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages that the n rows of a step attend to, and how many of their tokens are on this rank.

    All pages of a row but the last are full: page_size / cp tokens on each rank.

    Attributes:
        indptr: int32 [n + 1]; row i has the pages ids[indptr[i]:indptr[i + 1]].
        ids: int32, oldest first, up to the page of the last new token. The last ones may still be empty on this rank.
        first: int32 [n]; index of the row's first page in its sequence; above 0 if its window begins later.
        cached: int32 [n]; this rank's tokens before the new ones, and a single new token, which is written before
            attention.
        total: int32 [n]; this rank's tokens including all new ones.
        begins: int32 [n]; this rank's tokens before the window of the row's first new token; 0 without a window.
    """

    indptr: NDArray[np.int32]
    ids: NDArray[np.int32]
    first: NDArray[np.int32]
    cached: NDArray[np.int32]
    total: NDArray[np.int32]
    begins: NDArray[np.int32]

    def some(self, rows: Sequence[int]) -> Pages:
        """The pages of some rows."""
        ids = [self.ids[self.indptr[row] : self.indptr[row + 1]] for row in rows]
        index = list(rows)
        return Pages(
            indptr=np.cumsum([0, *map(len, ids)], dtype=np.int32),
            ids=np.concatenate(ids),
            first=self.first[index],
            cached=self.cached[index],
            total=self.total[index],
            begins=self.begins[index],
        )


@dataclass(frozen=True)
class Places:
    """Where the cache of one component space is written and read.

    Attributes:
        owned: int64; indices of those of the T tokens that this rank stores.
        slots: int64; cache slots to write them to.
        pages: to read.
        page_size: tokens per page; cp ranks hold page_size / cp_size consecutive tokens of a page each.
    """

    owned: Tensor
    slots: Tensor
    pages: Pages
    page_size: int
    cp_rank: int = 0
    cp_size: int = 1

    @cached_property
    def prefixes(self) -> tuple[Prefix, ...]:
        """Cached tokens of each row, for backends without paged attention; slow."""
        return tuple(self._prefixes())

    def _prefixes(self) -> Iterator[Prefix]:
        pages, share = self.pages, self.page_size // self.cp_size
        for row, (first, count) in enumerate(zip(pages.first.tolist(), pages.cached.tolist(), strict=True)):
            ids = pages.ids[pages.indptr[row] : pages.indptr[row] + -(-count // share)].astype(np.int64)
            if not len(ids):
                yield Prefix((), np.empty(0, np.int64))
                continue
            assert ids.min() >= 0, "a page that a query attends to is no longer held"
            missing = len(ids) * share - count
            breaks = np.flatnonzero(np.diff(ids) != 1) + 1
            runs = [(int(part[0]) * share, len(part) * share) for part in np.split(ids, breaks)]
            runs[-1] = (runs[-1][0], runs[-1][1] - missing)
            numbers = np.arange(first, first + len(ids))
            positions = (numbers[:, None] * self.page_size + self.cp_rank * share + np.arange(share)).ravel()
            yield Prefix(tuple(runs), positions[: len(positions) - missing])


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows as recurrent layers take them, int64 on the device. No row reads what another one writes, but for padding.

    Attributes:
        spans: [N, 2], first token and number of tokens.
        reads: [N], slots of the states before; negative for a state of zeros.
        writes: [T], slots of the states after each token of the step, where they are kept.
        kept: [N], number of tokens at the end of the row after which the state is kept: 1, or all of a row with drafts.
        longest: most tokens of a row.
    """

    spans: Tensor
    reads: Tensor
    writes: Tensor
    kept: Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything that a forward pass on one rank needs of a plan.

    Attributes:
        ids, positions: int64 [T_local].
        num_tokens: T, over all cp ranks.
        rows: one per row of the plan.
        places: by component space.
        read_states, write_states: int64 [rows]; as in `rows`, with 0 for none.
        logits: int64 [N]; local indices of the tokens whose logits are computed.
        is_decode: whether every row has one new token.
        state_rows: those of a CUDA graph, where `rows` has a row per token also for rows with drafts; else None.
    """

    ctx: ParallelContext
    ids: Tensor
    positions: Tensor
    num_tokens: int
    rows: tuple[RowInputs, ...]
    exchange: Exchange
    places: Mapping[str, Places]
    read_states: Tensor
    write_states: Tensor
    logits: Tensor
    is_decode: bool
    state_rows: StateRows | None = None

    @property
    def has_all_tokens(self) -> bool:
        """Whether every cp rank computes all tokens, with its share of the weights."""
        return isinstance(self.exchange, HeadExchange)

    @property
    def wanted(self) -> Tensor | None:
        """`logits`, padded to a power of two; None if that is more than half of the tokens."""
        count = max(_LEAST_WANTED, power_of_2(max(len(self.logits), 1)))
        if 2 * count > len(self.ids):
            return None
        return F.pad(self.logits, (0, count - len(self.logits)))

    def some(self, rows: Sequence[int]) -> StepInputs:
        """What attention needs of some rows, as a step of their own, if tokens are split over cp; without logits.

        Args:
            rows: indices, ascending.
        """
        if len(rows) == len(self.rows):
            return self
        assert isinstance(self.exchange, TokenExchange), "tokens are split over cp"
        chosen, local = _moved_together([self.rows[row] for row in rows])
        index, where = self.ctx.on_device(local), self.ctx.on_device(np.array(rows, np.int64))
        return replace(
            self,
            ids=self.ids[index],
            positions=self.positions[index],
            num_tokens=chosen[-1].tokens.stop,
            rows=chosen,
            exchange=self.exchange.some(rows, self.ctx),
            places={space: replace(places, pages=places.pages.some(rows)) for space, places in self.places.items()},
            read_states=self.read_states[where],
            write_states=self.write_states[where],
            logits=index[:0],
            is_decode=all(len(row.tokens) == 1 for row in chosen),
        )


def step_inputs(
    plan: StepPlan,
    tables: Mapping[str, page_tables.PageTables],
    windows: Mapping[str, int],
    *,
    page_size: int,
    ctx: ParallelContext,
    has_all_tokens: bool = False,
) -> StepInputs:
    """Build one rank's inputs from a plan and the page tables of all slots; see `build_inputs`."""
    of_slots = {row.slot: {space: tables[space].of(row.slot) for space in windows} for row in plan.rows}
    return build_inputs(plan, of_slots, page_size=page_size, windows=windows, ctx=ctx, has_all_tokens=has_all_tokens)


def build_inputs(
    plan: StepPlan,
    page_tables: Mapping[int, PageTables],
    *,
    page_size: int,
    windows: Mapping[str, int],
    ctx: ParallelContext,
    has_all_tokens: bool = False,
) -> StepInputs:
    """Build one rank's inputs from a plan.

    Args:
        page_tables: by slot, including the plan's new pages.
        page_size: tokens per page.
        windows: component space -> number of tokens that a query attends to, including itself; 0 for no limit.
        has_all_tokens: whether every cp rank computes all tokens of a plan whose rows have one each, with its share of
            the weights, and gets all logits.
    """
    locals_ = [local_positions(plan, cp_rank=rank, cp_size=ctx.cp.size) for rank in range(ctx.cp.size)]
    starts = np.cumsum([0, *(row.num_tokens for row in plan.rows)])
    mine = locals_[ctx.cp.rank]
    if has_all_tokens:
        assert all(row.num_tokens == 1 for row in plan.rows), "every cp rank computes all tokens of rows of one token"
        mine = [np.zeros(1, np.int64) for _ in plan.rows]
    tables = [page_tables[row.slot] for row in plan.rows]
    firsts = np.array([row.start for row in plan.rows], np.int64)
    every = _rows_of([row.num_tokens for row in plan.rows])
    positions = np.arange(len(every)) + (firsts - starts[:-1])[every]
    own = slice(None) if ctx.cp.size == 1 or has_all_tokens else among_all(mine, starts)
    tokens = np.frombuffer(b"".join(row.tokens for row in plan.rows), np.int32)
    # Ids, positions, owned and slots of each space, and both ways of the exchange; then three numbers per row.
    room = 8 * (4 + 2 * len(windows)) * (len(every) + 32 * ctx.cp.size) + 24 * (len(plan.rows) + 32)
    uploads = Uploads(ctx.device, room=room)
    inputs = StepInputs(
        ctx=ctx,
        ids=uploads.integers(tokens[own]),
        positions=uploads.integers(positions[own]),
        num_tokens=int(starts[-1]),
        rows=_rows(plan, mine, starts=starts.tolist()),
        exchange=HeadExchange(ctx.cp) if has_all_tokens else TokenExchange.between(locals_, starts, ctx, uploads),
        places={
            space: _places(
                plan,
                [table[space] for table in tables],
                positions,
                every,
                page_size=page_size,
                window=window,
                ctx=ctx,
                uploads=uploads,
            )
            for space, window in windows.items()
        },
        read_states=uploads.integers(np.array([max(row.read_state, 0) for row in plan.rows])),
        write_states=uploads.integers(np.array([max(row.write_state, 0) for row in plan.rows])),
        logits=uploads.integers(np.arange(len(mine)) if has_all_tokens else _emitted(plan, mine)),
        is_decode=all(row.num_tokens == 1 for row in plan.rows),
    )
    uploads.send()
    return inputs


def _emitted(plan: StepPlan, mine: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Local indices of the tokens of each row whose logits are used, given those that this rank computes."""
    found, first = list[int](), 0
    for row, own in zip(plan.rows, mine, strict=True):
        if row.num_tokens > 1:
            found += (first + np.flatnonzero(is_emitted(row, own))).tolist()
        elif len(own) and (row.targets or row.output_position >= 0):  # numpy would cost more per row
            found.append(first)
        first += len(own)
    return np.array(found, np.int64)


def _rows_of(counts: Sequence[int]) -> NDArray[np.int64]:
    """Row index of each token, given the number of tokens per row."""
    return np.repeat(np.arange(len(counts)), counts)


def _rows(plan: StepPlan, mine: Sequence[NDArray[np.int64]], *, starts: Sequence[int]) -> tuple[RowInputs, ...]:
    """Rows, given the new tokens of each that this rank computes, and where they begin among all tokens."""
    rows, local_start, slots = [], 0, set[int]()
    for row, own, start in zip(plan.rows, mine, starts, strict=False):
        rows.append(
            RowInputs(
                start=row.start,
                tokens=range(start, start + row.num_tokens),
                local=range(local_start, local_start + len(own)),
                runs=_runs(own) if row.num_tokens > 1 else (),
                read_state=row.read_state,
                write_state=row.write_state,
                draft_states=row.draft_states,
                is_continued=row.slot in slots,
            )
        )
        slots.add(row.slot)
        local_start += len(own)
    return tuple(rows)


def _places(
    plan: StepPlan,
    tables: Sequence[NDArray[np.int32]],
    positions: NDArray[np.int64],
    of_row: NDArray[np.int64],
    *,
    page_size: int,
    window: int,
    ctx: ParallelContext,
    uploads: Uploads,
) -> Places:
    """Where a step writes and reads, given the position and the row of each of its T tokens."""
    cp = {"cp_rank": ctx.cp.rank, "cp_size": ctx.cp.size}
    pages = pages_of(plan, tables, page_size=page_size, window=window, ctx=ctx)
    ids = pages.ids[positions // page_size + (pages.indptr[:-1] - pages.first)[of_row]]
    owned, slots = owned_slots(positions, ids, page_size=page_size, **cp)
    kept = slots >= 0
    return Places(
        owned=uploads.integers(owned[kept]),
        slots=uploads.integers(slots[kept]),
        pages=pages,
        page_size=page_size,
        **cp,
    )


def pages_of(
    plan: StepPlan, tables: Sequence[NDArray[np.int32]], *, page_size: int, window: int, ctx: ParallelContext
) -> Pages:
    """The pages that a plan's rows attend to, given those that each has from its beginning on."""
    starts = np.array([row.start for row in plan.rows], np.int64)
    counts = np.array([row.num_tokens for row in plan.rows], np.int64)
    ends = starts + counts
    # Pages before the window may have been freed.
    begins = np.maximum(starts - window + 1, 0) if window else np.zeros_like(starts)
    first = begins // page_size
    last = -(-ends // page_size)
    ids = [table[begin:end] for table, begin, end in zip(tables, first.tolist(), last.tolist(), strict=True)]

    def owned_lens(lens: NDArray[np.int64]) -> NDArray[np.int32]:
        """This rank's tokens among the first ones of each row, without those before its first page."""
        owned = owned_prefix_lens(lens, page_size=page_size, cp_rank=ctx.cp.rank, cp_size=ctx.cp.size)
        return np.maximum(owned - first * (page_size // ctx.cp.size), 0).astype(np.int32)

    indptr = np.concatenate([[0], np.cumsum(last - first)]).astype(np.int32)
    every = np.concatenate([np.empty(0, np.int32), *ids])
    assert len(every) == indptr[-1], "a row has no page for its new tokens"
    return Pages(
        indptr=indptr,
        ids=every,
        first=first.astype(np.int32),
        # A single new token is read from its page like those before it, so that no causal part is left.
        cached=owned_lens(starts + (counts == 1)),
        total=owned_lens(ends),
        begins=owned_lens(begins),
    )


def _moved_together(rows: Sequence[RowInputs]) -> tuple[tuple[RowInputs, ...], NDArray[np.int64]]:
    """Rows whose tokens follow each other from 0 on, and indices of this rank's tokens of them among all of its own."""
    found, first, first_local = [], 0, 0
    for row in rows:
        tokens, local = range(first, first + len(row.tokens)), range(first_local, first_local + len(row.local))
        found.append(replace(row, tokens=tokens, local=local))
        first, first_local = tokens.stop, local.stop
    index = np.concatenate([np.arange(row.local.start, row.local.stop) for row in rows])
    return tuple(found), index.astype(np.int64)


def _runs(positions: NDArray[np.int64]) -> tuple[range, ...]:
    """Runs of ascending positions."""
    if not len(positions):
        return ()
    if positions[-1] - positions[0] == len(positions) - 1:
        return (range(int(positions[0]), int(positions[-1]) + 1),)
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return tuple(range(int(part[0]), int(part[-1]) + 1) for part in np.split(positions, breaks))
