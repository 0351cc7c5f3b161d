"""Draft tokens of a draft model, on the ranks of the last stage: one pass over what the target computed, then one per
draft token.

    row       s  d1 d2 d3        the last token and three draft tokens; behind them were sampled  d1 d2 x y
    known     s  d1 d2 x         two were right, x is the token behind them
    follow    s  d1 d2 d3        the draft model takes the same row, so that its cache is as long as the target's
    draft     x -> e1 -> e2      each pass takes one token of each sequence, behind the last right one

A draft model that takes features has them and the next token in each row: it follows with d1 d2 x, and has e1 already.
The next row of the target is x e1 e2, and is followed even where draft tokens were written before.

While nobody wants its draft tokens, a model that takes tokens alone may lag behind, up to the end of a page: then it
takes all that it has missed at once, before others can go on from that page.

Nobody reads what is written for tokens that turn out to be wrong: the next row begins before them. A recurrent draft
model keeps a state behind each draft token of a row, as the target does; while it drafts, its states lie in a spare
slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.attention.base import AttentionBackend
from raycache.layers.forward_pass import ForwardPass
from raycache.memory.device import DevicePool
from raycache.memory.streams import Event, Passed, after_compute
from raycache.models.drafts.base import DraftModel
from raycache.parallel.context import ParallelContext
from raycache.rank.answer import PendingAnswer
from raycache.rank.graphs import DecodeGraphs, GraphLayers
from raycache.rank.sampler import SampleRow, sample
from raycache.step.inputs import StepInputs, step_inputs
from raycache.step.page_tables import PageTables
from raycache.types import PackedTokens
from raycache.wire.plan import UNKNOWN, Row, StepPlan, drafting_rows, emissions, local_positions

DraftRow = Callable[[Row, int], SampleRow]
"""How a row's slot samples the token so many positions behind the first that the row samples."""

# Shapes in this file: T_local new tokens of this rank, M its emitted positions, G rows that want draft tokens of all cp
# ranks, G_local of this one, C hidden size of the target, F features of the draft.


@dataclass(frozen=True)
class _Start:
    """Where the draft tokens of a sequence begin.

    Attributes:
        row: of the plan.
        num_right: its drafts that were right.
        token: what is known behind them.
        state: slot of the draft's states before that token, -1 for none.
        spare: slot of its states from there on.
    """

    row: Row
    num_right: int
    token: int
    state: int
    spare: int

    @property
    def position(self) -> int:
        """Of the token."""
        return self.row.start + self.row.first_sampled + 1 + self.num_right


@dataclass(frozen=True)
class Followed:
    """A step of the target.

    Attributes:
        plan: of it.
        tokens: int64 [M], behind the emitted positions.
        found: what the draft takes of the target, [T_local, C] of each layer that it takes.
        inputs: of the rank; None if it was a recorded step.
        recorded: what was replayed, or None.
        tables: of the slots, by component space.
    """

    plan: StepPlan
    tokens: Tensor
    found: Tensor
    inputs: StepInputs | None
    recorded: DecodeGraphs | None
    tables: Mapping[str, PageTables]


@dataclass(frozen=True)
class DraftGraphs:
    """Recorded passes of a draft model.

    Attributes:
        passes: of one token of each sequence.
        following: of whole steps, for the recorded ones of the target.
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
    ) -> DraftGraphs:
        """Record passes of so many rows, and what follows the recorded steps of the target."""
        features = None
        if model.num_features:
            features = torch.empty((0, model.num_features), dtype=dtype, device=target.ctx.device)

        def forward(ids: Tensor, features: Tensor | None, run: ForwardPass) -> tuple[Tensor, ...]:
            return (model.forward(ids, features, run),)

        layers = GraphLayers(forward, pool.behind(), features=features)
        graphs = partial(DecodeGraphs, layers, pool=pool, backend=backend, ctx=target.ctx, has_states=has_states)
        return cls(graphs(sizes=sizes), graphs(sizes=target.sizes, target=target))

    @property
    def num_bytes(self) -> int:
        """Of device memory that they keep."""
        return self.passes.num_bytes + self.following.num_bytes


@dataclass
class Drafter:
    """The draft model of one rank.

    Attributes:
        model: this rank's share of it.
        pool: of the target and the draft.
        windows: of the draft's component spaces, see `build_inputs`.
        backend: attention.
        ctx: of the rank.
        has_states: whether the draft is recurrent.
        may_lag: whether it may take decoded tokens later, all of its state being in the pages of the sequence; not
            where rows are fed, nor where the memory of a step is counted.
        graphs: recorded passes, or None.
        planned: behind what is copied of the plans of its passes, and of the step before them.
    """

    model: DraftModel
    pool: DevicePool
    windows: Mapping[str, int]
    backend: AttentionBackend
    ctx: ParallelContext
    has_states: bool
    may_lag: bool
    graphs: DraftGraphs | None = None
    planned: Event = field(default_factory=Passed)
    _missed: dict[int, tuple[int, PackedTokens]] = field(default_factory=dict)  # slot -> from where on, and what

    def forget(self, slot: int) -> None:
        """A slot has another owner."""
        self._missed.pop(slot, None)

    def draft(self, step: Followed, row_of: DraftRow) -> Tensor:
        """Follow a step, and draft what its rows want. Collective over tp and cp.

        Args:
            step: of the target.
            row_of: how its rows sample.
        Returns:
            int64, of this cp rank's rows in the order of `drafting_rows`, all draft tokens of one behind each other.
        """
        plan, cp = step.plan, self.ctx.cp
        in_turn = drafting_rows(plan, cp_size=cp.size)
        if not in_turn[0]:
            self._follow(step)
            return step.tokens[:0]
        sampled = self._gather(plan, step.tokens)  # on its way while the draft follows
        emitted = self._follow(step)
        rows = [of_rank[turn] for turn in range(len(in_turn[0])) for of_rank in in_turn if turn < len(of_rank)]
        starts = self._starts(plan, rows, _by_position(plan, sampled.answer()))
        mine = starts[cp.rank :: cp.size]
        drafted: list[Tensor] = []  # one per pass; sequences that want fewer come last
        if self.model.num_features:
            found = self._behind(plan, rows, starts, emitted)
            ids = self._choose(found, mine, 0, row_of)
            drafted.append(ids)
        else:
            found, ids = emitted, self.ctx.on_device(np.array([start.token for start in mine], np.int64))
        for turn in range(len(drafted), starts[0].row.num_next_drafts):
            left = [start for start in starts if start.row.num_next_drafts > turn]
            count = len(left[cp.rank :: cp.size])
            features = found[:count] if self.model.num_features else None
            found = self._pass(self._next_plan(left, turn), ids[:count], features, step.tables)
            ids = self._choose(found, mine[:count], turn, row_of)
            drafted.append(ids)
        order = [(turn, i) for i, start in enumerate(mine) for turn in range(start.row.num_next_drafts)]
        return torch.cat([step.tokens[:0], *(drafted[turn][i : i + 1] for turn, i in order)])

    def _follow(self, step: Followed) -> Tensor:
        """Take all tokens of a step; what was found at the emitted ones, [M, F]."""
        if self.may_lag and (plan := self._without_lag(step.plan)) is not step.plan:
            if plan.rows:
                late = step_inputs(plan, step.tables, self.windows, page_size=self.pool.page_size, ctx=self.ctx)
                self._run(late.ids, None, late)
            return step.found  # nobody looks at what a draft without features found
        features = self.model.features(step.found) if self.model.num_features else None
        if step.recorded is not None and self.graphs is not None:
            self.graphs.following.prepare_behind(step.recorded)
            (found,) = self.graphs.following.replay(
                ids=step.tokens if self.model.num_features else None, features=features
            )
            return found
        assert step.inputs is not None, "what follows a recorded step is recorded with it"
        ids = self._next_ids(step, step.inputs) if self.model.num_features else step.inputs.ids
        return self._run(ids, features, step.inputs)[step.inputs.logits]

    def _without_lag(self, plan: StepPlan) -> StepPlan:
        """The rows that the draft has to follow now, each with what it has missed; the same plan if that is all."""
        rows = []
        for row in plan.rows:
            start, missed = self._missed.pop(row.slot, (row.start, b""))
            if start + len(missed) // 4 != row.start:
                start, missed = row.start, b""  # pages were loaded since: the draft's rows are there
            is_page_end = (row.start + row.num_tokens) % self.pool.page_size == 0
            if row.num_tokens == 1 and not row.num_next_drafts and not is_page_end:
                self._missed[row.slot] = start, missed + row.tokens
            else:
                rows.append(Row(row.slot, start, missed + row.tokens) if missed else row)
        is_same = len(rows) == len(plan.rows) and all(one is other for one, other in zip(rows, plan.rows, strict=True))
        return plan if is_same else StepPlan(0, rows)

    def _next_ids(self, step: Followed, inputs: StepInputs) -> Tensor:
        """The token behind each of this rank's: int64 [T_local]."""
        found = [np.empty(0, np.int64)]
        locals_ = local_positions(step.plan, cp_rank=self.ctx.cp.rank, cp_size=self.ctx.cp.size)
        for row, mine in zip(step.plan.rows, locals_, strict=True):
            # What is sampled, or scored, is filled in below.
            found.append(np.append(np.frombuffer(row.tokens, np.int32)[1:], max(row.next_token, 0))[mine])
        ids = self.ctx.on_device(np.concatenate(found).astype(np.int64))
        ids[inputs.logits] = step.tokens
        return ids

    def _starts(self, plan: StepPlan, rows: Sequence[int], sampled: Mapping[tuple[int, int], int]) -> list[_Start]:
        """Compare what was sampled with what was drafted before."""
        starts = []
        for i in rows:
            row = plan.rows[i]
            drafts = np.frombuffer(row.tokens, np.int32)[row.first_sampled + 1 :].tolist()
            behind = [sampled[i, row.first_sampled + k] for k in range(row.num_drafts + 1)]
            num_right = next((k for k, draft in enumerate(drafts) if behind[k] != draft), len(drafts))
            state, spare = -1, -1
            if self.has_states:
                state = (row.write_state, *row.draft_states)[num_right]
                spare = self.pool.first_spare_state + row.slot
            starts.append(_Start(row, num_right, behind[num_right], state, spare))
        return starts

    def _gather(self, plan: StepPlan, tokens: Tensor) -> PendingAnswer:
        """The tokens behind the emitted positions of each cp rank, padded: [cp, longest M]. Collective over cp."""
        if self.ctx.cp.size == 1:
            return PendingAnswer(tokens[None])
        counts = [sum(len(found) for _, found in of_rank) for of_rank in emissions(plan, cp_size=self.ctx.cp.size)]
        padded = tokens.new_zeros(max(counts))
        padded[: len(tokens)] = tokens
        return PendingAnswer(self.ctx.cp.all_gather(padded))

    def _behind(self, plan: StepPlan, rows: Sequence[int], starts: Sequence[_Start], emitted: Tensor) -> Tensor:
        """What was found at the last right token of each row: [G_local, F] of [M, F]. Collective over cp."""
        mine = emissions(plan, cp_size=self.ctx.cp.size)[self.ctx.cp.rank]
        index = [(i, position) for i, positions in mine for position in positions.tolist()]
        line_of = {key: line for line, key in enumerate(index)}
        wanted = [line_of.get((i, p.row.first_sampled + p.num_right), -1) for i, p in zip(rows, starts, strict=True)]
        if self.ctx.cp.size == 1:
            return emitted[self.ctx.on_device(np.array(wanted, np.int64))]
        here = [k for k, line in enumerate(wanted) if line >= 0]
        every = emitted.new_zeros(len(rows), emitted.shape[1])
        if here:
            lines = self.ctx.on_device(np.array([wanted[k] for k in here], np.int64))
            every[self.ctx.on_device(np.array(here, np.int64))] = emitted[lines]
        return self.ctx.cp.all_reduce(every)[self.ctx.cp.rank :: self.ctx.cp.size]

    def _next_plan(self, starts: Sequence[_Start], turn: int) -> StepPlan:
        """One token more of each sequence."""
        offset = turn - bool(self.model.num_features)  # a row with features stands one position before its token
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

    def _pass(self, plan: StepPlan, ids: Tensor, features: Tensor | None, tables: Mapping[str, PageTables]) -> Tensor:
        """Run a plan of one token per row: what was found, [G_local, F]."""
        if self.graphs is not None and self.graphs.passes.can_run(plan):
            return self._replay(self.graphs.passes, plan, ids, features, tables)
        inputs = step_inputs(plan, tables, self.windows, page_size=self.pool.page_size, ctx=self.ctx)
        return self._run(ids, features, inputs)

    def _run(self, ids: Tensor, features: Tensor | None, inputs: StepInputs) -> Tensor:
        self.planned.synchronize()  # plans are copied from memory that the next one overwrites
        run = ForwardPass(self.backend.plan(inputs), self.pool.behind(), inputs.positions)
        found = self.model.forward(ids, features, run)
        self.planned = after_compute(self.ctx.device)
        return found

    def _replay(
        self,
        graphs: DecodeGraphs,
        plan: StepPlan,
        ids: Tensor,
        features: Tensor | None,
        tables: Mapping[str, PageTables],
    ) -> Tensor:
        self.planned.synchronize()
        graphs.prepare(plan, tables)
        self.planned = after_compute(self.ctx.device)
        (found,) = graphs.replay(ids=ids, features=features)
        return found

    def _choose(self, found: Tensor, starts: Sequence[_Start], turn: int, row_of: DraftRow) -> Tensor:
        """The token that the request's own sampler draws of the draft's logits: the same one, where both agree."""
        logits = self.model.logits(found).nan_to_num()  # of a load that failed, too; the decider throws that away
        return sample(logits, [row_of(start.row, start.num_right + 1 + turn) for start in starts])


def _by_position(plan: StepPlan, tokens: NDArray[np.int64]) -> dict[tuple[int, int], int]:
    """(row, position in it) -> the token behind it, of all cp ranks: [cp, longest M]."""
    found: dict[tuple[int, int], int] = {}
    for of_rank, values in zip(emissions(plan, cp_size=len(tokens)), tokens.tolist(), strict=True):
        keys = [(i, position) for i, positions in of_rank for position in positions.tolist()]
        found.update(zip(keys, values, strict=False))
    return found
