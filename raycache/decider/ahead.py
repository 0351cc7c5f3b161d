"""When a step may be planned while the one before runs.

Only with one pipeline stage, and for the same requests, each a chunk further, or fed with the token that is still being
sampled. If that token ends the request, the row is thrown away:

    planned    17: samples token 42      18: fed with token 42         19: without it       20: others get its slot
    back                                 17: token 42 is the end       18: thrown away      19

What is planned ahead makes nothing known, computed or free:
 - The tree gets whole pages of known tokens when the row that computes them is back. Rows in flight write only behind
   what is back of their request, so never into a page of the tree; a save or another request may read that at any time.
 - A request keeps its slot, pages and locks until its last row is back, also when it has ended before
   (`RequestQueues.finish`). So no plan in flight touches what is free, and a load or another request may write there at
   any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from raycache.cache.sequences import SequenceCache
from raycache.decider.drafts import Drafts
from raycache.decider.run import Run


class Blocker(Enum):
    """Why the row of a request that is in flight has to be back before its next one is planned."""

    RESTORE_POINT = "it may leave a restore point, which needs what is known to be computed"
    LOAD = "its load may fail, and it would go back to where that began"
    PENALTIES = "the token that is being sampled counts in the penalties of the next"
    SAMPLING = "the next token is drawn at random, and ranks feed greedy rows only"
    DRAFTS = "its next row begins where the draft tokens in flight are accepted up to"
    NEXT_DRAFTS = "the draft tokens of its next row come with its results"
    WANTS_DRAFTS = "its next row wants draft tokens, which follow the token that is being sampled"
    MORE_TO_LOAD = "storage has brought tokens that it could load, but not while it computes them"


class PlanAhead:
    """Decides for which requests a step may be planned ahead.

    Args:
        num_stages: of the pipeline.
    Attributes:
        is_on: whether requests in flight may be given a further row at all.
    """

    def __init__(self, cache: SequenceCache, drafts: Drafts, *, num_stages: int) -> None:
        self.is_on = num_stages == 1
        self._cache, self._drafts = cache, drafts

    def blocker(self, run: Run) -> Blocker | None:
        """What keeps a request in flight from being given a further row."""
        request = run.request
        sampling, drafts, is_fed = request.spec.sampling, request.drafts, run.is_fed
        if self._cache.has_points:
            return Blocker.RESTORE_POINT
        if run.holding.load is not None:
            return Blocker.LOAD
        if is_fed and sampling.has_penalties:
            return Blocker.PENALTIES
        if is_fed and not sampling.is_greedy:
            return Blocker.SAMPLING
        if drafts.num_in_row > 0:
            return Blocker.DRAFTS
        if drafts.num_asked > 0:
            return Blocker.NEXT_DRAFTS
        if is_fed and self._drafts.wanted(drafts.rate) > 0:
            return Blocker.WANTS_DRAFTS
        return Blocker.MORE_TO_LOAD if run.has_more_to_load else None

    def holds_up(self, running: Sequence[Run]) -> bool:
        """Whether a request in flight has to be back before its next row is planned.

        The others wait for it then: with a plan of their own they would run in turn with it from now on.
        """
        return self.is_on and any(
            run.wants_row and self.blocker(run) is not None for run in running if run.num_in_flight
        )

    def ready(self, running: Sequence[Run]) -> list[Run]:
        """Those that can be given a row, if `holds_up` is false."""
        return [run for run in running if run.wants_row and (self.is_on or not run.num_in_flight)]
