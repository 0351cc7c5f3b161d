"""A request inside the engine: its specification, its tokens and outputs, and what it holds while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from llguidance import LLMatcher

from raycache.cache.held_units import Capacity
from raycache.cache.holding import PLAIN_USE, Holding, Use
from raycache.cache.keys import PackedDigests
from raycache.cache.prefetches import Prefetch
from raycache.decider.drafts import DraftState
from raycache.decider.grammar import RequestGrammar
from raycache.decider.hits import CacheReport
from raycache.errors import RequestError
from raycache.types import (
    FinishReason,
    GenerateRequest,
    Miss,
    PackedTokens,
    RequestOutput,
    SamplingParams,
    StreamPhase,
    StreamState,
    TokenLogprob,
)
from raycache.wire.plan import NO_PAGES, UNKNOWN, Row

_LOST = "the ranks were lost each time this request ran"


Told = tuple[int, str, Mapping[str, int], Miss, float, int, int, int]
"""Fields of a `RequestOutput` behind `finish_reason`, but for the error."""


class Phase(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """The immutable part of a request.

    Attributes:
        request_id: chosen by the client; unique among requests in progress.
        order: (priority, arrival number); smaller runs first.
        arrival_s: arrival time, on the engine's clock.
        deadline_s: on the same clock; None: no deadline.
        max_len: limit of prompt plus output, in tokens.
        use: tenant and eviction priority of its prefixes in the cache.
    """

    request_id: str
    sampling: SamplingParams
    seed: int
    order: tuple[int, int]
    arrival_s: float
    deadline_s: float | None
    prompt_len: int
    max_len: int
    use: Use = PLAIN_USE

    @classmethod
    def of(
        cls,
        request: GenerateRequest,
        *,
        seed: int,
        arrival: int,
        now_s: float,
        max_model_len: int,
        use: Use = PLAIN_USE,
    ) -> RequestSpec:
        """Build from a client's request, which may already have output from an engine that was lost.

        Args:
            request: validated.
            seed: used if the request sets none.
            arrival: running number of the request.
            now_s: current time, on the engine's clock.
        Raises:
            RequestError: the output has already reached its limit.
        """
        sampling = request.sampling
        if request.output and sampling.prompt_logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=None)  # delivered before the first token
        prompt_len = len(request.prompt)
        most = max_model_len if sampling.max_tokens is None else prompt_len + sampling.max_tokens
        max_len = min(most, max_model_len)
        if prompt_len + len(request.output) >= max_len:
            raise RequestError(f"output has {len(request.output)} tokens and has reached its limit", field="output")
        return cls(
            request_id=request.request_id,
            sampling=sampling,
            seed=seed if sampling.seed is None else sampling.seed,
            order=(request.priority, arrival),
            arrival_s=now_s,
            deadline_s=None if request.timeout_s is None else now_s + request.timeout_s,
            prompt_len=prompt_len,
            max_len=max_len,
            use=use,
        )


@dataclass(slots=True, eq=False)
class Request:
    """One sequence.

    Attributes:
        tokens: prompt and output, packed.
        phase: changed by `RequestQueues` only.
        run: pages, slot and progress while admitted; kept after the end until the last row completes.
        num_admissions: how often it was admitted.
        num_losses: successive gangs that were lost while it was in flight.
        ending: reason to end it as soon as it is not in flight: cancelled or late.
        may_load: whether to load its prefix from the host tier; False after a load failed.
        prefetch: fetch of its prefix from storage, or None.
        queued_s: seconds from arrival to first admission.
        report: cached tokens at its first admission.
        grammar: what its output must follow, or None.
        digests: of its first pages, as many as are known already.
        error: why it fails, once it does for a reason of its own.
        prompt_scores: log-probabilities of prompt tokens computed so far, from the second token on, if requested.
    """

    spec: RequestSpec
    tokens: bytearray
    drafts: DraftState = field(default_factory=DraftState)
    grammar: RequestGrammar | None = None
    phase: Phase = Phase.WAITING
    run: Run | None = None
    num_admissions: int = 0
    num_losses: int = 0
    ending: FinishReason | None = None
    may_load: bool = True
    prefetch: Prefetch | None = None
    queued_s: float = 0.0
    report: CacheReport = field(default_factory=CacheReport)
    prompt_scores: list[TokenLogprob | None] = field(default_factory=list)
    digests: PackedDigests = b""
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.tokens) // 4

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) // 4 - self.spec.prompt_len

    @property
    def is_in_flight(self) -> bool:
        """Whether a plan in flight has a row of it."""
        return self.run is not None and self.run.num_in_flight > 0

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return self.spec.sampling.prompt_logprobs is not None and len(self.prompt_scores) < self.spec.prompt_len

    @property
    def wanted_tops(self) -> list[int]:
        """Numbers of alternatives requested with its next log-probabilities; empty if it wants no log-probabilities."""
        sampling = self.spec.sampling
        if sampling.logprobs is None and sampling.prompt_logprobs is None:
            return []
        wanted = (sampling.logprobs, sampling.prompt_logprobs if self.is_scored else None)
        return [top for top in wanted if top is not None]

    def allowed_next(self) -> LLMatcher | None:
        """Matcher of the next tokens; None if all are allowed, or there is no next one."""
        is_over = self.phase is Phase.FINISHED
        return None if self.grammar is None or is_over else self.grammar.at(self.tokens)

    def state(self) -> StreamState:
        """Where it is now; may be called by another thread than the engine's."""
        run, prefetch = self.run, self.prefetch
        is_fetching = prefetch is not None and not (prefetch.is_done or prefetch.is_abandoned)
        if run is not None:
            phase = StreamPhase.RUNNING if run.holding.load is None else StreamPhase.LOADING
        elif is_fetching:
            phase = StreamPhase.LOADING
        else:
            phase = StreamPhase.PREEMPTED if self.num_admissions or self.num_output else StreamPhase.WAITING
        return StreamState(
            phase=phase,
            computed_tokens=0 if run is None else run.num_computed,
            output_tokens=self.num_output,
            cached_by_tier=self.report.by_tier,
        )

    def packed(self, start: int, stop: int) -> bytes:
        """Tokens [start, stop), packed."""
        return bytes(self.tokens[4 * start : 4 * stop])

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.tokens += token.to_bytes(4, "little", signed=True)

    def output(
        self,
        *tokens: int,
        logprobs: Sequence[TokenLogprob] = (),
        reason: FinishReason | None = None,
    ) -> RequestOutput:
        """Make the increment of this step for the client."""
        sampling = self.spec.sampling
        is_first = self.num_output <= 1 and bool(tokens)
        wants_scores = is_first and sampling.prompt_logprobs is not None
        return RequestOutput(
            self.spec.request_id,
            tokens,
            tuple(logprobs) if logprobs and sampling.logprobs is not None else None,
            tuple(self.prompt_scores) if wants_scores else None,
            reason,
            *self.told,
            (self.error or _LOST) if reason is FinishReason.ERROR else None,
        )

    @property
    def told(self) -> Told:
        """Fields of a `RequestOutput` that change with a request's starts and draft tokens only."""
        report, drafts = self.report, self.drafts
        return (
            report.cached_len,
            report.cut_by,
            report.by_tier,
            report.miss,
            self.queued_s,
            self.num_admissions,
            drafts.num_drafted,
            drafts.num_accepted,
        )


@dataclass(frozen=True, slots=True)
class Steady:
    """What stays the same of a run from its first token on, if its rows are then a token in and a token out: nothing is
    drafted, masked or scored for it, no log-probabilities are wanted, and it holds pages only.

    Attributes:
        stops: tokens that end the output.
        max_bytes: limit of its packed tokens.
        told: fields of each `RequestOutput` behind `finish_reason`.
    """

    request_id: str
    prompt_len: int
    stops: frozenset[int]
    max_bytes: int
    told: Told

    @classmethod
    def of(cls, request: Request, *, stops: frozenset[int]) -> Steady:
        """Of a request that has output."""
        spec = request.spec
        return cls(spec.request_id, spec.prompt_len, stops, 4 * spec.max_len, request.told)


@dataclass(slots=True, eq=False)
class Run:
    """What a request holds from admission until everything is released, and its progress.

    tokens    [ prompt ......................... | output ... ]
    computed  [ cached | chunks done so far ]                      their state is in its pages
    planned   [ .............................. | rows in flight ]  up to one token behind `tokens`: the next one
                                                               [ open ]  draft tokens in flight, if accepted

    Attributes:
        slot: index of its per-request state on the ranks.
        num_planned: value of num_computed once the rows in flight are done, if they accept no draft tokens.
        restore_at: ascending token positions at which a chunk must end and leave a restore point.
        is_kept: whether its pages enter the cache while its prompt is computed; False: after that.
        num_in_flight: rows of it in plans in flight, and in the plan that is being made.
        steady: None until its first token, and for runs of another kind.
    """

    request: Request
    slot: int
    holding: Holding
    num_computed: int
    num_planned: int
    restore_at: list[int]
    is_kept: bool = True
    num_in_flight: int = 0
    steady: Steady | None = None

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 in decode."""
        return self.request.num_tokens - self.num_computed

    @property
    def next_start(self) -> int:
        """Position of the first token of the next row."""
        return self.num_planned if self.num_in_flight else self.num_computed

    @property
    def num_open(self) -> int:
        """Draft tokens in flight: the next row begins at `next_start` or up to as many tokens later."""
        return self.request.drafts.num_in_row if self.num_in_flight else 0

    @property
    def num_next(self) -> int:
        """Value of `remaining` once the rows in flight are done."""
        left = len(self.request.tokens) // 4 - (self.num_planned if self.num_in_flight else self.num_computed)
        return left if left > 1 else 1

    @property
    def is_fed(self) -> bool:
        """Whether the input token of the next row is still being sampled."""
        return self.num_in_flight > 0 and self.num_planned == self.request.num_tokens

    @property
    def wants_row(self) -> bool:
        """Whether it needs another row, as far as is known: the token being sampled may still end it."""
        request = self.request
        if request.phase is not Phase.RUNNING or request.ending is not None:
            return False
        return not (self.num_in_flight and self.is_fed and request.num_tokens + 1 >= request.spec.max_len)

    @property
    def has_more_to_load(self) -> bool:
        """Whether storage has fetched prompt tokens beyond those computed."""
        prefetch = self.request.prefetch
        return prefetch is not None and prefetch.end > self.next_start and self.num_next > 1 and self.request.may_load

    def next_row(
        self,
        count: int,
        capacity: Capacity,
        drafts: PackedTokens = b"",
        *,
        num_next_drafts: int = 0,
        stops_at_page: bool = False,
    ) -> Row:
        """Make the row of the next `count` tokens, followed by packed draft tokens; `capacity` covers both."""
        request = self.request
        start, num_tokens = self.next_start, request.num_tokens
        is_fed = self.num_in_flight > 0 and start == num_tokens
        stop = start + count
        is_sampled = stop >= num_tokens
        self.num_planned, num_drafts = stop, len(drafts) // 4
        accepted = request.drafts.plan(num_drafts, num_next_drafts)
        return Row(
            slot=self.slot,
            start=start,
            tokens=(UNKNOWN if is_fed else request.packed(start, stop)) + drafts,
            new_pages=capacity.new_pages or NO_PAGES,
            output_position=num_tokens - request.spec.prompt_len + is_fed if is_sampled else -1,
            targets=request.packed(start + 1, min(stop + 1, request.spec.prompt_len)) if request.is_scored else b"",
            read_state=capacity.read_state,
            write_state=capacity.write_state,
            is_fed=is_fed,
            num_drafts=num_drafts,
            draft_states=capacity.draft_states,
            accepted=accepted if request.spec.sampling.has_penalties else b"",
            num_next_drafts=num_next_drafts,
            next_token=-1 if is_sampled else int.from_bytes(request.packed(stop, stop + 1), "little"),
            is_masked=is_sampled and request.grammar is not None,
            stops_at_page=stops_at_page,
        )
