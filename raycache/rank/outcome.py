"""What rows with draft tokens have sampled, and where the next row of their sequence begins.

    row       s  d1 d2 d3        the last token and three draft tokens; the target samples  d1 d2 x y  after them
    known     s  d1 d2 x         two draft tokens were accepted, x follows them
    next row           x  e1 e2  begins two positions later than it would with none accepted

Ranks know this before the decider does, so a step can follow that was planned for any outcome (decider/ahead.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor

from raycache.parallel.context import ParallelContext
from raycache.rank.pending_result import PendingResult
from raycache.wire.plan import Row, StepPlan
from raycache.wire.results import drafting_rows, emissions


class RowEnd(NamedTuple):
    """Where a row ends.

    Attributes:
        num_accepted: accepted draft tokens.
        token: the token sampled after them.
        state: slot of the state before that token; -1 for none.
    """

    num_accepted: int
    token: int
    state: int


@dataclass(frozen=True)
class NextDrafts:
    """Draft tokens for the next rows, on their way to the host.

    Attributes:
        places: (slot, number from 0) of each.
        tokens: int64 [len(places)].
    """

    places: list[tuple[int, int]]
    tokens: PendingResult

    @cached_property
    def by_slot(self) -> Mapping[int, list[int]]:
        """Draft tokens of each slot; waits for them."""
        found: dict[int, list[int]] = {}
        for (slot, _), token in zip(self.places, self.tokens.wait().tolist(), strict=True):
            found.setdefault(slot, []).append(token)
        return found

    @staticmethod
    def places_of(plan: StepPlan, *, cp_size: int) -> list[list[tuple[int, int]]]:
        """Per cp rank, (slot, number) of each draft token that it makes, in the order of its result."""
        return [
            [(plan.rows[i].slot, number) for i in rows for number in range(plan.rows[i].num_next_drafts)]
            for rows in drafting_rows(plan, cp_size=cp_size)
        ]


@dataclass(frozen=True)
class Outcome:
    """What a step has sampled, on its way to the host.

    Attributes:
        plan: rows as they were computed; a fed one may lack its draft tokens.
        sampled: tokens sampled by all cp ranks, [cp, longest].
        drafts: those of fed rows.
    """

    plan: StepPlan
    sampled: PendingResult
    drafts: NextDrafts | None
    page_size: int

    def end(self, number: int) -> RowEnd:
        """Where row `number` of the plan ends, which has sampled a token; waits for it."""
        row = self.plan.rows[number]
        behind = [self._by_position[number, row.first_sampled + k] for k in range(row.num_drafts + 1)]
        drafts = self._drafts(row)[: row.most_accepted(row.start, page_size=self.page_size)]
        num_accepted = next((k for k, draft in enumerate(drafts) if behind[k] != draft), len(drafts))
        state = row.draft_states[num_accepted - 1] if num_accepted and row.draft_states else row.write_state
        return RowEnd(num_accepted, behind[num_accepted], state)

    def resume(self, plan: StepPlan) -> StepPlan:
        """The next plan, with its fed rows where their sequences go on; waits for rows with draft tokens only."""
        if not any(row.is_fed and row.slot in self._drafted for row in plan.rows):
            return plan
        rows = [self._resumed(row) if row.is_fed and row.slot in self._drafted else row for row in plan.rows]
        return replace(plan, rows=rows)

    def _resumed(self, row: Row) -> Row:
        end = self.end(self._drafted[row.slot])
        return replace(
            row,
            start=row.start + end.num_accepted,
            output_position=row.output_position + end.num_accepted,
            tokens=np.int32(end.token).tobytes() + row.tokens[4:],
            read_state=end.state,
        )

    def _drafts(self, row: Row) -> list[int]:
        if row.num_drafts and row.is_fed:
            assert self.drafts is not None, "a row is fed with draft tokens that were not made"
            return self.drafts.by_slot[row.slot][: row.num_drafts]
        return np.frombuffer(row.tokens, np.int32)[row.first_sampled + 1 :].tolist() if row.num_drafts else []

    @cached_property
    def _drafted(self) -> dict[int, int]:
        """Slot -> number of its row with draft tokens."""
        return {row.slot: i for i, row in enumerate(self.plan.rows) if row.num_drafts}

    @cached_property
    def _by_position(self) -> dict[tuple[int, int], int]:
        """(row, position in the row) -> token sampled there."""
        tokens = self.sampled.wait()
        found: dict[tuple[int, int], int] = {}
        for of_rank, values in zip(emissions(self.plan, cp_size=len(tokens)), tokens.tolist(), strict=True):
            keys = [(i, position) for i, positions in of_rank for position in positions]
            found.update(zip(keys, values, strict=False))
        return found


def gather_sampled(plan: StepPlan, tokens: Tensor, ctx: ParallelContext) -> Tensor:
    """Gather the tokens sampled by all cp ranks, padded: int64 [cp, longest]. Collective over cp."""
    if ctx.cp.size == 1:
        return tokens[None]
    counts = [sum(len(found) for _, found in of_rank) for of_rank in emissions(plan, cp_size=ctx.cp.size)]
    return gather_padded(tokens, max(counts), ctx)


def gather_padded(tokens: Tensor, longest: int, ctx: ParallelContext) -> Tensor:
    """Gather up to `longest` tokens of every cp rank, int64 [cp, longest]. Collective over cp."""
    padded = tokens.new_zeros(longest)
    padded[: len(tokens)] = tokens
    return ctx.cp.all_gather(padded)
