"""Adds draft tokens to rows, and determines how many were accepted.

    row       known tokens, then draft tokens; the ranks draft num_next_drafts tokens for the next row
    result    a token sampled after the last known one, and one after each draft token

Draft tokens are accepted up to the first that differs from the token sampled at its position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raycache.cache.held_units import Capacity
from raycache.cache.sequences import SequenceCache
from raycache.decider.batch import Batch
from raycache.decider.drafts import Drafts
from raycache.decider.request import Request, Run
from raycache.types import FinishReason, PackedTokens
from raycache.wire.plan import Row, left_in_page, unknown_drafts
from raycache.wire.results import RowResult


@dataclass(frozen=True, slots=True)
class Drafted:
    """Draft tokens of a row, and page capacity for the whole row; see `Row`."""

    drafts: PackedTokens
    num_next_drafts: int
    capacity: Capacity
    stops_at_page: bool


class DraftedRows:
    """Adds draft tokens to rows and verifies their results.

    Args:
        eos_token_ids: tokens that end an output.
    """

    def __init__(self, drafts: Drafts, cache: SequenceCache, *, eos_token_ids: tuple[int, ...]) -> None:
        self._drafts, self._cache = drafts, cache
        self._eos = frozenset(eos_token_ids)

    @property
    def most(self) -> int:
        """Draft tokens of a row."""
        return self._drafts.most

    def stops(self, request: Request) -> frozenset[int]:
        """Tokens that end a request's output."""
        sampling = request.spec.sampling
        ignores_eos = sampling.ignore_eos and request.grammar is None
        return (frozenset() if ignores_eos else self._eos).union(sampling.stop_token_ids)

    def draft(self, run: Run, count: int, batch: Batch) -> Drafted | None:
        """Draft for a next row of `count` known tokens; None if nothing is drafted, or there are too few pages.

        Draft tokens use spare pages only; they preempt nobody.
        """
        if not self._drafts.most:
            return None
        request, start, num_open = run.request, run.next_start, run.num_open
        drafts, num_next_drafts = self._known(run, batch), 0
        if drafts and request.grammar is not None:
            drafts = request.grammar.allowed(drafts, behind=request.tokens)
        num_drafts = len(drafts) // 4
        stop = start + count + num_drafts
        if self._drafts.are_from_ranks and run.num_next == count:
            useful = max(self._most(run, start + count + accepted) for accepted in range(num_open + num_drafts + 1))
            most = min(request.spec.max_len - stop - num_open, batch.next_draft_budget, useful)
            num_next_drafts = batch.drafting.ask(request.drafts.rate, most=most)
        if not (num_drafts or num_next_drafts or num_open):
            return None
        capacity = run.holding.reserve(
            start, stop, num_drafts=num_drafts, num_next_drafts=num_next_drafts, num_open=num_open
        )
        if capacity is None:
            return None
        batch.is_catching_up |= num_next_drafts > 0 and request.drafts.num_asked == 0
        is_open = num_drafts > 0 and run.is_fed
        return Drafted(drafts, num_next_drafts, capacity, stops_at_page=is_open and self._leaves_points)

    def take(self, run: Run, row: Row, result: RowResult) -> tuple[list[int], FinishReason | None]:
        """Return a row's tokens: up to the first that differs from its draft token, or that ends the output.

        Accepted draft tokens are appended to the request; the last token, which is not a draft token, is not.
        """
        request = run.request
        spec, state = request.spec, request.drafts
        drafts: list[int] = []
        if row.num_drafts:
            # Those of a fed row came with the results of the row before.
            known = state.next_drafts if row.is_fed else row.tokens[4 * (row.first_sampled + 1) :]
            most = row.most_accepted(run.num_computed, page_size=self._cache.page_size)
            drafts = np.frombuffer(known, np.int32)[:most].tolist()
        state.next_drafts = np.array(result.next_drafts, np.int32).tobytes() if result.next_drafts else b""
        if not result.tokens or request.ending is not None:
            return [], None
        taken: list[int] = []
        reason, stops = None, self.stops(request)
        for token, draft in zip(result.tokens, [*drafts, None], strict=False):
            taken.append(token)
            if token in stops:
                reason = FinishReason.STOP
            elif request.num_tokens + len(taken) >= spec.max_len:
                reason = FinishReason.LENGTH
            if reason is not None or token != draft:
                break
        if drafts:
            num_accepted = len(taken) - 1
            # Draft tokens after the end of the output do not count as verified.
            self._drafts.note(state, num_accepted, len(drafts) if reason is None else num_accepted)
            if num_accepted:
                state.uncounted = np.array(drafts[:num_accepted], np.int32).tobytes()
                request.tokens += state.uncounted
        return taken, reason

    def _known(self, run: Run, batch: Batch) -> PackedTokens:
        """Draft tokens that follow the last token of a decoding request."""
        request = run.request
        is_decode = run.num_next == 1 and request.num_output > 0
        if not is_decode:
            return b""
        budget = min(batch.draft_budget, batch.scored_budget)
        if run.num_in_flight and self._drafts.are_from_ranks:
            most = min(budget, self._most_for_len(run, run.next_start + run.num_open), request.drafts.num_asked)
            return unknown_drafts(max(most, 0))
        most = min(budget, self._most(run, run.next_start))
        if self._drafts.are_from_ranks:
            return request.drafts.next_drafts[: 4 * max(most, 0)]
        if run.num_in_flight:
            request.drafts.rate.num_idle += 1
            return b""
        return batch.drafting.draft(request.tokens, request.drafts.rate, most=most)

    def _most(self, run: Run, start: int) -> int:
        """Most draft tokens for a decode row that begins at `start`."""
        most = self._most_for_len(run, start)
        if self._leaves_points:  # else the one at the page boundary would be missed
            most = min(most, left_in_page(start, page_size=self._cache.page_size))
        return most

    def _most_for_len(self, run: Run, start: int) -> int:
        """The same as far as the length of the output goes."""
        return run.request.spec.max_len - start - 2

    @property
    def _leaves_points(self) -> bool:
        """Whether sequences leave restore points at page boundaries."""
        return self._cache.has_points and self._cache.is_kept
