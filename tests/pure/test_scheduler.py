"""The decider against a twin: whatever happens, each request gets the tokens that it would get alone and uncached."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from llguidance import LLTokenizer, TokenizerWrapper

from raycache.cache.keys import Identity
from raycache.cache.sequences import SequenceCache
from raycache.cache.spaces import SpaceSizes
from raycache.decider.budget import StepBudget
from raycache.decider.drafts import Drafts
from raycache.decider.engine import Engine
from raycache.decider.grammar import Grammars, SameThread
from raycache.decider.scheduler import Scheduler
from raycache.errors import PromptTooLongError, QueueFullError, RankLostError, RequestError
from raycache.memory.component import window_pages
from raycache.types import (
    EngineInfo,
    FinishReason,
    GenerateRequest,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from raycache.wire.plan import MAX_SCORED_TOKENS, StepPlan
from tests.oracle.drafters import KnownTexts
from tests.oracle.twin import EOS, VOCAB, TwinExecutor, continuation, logprob, prompt_scores

in_every_flow = pytest.mark.parametrize(("stages", "plans_ahead"), [(1, False), (1, True), (3, False)])

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def make_engine(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_step_tokens: int = 32,
    prompt_share: float = 1.0,
    max_running: int = 8,
    max_queue: int = 100,
    stages: int = 1,
    plans_ahead: bool = False,
    prefix_cache: bool = True,
    max_model_len: int = 10_000,
    window: int = 0,
    has_state: bool = False,
    points: int = 8,
    interval: int = 0,
    drafts: Drafts | None = None,
    drafter: KnownTexts | None = None,
    threads: Executor | None = None,
) -> tuple[Engine, TwinExecutor]:
    drafts = drafts or Drafts()
    sizes = make_sizes(
        num_pages, page_size, max_running, window=window, has_state=has_state, points=points, drafts=drafts.most
    )
    executor = TwinExecutor(sizes, depth=2 if plans_ahead else stages, drafter=drafter)
    info = EngineInfo(
        model="twin",
        model_dir="",
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        max_model_len=min(max_model_len, num_pages * page_size),
        page_size=page_size,
        num_pages=num_pages,
        max_queue=max_queue,
    )
    scheduler = Scheduler(
        cache=SequenceCache(sizes, is_kept=prefix_cache),
        budget=StepBudget(max_step_tokens, prompt_share),
        max_running=max_running,
        micro_batches=stages,
        eos_token_ids=(EOS,),
        restore_interval=interval,
        drafts=drafts,
        grammars=Grammars(twin_table, threads or SameThread()),
    )
    identity = Identity("twin", page_size)
    return Engine(executor, info=info, scheduler=scheduler, identity=identity, timeout_s=5.0), executor


class _Letters:
    """The twin's vocabulary for llguidance: token 1 is "a"."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = (b"<end>", *(bytes([96 + i]) for i in range(1, VOCAB)))
    special_token_ids = (EOS,)

    def __call__(self, text: bytes) -> list[int]:
        return [letter - 96 for letter in text]


def twin_table() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Letters()), eos_token=[EOS])


def make_sizes(
    num_pages: int,
    page_size: int,
    max_running: int = 8,
    *,
    window: int = 0,
    has_state: bool = False,
    points: int = 8,
    drafts: int = 0,
) -> SpaceSizes:
    """Pools with room for `points` restore points beside what running requests need."""
    pages = window_pages(window, page_size)
    return SpaceSizes(
        num_pages=num_pages,
        page_size=page_size,
        windows={"window": (window, (2 * max_running + points) * pages)} if window else {},
        states={"state": (2 + drafts) * max_running + points} if has_state else {},
    )


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)


def prompt_of(stream: int, length: int) -> list[int]:
    """The first tokens of one of several endless texts."""
    return np.random.default_rng(stream).integers(1, VOCAB, 400).tolist()[:length]


@dataclass
class Expected:
    """A request under way, and what is right for it."""

    request: GenerateRequest
    tokens: list[int]
    reason: FinishReason
    got: list[int] = field(default_factory=list)
    scores: tuple[TokenLogprob | None, ...] | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: FinishReason | None = None
    is_cancelled: bool = False

    def push(self, output: RequestOutput, *, page_size: int) -> None:
        prompt, sampling = self.request.prompt, self.request.sampling
        assert self.ended is None, "an increment after the last one"
        self.got += output.token_ids
        self.logprobs += output.logprobs or ()
        self.ended = output.finish_reason
        if output.prompt_logprobs is not None:
            assert self.scores is None, "prompt log-probabilities come once"
            self.scores = output.prompt_logprobs
        assert output.cached_tokens < len(prompt) and output.cached_tokens % page_size == 0
        if self.ended in (FinishReason.CANCELLED, FinishReason.TIMEOUT):
            assert self.is_cancelled or self.request.timeout_s is not None
            assert self.got == self.tokens[: len(self.got)]
        elif self.ended is not None:
            assert (self.got, self.ended) == (self.tokens, self.reason)
        if self.got:
            wanted = sampling.prompt_logprobs
            assert self.scores == (None if wanted is None else prompt_scores(prompt, num_top=wanted))
        if sampling.logprobs is not None:
            right = [
                logprob([*prompt, *self.tokens[:i]], token, num_top=sampling.logprobs)
                for i, token in enumerate(self.got)
            ]
            assert self.logprobs == right


class Service(RuleBasedStateMachine):
    """Requests come, go and are lost in any order, on a pool that is always too small."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4]),
        num_pages=st.integers(3, 14),
        max_step_tokens=st.sampled_from([1, 2, 3, 5, 7, 16]),
        prompt_share=st.sampled_from([1.0, 0.1, 0.5]),
        max_running=st.integers(1, 5),
        flow=st.sampled_from([(1, False), (1, True), (1, True), (3, False)]),
        prefix_cache=st.sampled_from([True, True, False]),
        window=st.sampled_from([0, 0, 2, 5, 9]),
        has_state=st.booleans(),
        points=st.integers(0, 5),
        interval=st.sampled_from([0, 3, 8]),
        most_drafts=st.sampled_from([0, 0, 1, 3, 7]),
        are_from_ranks=st.booleans(),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        max_step_tokens: int,
        prompt_share: float,
        max_running: int,
        flow: tuple[int, bool],
        prefix_cache: bool,
        window: int,
        has_state: bool,
        points: int,
        interval: int,
        most_drafts: int,
        are_from_ranks: bool,
    ) -> None:
        self.sizes = make_sizes(
            num_pages,
            page_size,
            max_running,
            window=window,
            has_state=has_state,
            points=points,
            drafts=most_drafts,
        )
        self.drafter = KnownTexts([], vocab=VOCAB)
        self.engine, self.executor = make_engine(
            num_pages=num_pages,
            page_size=page_size,
            max_step_tokens=max_step_tokens,
            prompt_share=prompt_share,
            max_running=max_running,
            max_queue=6,
            stages=flow[0],
            plans_ahead=flow[1],
            prefix_cache=prefix_cache,
            max_model_len=40,
            window=window,
            has_state=has_state,
            points=points,
            interval=interval,
            drafts=Drafts(
                self.drafter if most_drafts and not are_from_ranks else None,
                most=most_drafts,
                are_from_ranks=are_from_ranks,
                is_adaptive=most_drafts == 3,
            ),
            drafter=self.drafter,
        )
        self.requests: dict[str, Expected] = {}
        self.ended: list[Expected] = []
        self.arrivals = 0
        self.losses = 0

    @rule(
        stream=st.integers(0, 2),
        shared=st.integers(0, 30),
        suffix=st.lists(st.integers(1, VOCAB - 1), max_size=3),
        max_tokens=st.sampled_from([None, 1, 2, 7]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        logprobs=st.sampled_from([None, None, None, 0, 2]),
        scores=st.sampled_from([None, None, None, 0, 3]),
        ignore_eos=st.booleans(),
        stop=st.sampled_from([(), (), (5,)]),
        timeout_s=st.sampled_from([None, None, None, None, 1e-9]),
        penalty=st.sampled_from([0.0, 0.0, 0.0, 0.5]),
    )
    def add(
        self,
        stream: int,
        shared: int,
        suffix: list[int],
        max_tokens: int | None,
        priority: int,
        logprobs: int | None,
        scores: int | None,
        ignore_eos: bool,
        stop: tuple[int, ...],
        timeout_s: float | None,
        penalty: float,
    ) -> None:
        prompt = (prompt_of(stream, shared) + suffix)[: self.engine.info.max_model_len - 1] or [1]
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=stop,
            logprobs=logprobs,
            prompt_logprobs=scores,
            presence_penalty=penalty,
        )
        self._add(prompt, sampling, priority=priority, timeout_s=timeout_s)

    @precondition(lambda self: any(each.got for each in self.ended))
    @rule(data=st.data(), suffix=st.lists(st.integers(1, VOCAB - 1), max_size=3))
    def go_on_with_an_answer(self, data: st.DataObject, suffix: list[int]) -> None:
        before = data.draw(st.sampled_from([each for each in self.ended if each.got]), label="conversation")
        prompt = [*before.request.prompt, *before.got, *suffix][: self.engine.info.max_model_len - 1]
        self._add(prompt, greedy(3), priority=0, timeout_s=None)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)), label="request")
        self.requests[request_id].is_cancelled = True
        self.engine.cancel(request_id)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._take(self.engine.step())

    # A request in flight at a third loss in a row would end with an error: see the test of that.
    @precondition(lambda self: self.requests and self.losses < 2)
    @rule()
    def lose_the_gang(self) -> None:
        self.losses += 1
        self.executor.is_lost = True
        for _ in range(3):
            try:
                self._take(self.engine.step())
            except RankLostError:
                break
        self.executor = TwinExecutor(self.sizes, depth=self.executor.depth, drafter=self.drafter)
        self.engine.restart(self.executor)
        assert self.engine.stats().pages_free == self.engine.info.num_pages

    @rule(space=st.sampled_from(["window", "state", "full"]))
    def evict_a_component(self, space: str) -> None:
        self.engine.evict(space)

    @rule()
    def beat(self) -> None:
        self.engine.heartbeat()

    @invariant()
    def balances_hold(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self._take(self.engine.step())
            self.engine.check()
        stats = self.engine.stats()
        note(f"{stats}")
        assert not self.requests and not self.engine.has_requests, "requests never end"
        assert (stats.running, stats.waiting, stats.pages_in_use, stats.pages_locked) == (0, 0, 0, 0)
        assert sum(stats.finished.values()) == len(self.ended)
        self.engine.close()

    def _add(self, prompt: list[int], sampling: SamplingParams, *, priority: int, timeout_s: float | None) -> None:
        # Ids are used again: a client may.
        request_id = f"r{self.arrivals % 9}"
        self.arrivals += 1
        request = GenerateRequest(request_id, prompt, sampling, priority, timeout_s)
        if request_id in self.requests:
            return
        try:
            self.engine.add(request)
        except QueueFullError as error:
            assert self.engine.stats().waiting >= error.limit
            return
        tokens, reason = continuation(prompt, sampling, max_len=self.engine.info.max_model_len)
        self.drafter.texts.append([*prompt, *tokens])
        self.requests[request_id] = Expected(request, tokens, reason)

    def _take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            expected = self.requests[output.request_id]
            expected.push(output, page_size=self.engine.info.page_size)
            if expected.ended is not None:
                self.ended.append(self.requests.pop(output.request_id))


Service.TestCase.settings = settings(stateful_step_count=40)
TestService = Service.TestCase


def add(engine: Engine, name: str, prompt: Sequence[int], max_tokens: int = 4, **kwargs: object) -> list[int]:
    """Queue a greedy request; the tokens that are right for it."""
    sampling = kwargs.pop("sampling", greedy(max_tokens))
    engine.add(GenerateRequest(name, prompt, sampling, **kwargs))  # type: ignore[arg-type]
    return continuation(prompt, sampling, max_len=engine.info.max_model_len)[0]  # type: ignore[arg-type]


def run(engine: Engine, *, most: int = 500) -> dict[str, list[int]]:
    """Step until all is done; tokens per request."""
    found: dict[str, list[int]] = {}
    for _ in range(most):
        if not engine.has_work:
            return found
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check()
    raise AssertionError(f"requests never end: {engine.stats()}")


def computed(plan: StepPlan) -> list[int]:
    return [row.num_tokens for row in plan.rows]


def test_smaller_priorities_run_first_and_equal_ones_in_order_of_arrival() -> None:
    engine, _ = make_engine(max_running=1)
    for name, priority in (("b", 1), ("c", 1), ("a", 0), ("z", 5)):
        add(engine, name, [1, 2, 3], priority=priority)
    order = []
    while engine.has_requests:
        order += [output.request_id for output in engine.step() if output.finish_reason]
    assert order == ["a", "b", "c", "z"]


def test_a_cancelled_request_frees_its_pages_in_the_next_step() -> None:
    engine, _ = make_engine()
    add(engine, "gone", prompt_of(0, 30), max_tokens=50)
    engine.step()
    assert engine.stats().pages_in_use + engine.stats().pages_locked > 0
    engine.cancel("gone")
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.CANCELLED
    stats = engine.stats()
    assert (stats.pages_in_use, stats.pages_locked, stats.running) == (0, 0, 0)
    assert not engine.has_requests
    engine.check()


def test_a_cancelled_request_that_waits_leaves_the_queue() -> None:
    engine, executor = make_engine(max_running=1)
    add(engine, "runs", [1, 2], max_tokens=30)
    engine.step()
    for i in range(20):
        add(engine, f"waits{i}", [3, 4])
        engine.cancel(f"waits{i}")
    ended = [output for output in engine.step() if output.finish_reason]
    assert len(ended) == 20
    assert engine.stats().waiting == 0
    assert all(computed(plan) == [1] for plan in executor.plans[1:])
    engine.check()


def test_the_queue_of_cancelled_requests_does_not_grow_without_bound() -> None:
    engine, _ = make_engine(max_running=1, num_pages=3000)
    add(engine, "runs", [1, 2], max_tokens=2000)
    for i in range(1000):
        add(engine, f"waits{i}", [3, 4], priority=9)
        engine.cancel(f"waits{i}")
        engine.step()
    assert len(engine._scheduler.queues.waiting) < 100
    engine.check()


def test_cancelling_what_has_ended_or_never_was_does_nothing() -> None:
    engine, _ = make_engine()
    engine.cancel("nobody")
    right = add(engine, "a", [1, 2, 3])
    assert run(engine) == {"a": right}
    engine.cancel("a")
    assert engine.step() == []
    engine.check()


def test_a_deadline_ends_a_request_with_timeout() -> None:
    engine, _ = make_engine()
    add(engine, "late", [1, 2, 3], max_tokens=200, timeout_s=0.5)
    right = add(engine, "free", [4, 5], max_tokens=3)
    assert len(engine.step()) == 2
    time.sleep(0.5)
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs["late"].finish_reason is FinishReason.TIMEOUT
    assert run(engine)["free"] == right[2:]


def test_a_deadline_counts_while_waiting() -> None:
    engine, _ = make_engine(max_running=1)
    add(engine, "runs", [1, 2], max_tokens=9)
    engine.step()
    add(engine, "waits", [1, 2], timeout_s=1e-6)
    time.sleep(0.001)
    assert {o.request_id: o.finish_reason for o in engine.step()}["waits"] is FinishReason.TIMEOUT


def test_the_deadline_of_an_ended_request_does_not_end_a_later_one_of_the_same_name() -> None:
    engine, _ = make_engine()
    add(engine, "a", [1, 2], max_tokens=1, timeout_s=0.05)
    run(engine)
    right = add(engine, "a", [1, 2], max_tokens=9)
    time.sleep(0.06)
    assert run(engine)["a"] == right


def test_a_timeout_is_told_although_the_gang_is_lost_in_that_step() -> None:
    engine, executor = make_engine()
    add(engine, "stays", [1, 2], max_tokens=9)
    engine.step()
    add(engine, "late", [1, 2], timeout_s=1e-6)
    time.sleep(0.001)
    executor.is_lost = True
    with pytest.raises(RankLostError):
        engine.step()
    engine.restart(TwinExecutor(make_sizes(64, 4)))
    assert {o.request_id: o.finish_reason for o in engine.step()}["late"] is FinishReason.TIMEOUT
    assert engine.stats().rebuilds == 1
    (stays,) = [output for output in engine.step() if output.request_id == "stays"]
    assert stays.num_starts == 2


def test_the_time_in_the_queue_is_that_before_the_first_start() -> None:
    engine, _ = make_engine(max_running=1)
    add(engine, "first", [1, 2], max_tokens=2)
    add(engine, "second", [3, 4], max_tokens=2)
    waited = {}
    while engine.has_requests:
        waited |= {output.request_id: output for output in engine.step()}
        time.sleep(0.02)
    assert waited["first"].queued_s >= 0 and waited["second"].queued_s >= 0.02
    assert waited["second"].num_starts == 1


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    engine, _ = make_engine(max_queue=2, max_running=1)
    add(engine, "a", [1, 2], max_tokens=50)
    engine.step()
    add(engine, "b", [1, 2])
    add(engine, "c", [1, 2])
    with pytest.raises(QueueFullError) as refusal:
        add(engine, "d", [1, 2])
    assert refusal.value.limit == 2 and refusal.value.retry_after_s >= 1
    assert engine.stats().refused == 1
    run(engine)
    add(engine, "d", [1, 2])
    run(engine)


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    engine, _ = make_engine(num_pages=4, page_size=4)
    with pytest.raises(PromptTooLongError, match="16 tokens.*at most 15") as refusal:
        add(engine, "long", prompt_of(0, 16))
    assert refusal.value.field == "prompt"
    right = add(engine, "fits", prompt_of(0, 15), max_tokens=9)
    assert run(engine) == {"fits": right}
    assert len(right) == 1


@pytest.mark.parametrize(
    ("prompt", "sampling", "timeout_s", "field"),
    [
        ([], GREEDY, None, "prompt"),
        ([1, VOCAB], GREEDY, None, "prompt"),
        ([1, -1], GREEDY, None, "prompt"),
        ([1], SamplingParams(logit_bias={VOCAB: 1.0}), None, "logit_bias"),
        ([1], SamplingParams(stop_token_ids=(VOCAB,)), None, "stop_token_ids"),
        ([1], GREEDY, 0.0, "timeout_s"),
        ([1], GREEDY, float("nan"), "timeout_s"),
    ],
)
def test_a_wrong_request_is_refused_and_named(
    prompt: list[int], sampling: SamplingParams, timeout_s: float | None, field: str
) -> None:
    engine, _ = make_engine()
    with pytest.raises(RequestError) as refusal:
        engine.add(GenerateRequest("a", prompt, sampling, timeout_s=timeout_s))
    assert refusal.value.field == field
    assert not engine.has_requests


def test_a_name_in_use_is_refused() -> None:
    engine, _ = make_engine()
    right = add(engine, "a", [1, 2])
    with pytest.raises(RequestError, match="in use"):
        add(engine, "a", [3])
    assert run(engine) == {"a": right}


def test_a_second_request_finds_the_prompt_and_the_answer_of_the_first() -> None:
    engine, _ = make_engine()
    prompt = prompt_of(0, 30)
    right = add(engine, "a", prompt, max_tokens=10)
    run(engine)
    add(engine, "b", [*prompt, *right, 7], max_tokens=1)
    (output,) = engine.step()
    assert output.cached_tokens == 36  # 30 + 10 tokens, of which the last was never computed: 9 whole pages
    assert engine.stats().cached_tokens == 36


@in_every_flow
def test_requests_with_one_long_prefix_that_arrive_together_compute_it_once(stages: int, plans_ahead: bool) -> None:
    engine, _ = make_engine(max_step_tokens=16, stages=stages, plans_ahead=plans_ahead)
    shared = prompt_of(0, 80)
    right = {f"r{i}": add(engine, f"r{i}", [*shared, 1 + i], max_tokens=2) for i in range(5)}
    assert run(engine) == right
    stats = engine.stats()
    assert stats.computed_tokens == 80 + 5 * 1 + 5 * 1  # the prefix once, each last prompt token, each first output
    assert stats.cached_tokens == 4 * 80


def test_requests_that_share_nothing_do_not_wait_for_each_other() -> None:
    engine, executor = make_engine(max_step_tokens=64)
    right = {f"r{i}": add(engine, f"r{i}", prompt_of(i, 12), max_tokens=2) for i in range(4)}
    assert run(engine) == right
    assert computed(executor.plans[0]) == [12] * 4


def test_a_long_prompt_does_not_stop_decode() -> None:
    engine, executor = make_engine(max_step_tokens=8)
    right = {"chat": add(engine, "chat", [1, 2, 3], max_tokens=40)}
    engine.step()
    right["long"] = add(engine, "long", prompt_of(0, 100), max_tokens=2)
    found = run(engine)
    assert found["long"] == right["long"] and found["chat"] == right["chat"][1:]
    prefill = [plan for plan in executor.plans[1:] if max(computed(plan)) > 1]
    assert len(prefill) >= 100 // 7
    assert all(computed(plan) == [1, 7] for plan in prefill[:-1])


def test_a_step_keeps_to_its_token_budget() -> None:
    engine, executor = make_engine(max_step_tokens=5)
    right = {f"r{i}": add(engine, f"r{i}", prompt_of(i, 3 + i), max_tokens=5) for i in range(8)}
    assert run(engine) == right
    assert max(sum(computed(plan)) for plan in executor.plans) == 5


@pytest.mark.parametrize(("stages", "plans_ahead"), [(1, False), (1, True), (2, False), (4, False)])
def test_a_batch_has_at_most_max_running_requests(stages: int, plans_ahead: bool) -> None:
    engine, executor = make_engine(max_running=3, stages=stages, plans_ahead=plans_ahead)
    right = {f"r{i}": add(engine, f"r{i}", [1 + i], max_tokens=5) for i in range(9)}
    most = 0
    found: dict[str, list[int]] = {}
    while engine.has_requests:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
        most = max(most, engine.stats().running)
    assert found == right
    assert most == 3
    assert max(len(plan.rows) for plan in executor.plans) <= -(-3 // stages)


def test_running_requests_are_spread_over_the_stages() -> None:
    engine, executor = make_engine(stages=4, max_running=8)
    for i in range(8):
        add(engine, f"r{i}", [1 + i], max_tokens=12)
    run(engine)
    assert [len(plan.rows) for plan in executor.plans[8:24]] == [2] * 16


@pytest.mark.parametrize("prefix_cache", [True, False])
@in_every_flow
def test_a_preempted_request_goes_on_with_the_same_tokens(prefix_cache: bool, stages: int, plans_ahead: bool) -> None:
    engine, _ = make_engine(
        num_pages=12, page_size=4, prefix_cache=prefix_cache, stages=stages, plans_ahead=plans_ahead
    )
    right = {f"r{i}": add(engine, f"r{i}", prompt_of(i, 8), max_tokens=30) for i in range(4)}
    assert run(engine) == right
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.output_tokens == 4 * 30


def test_the_request_that_is_last_in_order_gives_its_pages_back() -> None:
    engine, _ = make_engine(num_pages=12, page_size=4)
    for i in range(3):
        add(engine, f"r{i}", prompt_of(i, 8), max_tokens=30)
    ended = []
    while engine.has_requests:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert engine.stats().preemptions > 0
    assert ended == ["r0", "r1", "r2"]


def test_an_important_request_takes_the_pages_of_one_that_is_not() -> None:
    engine, _ = make_engine(num_pages=8, page_size=4)
    right = {"low": add(engine, "low", prompt_of(0, 20), max_tokens=10, priority=1)}
    got = [output.token_ids[0] for _ in range(3) for output in engine.step()]
    right["high"] = add(engine, "high", prompt_of(1, 20), max_tokens=2)
    ended = []
    found: dict[str, list[int]] = {"low": got}
    while engine.has_requests:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
            ended += [output.request_id] if output.finish_reason else []
        engine.check()
    assert ended == ["high", "low"]
    assert found == right


def test_a_request_that_is_first_in_order_keeps_its_pages_while_another_decodes() -> None:
    engine, _ = make_engine(num_pages=8, page_size=4, max_step_tokens=4, prefix_cache=False)
    add(engine, "first", prompt_of(0, 24), max_tokens=2)
    engine.step()
    add(engine, "second", [1, 2, 3], max_tokens=12)
    run(engine)
    assert engine.stats().computed_tokens < 2 * (24 + 2 + 3 + 12)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_prompt_that_runs_out_of_pages_does_not_take_those_of_a_row_in_the_same_plan(prefix_cache: bool) -> None:
    engine, _ = make_engine(num_pages=20, page_size=1, max_step_tokens=2, prefix_cache=prefix_cache)
    right = {"low": add(engine, "low", [1, 2], max_tokens=17, priority=1)}
    found = {"low": [token for _ in range(2) for output in engine.step() for token in output.token_ids]}
    right["high"] = add(engine, "high", prompt_of(0, 12), max_tokens=3)
    for name, tokens in run(engine).items():
        found.setdefault(name, []).extend(tokens)
    assert found == right


def test_a_request_that_kills_every_gang_ends_with_an_error_and_the_others_go_on() -> None:
    engine, executor = make_engine(max_running=1)
    add(engine, "poison", prompt_of(0, 20), max_tokens=4)
    right = {"fine": add(engine, "fine", prompt_of(1, 20), max_tokens=4)}
    for _ in range(3):
        executor.is_lost = True
        with pytest.raises(RankLostError):
            engine.step()
        executor = TwinExecutor(make_sizes(64, 4))
        engine.restart(executor)
    ended, first = engine.step()
    assert (ended.request_id, ended.finish_reason) == ("poison", FinishReason.ERROR) and ended.error
    assert [*first.token_ids, *run(engine)["fine"]] == right["fine"]
    engine.check()


@in_every_flow
def test_a_lost_gang_does_not_change_the_tokens(stages: int, plans_ahead: bool) -> None:
    engine, executor = make_engine(stages=stages, plans_ahead=plans_ahead, max_step_tokens=16)
    right = {f"r{i}": add(engine, f"r{i}", prompt_of(i % 2, 20 + i), max_tokens=9) for i in range(5)}
    found: dict[str, list[int]] = {name: [] for name in right}
    for _ in range(4):
        for output in engine.step():
            found[output.request_id] += output.token_ids
    executor.is_lost = True
    with pytest.raises(RankLostError):
        engine.step()
    engine.restart(TwinExecutor(make_sizes(64, 4), depth=executor.depth))
    engine.check()
    assert engine.stats().pages_free == 64
    for name, tokens in run(engine).items():
        found[name] += tokens
    assert found == right


def test_eviction_makes_room_for_other_prefixes_and_forgets_the_oldest_first() -> None:
    engine, _ = make_engine(num_pages=12, page_size=4)
    for stream in (0, 1, 2):
        add(engine, f"r{stream}", prompt_of(stream, 17), max_tokens=1)
        run(engine)
    assert engine.stats().evicted_pages > 0

    def cached(stream: int) -> int:
        add(engine, "again", prompt_of(stream, 17), max_tokens=1)
        return sum(output.cached_tokens for output in engine.step())

    assert cached(2) == cached(1) == 16
    assert cached(0) == 12  # lost its end alone


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    engine, _ = make_engine(prefix_cache=False)
    for name in ("a", "b"):
        right = add(engine, name, prompt_of(0, 30))
        assert run(engine) == {name: right}
    stats = engine.stats()
    assert stats.cached_tokens == 0 and stats.pages_free == stats.pages_total


def test_prompt_logprobs_recompute_the_prompt_and_leave_it_for_others() -> None:
    engine, _ = make_engine(max_step_tokens=7)
    prompt = prompt_of(0, 30)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2, prompt_logprobs=2)
    for name in ("a", "b"):
        engine.add(GenerateRequest(name, prompt, sampling))
        outputs = []
        while engine.has_requests:
            outputs += engine.step()
        assert outputs[0].prompt_logprobs == prompt_scores(prompt, num_top=2)
        assert outputs[0].cached_tokens == 0
        assert all(output.prompt_logprobs is None for output in outputs[1:])
    add(engine, "c", prompt)
    assert engine.step()[0].cached_tokens == 28


def test_prompt_logprobs_of_a_cached_prompt_of_more_than_half_the_pool_end() -> None:
    engine, _ = make_engine(num_pages=8, page_size=4, max_step_tokens=4)
    prompt = prompt_of(0, 24)
    add(engine, "cached", prompt)
    run(engine)
    right = add(engine, "scored", prompt, sampling=SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=0))
    assert run(engine) == {"scored": right}


def test_prompts_that_are_scored_together_share_the_room_for_scores() -> None:
    engine, executor = make_engine(num_pages=1024, page_size=4, max_step_tokens=4096, max_model_len=1024)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1, prompt_logprobs=0)
    right = {}
    for name in "abcd":
        right[name] = add(engine, name, [1 + i % 7 for i in range(600)], sampling=sampling)
    assert run(engine) == right
    scored = [sum(row.num_targets for row in plan.rows) for plan in executor.plans]
    assert MAX_SCORED_TOKENS // 2 < max(scored) <= MAX_SCORED_TOKENS + 4
    assert sum(scored) == 4 * 599


def test_top_logprobs_of_one_request_do_not_show_in_another() -> None:
    engine, _ = make_engine()
    for name, count in (("none", None), ("zero", 0), ("two", 2)):
        engine.add(GenerateRequest(name, [1, 2], SamplingParams(temperature=0.0, max_tokens=1, logprobs=count)))
    tops = {output.request_id: output.logprobs for output in engine.step()}
    assert tops["none"] is None
    assert tops["zero"] is not None and tops["zero"][0].top == ()
    assert tops["two"] is not None and len(tops["two"][0].top) == 2


def test_an_output_ends_at_the_end_of_sequence_at_a_stop_token_or_at_its_length() -> None:
    engine, _ = make_engine()
    for seed in range(30):
        for sampling in (
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.0, stop_token_ids=(3, 4), ignore_eos=True),
            SamplingParams(temperature=0.0, max_tokens=3),
        ):
            engine.add(GenerateRequest("a", prompt_of(seed, 5), sampling))
            outputs = []
            while engine.has_requests:
                outputs += engine.step()
            tokens, reason = continuation(prompt_of(seed, 5), sampling, max_len=engine.info.max_model_len)
            assert [token for output in outputs for token in output.token_ids] == tokens
            assert [output.finish_reason for output in outputs] == [None] * (len(tokens) - 1) + [reason]


def test_an_idle_engine_steps_and_beats_without_harm() -> None:
    engine, executor = make_engine()
    assert engine.step() == []
    engine.heartbeat()
    assert [len(plan.rows) for plan in executor.plans] == [0]
    engine.check()


def test_ten_thousand_waiting_requests_are_taken_in_quickly() -> None:
    engine, _ = make_engine(max_queue=100_000)
    start = time.process_time()
    for i in range(10_000):
        add_plain(engine, f"r{i}")
    assert time.process_time() - start < 10.0


def add_plain(engine: Engine, name: str) -> None:
    engine.add(GenerateRequest(name, [1, 2, 3], GREEDY))


@in_every_flow
def test_drafts_leave_their_share_of_a_step_to_others(stages: int, plans_ahead: bool) -> None:
    drafter = KnownTexts([], vocab=VOCAB)
    drafts = Drafts(drafter, most=7, is_adaptive=False)
    engine, executor = make_engine(
        max_step_tokens=16, num_pages=300, stages=stages, plans_ahead=plans_ahead, drafts=drafts
    )
    wanted = {f"r{i}": add(engine, f"r{i}", prompt_of(i, 9), 60) for i in range(8)}
    drafter.texts += [prompt_of(i, 9) + wanted[f"r{i}"] for i in range(8)]
    got: dict[str, int] = {}
    for _ in range(40 * stages):
        for output in engine.step():
            got[output.request_id] = got.get(output.request_id, 0) + len(output.token_ids)
    assert min(got.get(name, 0) for name in wanted) > 20, got
    assert drafts.num_accepted > 0
    run(engine)
    assert max(row.num_tokens for plan in executor.plans for row in plan.rows if row.num_drafts) > 1
    assert engine.stats().prompt_tokens == 8 * 9


def test_costs_of_steps_are_learned_with_stages_too() -> None:
    drafter = KnownTexts([], vocab=VOCAB)
    drafts = Drafts(drafter, most=4)
    engine, _ = make_engine(stages=2, drafts=drafts)
    drafter.texts.append(prompt_of(0, 9) + add(engine, "r", prompt_of(0, 9), 60))
    run(engine)
    assert drafts.costs.are_known
