"""The resources and progress of a request from admission until everything is released."""

from __future__ import annotations

from dataclasses import dataclass

from raycache.cache.held_units import Capacity
from raycache.cache.holding import Holding
from raycache.decider.request import Phase, Request
from raycache.types import PackedTokens
from raycache.wire.plan import NO_PAGES, UNKNOWN, Row


@dataclass(slots=True, eq=False)
class Run:
    """What a running request holds, and its progress.

    tokens    [ prompt ......................... | output ... ]
    computed  [ cached | chunks done so far ]                      their state is in its pages
    planned   [ .............................. | rows in flight ]  up to one token behind `tokens`: the next one

    Attributes:
        slot: index of its per-request state on the ranks.
        num_planned: value of num_computed once the rows in flight are done.
        restore_at: ascending token positions at which a chunk must end and leave a restore point.
        num_in_flight: plans in flight with a row of it, up to 2.
    """

    request: Request
    slot: int
    holding: Holding
    num_computed: int
    num_planned: int
    restore_at: list[int]
    num_in_flight: int = 0

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 in decode."""
        return self.request.num_tokens - self.num_computed

    @property
    def next_start(self) -> int:
        """Position of the first token of the next row."""
        return self.num_planned if self.num_in_flight else self.num_computed

    @property
    def num_next(self) -> int:
        """Value of `remaining` once the rows in flight are done."""
        return max(self.request.num_tokens - self.next_start, 1)

    @property
    def is_fed(self) -> bool:
        """Whether the input token of the next row is still being sampled."""
        return self.num_in_flight > 0 and self.num_planned == self.request.num_tokens

    @property
    def wants_row(self) -> bool:
        """Whether it needs another row, as far as is known: the token being sampled may still end it."""
        request = self.request
        is_last_sampled = self.is_fed and request.num_tokens + 1 >= request.spec.max_len
        return request.phase is Phase.RUNNING and request.ending is None and not is_last_sampled

    @property
    def has_more_to_load(self) -> bool:
        """Whether storage has fetched prompt tokens beyond those computed."""
        prefetch = self.request.prefetch
        return prefetch is not None and prefetch.end > self.next_start and self.num_next > 1 and self.request.may_load

    def next_row(self, count: int, capacity: Capacity, drafts: PackedTokens = b"", *, num_next_drafts: int = 0) -> Row:
        """Make the row of the next `count` tokens, followed by packed draft tokens; `capacity` covers both."""
        request = self.request
        start, is_fed = self.next_start, self.is_fed
        stop = start + count
        is_sampled = stop >= request.num_tokens
        self.num_planned, num_drafts = stop, len(drafts) // 4
        accepted = request.drafts.plan(num_drafts, num_next_drafts)
        return Row(
            slot=self.slot,
            start=start,
            tokens=UNKNOWN if is_fed else request.packed(start, stop) + drafts,
            new_pages=capacity.new_pages or NO_PAGES,
            output_position=request.num_output + is_fed if is_sampled else -1,
            targets=request.packed(start + 1, min(stop + 1, request.spec.prompt_len)) if request.is_scored else b"",
            read_state=capacity.read_state,
            write_state=capacity.write_state,
            is_fed=is_fed,
            num_drafts=num_drafts,
            draft_states=capacity.draft_states,
            accepted=accepted if request.spec.sampling.has_penalties else b"",
            num_next_drafts=num_next_drafts,
            next_token=-1 if is_sampled else int.from_bytes(request.packed(stop, stop + 1), "little"),
        )
