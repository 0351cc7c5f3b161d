"""Decode steps with weights split over cp, with ranks in processes of their own and gloo between them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from raycache import LLM, SamplingParams
from tests.oracle.families import make_family
from tests.oracle.tiny_tokenizers import byte_level
from tests.selection import mostly_long

PROMPTS = [list(range(3 + i, 40 + 3 * i)) for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(make_family(tmp_path_factory.mktemp("model"), "qwen3_moe"))


def outputs(model: Path, **settings: Any) -> tuple[list[list[int]], str]:
    """Tokens of five prompts at once, greedy and drawn, and what the engine says of its decode steps."""
    with LLM(model, page_size=8, num_pages=64, device="cpu", rank_timeout_s=60, **settings) as llm:
        found = llm.generate(PROMPTS, GREEDY) + llm.generate(PROMPTS[:3], SEEDED)
        return [list(output.token_ids) for output in found], llm.info.decode_weights


@pytest.mark.parametrize(
    "split", mostly_long([{"cp": 2}, {"tp": 2, "cp": 2}, {"cp": 2, "pp": 2}], but=[{"tp": 2, "cp": 2}]), ids=str
)
def test_tokens_are_those_of_one_rank(model: Path, split: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="raycache")
    alone, of_one = outputs(model)
    together, of_all = outputs(model, decode_split="on", **split)
    assert together == alone
    assert (of_one, of_all) == ("all", "split over cp")
    assert "decode steps: weights are split over cp=2" in caplog.text


def test_drafted_tokens_change_nothing(model: Path) -> None:
    repeating = [[5, 6, 7, 8, 9] * 6, [11, 12, 13] * 9, list(range(20, 50))]
    tokens, drafted = [], []
    for settings in ({}, {"cp": 2, "decode_split": "on", "draft": "ngram"}):
        with LLM(model, page_size=8, num_pages=64, device="cpu", rank_timeout_s=60, **settings) as llm:
            tokens.append([list(output.token_ids) for output in llm.generate(repeating, GREEDY)])
            drafted.append(sum(llm.stats().drafted.values()))
            assert llm.info.decode_weights == ("split over cp" if settings else "all")
    assert tokens[0] == tokens[1] and drafted[0] == 0 < drafted[1]


def test_the_reason_not_to_split_is_logged_and_in_the_status(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="raycache")
    _, said = outputs(model, cp=2)
    assert said.startswith("all: a rank would read 0 MB per layer less")
    assert "every cp rank reads all weights of its tp rank: a rank would read 0 MB" in caplog.text
