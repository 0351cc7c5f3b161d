"""Draft tokens: which, how many pay, and that outputs stay what they are without."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycache.decider.drafts import AcceptanceRate, Drafts, PromptLookup
from raycache.llm import LLM
from raycache.types import SamplingParams
from tests.oracle.drafters import KnownTexts
from tests.oracle.families import FAMILIES, make_family
from tests.oracle.golden import golden
from tests.oracle.tiny_tokenizers import byte_level
from tests.selection import mostly_long

NUM_TOKENS = 40


def packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


def unpacked(tokens: bytes) -> list[int]:
    return np.frombuffer(tokens, np.int32).tolist()


# --- draft tokens ----------------------------------------------------------------------------------------------------


def slow_lookup(tokens: list[int], most: int) -> list[int]:
    """What followed the last time that the longest of the last 4, 3 or 2 tokens stood there, over and over."""
    for length in (4, 3, 2):
        for start in range(len(tokens) - length - 1, -1, -1):
            if length < len(tokens) and tokens[start : start + length] == tokens[-length:]:
                return [*itertools.islice(itertools.cycle(tokens[start + length :]), most)]
    return []


@given(st.lists(st.sampled_from([0, 1, 2, 256, 65536, 257]), max_size=40), st.integers(1, 6))
def test_a_prompt_is_looked_up_as_its_slow_twin_does(tokens: list[int], most: int) -> None:
    assert unpacked(PromptLookup().draft(packed(tokens), most)) == slow_lookup(tokens, most)


def test_bytes_that_lie_across_two_tokens_are_no_match() -> None:
    tokens = [0x01000000, 0x02000000, 0x00000002, 7, 1, 2]  # in bytes 1 0 0 0 2 0 0 0, too
    assert unpacked(PromptLookup().draft(packed(tokens), 3)) == []


# --- how many ---------------------------------------------------------------------------------------------------------


def count(drafts: Drafts, rate: AcceptanceRate, *, num_decodes: int = 0) -> int:
    step = drafts.step(1, num_decodes=num_decodes)
    return len(step.draft(bytearray(packed([1, 2] * 60)), rate, most=100)) // 4


def wanted_in(drafts: Drafts, rate: AcceptanceRate, steps: int, *, num_rows: int = 1) -> list[int]:
    """Draft tokens wanted in so many steps."""
    return [drafts.step(num_rows, num_decodes=number).wanted(rate) for number in range(steps)]


def with_costs(*, fixed: float, per_token: float, jump: float = 0.0, per_pass: float = 0.0) -> Drafts:
    """Costs of steps, `jump` of which comes with the first draft token."""
    drafts = Drafts(PromptLookup(), most=8, are_from_ranks=per_pass > 0)
    for num_rows, num_drafts in itertools.product((1, 2, 9), (0, 0, 0, 1, 2, 5, 8)):
        num_passes = num_drafts if per_pass else 0
        for passes in {num_passes, num_passes // 2}:
            num_tokens = num_rows * (1 + num_drafts)
            seconds = fixed + per_token * num_tokens + jump * (num_drafts > 0) + per_pass * passes
            drafts.costs.note(seconds, num_tokens, num_rows=num_rows, num_passes=passes)
    return drafts


def test_nothing_is_drafted_without_a_drafter() -> None:
    assert count(Drafts(), AcceptanceRate()) == 0


def test_costs_of_steps_without_drafts_and_with_them_are_told_apart() -> None:
    costs = with_costs(fixed=3.0, per_token=1.0, jump=2.0, per_pass=0.5).costs
    assert costs.seconds(1, 0) == pytest.approx(4) and costs.seconds(5, 0) == pytest.approx(8)
    assert costs.seconds(1, 3, num_passes=3) == pytest.approx(3 + 4 + 2 + 1.5)
    assert costs.seconds(4, 1, num_passes=1) == pytest.approx(3 + 8 + 2 + 0.5)


def test_costs_that_came_together_are_known_together() -> None:
    drafts = Drafts(PromptLookup(), most=4, are_from_ranks=True)
    for num_drafts in (0, 1, 2, 3, 4) * 8:
        seconds = 1 + 0.3 * num_drafts
        drafts.costs.note(seconds, 1 + num_drafts, num_rows=1, num_passes=num_drafts)
    assert drafts.costs.seconds(1, 3, num_passes=3) == pytest.approx(1.9)


def test_until_costs_are_known_all_numbers_are_tried_for_some_steps_each() -> None:
    assert wanted_in(Drafts(PromptLookup(), most=2), AcceptanceRate(), 16) == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4
    assert not any(wanted_in(Drafts(PromptLookup(), most=2), AcceptanceRate(0.01), 40)), "a hopeless one needs no costs"


@pytest.mark.parametrize("num_requests", [1, 2, 8])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_costs_become_known_with_any_number_of_requests_and_stages(num_requests: int, stages: int) -> None:
    """Each stage has requests of its own in a plan."""
    drafts, last = Drafts(most=4, are_from_ranks=True, stages=stages), [0] * stages
    for number in range(24 * stages):
        step = drafts.step(num_requests, num_decodes=number)
        (asked,) = {step.ask(AcceptanceRate(), most=8) for _ in range(num_requests)}
        num_tokens = num_requests * (1 + last[number % stages])
        drafts.costs.note(1 + 0.01 * num_tokens + 0.1 * asked, num_tokens, num_rows=num_requests, num_passes=asked)
        last[number % stages] = asked
    assert drafts.costs.are_known


@pytest.mark.parametrize(
    ("share", "costs", "num_rows", "wanted"),
    [
        (0.9, {"fixed": 1.0, "per_token": 0.0}, 1, 8),  # a token more costs nothing
        (0.5, {"fixed": 1.0, "per_token": 1 / 9}, 1, 2),  # 1.75 / (12 / 9) is the best
        (0.4, {"fixed": 1.0, "per_token": 1.0}, 1, 0),
        (0.9, {"fixed": 1.0, "per_token": 1.0}, 64, 0),  # a batch that is bound by its tokens
        (0.9, {"fixed": 1.0, "per_token": 0.05, "jump": 1.0}, 1, 8),  # the first one costs
        (0.5, {"fixed": 1.0, "per_token": 0.05, "jump": 1.0}, 1, 0),
        (0.9, {"fixed": 1.0, "per_token": 0.05, "per_pass": 0.3}, 1, 5),
        (0.9, {"fixed": 1.0, "per_token": 0.05, "per_pass": 1.0}, 1, 0),
    ],
)
def test_as_many_are_drafted_as_pay(share: float, costs: dict[str, float], num_rows: int, wanted: int) -> None:
    drafts = with_costs(**costs)
    assert wanted_in(drafts, AcceptanceRate(share), 8, num_rows=num_rows)[-1] == wanted


def test_now_and_then_another_number_is_drafted_so_that_costs_stay_known() -> None:
    found = wanted_in(with_costs(fixed=1.0, per_token=0.0), AcceptanceRate(0.9), 64 * 9)
    assert set(found) == set(range(9)) and found.count(8) == 64 * 9 - 4 * 8


def test_where_it_does_not_pay_it_is_tried_now_and_then() -> None:
    drafts, rate = with_costs(fixed=0.0, per_token=1.0), AcceptanceRate(0.1)
    assert [count(drafts, rate, num_decodes=number) for number in range(34)] == [*([0] * 16), 1, *([0] * 16), 1]


def test_who_had_no_idea_is_asked_less_often() -> None:
    class Clueless:
        asked = 0

        def draft(self, tokens: bytes | bytearray, most: int) -> bytes:
            self.asked += 1
            return b""

    drafter, rate = Clueless(), AcceptanceRate()
    drafts = Drafts(drafter, most=4, is_adaptive=False)
    for _ in range(100):
        assert count(drafts, rate) == 0
    assert 20 <= drafter.asked <= 25


def test_luck_follows_what_is_accepted_and_new_requests_begin_with_that_of_all() -> None:
    drafts = Drafts(PromptLookup(), most=4)
    state = drafts.new_state()
    for _ in range(200):
        drafts.note(state, 0, 4)
    assert state.rate.value < 0.01 and drafts.new_state().rate.value < 0.2
    for _ in range(200):
        drafts.note(state, 3, 4)
    assert state.rate.value == pytest.approx(0.75, abs=0.1)
    assert (drafts.num_drafted, drafts.num_accepted) == (1600, 600)
    assert drafts.drafted_at[4] == 400 and drafts.accepted_at == {1: 200, 2: 200, 3: 200}


# --- outputs ----------------------------------------------------------------------------------------------------------


PROMPTS = [np.random.default_rng(length).integers(3, 200, length).tolist() for length in (37, 70, 5)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def complete(llm: LLM, sampling: SamplingParams) -> list[list[int]]:
    found = [list(completion.token_ids) for completion in llm.generate(PROMPTS, sampling)]
    llm.check()
    return found


def drafting(model: Path, texts: list[list[int]], **settings: object) -> tuple[LLM, Drafts]:
    """With draft tokens that are mostly what `texts` say."""
    llm = LLM(str(model), page_size=16, num_pages=64, draft="ngram", draft_tokens=5, adaptive_drafts=False, **settings)
    drafts = llm.engine._scheduler.drafts
    drafts.drafter = KnownTexts(texts, vocab=200)
    return llm, drafts


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Made when they are asked for."""

    class Made(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = byte_level(make_family(tmp_path_factory.mktemp(name), name))
            return self[name]

    return Made()


@pytest.mark.parametrize("family", mostly_long(FAMILIES, but=["llama", "gemma3", "nemotron_h"]))
def test_greedy_outputs_are_what_transformers_finds_likeliest(models: dict[str, Path], family: str) -> None:
    plain = LLM(str(models[family]), page_size=16, num_pages=64)
    texts = [prompt + output for prompt, output in zip(PROMPTS, complete(plain, GREEDY), strict=True)]
    plain.close()
    for prompt, text, logits in zip(PROMPTS, texts, golden(models[family], texts).logits, strict=True):
        assert text[len(prompt) :] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()

    llm, drafts = drafting(models[family], texts)
    for _ in range(2):  # cold, and from what was left in the cache with drafts
        assert [p + o for p, o in zip(PROMPTS, complete(llm, GREEDY), strict=True)] == texts
    assert 0 < drafts.num_accepted < drafts.num_drafted
    assert llm.stats().cached_tokens > 0
    llm.close()


@pytest.mark.parametrize(
    "family", mostly_long(["llama", "nemotron_h", "gemma3", "deepseek_v32"], but=["llama", "nemotron_h"])
)
@pytest.mark.parametrize(
    "wishes",
    [
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.7, "seed": 5, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0.0, "frequency_penalty": 1.0},
    ],
    ids=["sampled", "sampled with penalties", "greedy with penalties"],
)
def test_samples_are_the_same_for_a_seed(models: dict[str, Path], family: str, wishes: dict[str, float]) -> None:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **wishes)  # type: ignore[arg-type]
    plain = LLM(str(models[family]), page_size=16, num_pages=64)
    expected = complete(plain, sampling)
    plain.close()
    llm, drafts = drafting(models[family], [p + o for p, o in zip(PROMPTS, expected, strict=True)])
    assert complete(llm, sampling) == expected
    assert 0 < drafts.num_accepted < drafts.num_drafted
    llm.close()


def test_log_probabilities_and_stops_are_those_of_single_steps(models: dict[str, Path]) -> None:
    plain = LLM(str(models["qwen3"]), page_size=16, num_pages=64)
    texts = [prompt + output for prompt, output in zip(PROMPTS, complete(plain, GREEDY), strict=True)]
    stop = texts[0][len(PROMPTS[0]) + 7]
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=2, stop_token_ids=(stop,))
    expected = plain.generate(PROMPTS, sampling)
    plain.close()
    llm, drafts = drafting(models["qwen3"], texts)
    found = llm.generate(PROMPTS, sampling)
    llm.check()
    llm.close()
    assert drafts.num_accepted > 0
    for one, other in zip(expected, found, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.logprobs is not None and other.logprobs is not None
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        for entry, again in pairs:
            assert entry.token_id == again.token_id and entry.logprob == pytest.approx(again.logprob, abs=1e-4)
            assert [i for i, _ in entry.top] == [i for i, _ in again.top]


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chance of a sum of squares at least that large, if `counts` are drawn from what was expected."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), torch.tensor(statistic / 2)))


def likeliest(model: Path, texts: list[list[int]], count: int) -> list[list[tuple[int, float]]]:
    """The likeliest next tokens of each text, and their chances among each other."""
    found = []
    for logits in golden(model, texts).logits:
        ids = np.argsort(logits[-1])[-count:]
        chances = np.exp(logits[-1][ids] - logits[-1][ids].max())
        found.append(list(zip(ids.tolist(), (chances / chances.sum()).tolist(), strict=True)))
    return found


@pytest.mark.long
def test_sampled_tokens_are_distributed_as_the_model_says(models: dict[str, Path]) -> None:
    """Three tokens in a row, each among the three likeliest: the second is drafted. Twenty times with other seeds."""
    model, prompt, width, num_draws, num_rounds = models["qwen3"], PROMPTS[2], 3, 300, 20
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        nexts = likeliest(model, [[*prompt, *path] for path in paths], width)
        pairs = zip(paths.items(), nexts, strict=True)
        paths = {(*path, token): chance * share for (path, chance), found in pairs for token, share in found}
    drafted = {path[:2] for path in list(paths)[:: 2 * width]}
    llm, drafts = drafting(model, [[*prompt, *path] for path in drafted])
    p_values = []
    for number in range(num_rounds):
        samplings = [
            SamplingParams(temperature=1.0, top_k=width, max_tokens=3, ignore_eos=True, seed=num_draws * number + i)
            for i in range(num_draws)
        ]
        found = Counter(tuple(each.token_ids) for each in llm.generate([prompt] * num_draws, samplings))
        assert found.keys() <= paths.keys()
        counts, expected = np.array([found[path] for path in paths]), num_draws * np.array(list(paths.values()))
        p_values.append(chi_square_p(counts, expected))
    llm.close()
    assert 0.1 * drafts.num_drafted < drafts.num_accepted < drafts.num_drafted
    assert min(p_values) > 0.001 and 0.3 < np.mean(p_values) < 0.7, p_values
