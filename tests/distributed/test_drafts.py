"""Drafted tokens where ranks share the rows that check them: context parallel, tensor parallel, pipeline stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raycache.llm import LLM
from tests.oracle.families import make_family
from tests.oracle.golden import golden
from tests.oracle.tiny_tokenizers import byte_level
from tests.unit import test_draft_models as by_models
from tests.unit.test_drafts import GREEDY, PROMPTS, complete, drafting
from tests.unit.test_drafts_ahead import watch


@pytest.mark.parametrize(
    ("family", "split"),
    [
        pytest.param("deepseek_v32", {"cp": 4}, marks=pytest.mark.long),
        ("nemotron_h", {"tp": 2, "cp": 2}),
        pytest.param("gemma3", {"pp": 2, "cp": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_outputs_of_any_split_are_what_transformers_finds_likeliest(
    tmp_path: Path, family: str, split: dict[str, int]
) -> None:
    model = byte_level(make_family(tmp_path / family, family))
    plain = LLM(str(model), page_size=16, num_pages=64)
    texts = [prompt + output for prompt, output in zip(PROMPTS, complete(plain, GREEDY), strict=True)]
    plain.close()
    for prompt, text, logits in zip(PROMPTS, texts, golden(model, texts).logits, strict=True):
        assert text[len(prompt) :] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    llm, drafts = drafting(model, texts, rank_timeout_s=60, **split)
    for _ in range(2):
        assert [p + o for p, o in zip(PROMPTS, complete(llm, GREEDY), strict=True)] == texts
    assert 0 < drafts.num_accepted < drafts.num_drafted
    llm.close()


@pytest.mark.parametrize(
    ("make", "split"),
    [
        pytest.param(
            by_models.predicting("deepseek_v32"), {"cp": 4}, id="mtp of deepseek_v32, cp=4", marks=pytest.mark.long
        ),
        # Windows of the target and states of the draft: both are split over all four ranks, each in its own way.
        pytest.param(
            by_models.other("gemma3", "nemotron_h", share=0.4),
            {"tp": 2, "cp": 2},
            id="gemma3 by nemotron_h, tp=2 cp=2",
            marks=pytest.mark.long,
        ),
        # The head takes what enters layers 2, 4 and 5 of 8; layer 2 is on the first stage, the head on the last.
        pytest.param(
            by_models.eagle3("llama", has_embedding=False), {"pp": 2, "cp": 2}, id="eagle3 of llama, pp=2 cp=2"
        ),
        pytest.param(by_models.other("nemotron_h", "llama", share=0.35), {"cp": 2}, id="nemotron_h by llama, cp=2"),
        pytest.param(
            by_models.eagle3("llama", has_embedding=False),
            {"pp": 2, "cp": 2, "decode_split": "on"},
            id="eagle3 of llama, pp=2 cp=2, split weights",
        ),
        pytest.param(
            by_models.predicting("deepseek_v32"),
            {"tp": 2, "cp": 2, "decode_split": "on"},
            id="mtp of deepseek_v32, tp=2 cp=2, split weights",
            marks=pytest.mark.long,
        ),
        pytest.param(
            by_models.other("gemma3", "nemotron_h", share=0.4),
            {"cp": 2, "decode_split": "on"},
            id="gemma3 by nemotron_h, cp=2, split weights",
            marks=pytest.mark.long,
        ),
        pytest.param(
            by_models.small, {"cp": 2, "decode_split": "on"}, id="small, cp=2, split weights", marks=pytest.mark.long
        ),
    ],
)
def test_drafts_of_any_split_are_those_of_a_slow_twin(
    tmp_path: Path, make: by_models.Make, split: dict[str, Any]
) -> None:
    pair = make(tmp_path)
    with pair.open(rank_timeout_s=60, **split) as llm:
        assert (llm.info.decode_weights == "split over cp") == ("decode_split" in split)
        rows = by_models.watch(llm)
        texts = by_models.complete(llm, PROMPTS)
        for prompt, text, logits in zip(PROMPTS, texts, golden(pair.target, texts).logits, strict=True):
            assert text[len(prompt) :] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        by_models.check_rows(pair, rows, texts)
        made, right = by_models.counts(rows, texts)
        stats = llm.stats()
        assert (stats.drafted, stats.accepted) == (made, right)
        assert 0.2 < right.total() / made.total() < 0.9

        cold = dict(rows)
        rows.clear()
        assert by_models.complete(llm, PROMPTS) == texts
        assert llm.stats().cached_tokens > 0 and rows == cold


@pytest.mark.parametrize(
    ("make", "split"),
    [
        pytest.param(by_models.small, {"tp": 2}, id="small, tp=2"),
        pytest.param(by_models.eagle3("llama", has_embedding=False), {"cp": 2}, id="eagle3 of llama, cp=2"),
        pytest.param(
            by_models.other("nemotron_h", "llama", share=0.35),
            {"tp": 2, "cp": 2, "decode_split": "on"},
            id="nemotron_h by llama, tp=2 cp=2, split weights",
            marks=pytest.mark.long,
        ),
    ],
)
def test_any_split_follows_what_is_planned_before_it_is_known(
    tmp_path: Path, make: by_models.Make, split: dict[str, Any]
) -> None:
    pair = make(tmp_path)
    with by_models.open_llm(pair.target) as plain:
        texts = [by_models.complete(plain, PROMPTS, sampling) for sampling in (by_models.GREEDY, by_models.SAMPLED)]
    with pair.open(rank_timeout_s=60, overlap="on", **split) as llm:
        counted = watch(llm)
        for sampling, wanted in zip((by_models.GREEDY, by_models.SAMPLED), texts, strict=True):
            assert by_models.complete(llm, PROMPTS, sampling) == wanted
        assert counted["fed"] == counted["decode"] and counted["fed with drafts"] > 0
