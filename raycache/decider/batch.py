"""A step plan under construction."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from raycache.decider.drafts import DraftStep
from raycache.decider.request import Run
from raycache.wire.plan import MAX_SCORED_TOKENS, UNKNOWN, Admit, Row, Rows, StepPlan


@dataclass(slots=True)
class Batch:
    """A step plan under construction, and the runs behind its rows.

    Attributes:
        budget: tokens that may still be added.
        prompt_budget: tokens of prompts that may still be added.
        longest_chunk: tokens that one prompt may have in this step.
        least_chunk: smallest number of tokens that a prompt beside others gets in this step.
        prompt_tokens: slot of each prompt in this step -> its tokens.
        scored_budget: scored tokens that may still be added, draft tokens included: each needs logits.
        draft_budget, next_draft_budget: draft tokens that this step may still verify, and still request for the next.
        runs: one per row, in the same order; rows of the same run follow each other in its sequence.
        num_tokens: new tokens of all rows.
        is_decode: whether all rows are decode rows.
        loads: sequence numbers of the host-to-device moves that its rows wait for.
        num_loaded: tokens loaded by those moves.
        is_catching_up: whether the draft model prefills tokens it has missed; such a step is not timed.
        start_s: time of submission, on the engine's clock.
        needs_masks: whether the masks of its plan are still to be sent.
    """

    budget: int
    max_rows: int
    drafting: DraftStep
    prompt_budget: int = sys.maxsize
    longest_chunk: int = sys.maxsize
    least_chunk: int = 1
    prompt_tokens: dict[int, int] = field(default_factory=dict)
    scored_budget: int = MAX_SCORED_TOKENS
    draft_budget: int = 0
    next_draft_budget: int = 0
    rows: Rows = field(default_factory=Rows)
    admits: list[Admit] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    num_tokens: int = 0
    is_decode: bool = True
    loads: list[int] = field(default_factory=list)
    num_loaded: int = 0
    is_catching_up: bool = False
    start_s: float = 0.0
    needs_masks: bool = False
    plan: StepPlan = field(default_factory=lambda: StepPlan(0))

    @property
    def is_full(self) -> bool:
        """Whether the row or token budget is used up."""
        return self.budget <= 0 or len(self.runs) >= self.max_rows

    @property
    def takes_prompts(self) -> bool:
        """Whether there is room for another prompt."""
        least = self.least_chunk if self.prompt_tokens else 1
        return min(self.budget, self.prompt_budget) >= least

    def bound_prompts(self, tokens: int, *, longest_chunk: int, least_chunk: int) -> None:
        """Limit the prompts of this step, which has no rows yet."""
        self.prompt_budget, self.longest_chunk, self.least_chunk = tokens, longest_chunk, least_chunk

    def chunk_room(self, run: Run) -> int:
        """Tokens that the next row of a prompt may have; 0: it waits for the next step."""
        room = min(self.budget, self.prompt_budget, self.longest_chunk - self.prompt_tokens.get(run.slot, 0))
        return room if not self.prompt_tokens or room >= min(self.least_chunk, run.num_next) else 0

    def add(self, run: Run, row: Row) -> None:
        """Append a row, which is in flight from now on."""
        self.rows.append(row)
        self.runs.append(run)
        run.num_in_flight += 1
        num_tokens, num_drafts = row.num_tokens, row.num_drafts
        self.num_tokens += num_tokens
        self.is_decode &= num_tokens == 1 + num_drafts
        self.budget -= num_tokens
        if row.output_position < 0 or num_tokens > 1 + num_drafts:
            self.prompt_budget -= num_tokens
            self.prompt_tokens[run.slot] = self.prompt_tokens.get(run.slot, 0) + num_tokens
        self.scored_budget -= row.num_targets + num_drafts
        self.draft_budget -= num_drafts
        self.next_draft_budget -= row.num_next_drafts

    def add_token(self, run: Run, start: int, output_position: int) -> None:
        """Append the row of a steady run's last token, at position `start`, or of the one that is still being sampled.
        It has room for that."""
        token = UNKNOWN if run.num_in_flight else bytes(run.request.tokens[-4:])
        self.rows.tokens.append((run.slot, start, token, output_position))
        self.runs.append(run)
        run.num_in_flight += 1
        run.num_planned = start + 1
        self.num_tokens += 1
        self.budget -= 1
