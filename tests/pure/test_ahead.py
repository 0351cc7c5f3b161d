"""Steps that are planned while the one before runs: the same tokens, no step more than needed, and nothing of a request
that ends in between goes to others too early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raycache.cache.prefetches import Waiting
from raycache.decider.drafts import Drafts
from raycache.decider.engine import Engine
from raycache.errors import RankLostError
from raycache.types import FinishReason, GenerateRequest, Miss, SamplingParams
from raycache.wire.plan import StepPlan
from raycache.wire.results import RowResult
from tests.oracle.drafters import KnownTexts
from tests.oracle.tiered import Setup, Tiered
from tests.oracle.twin import EOS, VOCAB, TwinExecutor, continuation
from tests.oracle.twin_storage import StorageTrouble
from tests.pure.test_scheduler import add, greedy, make_engine, make_sizes, prompt_of, run

in_both_flows = pytest.mark.parametrize("plans_ahead", [False, True])


def ahead(**settings: object) -> tuple[Engine, TwinExecutor]:
    return make_engine(plans_ahead=True, **settings)  # type: ignore[arg-type]


def fed(executor: TwinExecutor) -> list[list[bool]]:
    """Per plan, which of its rows were fed."""
    return [[row.is_fed for row in plan.rows] for plan in executor.plans]


def ending_prompt(length: int, *, output: int) -> list[int]:
    """A prompt whose answer ends by itself after so many tokens."""
    for stream in range(10_000):
        prompt = prompt_of(stream, length)
        tokens, _ = continuation(prompt, SamplingParams(temperature=0.0), max_len=100)
        if len(tokens) == output and tokens[-1] == EOS:
            return prompt
    raise AssertionError("no such prompt")


class Watched(TwinExecutor):
    """Tells what it is asked for, in order."""

    def __init__(self) -> None:
        super().__init__(make_sizes(64, 4), depth=2)
        self.events: list[tuple[str, int]] = []

    def submit(self, plan: StepPlan) -> None:
        self.events.append(("submit", plan.step))
        super().submit(plan)

    def collect(self, plan: StepPlan) -> list[RowResult]:
        self.events.append(("collect", plan.step))
        return super().collect(plan)


def test_each_step_is_sent_before_the_one_before_is_waited_for() -> None:
    engine, _ = ahead()
    executor = Watched()
    engine.restart(executor)
    right = add(engine, "a", [1, 2, 3], max_tokens=4)
    assert run(engine) == {"a": right}
    s, c = "submit", "collect"
    assert executor.events == [(s, 1), (s, 2), (c, 1), (s, 3), (c, 2), (s, 4), (c, 3), (c, 4)]


def test_decode_rows_are_fed_and_an_output_of_known_length_costs_no_row_more() -> None:
    for max_tokens in (1, 2, 5):
        engine, executor = ahead()
        right = {f"r{i}": add(engine, f"r{i}", prompt_of(i, 9), max_tokens=max_tokens) for i in range(3)}
        assert run(engine) == right
        assert fed(executor) == [[False] * 3] + [[True] * 3] * (max_tokens - 1)
        assert engine.stats().computed_tokens == 3 * (9 + max_tokens - 1)


def test_rows_that_are_sampled_at_random_are_fed_too() -> None:
    engine, executor = ahead()
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=5, ignore_eos=True)
    right = {f"r{i}": add(engine, f"r{i}", prompt_of(i, 9), sampling=sampling) for i in range(2)}
    assert run(engine) == right
    assert fed(executor) == [[False] * 2] + [[True] * 2] * 4


def test_an_output_that_reaches_the_longest_context_is_not_fed_beyond_it() -> None:
    engine, executor = ahead(max_model_len=12)
    right = add(engine, "a", prompt_of(0, 9), max_tokens=50)
    assert run(engine) == {"a": right} and len(right) == 3
    assert [row.start + row.num_tokens for plan in executor.plans for row in plan.rows] == [9, 10, 11]


@pytest.mark.parametrize("output", [1, 2, 3, 4, 5, 6])
def test_what_was_fed_with_the_end_of_a_sequence_is_thrown_away(output: int) -> None:
    engine, executor = ahead()
    prompt = ending_prompt(7, output=output)
    right = add(engine, "a", prompt, sampling=SamplingParams(temperature=0.0))
    assert run(engine) == {"a": right} and len(right) == output
    assert fed(executor) == [[False]] + [[True]] * output
    stats = engine.stats()
    assert (stats.output_tokens, stats.running, stats.pages_in_use, stats.pages_locked) == (output, 0, 0, 0)
    # Only what is known and computed is found again: the end itself was computed by the row that nobody looked at.
    assert stats.pages_cached == (7 + output - 1) // 4
    add(engine, "again", [*prompt, *right, 3, 4, 5, 6], max_tokens=1)
    assert engine.step()[0].cached_tokens == (7 + output - 1) // 4 * 4


def test_the_slot_and_the_pages_of_an_ended_request_go_to_others_when_its_last_row_is_back() -> None:
    engine, executor = ahead(max_running=1, num_pages=4, prefix_cache=False)
    prompt = ending_prompt(7, output=2)
    right = {"a": add(engine, "a", prompt, sampling=SamplingParams(temperature=0.0))}
    right["b"] = add(engine, "b", prompt_of(1, 12), max_tokens=3)
    found = {"a": engine.step()[0].token_ids, "b": ()}
    (end,) = engine.step()
    assert end.finish_reason is FinishReason.STOP
    engine.check()
    stats = engine.stats()
    assert (stats.running, stats.pages_free) == (1, 1), "a row of it is in flight"
    assert run(engine)["b"] == right["b"]
    assert [len(plan.admits) for plan in executor.plans] == [1, 0, 0, 1, 0, 0]
    assert [*found["a"], *end.token_ids] == right["a"]
    assert engine.stats().pages_free == 4


def test_a_name_can_be_used_again_while_the_last_row_of_the_request_before_is_in_flight() -> None:
    engine, _ = ahead()
    prompt = ending_prompt(7, output=2)
    add(engine, "a", prompt, sampling=SamplingParams(temperature=0.0))
    while engine.has_requests:
        engine.step()
    assert engine.has_work
    right = add(engine, "a", prompt_of(1, 9), max_tokens=4)
    assert run(engine) == {"a": right}


def test_chunks_of_a_prompt_follow_each_other_and_its_answer_follows_them() -> None:
    engine, executor = ahead(max_step_tokens=8)
    right = add(engine, "a", prompt_of(0, 20), max_tokens=3)
    engine.step()
    assert [row.num_tokens for plan in executor.plans for row in plan.rows] == [8, 8]
    assert run(engine) == {"a": right}
    assert fed(executor) == [[False], [False], [False], [True], [True]]


def test_a_request_that_comes_later_joins_the_plan_of_those_that_run() -> None:
    engine, executor = ahead()
    right = {"a": add(engine, "a", [1, 2], max_tokens=12)}
    found = {"a": [*engine.step()[0].token_ids]}
    right["b"] = add(engine, "b", [3, 4], max_tokens=4)
    for name, tokens in run(engine).items():
        found.setdefault(name, []).extend(tokens)
    assert found == right
    assert fed(executor)[2:6] == [[True, False], [True, True], [True, True], [True, True]]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("settings", [{"window": 5}, {"has_state": True}, {"window": 9, "has_state": True}], ids=str)
def test_models_with_windows_and_states_are_fed_across_page_borders(
    settings: dict[str, Any], prefix_cache: bool
) -> None:
    engine, executor = ahead(**settings, prefix_cache=prefix_cache)
    right = {f"r{i}": add(engine, f"r{i}", prompt_of(i, 3 + i), max_tokens=14) for i in range(4)}
    assert run(engine) == right
    assert all(row.is_fed == (row.output_position > 0) for plan in executor.plans for row in plan.rows)
    if not prefix_cache:
        return
    for i, (name, tokens) in enumerate(right.items()):  # each left a restore point at its last page boundary
        length = 3 + i + len(tokens) - 1
        add(engine, f"{name} again", [*prompt_of(i, 3 + i), *tokens, 5], max_tokens=1)
        (output,) = [output for _ in range(3) for output in engine.step()]
        assert output.cached_tokens == length // 4 * 4


def test_who_cannot_be_fed_is_waited_for_by_all_so_that_all_go_on_together() -> None:
    engine, executor = ahead()
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=6, presence_penalty=1.0)
    right = {"odd": add(engine, "odd", [1, 2, 3], sampling=sampling)}
    right |= {f"r{i}": add(engine, f"r{i}", prompt_of(i, 3), max_tokens=6) for i in range(3)}
    assert run(engine) == right
    assert fed(executor) == [[False] * 4] * 6


def test_once_the_one_with_penalties_is_gone_the_others_are_fed() -> None:
    engine, executor = ahead()
    right = {"odd": add(engine, "odd", [1, 2], sampling=SamplingParams(max_tokens=2, repetition_penalty=1.1))}
    right["a"] = add(engine, "a", [3, 4], max_tokens=5)
    assert run(engine) == right
    assert fed(executor) == [[False, False], [False, False], [True], [True], [True]]


def test_prompt_logprobs_are_told_as_without() -> None:
    told = []
    for plans_ahead in (False, True):
        engine, _ = make_engine(max_step_tokens=7, plans_ahead=plans_ahead)
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4, prompt_logprobs=2, logprobs=1)
        engine.add(GenerateRequest("a", prompt_of(0, 30), sampling))
        outputs = []
        while engine.has_work:
            outputs += [replace(output, queued_s=0.0) for output in engine.step()]
        told.append(outputs)
    assert told[0] == told[1]


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
@pytest.mark.parametrize("steps", range(12))
def test_a_request_can_be_cancelled_at_any_point(steps: int, max_tokens: int) -> None:
    engine, _ = ahead(max_step_tokens=8)
    right = {"gone": add(engine, "gone", prompt_of(0, 20), max_tokens=max_tokens)}
    right["stays"] = add(engine, "stays", prompt_of(1, 6), max_tokens=12)
    found: dict[str, list[int]] = {name: [] for name in right}
    reasons = []

    def step() -> None:
        for output in engine.step():
            found[output.request_id] += output.token_ids
            if output.request_id == "gone" and output.finish_reason:
                reasons.append(output.finish_reason)
        engine.check()

    for _ in range(steps):
        step()
    was_there = not reasons
    engine.cancel("gone")
    for _ in range(2):
        step()
    assert len(reasons) == 1, "in flight at most once more"
    assert (reasons[0] is FinishReason.CANCELLED) is was_there
    while engine.has_work:
        step()
    assert found["stays"] == right["stays"]
    assert found["gone"] == right["gone"][: len(found["gone"])]
    stats = engine.stats()
    assert (stats.running, stats.pages_in_use, stats.pages_locked) == (0, 0, 0)


@pytest.mark.parametrize("steps", range(9))
def test_a_gang_can_be_lost_with_two_plans_in_flight(steps: int) -> None:
    engine, executor = ahead(max_step_tokens=16)
    right = {f"r{i}": add(engine, f"r{i}", prompt_of(i % 2, 20 + i), max_tokens=5) for i in range(3)}
    right["ends"] = add(engine, "ends", ending_prompt(7, output=2), sampling=SamplingParams(temperature=0.0))
    found: dict[str, list[int]] = {name: [] for name in right}
    for _ in range(steps):
        for output in engine.step():
            found[output.request_id] += output.token_ids
    executor.is_lost = True
    if engine.has_work:
        with pytest.raises(RankLostError):
            engine.step()
    engine.restart(TwinExecutor(make_sizes(64, 4), depth=2))
    engine.check()
    assert engine.stats().pages_free == 64
    for name, tokens in run(engine).items():
        found[name] += tokens
    assert found == right


def test_a_gang_lost_twice_with_the_same_request_in_two_plans_counts_as_two_losses() -> None:
    engine, executor = ahead()
    right = add(engine, "a", [1, 2, 3], max_tokens=6)
    for _ in range(2):
        executor.is_lost = True
        with pytest.raises(RankLostError):
            engine.step()
        executor = TwinExecutor(make_sizes(64, 4), depth=2)
        engine.restart(executor)
    assert run(engine) == {"a": right}


def test_a_more_important_request_gets_the_pages_of_one_that_is_in_flight() -> None:
    engine, _ = ahead(num_pages=8, page_size=4)
    right = {"low": add(engine, "low", prompt_of(0, 20), max_tokens=10, priority=1)}
    found = {"low": [token for _ in range(3) for output in engine.step() for token in output.token_ids]}
    right["high"] = add(engine, "high", prompt_of(1, 20), max_tokens=2)
    order = []
    for _ in range(60):
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
            order += [output.request_id] if output.finish_reason else []
        engine.check()
    assert (order, found) == (["high", "low"], right)
    assert engine.stats().preemptions == 1


@in_both_flows
def test_when_pages_are_short_the_last_in_order_gives_its_own_back(plans_ahead: bool) -> None:
    engine, _ = make_engine(num_pages=12, plans_ahead=plans_ahead)
    right = {f"r{i}": add(engine, f"r{i}", prompt_of(i, 8), max_tokens=30) for i in range(3)}
    ended: list[str] = []
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
            ended += [output.request_id] if output.finish_reason else []
        engine.check()
    assert (ended, found) == (["r0", "r1", "r2"], right)
    assert engine.stats().preemptions > 0


@in_both_flows
def test_a_request_gets_the_page_that_it_needs_from_one_behind_it_that_needs_none(plans_ahead: bool) -> None:
    engine, _ = make_engine(num_pages=6, page_size=8, plans_ahead=plans_ahead, prefix_cache=False)
    right = {"first": add(engine, "first", prompt_of(0, 14), max_tokens=9)}
    right["second"] = add(engine, "second", prompt_of(1, 9), max_tokens=8)
    outputs = engine.step()
    cache = engine._scheduler.cache
    taken = cache.begin(np.zeros(16, np.int32).tobytes(), is_matched=False, now=1)
    assert taken.reserve(0, 16) is not None, "all other pages are somebody else's for a while"
    for _ in range(11):
        outputs += engine.step()
    taken.end()
    while engine.has_work:
        outputs += engine.step()
        engine.check()
    assert [output.request_id for output in outputs if output.finish_reason] == ["first", "second"]
    assert {name: [t for o in outputs if o.request_id == name for t in o.token_ids] for name in right} == right


def test_a_load_that_fails_takes_back_a_request_that_is_in_no_other_plan() -> None:
    tiers = Tiered(Setup(plans_ahead=True, device_pages=32))
    prompt = prompt_of(0, 30)
    tiers.ask(prompt)
    tiers.forget("device")
    tiers.memory.slots.clear()
    assert tiers.ask(prompt, max_tokens=5).miss is Miss.CHECKSUM
    assert tiers.num_bad_loads == 1


def test_what_storage_brings_while_a_prompt_is_computed_is_loaded() -> None:
    cached = []
    for plans_ahead in (False, True):
        tiers = Tiered(
            Setup(
                plans_ahead=plans_ahead,
                device_pages=64,
                has_storage=True,
                waiting=Waiting.BEST_EFFORT,
                max_step_tokens=4,
            )
        )
        prompt = prompt_of(0, 85)
        tiers.ask(prompt)
        tiers.forget("device", "host")
        tiers.storage.trouble = StorageTrouble(most_ticks=5)
        cached.append(tiers.ask(prompt, max_tokens=3).cached_by_tier["storage"])
    assert min(cached) > 20


def test_no_plan_is_empty() -> None:
    engine, executor = ahead(max_running=2)
    for i in range(7):
        add(engine, f"r{i}", prompt_of(i, 5), sampling=SamplingParams(temperature=0.0, max_tokens=9))
    run(engine)
    assert all(plan.rows for plan in executor.plans)


def test_closing_takes_what_is_in_flight_and_a_beat_does_not_disturb_it() -> None:
    engine, executor = ahead()
    add(engine, "a", [1, 2], max_tokens=30)
    engine.step()
    engine.heartbeat()
    engine.step()
    assert all(plan.rows for plan in executor.plans)
    engine.close()
    ended, _ = ahead()
    add(ended, "a", ending_prompt(7, output=2), sampling=SamplingParams(temperature=0.0))
    while ended.has_requests:
        ended.step()
    ended.close()
    ended.check()
    assert ended.stats().pages_in_use == 0


def test_tokens_outside_the_prompt_are_never_looked_at_before_they_are_known() -> None:
    engine, _ = ahead(page_size=2)
    prompts = {f"r{i}": prompt_of(i, 3 + i) for i in range(4)}
    right = {name: add(engine, name, prompt, sampling=greedy(9)) for name, prompt in prompts.items()}
    assert run(engine) == right
    for name, prompt in prompts.items():
        whole = [*prompt, *right[name]][:-1]
        add(engine, name, [*whole, VOCAB - 1, VOCAB - 1], max_tokens=1)
        assert engine.step()[0].cached_tokens == len(whole) // 2 * 2
        run(engine)


def of_ranks(most: int = 3, **settings: Any) -> tuple[Engine, TwinExecutor, KnownTexts, Drafts]:
    """An engine whose draft tokens the ranks make."""
    drafter, drafts = KnownTexts([], vocab=VOCAB), Drafts(most=most, are_from_ranks=True, is_adaptive=False)
    return *make_engine(drafts=drafts, drafter=drafter, num_pages=200, **settings), drafter, drafts


def drafting(engine: Engine, drafter: KnownTexts, count: int = 3, **kwargs: Any) -> None:
    """Answer some requests, of whose output some draft tokens are right."""
    prompts = {f"r{i}": prompt_of(i, 9 + i) for i in range(count)}
    right = {name: add(engine, name, prompt, **{"max_tokens": 40, **kwargs}) for name, prompt in prompts.items()}
    drafter.texts += [prompts[name] + right[name] for name in prompts]
    assert run(engine) == right
    engine.check()


@pytest.mark.parametrize("has_state", [False, True])
def test_rows_are_planned_before_it_is_known_how_many_draft_tokens_those_before_accept(has_state: bool) -> None:
    rates, steps = [], []
    for plans_ahead in (False, True):
        engine, executor, drafter, drafts = of_ranks(plans_ahead=plans_ahead, has_state=has_state, points=64)
        drafting(engine, drafter)
        rows = [row for plan in executor.plans for row in plan.rows if row.output_position > 0]
        assert {row.is_fed for row in rows} == {plans_ahead}
        assert sum(row.num_drafts > 0 for row in rows) > 0.6 * len(rows)
        rates.append(drafts.num_accepted / drafts.num_drafted)
        steps.append(len(executor.plans))
    # A row in flight is discarded at the end, and with states a row begins anew at each page boundary.
    assert rates[0] == pytest.approx(rates[1], abs=0.1) and abs(steps[1] - steps[0]) <= 4


def test_rows_with_penalties_wait_until_draft_tokens_are_accepted() -> None:
    engine, executor, drafter, drafts = of_ranks(plans_ahead=True)
    drafting(engine, drafter, sampling=replace(greedy(40), presence_penalty=0.5))
    rows = [row for plan in executor.plans for row in plan.rows if row.num_drafts]
    assert drafts.num_accepted > 0 and not any(row.is_fed for row in rows)


def test_draft_tokens_wait_where_states_are_too_few_for_two_rows_of_each_request() -> None:
    for points, is_fed in ((0, False), (8 * 5, True)):
        engine, executor, drafter, drafts = of_ranks(plans_ahead=True, has_state=True, points=points, max_running=8)
        drafting(engine, drafter, 8)
        # States for two rows of each of four requests, or of all eight.
        plans = [
            plan for plan in executor.plans if len(plan.rows) > 4 and all(row.output_position > 0 for row in plan.rows)
        ]
        assert any(row.is_fed and row.num_drafts for plan in plans for row in plan.rows) == is_fed
        assert len(plans) > 4 and drafts.num_accepted > 0
