"""Requests with grammars: the decider's masks against regular expressions, whatever happens to the requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import settings

from raycache.decider import grammar as grammar_module
from raycache.decider.drafts import Drafts
from raycache.decider.engine import Engine
from raycache.errors import QueueFullError, RankLostError, RequestError
from raycache.types import FinishReason, GenerateRequest, RequestOutput, SamplingParams
from tests.oracle.drafters import KnownTexts
from tests.oracle.twin import EOS, VOCAB, TwinExecutor, continuation
from tests.pure import test_scheduler
from tests.pure.test_scheduler import Expected, greedy, in_every_flow, make_engine, make_sizes, prompt_of, run

PATTERNS = ["[a-l]*", "(ab|c)*d", "a{3}b{2,5}(c|de)?", "[^a]{2}.*|[a-c]{4}", "(abcabcabcd)+", "b"]


def constrained(pattern: str, sampling: SamplingParams | None = None) -> SamplingParams:
    return replace(sampling or greedy(30), grammar=f"start: /{pattern}/")


def allows(pattern: str, output: list[int], token: int) -> bool:
    text = letters(output)
    if token == EOS:
        return regex.fullmatch(pattern, text) is not None
    return regex.fullmatch(pattern, text + letters([token]), partial=True) is not None


def letters(tokens: list[int]) -> str:
    return "".join(chr(96 + token) for token in tokens)


def expected(pattern: str, prompt: list[int], sampling: SamplingParams, *, max_len: int) -> Any:
    return continuation(prompt, sampling, max_len=max_len, allows=lambda output, token: allows(pattern, output, token))


class Constrained(test_scheduler.Service):
    """Half of the requests have a grammar."""

    def _add(self, prompt: list[int], sampling: SamplingParams, *, priority: int, timeout_s: float | None) -> None:
        if self.arrivals % 2:
            super()._add(prompt, sampling, priority=priority, timeout_s=timeout_s)
            return
        request_id, pattern = f"g{self.arrivals % 9}", PATTERNS[self.arrivals // 2 % len(PATTERNS)]
        self.arrivals += 1
        sampling = constrained(pattern, sampling)
        request = GenerateRequest(request_id, prompt, sampling, priority, timeout_s)
        if request_id in self.requests:
            return
        try:
            self.engine.add(request)
        except QueueFullError:
            return
        tokens, reason = expected(pattern, prompt, sampling, max_len=self.engine.info.max_model_len)
        self.drafter.texts.append([*prompt, *tokens])
        self.requests[request_id] = Expected(request, tokens, reason)


Constrained.TestCase.settings = settings(stateful_step_count=40)
TestConstrained = Constrained.TestCase


def add(engine: Engine, name: str, pattern: str, prompt: list[int], **kwargs: Any) -> list[int]:
    """Queue a request with a grammar; the tokens that are right for it."""
    sampling = constrained(pattern)
    engine.add(GenerateRequest(name, prompt, sampling, **kwargs))
    tokens: list[int] = expected(pattern, prompt, sampling, max_len=engine.info.max_model_len)[0]
    return tokens


@in_every_flow
def test_outputs_are_those_of_the_pattern_beside_free_ones(stages: int, plans_ahead: bool) -> None:
    engine, executor = make_engine(stages=stages, plans_ahead=plans_ahead)
    right = {pattern: add(engine, pattern, pattern, prompt_of(i, 9)) for i, pattern in enumerate(PATTERNS)}
    right["free"] = test_scheduler.add(engine, "free", prompt_of(9, 9), max_tokens=30)
    assert run(engine) == right
    assert all(tokens[-1] == EOS or len(tokens) == 30 for tokens in right.values())
    rows = [row for plan in executor.plans for row in plan.rows]
    assert {plan.mask_len for plan in executor.plans} <= {0, 4}
    assert all(row.output_position >= 0 for row in rows if row.is_masked)
    assert {row.is_masked for row in rows} == {True, False}
    assert {row.is_fed for row in rows if row.is_masked} == ({True, False} if plans_ahead else {False})


def test_rows_with_masks_wait_until_draft_tokens_of_the_ranks_are_accepted() -> None:
    drafter, drafts = KnownTexts([], vocab=VOCAB), Drafts(most=3, are_from_ranks=True, is_adaptive=False)
    engine, executor = make_engine(plans_ahead=True, drafts=drafts, drafter=drafter)
    right = {pattern: add(engine, pattern, pattern, prompt_of(i, 9)) for i, pattern in enumerate(PATTERNS)}
    drafter.texts += [prompt_of(i, 9) + right[pattern] for i, pattern in enumerate(PATTERNS)]
    assert run(engine) == right
    rows = [row for plan in executor.plans for row in plan.rows if row.num_drafts]
    assert drafts.num_accepted > 0 and not any(row.is_fed for row in rows)


def test_without_its_masks_a_request_fails_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = np.full((1, 4), 255, np.uint8)
    monkeypatch.setattr(grammar_module.Grammars, "masks", lambda self, rows, matchers: everything[: len(rows)])
    engine, _ = make_engine()
    add(engine, "constrained", "(abc)+d", prompt_of(3, 9))
    right = test_scheduler.add(engine, "free", prompt_of(9, 9))
    outputs = outputs_of(engine)
    (last,) = [each for each in outputs if each.finish_reason and each.request_id == "constrained"]
    assert last.finish_reason is FinishReason.ERROR
    assert str(last.error).startswith("the grammar cannot be followed any further: ")
    assert [token for each in outputs if each.request_id == "free" for token in each.token_ids] == right
    assert engine.stats().finished == {"error": 1, "length": 1}


def outputs_of(engine: Engine, *, most: int = 300) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _ in range(most):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
        engine.check()
    raise AssertionError("requests never end")


def test_drafts_are_cut_where_the_grammar_forbids_them_and_the_rest_is_accepted() -> None:
    pattern, prompt = "(abcabcabcd)+", prompt_of(1, 9)
    tokens, _ = expected(pattern, prompt, constrained(pattern), max_len=60)
    wrong = [*tokens[:8], 12, *tokens[9:]]
    for text, accepts_all in ((tokens, True), (wrong, False)):
        drafter = KnownTexts([[*prompt, *text]], vocab=VOCAB)
        engine, executor = make_engine(drafts=Drafts(drafter, most=5, is_adaptive=False))
        assert add(engine, "a", pattern, prompt) == tokens
        assert run(engine) == {"a": tokens}
        rows = [row for plan in executor.plans for row in plan.rows if row.num_drafts]
        assert rows and all(row.num_masks == 1 + row.num_drafts for row in rows)
        assert engine.stats().accepted[1] > 0
        assert accepts_all or all(12 not in row.tokens[4:] for row in rows)


def test_a_lost_gang_and_an_earlier_output_change_nothing() -> None:
    pattern, prompt = "a{3}b{2,5}(c|de)?", prompt_of(2, 9)
    engine, executor = make_engine()
    right = add(engine, "a", pattern, prompt)
    got = [token for _ in range(3) for output in engine.step() for token in output.token_ids]
    executor.is_lost = True
    with pytest.raises(RankLostError):
        engine.step()
    engine.restart(TwinExecutor(make_sizes(64, 4)))
    assert got + run(engine)["a"] == right

    again, _ = make_engine()
    assert add(again, "a", pattern, prompt, output=right[:4]) == right
    assert run(again) == {"a": right[4:]}


class Later(Executor):
    """Runs what is submitted when it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append((Future(), lambda: work(*args, **kwargs)))
        return self.calls[-1][0]

    def run(self) -> None:
        for future, call in self.calls:
            future.set_result(call())
        self.calls.clear()


def test_a_request_waits_for_its_grammar_and_others_do_not() -> None:
    later = Later()
    engine, _ = make_engine(threads=later)
    right = {"a": add(engine, "a", "(ab|c)*d", prompt_of(0, 9)), "b": add(engine, "b", "(ab|c)*d", prompt_of(1, 9))}
    free = test_scheduler.add(engine, "free", prompt_of(2, 9), max_tokens=3)
    got = [token for _ in range(6) for output in engine.step() for token in output.token_ids]
    assert (got, engine.stats().waiting) == (free, 2)
    assert len(later.calls) == 1, "equal grammars are compiled once"
    assert engine.step() == [] and engine.has_work
    later.run()
    assert run(engine) == right


def test_of_requests_that_wait_for_a_grammar_none_makes_the_prompts_of_others_take_longer_steps() -> None:
    engine, executor = make_engine(
        threads=Later(), max_step_tokens=64, prompt_share=0.25, num_pages=400, max_running=32
    )
    test_scheduler.add(engine, "chat", [1, 2, 3], max_tokens=60)
    engine.step()
    for number in range(2):
        test_scheduler.add(engine, f"long {number}", prompt_of(number, 300), max_tokens=1)
    for number in range(20):
        add(engine, f"r{number}", "(ab|c)*d", prompt_of(2 + number, 9))
    engine.step()
    assert 16 <= sum(row.num_tokens for row in executor.plans[-1].rows) <= 1 + 64 / 3


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_grammar_that_turns_out_wrong_ends_its_request_only(is_cancelled: bool) -> None:
    later = Later()
    engine, _ = make_engine(threads=later)
    engine.add(GenerateRequest("wrong", [1, 2], SamplingParams(grammar="start: missing")))
    right = add(engine, "right", "b", [1, 2])
    engine.step()
    if is_cancelled:
        engine.cancel("wrong")
        assert [each.finish_reason for each in engine.step()] == [FinishReason.CANCELLED]
    later.run()
    outputs = outputs_of(engine)
    assert [token for each in outputs if each.request_id == "right" for token in each.token_ids] == right
    ended = {each.request_id: each for each in outputs if each.finish_reason}
    if not is_cancelled:
        assert ended["wrong"].error == 'the grammar cannot be compiled: at 1(8): unknown name: "missing"'
    with pytest.raises(RequestError, match="cannot be compiled"):
        engine.add(GenerateRequest("again", [1, 2], SamplingParams(grammar="start: missing")))
    assert not engine.has_requests


def test_a_model_without_an_end_token_refuses_grammars() -> None:
    engine, _ = make_engine()
    engine.info = replace(engine.info, eos_token_ids=())
    with pytest.raises(RequestError, match="no end token") as error:
        add(engine, "a", "b", [1])
    assert error.value.field == "grammar"
