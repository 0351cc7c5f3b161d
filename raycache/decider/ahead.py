"""Decides when a step may be planned while the previous one runs.

Only with one pipeline stage, and for the same requests: each gets its next chunk, or a decode row fed with the token
that is still being sampled. If that token ends the request, the row is discarded:

    planned    17: samples token 42      18: fed with token 42         19: without it       20: others get its slot
    back                                 17: token 42 is the end       18: discarded        19

With draft tokens of the ranks, the row is planned for every number that may be accepted. The ranks know it before the
decider does, and move the row up by as many tokens:

    row in flight                 s  d1 d2 d3
    next row, if none accepted       t  e1 e2 e3         pages for the longest outcome
                two accepted               t  e1 e2 e3   a state of its own behind each token

A draft token beyond a page boundary that may become a restore point is then not accepted (`Row.stops_at_page`): which
rows reach it is not known when they are planned. Rows with draft tokens of the decider, with penalties, with both draft
tokens and a grammar, and all of a batch for which there are too few states, wait for the row before them.

A mask that depends on the token that is still being sampled is sent when it is known (`Engine.step`).

Planning ahead never marks anything as known, computed or free:
 - Whole pages of known tokens enter the tree when the row that computes them completes. Rows in flight write only past
   that point, never into a page of the tree, which a save or another request may read at any time.
 - A request keeps its slot, pages and locks until its last row completes, even if it has already ended
   (`RequestQueues.finish`). So no plan in flight touches free pages, which a load or another request may write.
 - A row that ends on a page boundary may leave a restore point, so the next one writes its recurrent state elsewhere
   (`HeldUnits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from raycache.cache.sequences import SequenceCache
from raycache.decider.drafts import DraftStep
from raycache.decider.request import Run


class Blocker(Enum):
    """Why a request's row in flight must complete before its next one is planned."""

    LOAD = "its load may fail, and it would resume from where the load began"
    PENALTIES = "the token being sampled counts in the penalties of the next"
    DRAFTS = "its next row starts after the accepted draft tokens, which the decider needs for further ones"
    MASKS = "the masks of its next row depend on draft tokens that the ranks are making"
    WANTS_DRAFTS = "its next row needs draft tokens of the decider, which depend on the token being sampled"
    MORE_TO_LOAD = "storage has fetched tokens that it can load once nothing is in flight"


class PlanAhead:
    """Decides for which requests a step may be planned ahead.

    Args:
        num_stages: pipeline stages; nothing is planned ahead with more than one.
    Attributes:
        is_on: whether planning ahead is possible at all.
    """

    def __init__(self, cache: SequenceCache, *, num_stages: int) -> None:
        self._cache = cache
        self.is_on = num_stages == 1

    def blocker(self, run: Run, step: DraftStep) -> Blocker | None:
        """Return what keeps a request in flight from getting another row, or None; `step` is the last one planned."""
        request = run.request
        sampling, drafts, is_fed = request.spec.sampling, request.drafts, run.is_fed
        if run.holding.load is not None:
            return Blocker.LOAD
        if is_fed and sampling.has_penalties:
            return Blocker.PENALTIES
        if step.drafts.are_from_ranks:
            if request.grammar is not None and max(drafts.num_in_row, drafts.num_asked) > 0:
                return Blocker.MASKS
        elif drafts.num_in_row > 0:
            return Blocker.DRAFTS
        elif is_fed and step.wanted(drafts.rate) > 0:
            return Blocker.WANTS_DRAFTS
        return Blocker.MORE_TO_LOAD if run.has_more_to_load else None

    def holds_up(self, running: Sequence[Run], step: DraftStep) -> bool:
        """Whether any request in flight must complete before its next row is planned.

        The others then wait for it: in a separate plan they would alternate with it from then on.
        """
        if not self.is_on:
            return False
        # The next row of a steady run needs only the token of the one before, which penalties count.
        in_flight = [
            run
            for run in running
            if run.num_in_flight and (run.steady is None or run.request.spec.sampling.has_penalties) and run.wants_row
        ]
        if any(run.num_open for run in in_flight) and not self._has_states(len(running), most_drafts=step.drafts.most):
            return True
        return any(self.blocker(run, step) is not None for run in in_flight)

    def _has_states(self, num_running: int, *, most_drafts: int) -> bool:
        """Whether the states of all running requests suffice for two rows each that may accept draft tokens."""
        space = self._cache.device.state_space
        # The current state, the one at the last page boundary, and those that either row writes.
        return not space or num_running * (2 + 2 * (1 + most_drafts)) <= self._cache.num_units()[space]

    def ready(self, running: Sequence[Run]) -> list[Run]:
        """Runs that can get a row, given that `holds_up` is False."""
        return [run for run in running if run.wants_row and (self.is_on or not run.num_in_flight)]
