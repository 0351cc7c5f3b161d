"""Models that draft for others: what they draft is what slow twins draft, and outputs stay what they are without."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycache.decider.drafts import AcceptanceRate, DraftStep
from raycache.llm import LLM
from raycache.types import CacheAction, CacheCommand, SamplingParams
from tests.oracle.draft_models import (
    Eagle,
    Eagle3,
    Head,
    SmallerModel,
    Twin,
    make_eagle,
    make_eagle3,
    make_predicting,
    make_smaller,
    make_target,
    prediction_twin,
)
from tests.oracle.families import make_family
from tests.oracle.golden import golden
from tests.oracle.tiny_tokenizers import byte_level
from tests.selection import mostly_long
from tests.unit.test_drafts import chi_square_p, likeliest

PAGE_SIZE, NUM_DRAFTS, NUM_TOKENS = 16, 3, 40
PROMPTS = [np.random.default_rng(length).integers(3, 200, length).tolist() for length in (37, 70, 5)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass
class Pair:
    """A target, who drafts for it, and what it should draft.

    Attributes:
        target: directory.
        draft: setting.
        twin: slow.
        has_points: whether one of both has windows or recurrent layers: then rows with drafts end with a page.
        known: draft tokens of the twin that were asked for before.
        plain: directory of the target as transformers knows it, if that is another one.
    """

    target: Path
    draft: str
    twin: Twin
    has_points: bool = False
    known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    plain: Path | None = None

    def open(self, **settings: object) -> LLM:
        return open_llm(self.target, draft=self.draft, **settings)

    def drafted(self, tokens: Sequence[int], count: int) -> list[int]:
        if (key := tuple(tokens)) not in self.known:
            self.known[key] = self.twin.drafted(tokens, NUM_DRAFTS)
        return self.known[key][:count]


Make = Callable[[Path], Pair]


def open_llm(target: Path, **settings: object) -> LLM:
    sizes = {"page_size": PAGE_SIZE, "num_pages": 64, "draft_tokens": NUM_DRAFTS, "adaptive_drafts": False}
    return LLM(str(target), **{**sizes, **settings})


# --- pairs ------------------------------------------------------------------------------------------------------------


def small(folder: Path) -> Pair:
    target = byte_level(make_target(folder / "target", "llama"))
    draft = make_smaller(folder / "draft", target, num_layers=2, noise=0.3)
    return Pair(target, str(byte_level(draft)), SmallerModel(draft))


def other(target_name: str, draft_name: str, *, share: float) -> Make:
    def make(folder: Path) -> Pair:
        target = byte_level(make_target(folder / "target", target_name, share=share))
        draft = byte_level(make_target(folder / "draft", draft_name, share=share, seed=1, like=target))
        return Pair(target, str(draft), SmallerModel(draft), has_points=True)

    return make


def predicting(name: str, *, has_copies: bool = False, has_points: bool = False) -> Make:
    def make(folder: Path) -> Pair:
        target = byte_level(make_predicting(folder, name, has_copies=has_copies))
        return Pair(target, "mtp", prediction_twin(target), has_points=has_points)

    return make


def eagle(name: str, *, has_points: bool = False, has_bias: bool = False, num_layers: int = 1) -> Make:
    def make(folder: Path) -> Pair:
        target = byte_level(make_target(folder / "target", name, share=0.5))
        head = make_eagle(folder / "head", target, has_bias=has_bias, num_layers=num_layers)
        return Pair(target, str(head), Eagle(head, target), has_points=has_points)

    return make


def eagle3(name: str, *, has_embedding: bool, outputs: Sequence[int] | None = None) -> Make:
    def make(folder: Path) -> Pair:
        target = byte_level(make_target(folder / "target", name, share=0.35, num_hidden_layers=8))
        head = make_eagle3(folder / "head", target, draft_vocab=400, has_embedding=has_embedding, outputs=outputs)
        return Pair(target, str(head), Eagle3(head, target))

    return make


def mimo(root: Path) -> Pair:
    """A Qwen2 with a prediction layer, under its name for the twin and under MiMo's for us."""
    twin, target = byte_level(make_predicting(root / "qwen2", "qwen2")), root / "mimo"
    target.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (target / name).symlink_to(twin / name)
    config = json.loads((twin / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "model_type": "mimo", "attention_bias": True}))
    return Pair(target, "mtp", prediction_twin(twin), plain=twin)


PAIRS: dict[str, Make] = {
    "small": small,
    "gemma3 by llama": other("gemma3", "llama", share=0.4),
    "llama by gemma3": other("llama", "gemma3", share=0.4),
    "nemotron_h by llama": other("nemotron_h", "llama", share=0.35),
    "llama by nemotron_h": other("llama", "nemotron_h", share=0.35),
    "qwen3_next by gemma3": other("qwen3_next", "gemma3", share=0.4),
    "mtp of deepseek_v3": predicting("deepseek_v3", has_copies=True),
    "mtp of deepseek_v32": predicting("deepseek_v32"),
    "mtp of glm4_moe": predicting("glm4_moe", has_copies=True),
    "mtp of glm_moe_dsa": predicting("glm_moe_dsa"),
    "mtp of mimo": mimo,
    "mtp of qwen3_next": predicting("qwen3_next", has_points=True),
    "mtp of bailing_hybrid": predicting("bailing_hybrid", has_points=True),
    "mtp of bailing_moe_v2_5": predicting("bailing_moe_v2_5", has_points=True),
    "mtp of qwen3_5": predicting("qwen3_5", has_points=True),
    "mtp of qwen3_5_moe": predicting("qwen3_5_moe", has_points=True),
    "eagle of llama": eagle("llama"),
    "eagle of two layers with a bias": eagle("llama", has_bias=True, num_layers=2),
    "eagle of qwen3_next": eagle("qwen3_next", has_points=True),
    "eagle3 of llama": eagle3("llama", has_embedding=True),
    "eagle3 of deepseek_v3": eagle3("deepseek_v3", has_embedding=False),
    "eagle3 of named layers": eagle3("llama", has_embedding=False, outputs=(0, 2, 6)),
}

SOME = [
    "small",
    "llama by nemotron_h",
    "gemma3 by llama",
    "mtp of deepseek_v32",
    "eagle of qwen3_next",
    "eagle3 of llama",
]
"""One of each kind, with windows, states or neither."""

TWO = ["llama by nemotron_h", "eagle3 of llama"]
"""With states, and with a head that takes what the target's layers compute."""

LIKE_OTHERS = [
    "qwen3_next by gemma3",
    "gemma3 by llama",
    "eagle of qwen3_next",
    "mtp of deepseek_v3",
    "mtp of glm4_moe",
    "eagle of llama",
    "eagle3 of deepseek_v3",
    "llama by gemma3",
    "nemotron_h by llama",
    "mtp of glm_moe_dsa",
    "mtp of mimo",
    "mtp of qwen3_next",
    "mtp of bailing_hybrid",
    "mtp of qwen3_5",
    "mtp of qwen3_5_moe",
    "eagle of two layers with a bias",
    "eagle3 of named layers",
]
"""What they are made of is in other pairs as well."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Made when they are asked for."""

    class Made(dict[str, Pair]):
        def __missing__(self, name: str) -> Pair:
            self[name] = PAIRS[name](tmp_path_factory.mktemp("pair"))
            return self[name]

    return Made()


# --- what was drafted -------------------------------------------------------------------------------------------------

Rows = dict[tuple[int, ...], list[int]]
"""Drafts by the tokens that were known before them."""


def watch(llm: LLM) -> Rows:
    """The rows with drafts of all plans from now on."""
    rows: Rows = {}
    scheduler = llm.engine._scheduler
    schedule = scheduler.schedule

    def watched(now_s: float) -> object:
        ended, batch = schedule(now_s)
        for run, row in zip(batch.runs, batch.rows, strict=True) if batch is not None else ():
            if row.num_drafts:
                num_known = row.start + row.num_tokens - row.num_drafts
                known = np.frombuffer(bytes(run.request.tokens), np.int32)[:num_known].tolist()
                rows[tuple(known)] = np.frombuffer(bytes(row.tokens), np.int32)[-row.num_drafts :].tolist()
        return ended, batch

    scheduler.schedule = watched  # type: ignore[method-assign,assignment]
    return rows


def complete(llm: LLM, prompts: Sequence[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    """Prompts and outputs."""
    found = llm.generate(prompts, sampling)
    llm.check()
    return [prompt + list(completion.token_ids) for prompt, completion in zip(prompts, found, strict=True)]


def num_right(known: Sequence[int], drafts: Sequence[int], texts: list[list[int]]) -> int:
    text = next(text for text in texts if tuple(text[: len(known)]) == tuple(known))
    return next((i for i, draft in enumerate(drafts) if draft != text[len(known) + i]), len(drafts))


def check_drafts(pair: Pair, rows: Rows) -> None:
    assert rows == {known: pair.drafted(known, len(drafts)) for known, drafts in rows.items()}


def check_rows(pair: Pair, rows: Rows, texts: list[list[int]]) -> None:
    """Assert that the twin drafts the same, and that there were as many rows and drafts as there should be."""
    check_drafts(pair, rows)
    for text in texts:
        place, end = len(text) - NUM_TOKENS + 1, len(text) - 2 * NUM_DRAFTS - 2  # fewer are wanted at the end
        while place <= end:
            room = PAGE_SIZE - 1 - (place - 1) % PAGE_SIZE if pair.has_points else NUM_DRAFTS
            drafts = rows.get(tuple(text[:place]), [])
            assert len(drafts) == min(room, NUM_DRAFTS)
            place += num_right(text[:place], drafts, texts) + 1


def counts(rows: Rows, texts: list[list[int]]) -> tuple[Counter[int], Counter[int]]:
    """Drafts and those that were right, by position from 1."""
    made, right = Counter[int](), Counter[int]()
    for known, drafts in rows.items():
        made.update(range(1, len(drafts) + 1))
        right.update(range(1, num_right(known, drafts, texts) + 1))
    return made, right


# --- draft tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mostly_long(PAIRS, but=PAIRS.keys() - LIKE_OTHERS))
def test_drafts_are_those_of_a_slow_twin(pairs: dict[str, Pair], name: str) -> None:
    pair = pairs[name]
    with pair.open() as llm:
        rows = watch(llm)
        texts = complete(llm, PROMPTS)
        for prompt, text, logits in zip(PROMPTS, texts, golden(pair.plain or pair.target, texts).logits, strict=True):
            assert text[len(prompt) :] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        check_rows(pair, rows, texts)
        made, right = counts(rows, texts)
        stats = llm.stats()
        assert (stats.drafted, stats.accepted) == (made, right)
        assert 0.2 < right.total() / made.total() < 0.9

        cold = dict(rows)
        rows.clear()
        assert complete(llm, PROMPTS) == texts
        assert llm.stats().cached_tokens > 0 and rows == cold


@pytest.mark.parametrize("name", mostly_long(SOME, but=["eagle3 of llama"]))
def test_a_conversation_in_chunks_goes_on_from_what_was_written_with_drafts(pairs: dict[str, Pair], name: str) -> None:
    with pairs[name].open(max_step_tokens=24, max_running=4) as llm:
        rows = watch(llm)
        first = complete(llm, PROMPTS)
        check_rows(pairs[name], rows, first)
        rows.clear()
        texts = complete(llm, [[*text, 7, 8, 9] for text in first])
        assert llm.stats().cached_tokens > sum(len(prompt) for prompt in PROMPTS)
        check_rows(pairs[name], rows, texts)


@pytest.mark.parametrize("name", mostly_long(SOME, but=TWO))
def test_requests_that_lose_their_pages_go_on_with_the_same_drafts(pairs: dict[str, Pair], name: str) -> None:
    with open_llm(pairs[name].target) as plain:
        texts = complete(plain, PROMPTS)
    with pairs[name].open(num_pages=10) as llm:
        rows = watch(llm)
        assert complete(llm, PROMPTS) == texts
        assert llm.stats().preemptions > 0
        check_drafts(pairs[name], rows)


@pytest.mark.parametrize("name", mostly_long(SOME, but=TWO))
def test_what_the_draft_keeps_comes_back_from_the_host(pairs: dict[str, Pair], name: str) -> None:
    with pairs[name].open(host_memory="64MiB") as llm:
        rows = watch(llm)
        texts = complete(llm, PROMPTS)
        cold = dict(rows)
        rows.clear()
        llm.cache(CacheCommand(CacheAction.CLEAR, tiers=("device",)))
        assert complete(llm, PROMPTS) == texts
        assert llm.stats().cached_by_tier["host"] > 0 and rows == cold
        check_drafts(pairs[name], rows)


@pytest.mark.parametrize(
    "name", mostly_long(["mtp of deepseek_v32", "eagle of qwen3_next", "eagle3 of llama"], but=["eagle3 of llama"])
)
def test_a_branch_between_two_pages_keeps_one_row_of_the_other_prompt(pairs: dict[str, Pair], name: str) -> None:
    """The last row of a shared page has joined the next token of who computed it. Drafts are a little worse for it."""
    prompt, place = PROMPTS[1][: 3 * PAGE_SIZE], 2 * PAGE_SIZE
    branches = [[*prompt[:place], *PROMPTS[0][start : start + 6]] for start in (0, 6, 12)]
    twin = pairs[name].twin
    assert isinstance(twin, Head)
    with pairs[name].open() as llm:
        complete(llm, [prompt])
        rows = watch(llm)
        complete(llm, branches)
        assert llm.stats().cached_tokens == len(branches) * place
    others = {place - 1: prompt[place]}
    assert rows == {known: twin.drafted(known, len(drafts), others=others) for known, drafts in rows.items()}


# --- outputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mostly_long(PAIRS, but=SOME[:3]))
def test_samples_are_the_same_for_a_seed(pairs: dict[str, Pair], name: str) -> None:
    with open_llm(pairs[name].target) as plain:
        texts = complete(plain, PROMPTS, SAMPLED)
    with pairs[name].open() as llm:
        assert complete(llm, PROMPTS, SAMPLED) == texts
        stats = llm.stats()
        assert 0 < sum(stats.accepted.values()) < sum(stats.drafted.values())


@pytest.mark.long
def test_sampled_tokens_are_distributed_as_the_target_says(pairs: dict[str, Pair]) -> None:
    """Four tokens in a row, each one of two: the second and third are drafted. 20 times with other seeds."""
    pair, prompt, width, num_draws, num_rounds = pairs["small"], PROMPTS[1][24:29], 2, 200, 20
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        nexts = likeliest(pair.plain or pair.target, [[*prompt, *path] for path in chances], width)
        both = zip(chances.items(), nexts, strict=True)
        chances = {(*path, token): chance * share for (path, chance), found in both for token, share in found}
    p_values = []
    with pair.open() as llm:
        for number in range(num_rounds):
            samplings = [
                SamplingParams(temperature=1.0, top_k=width, max_tokens=4, ignore_eos=True, seed=num_draws * number + i)
                for i in range(num_draws)
            ]
            found = Counter(tuple(each.token_ids) for each in llm.generate([prompt] * num_draws, samplings))
            assert found.keys() <= chances.keys()
            observed, expected = np.array([found[path] for path in chances]), num_draws * np.array([*chances.values()])
            p_values.append(chi_square_p(observed, expected))
        stats = llm.stats()
    assert all(0.1 < stats.accepted[place] / stats.drafted[place] < 0.9 for place in (1, 2))
    assert min(p_values) > 0.001 and 0.3 < np.mean(p_values) < 0.7, p_values


@pytest.mark.parametrize(
    "family", mostly_long(["llama", "gemma3", "nemotron_h", "qwen3_next", "deepseek_v32"], but=["nemotron_h"])
)
def test_a_model_that_drafts_for_itself_is_always_right(tmp_path: Path, family: str) -> None:
    model = byte_level(make_family(tmp_path, family))
    with open_llm(model, draft=str(model)) as llm:
        for sampling in (GREEDY, GREEDY, SAMPLED):
            complete(llm, PROMPTS, sampling)
            stats = llm.stats()
            assert stats.accepted == stats.drafted and stats.drafted[NUM_DRAFTS] > 10


@pytest.mark.parametrize(
    "wishes",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "logit_bias": {514: 3.0}},
        {"temperature": 0.8, "repetition_penalty": 1.3},
    ],
    ids=["greedy", "bias", "penalty"],
)
def test_a_draft_with_fewer_tokens_bears_wishes_about_the_others(tmp_path: Path, wishes: dict[str, Any]) -> None:
    """Models of one tokenizer are padded to different sizes."""
    target = byte_level(make_target(tmp_path / "target", "llama"))
    draft = byte_level(make_target(tmp_path / "draft", "llama", vocab_size=499))
    prompts = [[*PROMPTS[0], 514, 7], PROMPTS[1]]
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, seed=5, **wishes)
    with open_llm(target) as plain:
        texts = complete(plain, prompts, sampling)
    with open_llm(target, draft=str(draft)) as llm:
        assert complete(llm, prompts, sampling) == texts
        assert llm.stats().drafted


def test_a_draft_that_nobody_asks_for_long_catches_up(pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pairs["small"]
    with pair.open() as llm:
        rows = watch(llm)
        random, ask = np.random.default_rng(0), DraftStep.ask
        drafter = llm._rank.drafter  # type: ignore[union-attr]
        assert drafter is not None and drafter.may_lag

        def now_and_then(step: DraftStep, rate: AcceptanceRate, *, most: int) -> int:
            return ask(step, rate, most=most) if random.random() < 0.15 else 0

        monkeypatch.setattr(DraftStep, "ask", now_and_then)
        longest = 0
        for _ in range(2):  # the second time from the pages that the first has left
            texts = complete(llm, PROMPTS)
            longest = max([longest, *(len(missed) // 4 for _, missed in drafter._missed.values())])
            check_drafts(pair, rows)
        assert 5 < len(rows) < 60 and longest > 2 and llm.stats().cached_tokens > 0
        for prompt, text, logits in zip(PROMPTS, texts, golden(pair.plain or pair.target, texts).logits, strict=True):
            assert text[len(prompt) :] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
