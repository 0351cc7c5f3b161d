"""The decider of one replica: takes requests in, plans steps, hands out tokens.

Not thread safe: one thread owns it. What executes the plans is behind `Executor`: the caller's own rank, processes,
    or Ray actors.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from raycache.engine.plan import RowResult, StepPlan
from raycache.engine.request import Request
from raycache.engine.scheduler import Batch, Scheduler
from raycache.errors import PromptTooLongError, QueueFullError, RequestError
from raycache.types import EngineInfo, EngineStats, FinishReason, GenerateRequest, RequestOutput


class Executor(Protocol):
    """The ranks of one gang, as the decider sees them."""

    @property
    def depth(self) -> int:
        """Plans that may be in flight: the number of pipeline stages."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to all ranks; returns before it is executed."""
        ...

    def collect(self, plan: StepPlan) -> list[RowResult]:
        """Wait for the oldest plan that was submitted.

        Raises:
            RankLostError: a rank died, failed or missed its deadline.
        """
        ...

    def close(self) -> None:
        """End the ranks."""
        ...


class Engine:
    """Scheduler and executor, put together.

    Args:
        executor: of a gang that has joined and loaded.
        info: facts about the model and the pool.
        scheduler: with the same pool and page size.
    """

    def __init__(self, executor: Executor, *, info: EngineInfo, scheduler: Scheduler) -> None:
        self.info = info
        self._executor = executor
        self._scheduler = scheduler
        self._in_flight: deque[Batch] = deque()
        # Kept over a step that fails: these increments are told once.
        self._outputs: list[RequestOutput] = []
        self._arrivals = 0
        self._random = random.SystemRandom()
        self._finish_times: deque[float] = deque(maxlen=64)

    @property
    def has_requests(self) -> bool:
        """Whether a step would have something to do."""
        return self._scheduler.has_requests

    def add(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: something in it is wrong; nothing was queued.
            PromptTooLongError: it can never run.
            QueueFullError: too many wait.
        """
        self._validate(request)
        if self._scheduler.num_waiting >= self.info.max_queue:
            raise QueueFullError(self.info.max_queue, self._retry_after_s())
        self._arrivals += 1
        self._scheduler.add(
            Request.create(
                request,
                seed=self._random.getrandbits(62),
                arrival=self._arrivals,
                now_s=time.monotonic(),
                max_model_len=self.info.max_model_len,
            )
        )

    def cancel(self, request_id: str) -> None:
        """End a request; its pages are free in the next step."""
        self._scheduler.end(request_id, FinishReason.CANCELLED)

    def step(self) -> list[RequestOutput]:
        """Plan and collect one step, keeping every pipeline stage busy.

        Returns:
            Increments of requests; empty when nothing could run.
        Raises:
            RankLostError: the gang is lost; `restart` goes on with another.
        """
        while len(self._in_flight) < self._executor.depth:
            self._outputs += self._scheduler.take_ended(time.monotonic())
            batch = self._scheduler.schedule()
            if batch is None:
                break
            self._executor.submit(batch.plan)
            self._in_flight.append(batch)
        if self._in_flight:
            batch = self._in_flight[0]
            results = self._executor.collect(batch.plan)
            self._in_flight.popleft()
            self._outputs += self._scheduler.complete(batch, results)
        outputs, self._outputs = self._outputs, []
        self._finish_times.extend(time.monotonic() for output in outputs if output.finish_reason is not None)
        return outputs

    def heartbeat(self) -> None:
        """Tell idle ranks that the decider lives; an idle gang ends itself without."""
        if not self._in_flight:
            plan = self._scheduler.heartbeat()
            self._executor.submit(plan)
            self._executor.collect(plan)

    def restart(self, executor: Executor) -> None:
        """Go on with another gang, whose pools are empty; requests keep the tokens that they have."""
        self._in_flight.clear()
        self._executor = executor
        self._scheduler.restart()

    def evict(self, space: str) -> bool:
        """Evict the least recently used page ("full") or restore point (a window or state space); False if none."""
        return self._scheduler.evict(space)

    def stats(self) -> EngineStats:
        """Counters and balances."""
        return self._scheduler.stats()

    def check(self) -> None:
        """Assert all balances."""
        self._scheduler.check()

    def close(self) -> None:
        """End the ranks in good order."""
        while self._in_flight:
            self._executor.collect(self._in_flight.popleft().plan)
        self._executor.submit(self._scheduler.heartbeat(is_last=True))
        self._executor.close()

    def _validate(self, request: GenerateRequest) -> None:
        vocab, longest = self.info.vocab_size, self.info.max_model_len
        if request.request_id in self._scheduler:
            raise RequestError(f"request_id {request.request_id!r} is in use already", field="request_id")
        if len(request.prompt) == 0:
            raise RequestError("prompt is empty; it needs at least one token", field="prompt")
        if len(request.prompt) >= longest:
            raise PromptTooLongError(
                f"prompt has {len(request.prompt)} tokens, this server takes at most {longest - 1} "
                f"(context of {longest} tokens, at least one for the output); shorten it, or raise --max-model-len "
                "and --kv-memory",
                field="prompt",
            )
        _check_ids("prompt", request.prompt, vocab)
        _check_ids("logit_bias", list(request.sampling.logit_bias), vocab)
        _check_ids("stop_token_ids", request.sampling.stop_token_ids, vocab)
        if request.timeout_s is not None and not request.timeout_s > 0:
            raise RequestError(f"timeout_s must be above 0, got {request.timeout_s}", field="timeout_s")

    def _retry_after_s(self) -> float:
        """Time in which the recent pace finishes a tenth of the queue, 1 to 60 s."""
        if len(self._finish_times) < 2:
            return 1.0
        pace = (self._finish_times[-1] - self._finish_times[0]) / (len(self._finish_times) - 1)
        return min(max(pace * self.info.max_queue / 10, 1.0), 60.0)


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise RequestError(f"{field} has a token id outside the vocabulary, [0, {vocab_size})", field=field)
