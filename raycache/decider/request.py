"""A request inside the engine: its tokens, its pages and how far it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from raycache.cache.holding import Holding, Room, Use
from raycache.cache.storage_tier import Prefetch
from raycache.decider.drafts import Luck
from raycache.errors import RequestError
from raycache.types import (
    FinishReason,
    GenerateRequest,
    Miss,
    PackedTokens,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from raycache.wire.plan import NO_PAGES, UNKNOWN, Row


class Phase(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence.

    tokens    [ prompt ......................... | output ... ]
    computed  [ cached | chunks done so far ]                      state of these is in what it holds
    planned   [ .............................. | rows in flight ]  up to one token behind `tokens`: the next one

    Attributes:
        request_id: name given by the client.
        sampling: how to continue.
        seed: of its random numbers.
        order: (priority, arrival number); smaller runs first.
        arrival_s: on the engine's clock.
        deadline: on the same clock, seconds; None for none.
        max_len: most tokens of prompt and output.
        tokens: packed prompt and output.
        prompt_len, num_computed, cached_len: in tokens; cached_len is what the first admission found.
        num_planned: as num_computed, once the rows in flight are done.
        cut_by: the component that kept the first admission from finding more, or "".
        cuts: positions, ascending, at which a chunk ends and leaves a restore point.
        holding: of the cache, while running.
        slot: on the ranks, while running.
        num_admissions: times that it began to run.
        queued_s: from its arrival until the first of them.
        num_losses: gangs that were lost while it was in flight, one after another.
        num_in_flight: plans that are out and have a row of it, up to 2.
        ending: why it ends as soon as it is not in flight, if it was cancelled or is late.
        use: what its prefixes in the cache belong to, and count for.
        may_load: whether its prefix may come from the host; not after that turned out to be bad.
        prefetch: of its prefix from storage, if it was looked for there.
        cached_by_tier, miss: where cached_len came from, and why it is not more.
        luck: of its drafts.
        num_drafts: in its last row.
        num_drafted, num_accepted: drafts that were checked, and those of them that were right.
        next_drafts: packed, what the ranks' draft model says follows its tokens.
        num_next_drafts: wanted with its last row.
        uncounted: packed drafts that were accepted, and that the ranks' penalties do not know of.
        prompt_scores: log-probabilities of the prompt's tokens found so far, if wanted; from the second token on.
    """

    request_id: str
    sampling: SamplingParams
    seed: int
    order: tuple[int, int]
    arrival_s: float
    deadline: float | None
    max_len: int
    tokens: bytearray
    prompt_len: int
    phase: Phase = Phase.WAITING
    num_computed: int = 0
    cached_len: int = 0
    num_planned: int = 0
    cut_by: str = ""
    cuts: list[int] = field(default_factory=list)
    holding: Holding | None = None
    slot: int = -1
    num_admissions: int = 0
    queued_s: float = 0.0
    num_losses: int = 0
    num_in_flight: int = 0
    ending: FinishReason | None = None
    prompt_scores: list[TokenLogprob | None] = field(default_factory=list)
    use: Use = field(default_factory=Use)
    may_load: bool = True
    prefetch: Prefetch | None = None
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    miss: Miss = Miss.NONE
    luck: Luck = field(default_factory=Luck)
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    uncounted: bytes = b""
    next_drafts: PackedTokens = b""
    num_next_drafts: int = 0

    @classmethod
    def create(cls, request: GenerateRequest, *, seed: int, arrival: int, now_s: float, max_model_len: int) -> Request:
        """Take a client's request in, at its start or after the tokens that it got from an engine that was lost.

        Args:
            request: checked already.
            seed: used if its sampling names none.
            arrival: number of the request.
            now_s: the engine's clock, seconds.
            max_model_len: most tokens of prompt and output together.
        Raises:
            RequestError: it has all the tokens already that it may get.
        """
        sampling = request.sampling
        if request.output and sampling.prompt_logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=None)  # told before the first token
        prompt_len = len(request.prompt)
        most = max_model_len if sampling.max_tokens is None else prompt_len + sampling.max_tokens
        max_len = min(most, max_model_len)
        if prompt_len + len(request.output) >= max_len:
            raise RequestError(f"output has {len(request.output)} tokens and leaves no room for more", field="output")
        return cls(
            request_id=request.request_id,
            sampling=sampling,
            seed=seed if sampling.seed is None else sampling.seed,
            order=(request.priority, arrival),
            arrival_s=now_s,
            deadline=None if request.timeout_s is None else now_s + request.timeout_s,
            max_len=max_len,
            tokens=bytearray(np.asarray([*request.prompt, *request.output], np.int32).tobytes()),
            prompt_len=prompt_len,
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.tokens) // 4

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 in decode."""
        return self.num_tokens - self.num_computed

    @property
    def is_in_flight(self) -> bool:
        """Whether a plan with a row of it is out."""
        return self.num_in_flight > 0

    @property
    def next_start(self) -> int:
        """Position of the first token of its next row."""
        return self.num_planned if self.num_in_flight else self.num_computed

    @property
    def num_next(self) -> int:
        """As `remaining`, once the rows in flight are done."""
        return max(self.num_tokens - self.next_start, 1)

    @property
    def is_fed(self) -> bool:
        """Whether the token of its next row is still being sampled."""
        return self.num_in_flight > 0 and self.num_planned == self.num_tokens

    @property
    def wants_row(self) -> bool:
        """Whether it goes on, as far as is known: the token that is being sampled may still end it."""
        is_last_sampled = self.is_fed and self.num_tokens + 1 >= self.max_len
        return self.phase is Phase.RUNNING and self.ending is None and not is_last_sampled

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of prompt tokens are still wanted."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_scores) < self.prompt_len

    @property
    def wanted_tops(self) -> list[int]:
        """Alternatives that it wants to be told with its next log-probabilities; empty if it wants none of these."""
        sampling = self.sampling
        wanted = (sampling.logprobs, sampling.prompt_logprobs if self.is_scored else None)
        return [top for top in wanted if top is not None]

    def next_row(self, count: int, room: Room, drafts: PackedTokens = b"", *, num_next_drafts: int = 0) -> Row:
        """Its next tokens for a plan.

        Args:
            count: of tokens, at most `num_next`.
            room: for them, and for the drafts.
            drafts: packed guesses at what follows them.
            num_next_drafts: wanted at what follows those.
        """
        start, is_fed = self.next_start, self.is_fed
        is_sampled = start + count >= self.num_tokens
        self.num_planned, self.num_drafts, self.num_next_drafts = start + count, len(drafts) // 4, num_next_drafts
        targets = b""
        if self.is_scored:
            targets = self.packed(start + 1, min(start + 1 + count, self.prompt_len))
        accepted, self.uncounted = self.uncounted, b""
        return Row(
            slot=self.slot,
            start=start,
            tokens=UNKNOWN if is_fed else self.packed(start, start + count) + drafts,
            new_pages=room.new_pages or NO_PAGES,
            output_position=self.num_output + is_fed if is_sampled else -1,
            targets=targets,
            read_state=room.read_state,
            write_state=room.write_state,
            is_fed=is_fed,
            num_drafts=self.num_drafts,
            draft_states=room.draft_states,
            accepted=accepted if self.sampling.has_penalties else b"",
            num_next_drafts=num_next_drafts,
            next_token=-1 if is_sampled else self._token(start + count),
        )

    def packed(self, start: int, stop: int) -> bytes:
        """Tokens [start, stop), packed."""
        return bytes(self.tokens[4 * start : 4 * stop])

    def _token(self, position: int) -> int:
        return int.from_bytes(self.tokens[4 * position : 4 * position + 4], "little")

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.tokens += token.to_bytes(4, "little", signed=True)

    def accept(self, row: Row, num_accepted: int) -> None:
        """Add drafts of a row that turned out to be right."""
        first = 4 * (row.first_sampled + 1)
        self.uncounted = bytes(row.tokens[first : first + 4 * num_accepted])
        self.tokens += self.uncounted

    def output(
        self,
        *tokens: int,
        logprobs: Sequence[TokenLogprob] = (),
        reason: FinishReason | None = None,
    ) -> RequestOutput:
        """What to tell the client of this step."""
        is_first = self.num_output <= 1 and bool(tokens)
        wants_scores = is_first and self.sampling.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            token_ids=tokens,
            logprobs=tuple(logprobs) if logprobs and self.sampling.logprobs is not None else None,
            prompt_logprobs=tuple(self.prompt_scores) if wants_scores else None,
            finish_reason=reason,
            cached_tokens=self.cached_len,
            cut_by=self.cut_by,
            cached_by_tier=self.cached_by_tier,
            miss=self.miss,
            queued_s=self.queued_s,
            num_starts=self.num_admissions,
            drafted_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
            error="the ranks were lost each time that it ran" if reason is FinishReason.ERROR else None,
        )
