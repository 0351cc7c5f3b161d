"""Runs a draft model on the ranks of the last stage: one pass over the target's rows, then one pass per draft token.

    row       s  d1 d2 d3        the last token and three draft tokens; the target samples  d1 d2 x y  after them
    known     s  d1 d2 x         two draft tokens were accepted, x follows them
    follow    s  d1 d2 d3        the draft model runs the same row, so that its cache is as long as the target's
    draft     x -> e1 -> e2      each pass takes one token per sequence, beginning with x

A draft model that takes features gets those of a token together with the token after it: it follows with d1 d2 x, which
already yields e1. The target's next row is x e1 e2; the draft model follows it although it has run some of its tokens.

While no draft tokens are requested, a draft model without features may lag behind, at most to the end of a page: it
then runs all missed tokens at once, before other sequences can reuse that page.

Cache entries of rejected tokens are never read: the next row overwrites them. A recurrent draft model keeps a state
after each draft token of a row, like the target; while drafting, it keeps its states in a spare slot.

Under cp the target computes some steps with all tokens on every rank, and its weights split over cp. The draft model
follows a step in the same way, and drafts so for all rows on every rank if its weights can be split:

    target             draft follows      passes
    tokens split       tokens split       rows split, or all rows on every rank
    all tokens         all tokens         all rows on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from raycache.attention.base import AttentionBackend
from raycache.layers.forward_pass import ForwardPass
from raycache.memory.device import DevicePool
from raycache.models.drafts.base import DraftModel
from raycache.parallel.context import ParallelContext
from raycache.rank.graphs import DecodeGraphs, GraphLayers
from raycache.rank.outcome import NextDrafts, Outcome, RowEnd, gather_padded, gather_sampled
from raycache.rank.recorder import Recorder
from raycache.rank.sampler import SampleRow, sample
from raycache.step.inputs import StepInputs, step_inputs
from raycache.step.page_tables import PageTables
from raycache.step.single_rows import emitted_tokens
from raycache.types import PackedTokens
from raycache.wire.plan import UNKNOWN, Row, StepPlan, local_positions
from raycache.wire.results import drafting_rows, emissions

DraftRow = Callable[[Row, int], SampleRow]
"""(row, offset) -> parameters for sampling the token `offset` positions after the row's first sampled one."""

# Shapes in this file: T_local new tokens of this rank, M its emitted positions; if every cp rank computes all tokens,
# both are all tokens of the step. G rows to draft for on all cp ranks, G_local that this one drafts for, C hidden size
# of the target, F features of the draft.


@dataclass(frozen=True)
class _Start:
    """Where drafting starts in a sequence.

    Attributes:
        row: the sequence's row in the plan.
        end: where the row ends; drafting begins with its token.
        state: slot of the draft model's state before that token, -1 for none.
        spare: slot of its state while drafting.
    """

    row: Row
    end: RowEnd
    state: int
    spare: int

    @property
    def last(self) -> int:
        """Index in the row of its last accepted token."""
        return self.row.first_sampled + self.end.num_accepted

    @property
    def position(self) -> int:
        """Position in the sequence of the first token to draft from."""
        return self.row.start + self.last + 1


@dataclass(frozen=True)
class Followed:
    """A step of the target model.

    Attributes:
        tokens: int64, sampled after the positions that this cp rank emits, even if it computes all tokens.
        gathered: those of all cp ranks (see `gather_sampled`), if they were gathered.
        outputs: the target's features for the draft model, [T_local, C] per recorded layer.
        inputs: None if a graph was replayed.
        recorded: the graphs that were replayed, or None.
        tables: page tables by component space.
    """

    plan: StepPlan
    tokens: Tensor
    gathered: Tensor | None
    outputs: Tensor
    inputs: StepInputs | None
    recorded: DecodeGraphs | None
    tables: Mapping[str, PageTables]

    @property
    def has_all_tokens(self) -> bool:
        """Whether every cp rank has computed all tokens."""
        if self.recorded is not None:
            return self.recorded.has_all_tokens
        assert self.inputs is not None, "a step has inputs, or was replayed"
        return self.inputs.has_all_tokens


@dataclass(frozen=True)
class DraftTokens:
    """Draft tokens of a step, int64, in the order of `drafting_rows`.

    Attributes:
        own: of this cp rank's rows.
        every: of all cp ranks, one after the other.
        places: of each in `every` (see `NextDrafts`).
    """

    own: Tensor
    every: Tensor
    places: list[tuple[int, int]]


@dataclass(frozen=True)
class DraftGraphs:
    """CUDA graphs of a draft model.

    Attributes:
        passes: draft a token per sequence; their second output are the likeliest tokens, [G_local].
        following: follow the target's graphs.
    """

    passes: DecodeGraphs
    following: DecodeGraphs

    @classmethod
    def record(
        cls,
        model: DraftModel,
        *,
        sizes: Sequence[int],
        pool: DevicePool,
        backend: AttentionBackend,
        target: DecodeGraphs,
        has_states: bool,
        dtype: torch.dtype,
        new_recorder: Callable[[], Recorder],
    ) -> DraftGraphs:
        """Record passes of these batch sizes, and one that follows each of the target's graphs.

        Args:
            model: with its weights split over cp if the target's are.
            sizes: in rows.
            has_states: whether the draft model is recurrent.
            dtype: of its features.
        """
        features = None
        if model.num_features:
            features = torch.empty((0, model.num_features), dtype=dtype, device=target.ctx.device)

        def forward(ids: Tensor, features: Tensor | None, run: ForwardPass) -> tuple[Tensor, ...]:
            return (model.forward(ids, features, run),)

        def draft(ids: Tensor, features: Tensor | None, run: ForwardPass) -> tuple[Tensor, ...]:
            found = model.forward(ids, features, run)
            return found, _likeliest(model.logits(found))

        graphs = partial(DecodeGraphs, pool=pool, backend=backend, ctx=target.ctx)
        passes, following = (
            GraphLayers(
                layers, pool.behind(), hidden=features, has_all_tokens=target.has_all_tokens, has_states=has_states
            )
            for layers in (draft, forward)
        )
        return cls(
            graphs(passes, sizes=sizes, recorder=new_recorder()),
            graphs(following, sizes=target.sizes, target=target, recorder=new_recorder()),
        )


@dataclass
class Drafter:
    """Runs the draft model of one rank.

    Attributes:
        model: this rank's share of the draft model.
        decode_model: the same with weights split over cp, for passes, and to follow steps of which every cp rank
            computes all tokens; None if there are no such steps.
        pool: shared by target and draft model.
        windows: component space of the draft model -> window in tokens (see `build_inputs`).
        has_states: whether the draft model is recurrent.
        may_lag: whether it may run decoded tokens later. Requires that all its state is in pages and that the host
            knows every row's tokens.
    """

    model: DraftModel
    decode_model: DraftModel | None
    pool: DevicePool
    windows: Mapping[str, int]
    backend: AttentionBackend
    ctx: ParallelContext
    has_states: bool
    may_lag: bool
    graphs: DraftGraphs | None = None
    _missed: dict[int, tuple[int, PackedTokens]] = field(default_factory=dict)  # slot -> (position, tokens)

    @property
    def _drafts_for_all(self) -> bool:
        """Whether every cp rank drafts for all rows, with its share of the weights."""
        return self.decode_model is not None

    def forget(self, slot: int) -> None:
        """Forget the missed tokens of a slot that gets a new request."""
        self._missed.pop(slot, None)

    def follow(self, step: Followed) -> Tensor:
        """Run all tokens of a step; returns features at the emitted positions, [M, F]. Collective over tp and cp."""
        if self.may_lag and (plan := self._without_lag(step.plan)) is not step.plan:
            if plan.rows:
                late = step_inputs(plan, step.tables, self.windows, page_size=self.pool.page_size, ctx=self.ctx)
                self._run(late.ids, None, late)
            return step.outputs  # ignored: lagging models take no features
        tokens = features = None
        if self.model.num_features:
            tokens = self._tokens(step)
            features = self._model(has_all_tokens=step.has_all_tokens).features(step.outputs)
        if step.recorded is not None and self.graphs is not None:
            self.graphs.following.prepare_behind(step.recorded)
            (found,) = self.graphs.following.replay(ids=tokens, hidden=features)
            return found
        assert step.inputs is not None, "a replayed step must be followed by a replay"
        ids = step.inputs.ids if tokens is None else self._next_ids(step.plan, tokens, step.inputs)
        return self._run(ids, features, step.inputs)[step.inputs.logits]

    def draft(self, step: Followed, emitted: Tensor, outcome: Outcome, row_of: DraftRow) -> DraftTokens:
        """Draft the tokens that a step's rows request, at least one of them any. Collective over tp and cp.

        Args:
            emitted: as `follow` has returned it for the step.
        """
        plan, cp = step.plan, self.ctx.cp
        in_turn = drafting_rows(plan, cp_size=cp.size)
        rows = [of_rank[turn] for turn in range(len(in_turn[0])) for of_rank in in_turn if turn < len(of_rank)]
        starts = [self._start(plan.rows[i], outcome.end(i)) for i in rows]
        here = slice(None) if self._drafts_for_all else slice(cp.rank, None, cp.size)  # rows to draft for
        mine = starts[here]
        drafted: list[Tensor] = []  # one per pass; sequences with fewer draft tokens come last
        if self.model.num_features:
            found = self._behind(step, rows, starts, emitted)[here]
            ids = self._choose(found, mine, 0, row_of)
            drafted.append(ids)
        else:
            found, ids = emitted, self.ctx.on_device(np.array([start.end.token for start in mine], np.int64))
        for turn in range(len(drafted), starts[0].row.num_next_drafts):
            left = [start for start in starts if start.row.num_next_drafts > turn]
            count = len(left[here])
            features = found[:count] if self.model.num_features else None
            found, likeliest = self._pass(self._next_plan(left, turn), ids[:count], features, step.tables)
            ids = self._choose(found, mine[:count], turn, row_of, likeliest=likeliest)
            drafted.append(ids)
        return self._in_order(plan, drafted)

    def _in_order(self, plan: StepPlan, drafted: Sequence[Tensor]) -> DraftTokens:
        """Put the draft tokens of all passes in the order of `drafting_rows`. Collective over cp."""
        cp = self.ctx.cp
        places = NextDrafts.places_of(plan, cp_size=cp.size)
        counts = [[plan.rows[i].num_next_drafts for i in of_rank] for of_rank in drafting_rows(plan, cp_size=cp.size)]
        begins = np.cumsum([0, *map(len, drafted)]).tolist()
        takes_all = self._drafts_for_all or cp.size == 1
        ranks = range(cp.size) if takes_all else (cp.rank,)  # they take turns in the rows of a pass
        order = [
            begins[number] + turn * len(ranks) + k
            for k, rank in enumerate(ranks)
            for turn, count in enumerate(counts[rank])
            for number in range(count)
        ]
        found, lens = torch.cat(list(drafted))[self.ctx.on_device(np.array(order, np.int64))], list(map(len, places))
        if takes_all:
            own, every = found[sum(lens[: cp.rank]) :][: lens[cp.rank]], found
        else:
            parts = gather_padded(found, max(lens), self.ctx)
            own, every = found, torch.cat([part[:count] for part, count in zip(parts, lens, strict=True)])
        return DraftTokens(own, every, [place for of_rank in places for place in of_rank])

    def _model(self, *, has_all_tokens: bool) -> DraftModel:
        """The model for steps of which every cp rank computes all tokens, or for others."""
        if not has_all_tokens:
            return self.model
        assert self.decode_model is not None, "the draft model's weights are split over cp if the target's are"
        return self.decode_model

    def _tokens(self, step: Followed) -> Tensor:
        """The tokens sampled after the emitted positions, int64 [M]. Collective over cp if they were not gathered."""
        if not step.has_all_tokens:
            return step.tokens
        plan, cp = step.plan, self.ctx.cp
        every = gather_sampled(plan, step.tokens, self.ctx) if step.gathered is None else step.gathered
        if all(row.num_tokens == 1 for row in plan.rows):
            return every.T.flatten()[: len(plan.rows)]  # row i is on cp rank i mod cp
        places = np.zeros(sum(row.num_tokens for row in plan.rows), np.int64)
        for rank in range(cp.size):
            emitted = emitted_tokens(plan, cp_rank=rank, cp_size=cp.size)
            places[emitted] = rank * every.shape[1] + np.arange(len(emitted))
        return every.flatten()[self.ctx.on_device(places)]

    def _without_lag(self, plan: StepPlan) -> StepPlan:
        """Rows that must be followed now, with the tokens missed before; the same plan if nothing lags."""
        rows = []
        for row in plan.rows:
            start, missed = self._missed.pop(row.slot, (row.start, b""))
            if start + len(missed) // 4 != row.start:
                start, missed = row.start, b""  # loaded pages took their place, and hold the draft model's cache too
            is_page_end = (row.start + row.num_tokens) % self.pool.page_size == 0
            if row.num_tokens == 1 and not row.num_next_drafts and not is_page_end:
                self._missed[row.slot] = start, missed + row.tokens
            else:
                rows.append(Row(row.slot, start, missed + row.tokens) if missed else row)
        is_same = len(rows) == len(plan.rows) and all(one is other for one, other in zip(rows, plan.rows, strict=True))
        return plan if is_same else StepPlan(0, rows)

    def _next_ids(self, plan: StepPlan, tokens: Tensor, inputs: StepInputs) -> Tensor:
        """The token after each of this rank's tokens: int64 [T_local]; `tokens` are those sampled, [M]."""
        if inputs.has_all_tokens:
            return tokens
        found = [np.empty(0, np.int64)]
        locals_ = local_positions(plan, cp_rank=self.ctx.cp.rank, cp_size=self.ctx.cp.size)
        for row, mine in zip(plan.rows, locals_, strict=True):
            # Emitted positions are overwritten below.
            found.append(np.append(np.frombuffer(row.tokens, np.int32)[1:], max(row.next_token, 0))[mine])
        ids = self.ctx.on_device(np.concatenate(found).astype(np.int64))
        ids[inputs.logits] = tokens
        return ids

    def _start(self, row: Row, end: RowEnd) -> _Start:
        spare = self.pool.first_spare_state + row.slot if self.has_states else -1
        return _Start(row, end, end.state if self.has_states else -1, spare)

    def _behind(self, step: Followed, rows: Sequence[int], starts: Sequence[_Start], emitted: Tensor) -> Tensor:
        """Select the features of each row's last accepted token: [M, F] -> [G, F]. Collective over cp."""
        plan, cp = step.plan, self.ctx.cp
        if step.has_all_tokens:
            firsts = np.cumsum([0, *(row.num_tokens for row in plan.rows)])
            index = [firsts[i] + start.last for i, start in zip(rows, starts, strict=True)]
            return emitted[self.ctx.on_device(np.array(index, np.int64))]
        keys = [(i, k) for i, positions in emissions(plan, cp_size=cp.size)[cp.rank] for k in positions]
        line_of = {key: line for line, key in enumerate(keys)}
        last = [line_of.get((i, start.last), -1) for i, start in zip(rows, starts, strict=True)]
        if cp.size == 1:
            return emitted[self.ctx.on_device(np.array(last, np.int64))]
        here = [k for k, line in enumerate(last) if line >= 0]
        every = emitted.new_zeros(len(rows), emitted.shape[1])
        if here:
            lines = self.ctx.on_device(np.array([last[k] for k in here], np.int64))
            every[self.ctx.on_device(np.array(here, np.int64))] = emitted[lines]
        return cp.all_reduce(every)

    def _next_plan(self, starts: Sequence[_Start], turn: int) -> StepPlan:
        """Plan the next pass of one token per sequence."""
        offset = turn - bool(self.model.num_features)  # features are those of the position before the token
        states = [(start.spare if offset else start.state, start.spare) for start in starts]
        return StepPlan(
            0,
            [
                Row(
                    start.row.slot,
                    start.position + offset,
                    UNKNOWN,
                    output_position=0,
                    read_state=read,
                    write_state=write,
                )
                for start, (read, write) in zip(starts, states, strict=True)
            ],
        )

    def _pass(
        self, plan: StepPlan, ids: Tensor, features: Tensor | None, tables: Mapping[str, PageTables]
    ) -> tuple[Tensor, Tensor | None]:
        """Run a plan of one token per row; returns [G_local, F], and the likeliest tokens [G_local] if recorded."""
        if self.graphs is not None and self.graphs.passes.can_run(plan):
            return self._replay(self.graphs.passes, plan, ids, features, tables)
        inputs = step_inputs(
            plan,
            tables,
            self.windows,
            page_size=self.pool.page_size,
            ctx=self.ctx,
            has_all_tokens=self._drafts_for_all,
        )
        return self._run(ids, features, inputs), None

    def _run(self, ids: Tensor, features: Tensor | None, inputs: StepInputs) -> Tensor:
        run = ForwardPass(self.backend.plan(inputs), self.pool.behind(), inputs.positions)
        return self._model(has_all_tokens=inputs.has_all_tokens).forward(ids, features, run)

    def _replay(
        self,
        graphs: DecodeGraphs,
        plan: StepPlan,
        ids: Tensor,
        features: Tensor | None,
        tables: Mapping[str, PageTables],
    ) -> tuple[Tensor, Tensor]:
        graphs.prepare(plan, tables)
        found, likeliest = graphs.replay(ids=ids, hidden=features)
        return found, likeliest

    def _choose(
        self,
        found: Tensor,
        starts: Sequence[_Start],
        turn: int,
        row_of: DraftRow,
        *,
        likeliest: Tensor | None = None,
    ) -> Tensor:
        """Sample with the request's parameters and seed: logits equal to the target's give equal tokens, and ranks that
        draft for the same rows the same ones."""
        rows = [row_of(start.row, start.end.num_accepted + 1 + turn) for start in starts]
        if likeliest is not None and all(row.is_plain for row in rows):
            return likeliest.clone()  # the next pass overwrites it
        model = self._model(has_all_tokens=self._drafts_for_all)
        return sample(model.logits(found).nan_to_num(), rows)


def _likeliest(logits: Tensor) -> Tensor:
    """What `sample` gives for plain rows, [G_local]."""
    # After a failed load logits can be anything; the decider discards such rows.
    return logits.nan_to_num().argmax(-1)
