"""Drafts of models on CUDA devices: right outputs, right draft tokens, recorded passes, several GPUs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from raycache import LLM, SamplingParams
from raycache.decider.drafts import PromptLookup
from raycache.rank.graphs import DecodeGraphs
from raycache.wire.plan import StepPlan
from tests.oracle.families import make_family
from tests.oracle.half import make_half
from tests.oracle.tiny_tokenizers import byte_level

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SPLITS: list[dict[str, int]] = [{}, {"tp": 2}, {"cp": 2}, {"pp": 2}]


def prompts(vocab: int) -> list[list[int]]:
    return [np.random.default_rng(length).integers(3, vocab, length).tolist() for length in (37, 70, 5, 130)]


def complete(llm: LLM, asked: list[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    found = [list(one.token_ids) for one in llm.generate(asked, sampling)]
    llm.check()
    return found


def assert_likeliest(oracle: Any, asked: list[list[int]], outputs: list[list[int]]) -> None:
    """Every token is the likeliest behind those before it, but where rounding decides."""
    for prompt, output in zip(asked, outputs, strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        behind = logits.amax(-1) - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert float((behind / logits.std(-1)).median()) == 0.0 and float((behind / logits.std(-1)).max()) < 0.5


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(("family", "draft"), [("llama", "llama"), ("deepseek_v32", "gemma3"), ("gemma3", "gemma3")])
def test_outputs_in_float32_are_those_of_the_cpu(
    tmp_path: Path, family: str, draft: str, split: dict[str, int]
) -> None:
    if sum(split.values()) > torch.cuda.device_count():
        pytest.skip("needs 2 GPUs")
    model = byte_level(make_family(tmp_path / family, family))
    other = model if family == draft else byte_level(make_family(tmp_path / draft, draft))
    asked = prompts(515)
    with LLM(str(model), device="cpu", page_size=16, num_pages=64) as llm:
        wanted = complete(llm, asked)
    settings: dict[str, Any] = {"draft": str(other), "draft_tokens": 3, "adaptive_drafts": False, **split}
    with LLM(str(model), device="cuda", dtype="float32", page_size=16, num_pages=64, **settings) as llm:
        for _ in range(2):
            assert complete(llm, asked) == wanted
        stats = llm.stats()
        assert sum(stats.drafted.values()) > 0 and stats.cached_tokens > 0
        if family == draft:
            assert stats.accepted == stats.drafted


@pytest.mark.parametrize(
    ("has_graphs", "pp"), [(True, 1), (False, 1), (True, 2)], ids=["recorded", "eager", "recorded stages"]
)
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gemma3"])
def test_a_model_drafts_what_it_says_itself_in_bfloat16(tmp_path: Path, family: str, has_graphs: bool, pp: int) -> None:
    if pp > torch.cuda.device_count():
        pytest.skip("needs 2 GPUs")
    model = byte_level(make_half(tmp_path / family, family))
    settings: dict[str, Any] = {"draft": str(model), "draft_tokens": 3, "adaptive_drafts": False}
    settings |= {"max_running": 8, "max_model_len": 512, "cuda_graphs": has_graphs, "pp": pp}
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    asked = prompts(oracle.config.vocab_size)
    with LLM(str(model), device="cuda", dtype="bfloat16", page_size=16, num_pages=64, **settings) as llm:
        outputs = complete(llm, asked)
        stats = llm.stats()
    # Its own passes are of other sizes than the rows that check them, and sum in another order.
    assert sum(stats.accepted.values()) > 0.85 * sum(stats.drafted.values()) > 0
    assert_likeliest(oracle, asked, outputs)


@pytest.mark.parametrize("is_right", [True, False], ids=["itself", "wrong guesses"])
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next"])
def test_recorded_steps_of_recurrent_models_check_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, is_right: bool
) -> None:
    model = byte_level(make_half(tmp_path / family, family))
    lengths: list[int] = []
    prepare = DecodeGraphs.prepare

    def noted(self: DecodeGraphs, plan: StepPlan, tables: Any) -> None:
        lengths.extend(row.num_tokens for row in plan.rows)
        prepare(self, plan, tables)

    monkeypatch.setattr(DecodeGraphs, "prepare", noted)
    monkeypatch.setattr(PromptLookup, "draft", lambda self, tokens, most: bytes(tokens[-4:]) * most)
    settings: dict[str, Any] = {"draft": str(model) if is_right else "ngram", "draft_tokens": 3}
    settings |= {"adaptive_drafts": False, "max_running": 8, "max_model_len": 512}
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    asked = prompts(oracle.config.vocab_size)
    with LLM(str(model), device="cuda", dtype="bfloat16", page_size=16, num_pages=64, **settings) as llm:
        outputs = complete(llm, asked)
        stats = llm.stats()
    assert max(lengths) == 4, "rows with drafts are recorded"
    share = sum(stats.accepted.values()) / sum(stats.drafted.values())
    assert share > 0.85 if is_right else share < 0.5
    assert_likeliest(oracle, asked, outputs)


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next", "bailing_hybrid"])
def test_recurrent_models_keep_a_state_behind_each_draft_token(tmp_path: Path, family: str) -> None:
    model = byte_level(make_family(tmp_path / "model", family))
    asked = prompts(515)
    with LLM(str(model), device="cpu", page_size=16, num_pages=64) as llm:
        wanted = complete(llm, asked)
    settings: dict[str, Any] = {"draft": str(model), "draft_tokens": 3, "adaptive_drafts": False}
    with LLM(str(model), device="cuda", dtype="float32", page_size=16, num_pages=64, **settings) as llm:
        for _ in range(2):
            assert complete(llm, asked) == wanted
        stats = llm.stats()
        assert stats.accepted == stats.drafted and stats.drafted[3] > 0


@pytest.mark.parametrize("family", ["llama", "deepseek_v32", "gemma3", "nemotron_h", "qwen3_next"])
@pytest.mark.parametrize("has_graphs", [True, False], ids=["recorded", "eager"])
def test_steps_planned_before_drafts_are_checked_give_the_same_tokens(
    tmp_path: Path, family: str, has_graphs: bool
) -> None:
    """Drafts of another model of the same vocabulary, of which few are right, and of the model itself."""
    model, other = (byte_level(make_family(tmp_path / name, name)) for name in (family, "qwen3"))
    asked = prompts(515)
    sampled = SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)
    settings: dict[str, Any] = {"draft_tokens": 3, "adaptive_drafts": False, "cuda_graphs": has_graphs}
    settings |= {"max_running": 4, "max_model_len": 512, "page_size": 16, "num_pages": 64, "dtype": "float32"}
    for draft in (model, other):
        found = []
        for overlap in ("off", "on"):
            with LLM(str(model), device="cuda", draft=str(draft), overlap=overlap, **settings) as llm:
                fed = count_fed(llm)
                greedy, stats = complete(llm, asked), llm.stats()
                assert (stats.accepted == stats.drafted) == (draft is model)
                found.append([greedy, complete(llm, asked, sampled)])
                assert (fed["with drafts"] > 0) == (overlap == "on")
        assert found[0] == found[1]


def count_fed(llm: LLM) -> Counter[str]:
    """Count rows from now on that were planned before those before them had ended."""
    counted = Counter[str]()
    scheduler = llm.engine._scheduler
    schedule = scheduler.schedule

    def watched(now_s: float) -> Any:
        ended, batch = schedule(now_s)
        for row in () if batch is None else batch.rows:
            counted["decode"] += row.output_position > 0
            counted["with drafts"] += row.is_fed and row.num_drafts > 0
        return ended, batch

    scheduler.schedule = watched  # type: ignore[method-assign]
    return counted
