"""What could have been reused, counted beside engines: all of it is where everything fits, and causes are right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from raycache import LLM
from raycache.achievable.reuse import Reuse
from raycache.types import GenerateRequest, SamplingParams
from tests.oracle import tiny_tokenizers
from tests.oracle.families import make_family

_PAGE = 16


def talk(model: Path, **settings: Any) -> dict[str, Any]:
    """Several conversations in turns below one beginning; each prompt has the outputs before it."""
    draw, reuse = random.Random(0), Reuse(page_size=_PAGE)
    shared = draw.choices(range(5, 300), k=50)
    prompts = [shared + draw.choices(range(5, 300), k=30) for _ in range(4)]
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    tiny_tokenizers.byte_level(model)
    with LLM(str(model), device="cpu", page_size=_PAGE, max_model_len=512, **settings) as llm:
        for turn in range(3):
            for number, prompt in enumerate(prompts):
                request = GenerateRequest(f"{turn} {number}", list(prompt), sampling)
                llm.engine.add(request)
                with reuse.follow(request, tenant="") as watch:
                    while llm.engine.has_work:
                        for output in llm.engine.step():
                            watch.take(output)
                            prompt += output.token_ids
                prompt += draw.choices(range(5, 300), k=25)
    return reuse.tallies.total.facts()


@pytest.fixture(scope="module")
def everything(llama: Path) -> dict[str, Any]:
    return talk(llama, num_pages=200)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("llama"), "llama", vocab_size=400)


def test_where_everything_fits_all_that_can_be_reused_is(everything: dict[str, Any]) -> None:
    assert everything["achieved"] == everything["achievable"] > 0.5
    assert everything["lost"] == []


def test_what_a_small_cache_loses_is_lost_to_capacity(llama: Path, everything: dict[str, Any]) -> None:
    small = talk(llama, num_pages=20)
    assert 0 < small["achieved"] < small["achievable"] == everything["achievable"]
    assert {(row["cause"], row["kind"]) for row in small["lost"]} == {("capacity", "evicted_device")}
    tokens = sum(row["tokens"] for row in small["lost"])
    assert tokens == everything["cached_tokens"] - small["cached_tokens"]


def test_what_restore_points_lose_is_lost_to_granularity(tmp_path: Path) -> None:
    model = make_family(tmp_path / "model", "qwen3_next", vocab_size=400)
    found = talk(model, num_pages=200)
    assert 0 < found["achieved"] < found["achievable"]
    assert {(row["cause"], row["kind"]) for row in found["lost"]} == {("granularity", "state")}
