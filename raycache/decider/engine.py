"""The decider of one replica: accepts requests, plans steps, returns tokens.

Not thread safe: one thread owns it. Plans are executed behind `Executor`: by a rank in this process, processes, or
Ray actors.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from raycache.cache.holding import Use
from raycache.cache.keys import Identity, digests_in
from raycache.decider.admin import CommandResult
from raycache.decider.batch import Batch
from raycache.decider.request import RequestSpec
from raycache.decider.scheduler import Scheduler
from raycache.decider.survey import Survey
from raycache.errors import PromptTooLongError, QueueFullError, RankLostError, RequestError
from raycache.parallel.board import Acks
from raycache.types import (
    CacheAction,
    CacheCommand,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerateRequest,
    PackedTokens,
    RequestOutput,
    StreamState,
    packed,
)
from raycache.wire.plan import Masks, StepPlan
from raycache.wire.results import RowResult

_POLL_S = 0.0001
"""Poll interval of the board, when a rank returns results before it acknowledges its loads."""
_DRAIN_S = 5.0
_BEATS_PER_TIMEOUT = 4
"""Heartbeats per rank timeout."""
_IDLE_S = 0.002
"""How long a step without rows waits for page moves between tiers."""


class Executor(Protocol):
    """The ranks of one gang, as the decider sees them."""

    @property
    def depth(self) -> int:
        """Plans that may be in flight: one per pipeline stage; two with one stage, so that the next is ready."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to all ranks; returns before it is executed."""
        ...

    def send_masks(self, plan: StepPlan, masks: Masks) -> None:
        """Send the masks of the last plan submitted, which has some, before the next plan."""
        ...

    def collect(self, plan: StepPlan) -> Sequence[RowResult]:
        """Wait for the results of the oldest plan in flight.

        Raises:
            RankLostError: a rank died, failed or missed its deadline.
        """
        ...

    def acks(self) -> Acks:
        """Progress of page moves that all ranks have reached; does not block."""
        ...

    def close(self) -> None:
        """End the ranks."""
        ...


class Engine:
    """Drives a scheduler and an executor.

    Args:
        executor: its gang has joined and loaded the model.
        identity: everything besides the tokens that cached state depends on; part of each cache key.
        timeout_s: a rank that does not acknowledge its loads for this long counts as lost.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        info: EngineInfo,
        scheduler: Scheduler,
        identity: Identity,
        timeout_s: float,
    ) -> None:
        self._identity = identity
        self._timeout_s = timeout_s
        self._load_s = self._collect_s = 0.0
        self._told_s = time.monotonic()
        self.info = info
        self._executor = executor
        self._scheduler = scheduler
        self._in_flight: deque[Batch] = deque()
        # Kept across a failed step: each increment is delivered exactly once.
        self._outputs: list[RequestOutput] = []
        self._arrivals = self._refused = self._rebuilds = 0
        self._random = random.SystemRandom()
        self._finish_times: deque[float] = deque(maxlen=64)
        self._surveys: deque[Survey] = deque()
        self._survey_secret = self._random.randbytes(16)
        scheduler.cache.events.flush()

    @property
    def has_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return len(self._scheduler.queues) > 0

    @property
    def has_work(self) -> bool:
        """Whether there are requests, plans in flight, page moves between tiers, or operators' questions."""
        return bool(self.has_requests or self._in_flight or self._surveys) or self._scheduler.cache.has_moves

    def add(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: the request is invalid; nothing was queued.
            PromptTooLongError: it can never run.
            QueueFullError: too many requests are waiting.
        """
        prompt, output = self._validated(request)
        if len(self._scheduler.queues.waiting) >= self.info.max_queue:
            self._refused += 1
            raise QueueFullError(self.info.max_queue, self._retry_after_s())
        self._arrivals += 1
        until_s = time.monotonic() + request.cache_ttl_s if request.cache_ttl_s else 0.0
        root = self.root(request.cache_salt)
        use = Use(root, request.cache_priority, until_s)
        now_s = time.monotonic()
        spec = RequestSpec.of(
            request,
            seed=self._random.getrandbits(62),
            arrival=self._arrivals,
            now_s=now_s,
            max_model_len=self.info.max_model_len,
            use=use,
        )
        digests = digests_in(request.page_chain, prompt, seed=root, page_size=self._identity.page_size)
        self._scheduler.add(spec, prompt + output, now_s=now_s, digests=digests)

    def root(self, cache_salt: str) -> bytes:
        """Root digest of a tenant's prefix keys."""
        return replace(self._identity, salt=cache_salt).seed()

    def cancel(self, request_id: str) -> None:
        """Cancel a request; its pages are freed in the next step."""
        self._scheduler.queues.end(request_id, FinishReason.CANCELLED)

    def step(self) -> list[RequestOutput]:
        """Plan and collect one step. Submits every plan that can run before it waits for the oldest, so that all
        pipeline stages stay busy.

        Returns:
            Output increments; empty when nothing could run.
        Raises:
            RankLostError: the gang is lost; call `restart` with a new one.
        """
        self._scheduler.acknowledge(self._executor.acks(), now_s=time.monotonic())
        while len(self._in_flight) < self._executor.depth:
            ended, batch = self._scheduler.schedule(time.monotonic())
            self._outputs += ended
            if batch is None:
                break
            batch.start_s = time.monotonic()
            self._executor.submit(batch.plan)
            self._told_s = batch.start_s
            self._in_flight.append(batch)
            self._send_masks()
        if self._surveys and not self._surveys[0].go_on():  # while the ranks work
            self._surveys.popleft()
        if self._in_flight:
            batch = self._in_flight[0]
            results = self._executor.collect(batch.plan)
            acks = self._loaded(batch)
            self._in_flight.popleft()
            self._note_pace(batch, acks)
            self._outputs += self._scheduler.complete(batch, results, acks)
            self._send_masks()
        else:
            # Ranks exit when they get no plan for too long, also while moves and commands take their time.
            if time.monotonic() - self._told_s > self._timeout_s / _BEATS_PER_TIMEOUT:
                self.heartbeat()
            if self._scheduler.cache.has_moves:
                self._scheduler.wait_for_moves(_IDLE_S)
            else:
                self._scheduler.wait_for_grammars(_IDLE_S)
        self._scheduler.cache.events.flush()
        outputs, self._outputs = self._outputs, []
        self._finish_times.extend(time.monotonic() for output in outputs if output.finish_reason is not None)
        return outputs

    def _send_masks(self) -> None:
        """Send the masks of the last plan, unless they depend on tokens that the plan before is still sampling."""
        batch = self._in_flight[-1] if self._in_flight else None
        if batch is None or not batch.needs_masks:
            return
        if len(self._in_flight) == 1 or not any(row.is_fed and row.is_masked for row in batch.rows.others.values()):
            self._executor.send_masks(batch.plan, self._scheduler.masks(batch))
            batch.needs_masks = False

    def heartbeat(self) -> None:
        """Tell idle ranks that the decider is alive; without it an idle gang exits."""
        if not self._in_flight:
            plan = self._scheduler.heartbeat()
            self._executor.submit(plan)
            self._told_s = time.monotonic()
            self._executor.collect(plan)

    def _loaded(self, batch: Batch) -> Acks:
        """Wait until all ranks have acknowledged a plan's loads; some may do so after they return results."""
        deadline = time.monotonic() + self._timeout_s
        while (acks := self._executor.acks()).loads < max(batch.loads, default=0):
            if time.monotonic() > deadline:
                raise RankLostError(-1, "unknown", batch.plan.step, "loads from the host were not acknowledged in time")
            time.sleep(_POLL_S)
        return acks

    def _note_pace(self, batch: Batch, acks: Acks) -> None:
        """Update the estimates of compute and load speed."""
        costs, now_s = self._scheduler.cache.costs, time.monotonic()
        if batch.loads:
            costs.load.note(acks.load_s - self._load_s, batch.num_loaded)
            self._load_s = acks.load_s
        elif batch.rows and not batch.is_catching_up:
            # A plan submitted while another ran started when that one ended.
            took_s = now_s - max(batch.start_s, self._collect_s)
            if batch.is_decode:
                self._scheduler.drafts.costs.note(
                    took_s,
                    batch.num_tokens,
                    num_rows=len(batch.rows),
                    num_passes=max((row.num_next_drafts for row in batch.rows.others.values()), default=0),
                )
            elif self._scheduler.ahead.is_on:
                costs.compute.note(took_s, batch.num_tokens)
        self._collect_s = now_s

    def restart(self, executor: Executor) -> None:
        """Continue on a new gang with empty pools; requests keep their tokens."""
        self._in_flight.clear()
        self._rebuilds += 1
        acks = executor.acks()
        self._executor, self._load_s = executor, acks.load_s
        self._scheduler.restart(acks)
        self._scheduler.cache.events.flush()

    def evict(self, space: str) -> bool:
        """Evict the least recently used page ("full") or restore point (a window or state space); False if none."""
        is_evicted = self._scheduler.cache.evict(space)
        self._scheduler.cache.events.flush()
        return is_evicted

    def admin(self, command: CacheCommand) -> CommandResult:
        """Start an operator's command; its result is set during later steps.

        Raises:
            ConfigError: the tier does not exist.
            RequestError: the prompt to inspect has no tokens, or ids outside the vocabulary.
        """
        if command.kind is CacheAction.INSPECT:
            if not len(command.prompt):
                raise RequestError("prompt is empty; there is nothing to inspect", field="prompt")
            _checked("prompt", command.prompt, self.info.vocab_size)
        if command.tree is not None:
            survey = Survey(
                self._scheduler.cache,
                command.tree,
                root=self.root,
                secret=self._survey_secret,
                step=self._scheduler.step,
            )
            self._surveys.append(survey)
            return survey.answer
        answer = self._scheduler.admin(command, root=self.root(command.cache_salt))
        self._scheduler.cache.events.flush()
        return answer

    def stats(self) -> EngineStats:
        """Current counters and gauges."""
        return replace(self._scheduler.stats(), refused=self._refused, rebuilds=self._rebuilds)

    def stream_states(self, request_ids: Sequence[str]) -> dict[str, StreamState]:
        """States of those of the requests that are in progress; may be called by another thread than the engine's."""
        return self._scheduler.queues.states(request_ids)

    def check(self) -> None:
        """Assert that pages, slots and locks balance."""
        self._scheduler.check()

    def close(self) -> None:
        """Stop the ranks, after a short wait for page moves to other tiers."""
        deadline = time.monotonic() + _DRAIN_S
        while self.has_work and not self.has_requests and time.monotonic() < deadline:
            self.step()
        while self._in_flight:
            self._executor.collect(self._in_flight.popleft().plan)
        self._scheduler.close()
        self._executor.submit(self._scheduler.heartbeat(is_last=True))
        self._executor.close()

    def _validated(self, request: GenerateRequest) -> tuple[PackedTokens, PackedTokens]:
        """Check a request; returns its prompt and output."""
        vocab, longest = self.info.vocab_size, self.info.max_model_len
        if request.request_id in self._scheduler.queues:
            raise RequestError.id_in_use(request.request_id)
        if len(request.prompt) == 0:
            raise RequestError("prompt is empty; send at least one token", field="prompt")
        if len(request.prompt) >= longest:
            raise PromptTooLongError(
                f"prompt has {len(request.prompt)} tokens, this server accepts at most {longest - 1} "
                f"(context of {longest} tokens, at least one for the output); shorten it, or raise --max-model-len "
                "and --kv-memory",
                field="prompt",
            )
        prompt = _checked("prompt", request.prompt, vocab)
        output = _checked("output", request.output, vocab)
        _checked("logit_bias", list(request.sampling.logit_bias), vocab)
        _checked("stop_token_ids", request.sampling.stop_token_ids, vocab)
        if request.sampling.grammar and not self.info.eos_token_ids:
            raise RequestError("this model defines no end token, which grammars need", field="grammar")
        if request.timeout_s is not None and not request.timeout_s > 0:
            raise RequestError(f"timeout_s must be above 0, got {request.timeout_s}", field="timeout_s")
        return prompt, output

    def _retry_after_s(self) -> float:
        """Time to finish a tenth of the queue at the recent pace, clamped to [1, 60] s."""
        if len(self._finish_times) < 2:
            return 1.0
        pace = (self._finish_times[-1] - self._finish_times[0]) / (len(self._finish_times) - 1)
        return min(max(pace * self.info.max_queue / 10, 1.0), 60.0)


def _checked(field: str, ids: Sequence[int], vocab_size: int) -> PackedTokens:
    """Pack token ids of a request.

    Raises:
        RequestError: they are no integers, or outside the vocabulary.
    """
    tokens, is_inside = b"", True
    if len(ids):
        try:
            tokens = packed(ids)
            # A negative number is a large one without its sign.
            is_inside = int(np.frombuffer(tokens, np.uint32).max()) < vocab_size
        except TypeError as cause:
            raise RequestError(f"{field} must be token ids, which are integers: {cause}", field=field) from cause
        except OverflowError:  # more than 32 bits
            is_inside = False
    if not is_inside:
        raise RequestError(f"{field} has a token id outside the vocabulary, [0, {vocab_size})", field=field)
    return tokens
