"""A request inside the engine: its tokens, its pages and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from raycache.cache.holding import Holding, Use
from raycache.cache.storage_tier import Prefetch
from raycache.errors import RequestError
from raycache.types import FinishReason, GenerateRequest, Miss, RequestOutput, SamplingParams, TokenLogprob


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

    Attributes:
        request_id: name given by the client.
        sampling: how to continue.
        seed: of its random numbers.
        order: (priority, arrival number); smaller runs first.
        deadline: on the engine's clock, seconds; None for none.
        max_len: most tokens of prompt and output.
        tokens: packed prompt and output.
        prompt_len, num_computed, cached_len: in tokens; cached_len is what the first admission found.
        num_planned: as num_computed, once the row in flight is done.
        cut_by: the component that kept the first admission from finding more, or "".
        cuts: positions, ascending, at which a chunk ends and leaves a restore point.
        holding: of the cache, while running.
        slot: on the ranks, while running.
        num_admissions: times that it began to run.
        num_losses: gangs that were lost while it was in flight, one after another.
        is_in_flight: a plan with one of its rows is out.
        ending: why it ends as soon as it is not in flight, if it was cancelled or is late.
        use: what its prefixes in the cache belong to, and count for.
        may_load: whether its prefix may come from the host; not after that turned out to be bad.
        prefetch: of its prefix from storage, if it was looked for there.
        cached_by_tier, miss: where cached_len came from, and why it is not more.
        prompt_scores: log-probabilities of the prompt's tokens found so far, if wanted; from the second token on.
    """

    request_id: str
    sampling: SamplingParams
    seed: int
    order: tuple[int, int]
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
    num_losses: int = 0
    is_in_flight: bool = False
    ending: FinishReason | None = None
    prompt_scores: list[TokenLogprob | None] = field(default_factory=list)
    use: Use = field(default_factory=Use)
    may_load: bool = True
    prefetch: Prefetch | None = None
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    miss: Miss = Miss.NONE

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
    def is_scored(self) -> bool:
        """Whether log-probabilities of prompt tokens are still wanted."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_scores) < self.prompt_len

    def packed(self, start: int, stop: int) -> bytes:
        """Tokens [start, stop), packed."""
        return bytes(self.tokens[4 * start : 4 * stop])

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.tokens += token.to_bytes(4, "little", signed=True)

    def output(
        self,
        token: int | None = None,
        *,
        logprob: TokenLogprob | None = None,
        reason: FinishReason | None = None,
    ) -> RequestOutput:
        """What to tell the client of this step."""
        is_first = self.num_output <= 1 and token is not None
        wants_scores = is_first and self.sampling.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            token_ids=() if token is None else (token,),
            logprobs=None if logprob is None or self.sampling.logprobs is None else (logprob,),
            prompt_logprobs=tuple(self.prompt_scores) if wants_scores else None,
            finish_reason=reason,
            cached_tokens=self.cached_len,
            cut_by=self.cut_by,
            cached_by_tier=self.cached_by_tier,
            miss=self.miss,
            error="the ranks were lost each time that it ran" if reason is FinishReason.ERROR else None,
        )
