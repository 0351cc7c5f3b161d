"""Rows with drafts: what is guessed at the tokens behind a row's own, and what became of it.

    row       its own tokens, then drafts, which the decider knows; num_next_drafts are wanted of the ranks behind those
    result    a token behind the last own one, and one behind each draft

Drafts are right up to the first that is not the token behind the one before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raycache.cache.holding import Room
from raycache.cache.sequences import SequenceCache
from raycache.decider.batch import Batch
from raycache.decider.drafts import Drafts
from raycache.decider.request import Request
from raycache.types import FinishReason, PackedTokens
from raycache.wire.plan import Row, RowResult


@dataclass(frozen=True, slots=True)
class Guessed:
    """What goes into a row beside its own tokens.

    Attributes:
        drafts: packed.
        num_next_drafts: that the ranks should make at what follows those.
        room: for the row's own tokens and all of it.
    """

    drafts: PackedTokens
    num_next_drafts: int
    room: Room


class DraftedRows:
    """Puts drafts into rows and takes their results apart.

    Args:
        drafts: guesses at next tokens.
        cache: where sequences live.
        eos_token_ids: tokens that end an output.
    """

    def __init__(self, drafts: Drafts, cache: SequenceCache, *, eos_token_ids: tuple[int, ...]) -> None:
        self._drafts, self._cache = drafts, cache
        self._eos = frozenset(eos_token_ids)

    def guess(self, request: Request, count: int, batch: Batch) -> Guessed | None:
        """Guesses for a request's next row, of `count` tokens of its own; None for none.

        They get pages that others do not need: without room, there are none.
        """
        assert request.holding is not None, "running requests hold something of the cache"
        start = request.next_start
        drafts, num_next_drafts = self._known(request, batch), 0
        num_drafts = len(drafts) // 4
        stop = start + count + num_drafts
        if self._drafts.are_told and request.num_next == count:
            useful = max(self._most(request, start + count + right) for right in range(num_drafts + 1))
            most = min(request.max_len - stop, batch.guess_budget, useful)
            num_next_drafts = self._drafts.ask(request.luck, most=most)
        if not num_drafts and not num_next_drafts:
            return None
        room = self._cache.make_room(
            request.holding, start, stop, num_drafts=num_drafts, num_next_drafts=num_next_drafts
        )
        if room is None:
            return None
        batch.is_catching_up |= num_next_drafts > 0 and request.num_next_drafts == 0
        return Guessed(drafts, num_next_drafts, room)

    def take(self, request: Request, row: Row, result: RowResult) -> tuple[list[int], FinishReason | None]:
        """What a row adds to its request: tokens up to the first that a draft differs from, or that ends the output."""
        if not result.tokens or request.ending is not None:
            return [], None
        drafts = np.frombuffer(row.tokens, np.int32)[row.first_sampled + 1 :].tolist()
        taken: list[int] = []
        reason = None
        for token, draft in zip(result.tokens, [*drafts, None], strict=True):
            taken.append(token)
            if token in request.sampling.stop_token_ids or (token in self._eos and not request.sampling.ignore_eos):
                reason = FinishReason.STOP
            elif request.num_tokens + len(taken) >= request.max_len:
                reason = FinishReason.LENGTH
            if reason is not None or token != draft:
                break
        if drafts:
            num_right = len(taken) - 1
            # Behind the end of the output nothing was checked.
            num_checked = len(drafts) if reason is None else num_right
            self._drafts.note(request.luck, num_right, num_checked)
            request.num_drafted += num_checked
            request.num_accepted += num_right
        return taken, reason

    def _known(self, request: Request, batch: Batch) -> PackedTokens:
        """Guesses at what follows the last token of a request in decode."""
        is_decode = request.num_next == 1 and request.num_output > 0
        if self._drafts.most == 0 or not is_decode:
            return b""
        most = min(batch.draft_budget, batch.scored_budget, self._most(request, request.next_start))
        if self._drafts.are_told:
            return b"" if request.is_in_flight else request.next_drafts[: 4 * max(most, 0)]
        if request.is_in_flight:
            request.luck.num_idle += 1
            return b""
        return self._drafts.guess(request.tokens, request.luck, most=most)

    def _most(self, request: Request, start: int) -> int:
        """Drafts that a row in decode can have which begins there."""
        most = request.max_len - start - 2
        if self._cache.has_points and self._cache.is_kept:
            page_size = self._cache.page_size
            most = min(most, page_size - start % page_size - 1)  # or the restore point there would be missed
        return most
