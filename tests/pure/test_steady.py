"""Decode rows of a token in and a token out: the same plans and outputs as with a `Row` made for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from raycache.decider.request import Steady
from raycache.errors import QueueFullError, RankLostError
from raycache.types import GenerateRequest, RequestOutput, SamplingParams
from raycache.wire.plan import NO_PAGES, UNKNOWN, Row, Rows, StepPlan
from raycache.wire.results import RowResult, SampledTokens, are_single, emissions, read_results, result_lens
from tests.oracle.twin import VOCAB, TwinExecutor, continuation
from tests.pure.test_scheduler import add, greedy, make_engine, make_sizes, prompt_of, run

Outputs = list[list[RequestOutput]]


def request_of(name: str, random: Random, *, longest: int) -> GenerateRequest:
    prompt = [*prompt_of(random.randrange(3), random.randint(1, 30)), random.randrange(1, VOCAB)][:longest]
    sampling = SamplingParams(
        temperature=random.choice([0.0, 1.0]),
        seed=random.randrange(1000),
        max_tokens=random.choice([None, 1, 2, 9, 30]),
        ignore_eos=random.random() < 0.5,
        stop_token_ids=random.choice([(), (), (5,)]),
        logprobs=random.choice([None, None, None, None, 2]),
        prompt_logprobs=random.choice([None, None, None, None, 0]),
        presence_penalty=random.choice([0.0, 0.0, 0.5]),
        grammar="start: /[a-z]+/" if random.random() < 0.1 else "",
    )
    return GenerateRequest(name, prompt, sampling, priority=random.choice([0, 0, 0, 1, -1]))


def trace(seed: int) -> tuple[list[StepPlan], Outputs, int]:
    """Requests that come and go on a small pool; the plans, the outputs of each step, and how many rows were only a
    token."""
    random = Random(seed)
    num_pages, page_size, max_running = random.randint(12, 60), random.choice([1, 2, 4, 16]), random.randint(1, 6)
    window = random.choice([0, 0, 0, 5])
    sizes = make_sizes(num_pages, page_size, max_running, window=window)
    engine, executor = make_engine(
        num_pages=num_pages,
        page_size=page_size,
        max_step_tokens=random.choice([3, 7, 16, 64]),
        prompt_share=random.choice([1.0, 0.5]),
        max_running=max_running,
        max_queue=6,
        max_model_len=60,
        prefix_cache=random.random() < 0.8,
        **random.choice([{"plans_ahead": True}, {"plans_ahead": True}, {}, {"stages": 3}]),  # type: ignore[arg-type]
        window=window,
    )
    plans: list[StepPlan] = []
    outputs: Outputs = []
    num_tokens = 0

    def watch(watched: TwinExecutor) -> None:
        submit: Callable[[StepPlan], None] = watched.submit

        def record(plan: StepPlan) -> None:
            nonlocal num_tokens
            if isinstance(plan.rows, Rows):
                num_tokens += len(plan.rows) - len(plan.rows.others)
            plans.append(replace(plan, rows=list(plan.rows)))
            submit(plan)

        watched.submit = record  # type: ignore[method-assign]

    watch(executor)
    for turn in range(80):
        if random.random() < 0.3:
            with suppress(QueueFullError):
                engine.add(request_of(f"r{turn}", random, longest=engine.info.max_model_len - 1))
        if random.random() < 0.05:
            engine.cancel(f"r{random.randrange(turn + 1)}")
        executor.is_lost = random.random() < 0.01
        try:
            outputs.append(engine.step())
        except RankLostError:
            executor = TwinExecutor(sizes, depth=executor.depth)
            watch(executor)
            engine.restart(executor)
        engine.check()
    while engine.has_requests:
        executor.is_lost = False
        outputs.append(engine.step())
        engine.check()
    return plans, outputs, num_tokens


@pytest.mark.parametrize("seed", range(100))
def test_plans_and_outputs_are_those_of_rows_made_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, outputs, _ = trace(seed)
    monkeypatch.setattr(Steady, "of", lambda *_, **__: None)
    slow_plans, slow_outputs, num_slow_tokens = trace(seed)
    assert plans == slow_plans
    assert [untimed(each) for each in outputs] == [untimed(each) for each in slow_outputs]
    assert num_slow_tokens == 0


def untimed(outputs: list[RequestOutput]) -> list[RequestOutput]:
    return [replace(output, queued_s=0.0) for output in outputs]


def test_many_rows_of_those_traces_are_only_a_token() -> None:
    assert sum(trace(seed)[2] for seed in range(20)) > 500


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_a_row_has_more_than_a_token_only_where_a_page_begins(plans_ahead: bool) -> None:
    engine, executor = make_engine(num_pages=64, page_size=16, plans_ahead=plans_ahead)
    others: list[tuple[int, int]] = []
    submit = executor.submit

    def record(plan: StepPlan) -> None:
        assert isinstance(plan.rows, Rows)
        others.extend((row.start, row.output_position) for row in plan.rows.others.values())
        submit(plan)

    executor.submit = record  # type: ignore[method-assign]
    right = add(engine, "a", prompt_of(0, 5), max_tokens=40)
    assert run(engine) == {"a": right}
    is_steady = [start for start, position in others if position > 1]
    assert is_steady == [16, 32]


def test_a_stop_token_that_is_being_sampled_ends_a_row_in_flight() -> None:
    prompt = prompt_of(1, 6)
    tokens, _ = continuation(prompt, greedy(30), max_len=60)
    stop = next(token for i, token in enumerate(tokens) if i > 4 and token not in tokens[:i])
    engine, executor = make_engine(num_pages=64, page_size=16, plans_ahead=True)
    sampling = replace(greedy(30), stop_token_ids=(stop,))
    right = add(engine, "a", prompt, sampling=sampling)
    assert right[-1] == stop and len(right) < 30
    assert run(engine) == {"a": right}
    assert len(executor.plans) == len(right) + 1, "one row was discarded"


# --- the wire ---------------------------------------------------------------------------------------------------------


def some_rows(random: Random) -> Rows:
    rows = Rows()
    for slot in range(random.randint(0, 20)):
        token = UNKNOWN if random.random() < 0.3 else np.int32(random.randrange(10**6)).tobytes()
        if random.random() < 0.8:
            rows.tokens.append((slot, random.randrange(2**40), token, random.randrange(100)))
        else:
            extra: dict[str, Any] = random.choice([{"new_pages": {"full": [7]}}, {"is_masked": True}, {}])
            rows.append(Row(slot, random.randrange(1000), token, output_position=random.randrange(100), **extra))
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_rows_in_columns_arrive_like_those_made_one_by_one(seed: int) -> None:
    rows = some_rows(Random(seed))
    one_by_one = [
        rows.others.get(i) or Row(slot, start, token, NO_PAGES, position, is_fed=token == UNKNOWN)
        for i, (slot, start, token, position) in enumerate(rows.tokens)
    ]
    assert list(rows) == one_by_one and len(rows) == len(one_by_one)
    found = StepPlan.unpack(StepPlan(1, rows).pack()).rows
    plain = StepPlan.unpack(StepPlan(1, one_by_one).pack()).rows
    assert [with_lists(row) for row in found] == [with_lists(row) for row in one_by_one] == list(map(with_lists, plain))


def with_lists(row: Row) -> Row:
    return replace(row, new_pages={space: list(ids) for space, ids in row.new_pages.items()})


@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_single_tokens_are_read_from_where_emissions_has_them(cp: int) -> None:
    for seed in range(10):
        rows = some_rows(Random(seed))
        plan = StepPlan(1, rows)
        assert are_single(plan) and are_single(StepPlan(1, list(rows)))
        places = emissions(plan, cp_size=cp)
        assert result_lens(plan, cp_size=cp) == [len(mine) for mine in places]
        answers = [np.array([[1000 + i] for i, _ in mine], np.int64).reshape(-1, 1) for mine in places]
        results = read_results(plan, answers)
        assert isinstance(results, SampledTokens)
        assert list(results) == [RowResult([1000 + i]) for i in range(len(rows))]


@pytest.mark.parametrize(
    "more",
    [
        {"output_position": -1},
        {"targets": UNKNOWN},
        {"num_next_drafts": 2},
        {"tokens": 2 * UNKNOWN, "num_drafts": 1},
    ],
)
def test_other_answers_are_not_read_as_single_tokens(more: dict[str, Any]) -> None:
    row = Row(**{"slot": 1, "start": 5, "tokens": UNKNOWN, "output_position": 3, **more})
    rows = Rows([row])
    rows.tokens.append((2, 9, UNKNOWN, 4))
    assert not are_single(StepPlan(1, rows)) and not are_single(StepPlan(1, list(rows)))
    assert not are_single(StepPlan(1, [Row(1, 5, UNKNOWN, output_position=3)], num_top=0))
