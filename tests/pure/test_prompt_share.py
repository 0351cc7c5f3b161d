"""The share of a step that prompts take while other requests generate."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from raycache.decider.budget import MAX_PARTS, StepBudget, least_chunk, longest_chunk
from raycache.decider.drafts import Drafts
from raycache.wire.plan import StepPlan
from tests.oracle.drafters import KnownTexts
from tests.oracle.twin import VOCAB
from tests.pure.test_scheduler import add, in_every_flow, make_engine, prompt_of, run


@given(st.lists(st.integers(2, 500), min_size=1, max_size=9), st.integers(1, 900))
def test_a_part_is_as_large_as_equal_parts_can_be(wanted: list[int], tokens: int) -> None:
    chunk = longest_chunk(wanted, tokens)
    assert least_chunk(tokens) <= chunk <= tokens
    if chunk > least_chunk(tokens):
        assert sum(min(each, chunk) for each in wanted) <= tokens
    if max(wanted) > chunk:  # a token more for each would be too much
        assert sum(min(each, chunk + 1) for each in wanted) > tokens


def test_prompts_that_fit_are_not_divided() -> None:
    assert longest_chunk([100, 20], 128) == 128
    assert longest_chunk([1000], 128) == 128
    assert longest_chunk([], 128) == 128
    assert longest_chunk([1000, 10], 128) == 118
    assert longest_chunk([1000] * 20, 128) == 32


def prompts(plan: StepPlan) -> Counter[int]:
    """Slot -> tokens of rows that are no decode rows."""
    found: Counter[int] = Counter()
    for row in plan.rows:
        if row.output_position < 0 or row.num_tokens - row.num_drafts > 1:
            found[row.slot] += row.num_tokens
    return found


def most(budget: StepBudget, plan: StepPlan, *, most_waiting: int) -> int:
    """Tokens that prompts of a plan may have, if so many requests wait at most."""
    return budget.prompt_tokens(4, num_prompts=most_waiting, num_others=decodes(plan))


def decodes(plan: StepPlan) -> int:
    """Decode rows of requests that did not begin with this plan."""
    new = {admit.slot for admit in plan.admits}
    return sum(row.slot not in new | set(prompts(plan)) for row in plan.rows)


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 12), st.integers(0, 6)), min_size=2, max_size=9),
    max_step_tokens=st.integers(8, 64),
    prompt_share=st.sampled_from([0.1, 0.25, 0.5, 0.9]),
    plans_ahead=st.booleans(),
    window=st.sampled_from([0, 0, 5]),
    has_state=st.booleans(),
    interval=st.sampled_from([0, 8]),
    most_drafts=st.sampled_from([0, 0, 3]),
)
def test_prompts_take_no_more_than_their_share_while_others_generate(
    lengths: list[tuple[int, int, int]],
    max_step_tokens: int,
    prompt_share: float,
    plans_ahead: bool,
    window: int,
    has_state: bool,
    interval: int,
    most_drafts: int,
) -> None:
    drafter = KnownTexts([], vocab=VOCAB)
    engine, executor = make_engine(
        num_pages=400,
        page_size=4,
        max_step_tokens=max_step_tokens,
        prompt_share=prompt_share,
        plans_ahead=plans_ahead,
        window=window,
        has_state=has_state,
        interval=interval,
        points=20,
        drafts=Drafts(drafter if most_drafts else None, most=most_drafts, is_adaptive=False),
    )
    right: dict[str, list[int]] = {}
    found: dict[str, list[int]] = {}
    for number, (length, max_tokens, steps) in enumerate(lengths):
        name = f"r{number}"
        right[name] = add(engine, name, prompt_of(number, length), max_tokens=max_tokens)
        drafter.texts.append(prompt_of(number, length) + right[name])
        for _ in range(steps):
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
            engine.check()
    for name, tokens in run(engine).items():
        found.setdefault(name, []).extend(tokens)
    assert found == right
    budget = StepBudget(max_step_tokens, prompt_share)
    for plan in executor.plans:
        assert sum(row.num_tokens for row in plan.rows) <= max_step_tokens
        if decodes(plan):
            assert sum(prompts(plan).values()) <= most(budget, plan, most_waiting=len(lengths) - decodes(plan))


@in_every_flow
def test_a_prompt_has_the_whole_budget_when_nobody_generates(stages: int, plans_ahead: bool) -> None:
    engine, executor = make_engine(
        max_step_tokens=32, prompt_share=0.25, num_pages=200, stages=stages, plans_ahead=plans_ahead
    )
    right = {"long": add(engine, "long", prompt_of(0, 300), max_tokens=2)}
    assert run(engine) == right
    taken = [sum(prompts(plan).values()) for plan in executor.plans if prompts(plan)]
    assert taken == [32] * 9 + [12]


@in_every_flow
def test_a_prompt_gets_more_again_when_the_others_end(stages: int, plans_ahead: bool) -> None:
    engine, executor = make_engine(
        max_step_tokens=32, prompt_share=0.25, num_pages=200, stages=stages, plans_ahead=plans_ahead
    )
    right = {"chat": add(engine, "chat", [1, 2, 3], max_tokens=6)}
    found = {"chat": [token for output in engine.step() for token in output.token_ids]}
    right["long"] = add(engine, "long", prompt_of(0, 300), max_tokens=2)
    for name, tokens in run(engine).items():
        found.setdefault(name, []).extend(tokens)
    assert found == right
    taken = [sum(prompts(plan).values()) for plan in executor.plans[1:] if prompts(plan)]
    assert set(taken[:4]) == {8} and set(taken[-7:-1]) == {32}


def test_long_prompts_get_equal_parts_and_a_short_one_what_it_needs() -> None:
    engine, executor = make_engine(max_step_tokens=64, prompt_share=0.5, num_pages=400)
    add(engine, "chat", [1, 2, 3], max_tokens=60)
    engine.step()
    add(engine, "a", prompt_of(0, 200), max_tokens=2)
    engine.step()
    add(engine, "b", prompt_of(1, 200), max_tokens=2)
    add(engine, "c", prompt_of(2, 9), max_tokens=2)
    run(engine)
    plans = [plan for plan in executor.plans[2:] if prompts(plan)]
    assert list(prompts(plans[0]).values()) == [16, 16]  # a, and b that has just come
    assert sorted(prompts(plans[1]).values()) == [9, 11, 11]  # c with all it needs
    shares = [sorted(prompts(plan).values()) for plan in plans[2:] if len(prompts(plan)) == 2]
    assert len(shares) > 5 and shares[:-1] == [[16, 16]] * (len(shares) - 1)


def test_many_prompts_take_turns_in_their_order() -> None:
    engine, executor = make_engine(max_step_tokens=64, prompt_share=0.5, num_pages=800, max_running=24)
    for number in range(8):  # as many as will wait
        add(engine, f"chat {number}", [1, 2, 3 + number], max_tokens=200)
    engine.step()
    right = {f"r{i}": add(engine, f"r{i}", prompt_of(i, 100), max_tokens=1) for i in range(8)}
    ended = []
    while not {*right} <= {*ended}:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert ended == [*right]
    plans = [plan for plan in executor.plans if decodes(plan) and prompts(plan)]
    assert MAX_PARTS <= max(len(prompts(plan)) for plan in plans) <= MAX_PARTS + 1  # one of them with its last tokens
    assert all(32 - 4 < sum(prompts(plan).values()) <= 32 for plan in plans[:-4])  # less than a page is left


def test_a_prompt_that_arrives_behind_a_long_one_begins_at_once_while_others_generate() -> None:
    engine, executor = make_engine(max_step_tokens=32, prompt_share=0.5, num_pages=400)
    add(engine, "chat", [1, 2, 3], max_tokens=60)
    add(engine, "long", prompt_of(0, 390), max_tokens=2)
    engine.step()
    engine.step()
    add(engine, "short", prompt_of(1, 8), max_tokens=1)
    (first,) = [output for output in engine.step() if output.request_id == "short"]
    assert first.finish_reason is not None
    assert sum(prompts(executor.plans[-1]).values()) == 16


def test_prompts_with_one_prefix_leave_no_part_to_those_that_wait_for_it() -> None:
    engine, executor = make_engine(max_step_tokens=32, prompt_share=0.5, num_pages=400)
    add(engine, "chat", [1, 2, 3], max_tokens=60)
    engine.step()
    shared = prompt_of(0, 200)
    for number in range(3):
        add(engine, f"r{number}", [*shared, 1 + number], max_tokens=1)
    run(engine)
    taken = [sum(prompts(plan).values()) for plan in executor.plans[1:] if prompts(plan)]
    assert taken[:12] == [16] * 12


def test_a_share_of_one_sets_no_limit() -> None:
    engine, executor = make_engine(max_step_tokens=32, prompt_share=1.0, num_pages=200)
    add(engine, "chat", [1, 2, 3], max_tokens=40)
    engine.step()
    add(engine, "long", prompt_of(0, 300), max_tokens=2)
    run(engine)
    taken = [sum(prompts(plan).values()) for plan in executor.plans[1:] if prompts(plan)]
    assert taken[:-1] == [31] * (len(taken) - 1)


def test_the_share_grows_while_more_requests_wait_than_generate() -> None:
    engine, executor = make_engine(max_step_tokens=64, prompt_share=0.25, num_pages=800, max_running=12)
    for number in range(10):
        add(engine, f"r{number}", prompt_of(number, 30), max_tokens=30)
    run(engine)
    taken = [sum(prompts(plan).values()) for plan in executor.plans if decodes(plan) and prompts(plan)]
    assert taken[0] > 32 and max(taken[-5:]) == 16
    assert all(a + 4 > b for a, b in itertools.pairwise(taken))  # less than a page is left


def test_of_requests_that_have_no_slot_none_counts_as_waiting() -> None:
    engine, executor = make_engine(max_step_tokens=64, prompt_share=0.25, num_pages=800, max_running=4)
    for number in range(3):
        add(engine, f"chat {number}", [1, 2, 3 + number], max_tokens=20)
    engine.step()
    for number in range(9):
        add(engine, f"r{number}", prompt_of(number, 60), max_tokens=1)
    run(engine)
    assert max(sum(prompts(plan).values()) for plan in executor.plans[1:9]) == 16


def test_the_share_is_made_of_whole_pages() -> None:
    assert StepBudget(8192, 0.25).prompt_tokens(64) == 2048
    assert StepBudget(8192, 0.25).prompt_tokens(64, num_prompts=61, num_others=3) == 7680
    assert [StepBudget(512, share).prompt_tokens(64) for share in (0.01, 0.2, 0.5)] == [64, 64, 256]
    assert all(a <= b for a, b in itertools.pairwise(StepBudget(100, s / 10).prompt_tokens(4) for s in range(1, 10)))


def test_a_share_of_few_pages_is_divided_too() -> None:
    engine, _ = make_engine(max_step_tokens=32, prompt_share=0.25, num_pages=400)
    add(engine, "chat", [1, 2, 3], max_tokens=200)
    engine.step()
    for number in range(2):
        add(engine, f"long {number}", prompt_of(number, 200), max_tokens=1)
        engine.step()
    add(engine, "short", prompt_of(2, 9), max_tokens=1)
    ended: list[str] = []
    for _ in range(6):
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert ended == ["short"]


def test_of_requests_that_find_no_pages_none_counts_as_waiting() -> None:
    engine, executor = make_engine(max_step_tokens=64, prompt_share=0.25, num_pages=60, max_running=32)
    for number in range(3):
        add(engine, f"chat {number}", [1, 2, 3 + number], max_tokens=60)
    engine.step()
    add(engine, "long", prompt_of(3, 100), max_tokens=1)
    engine.step()
    for number in range(20):
        add(engine, f"r{number}", prompt_of(number, 220), max_tokens=1)
    for _ in range(4):
        engine.step()
    assert [sum(prompts(plan).values()) for plan in executor.plans[1:6]] == [16] * 5
