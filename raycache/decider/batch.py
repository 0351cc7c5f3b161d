"""A plan in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from raycache.decider.run import Run
from raycache.wire.plan import MAX_SCORED_TOKENS, Admit, Row, StepPlan


@dataclass(slots=True)
class Batch:
    """A plan in the making, and the runs of its rows.

    Attributes:
        budget: tokens that may still be added.
        scored_budget: scored tokens that may still be added; drafts count, each has logits.
        draft_budget, next_draft_budget: draft tokens that may still be added, and asked for: those of the next step.
        runs: of the rows, in order.
        loads: numbers of the moves from the host that its rows wait for.
        num_loaded: tokens that those bring.
        is_catching_up: whether a draft model takes what it has missed, so that its pace says little.
        start_s: when it was sent.
    """

    budget: int
    max_rows: int
    scored_budget: int = MAX_SCORED_TOKENS
    draft_budget: int = 0
    next_draft_budget: int = 0
    rows: list[Row] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    num_loaded: int = 0
    is_catching_up: bool = False
    start_s: float = 0.0
    plan: StepPlan = field(default_factory=lambda: StepPlan(0))

    @property
    def is_full(self) -> bool:
        """Whether no row fits any more."""
        return self.budget <= 0 or len(self.rows) >= self.max_rows

    @property
    def is_decode(self) -> bool:
        """Whether all rows are of requests in decode."""
        return all(row.first_sampled == 0 for row in self.rows)

    def add(self, run: Run, row: Row) -> None:
        """Append a row."""
        self.rows.append(row)
        self.runs.append(run)
        self.budget -= row.num_tokens
        self.scored_budget -= row.num_targets + row.num_drafts
        self.draft_budget -= row.num_drafts
        self.next_draft_budget -= row.num_next_drafts
