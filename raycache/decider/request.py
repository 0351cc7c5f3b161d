"""A request inside the engine: its specification, its tokens and its output increments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from raycache.cache.holding import PLAIN_USE, Use
from raycache.cache.prefetches import Prefetch
from raycache.decider.drafts import DraftState
from raycache.decider.hits import CacheReport
from raycache.errors import RequestError
from raycache.types import FinishReason, GenerateRequest, RequestOutput, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from raycache.decider.run import Run


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
        prompt_scores: log-probabilities of prompt tokens computed so far, from the second token on, if requested.
    """

    spec: RequestSpec
    tokens: bytearray
    drafts: DraftState = field(default_factory=DraftState)
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
        wanted = (sampling.logprobs, sampling.prompt_logprobs if self.is_scored else None)
        return [top for top in wanted if top is not None]

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
        sampling, report, drafts = self.spec.sampling, self.report, self.drafts
        is_first = self.num_output <= 1 and bool(tokens)
        wants_scores = is_first and sampling.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.spec.request_id,
            token_ids=tokens,
            logprobs=tuple(logprobs) if logprobs and sampling.logprobs is not None else None,
            prompt_logprobs=tuple(self.prompt_scores) if wants_scores else None,
            finish_reason=reason,
            cached_tokens=report.cached_len,
            cut_by=report.cut_by,
            cached_by_tier=report.by_tier,
            miss=report.miss,
            queued_s=self.queued_s,
            num_starts=self.num_admissions,
            drafted_tokens=drafts.num_drafted,
            accepted_tokens=drafts.num_accepted,
            error="the ranks were lost each time this request ran" if reason is FinishReason.ERROR else None,
        )
