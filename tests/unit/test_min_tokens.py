"""min_tokens against transformers' min_new_tokens, and with drafts, grammars and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from raycache.api.tokenizer import Tokenizer
from raycache.errors import RequestError
from raycache.llm import LLM
from raycache.types import FinishReason, SamplingParams
from tests.oracle.draft_models import make_smaller, make_target
from tests.oracle.tiny_tokenizers import byte_level
from tests.unit.scripted import ScriptedEngine, over_asgi, run

NUM_NEW = 14
PROMPTS = [np.random.default_rng(length).integers(3, 200, length).tolist() for length in (5, 16, 37, 70)]
LEAST = (0, 1, 5, 9)
"""min_tokens of each prompt."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(make_target(tmp_path_factory.mktemp("models") / "target", "llama"))


@pytest.fixture(scope="module")
def draft(model: Path) -> Path:
    return byte_level(make_smaller(model.parent / "draft", model, num_layers=2, noise=0.1))


@pytest.fixture(scope="module", params=["plain", "tp=2", "ngram", "draft model", "draft model, tp=2"])
def llm(request: pytest.FixtureRequest, model: Path, draft: Path) -> Iterator[LLM]:
    settings: dict[str, Any] = {"device": "cpu", "page_size": 16, "num_pages": 64}
    if "tp=2" in request.param:
        settings["tp"] = 2
    if request.param == "ngram":
        settings |= {"draft": "ngram", "draft_tokens": 3, "adaptive_drafts": False}
    if "draft model" in request.param:
        settings |= {"draft": str(draft), "draft_tokens": 3, "adaptive_drafts": False}
    with LLM(str(model), **settings) as made:
        yield made
        made.check()
        assert "draft model" not in request.param or sum(made.stats().drafted.values())


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Tokens that end the output of each prompt, among them the first ones of its free output, and its output."""
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")

    def generated(prompt: list[int], stops: list[int], least: int) -> tuple[int, ...]:
        ids = torch.tensor([prompt])
        found = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            min_new_tokens=least,
            eos_token_id=stops,
            pad_token_id=0,
        )
        return tuple(found[0, len(prompt) :].tolist())

    found = []
    for prompt, least in zip(PROMPTS, LEAST, strict=True):
        stops = list(dict.fromkeys(generated(prompt, [511], NUM_NEW)))[:4]
        found.append((tuple(stops), generated(prompt, stops, least)))
    return found


def test_greedy_output_is_that_of_transformers(
    llm: LLM, expected: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    wanted = [
        SamplingParams(temperature=0.0, max_tokens=NUM_NEW, min_tokens=least, stop_token_ids=stops, ignore_eos=True)
        for (stops, _), least in zip(expected, LEAST, strict=True)
    ]
    assert any(len(tokens) > least for (_, tokens), least in zip(expected, LEAST, strict=True))
    found = llm.generate(PROMPTS, wanted)
    assert [each.token_ids for each in found] == [tokens for _, tokens in expected]
    assert [llm.generate([p], s)[0].token_ids for p, s in zip(PROMPTS, wanted, strict=True)] == [
        tokens for _, tokens in expected
    ]


@pytest.mark.parametrize("wishes", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}, {"logprobs": 1}], ids=str)
def test_an_end_that_is_always_wanted_comes_as_soon_as_it_may(llm: LLM, wishes: dict[str, Any]) -> None:
    (eos, *_) = llm.info.eos_token_ids
    always = SamplingParams(**wishes, logit_bias={eos: 100.0}, max_tokens=NUM_NEW)
    wanted = [replace(always, min_tokens=least) for least in LEAST]
    found = llm.generate(PROMPTS, wanted)
    assert [len(each.token_ids) for each in found] == [least + 1 for least in LEAST]
    assert [each.token_ids.index(eos) for each in found] == list(LEAST)
    assert {each.finish_reason for each in found} == {FinishReason.STOP}


def test_a_grammar_ends_the_output_if_it_allows_nothing_else(llm: LLM) -> None:
    (eos, *_) = llm.info.eos_token_ids
    endless = SamplingParams(grammar="start: /a*/", min_tokens=6, logit_bias={eos: 100.0}, max_tokens=NUM_NEW)
    short = SamplingParams(grammar='start: "ab"', min_tokens=6, temperature=0.0, max_tokens=NUM_NEW)
    more, less = llm.generate(["one two", "three"], [endless, short])
    assert (len(more.token_ids), set(more.text)) == (7, {"a"})
    assert (less.text, less.finish_reason) == ("ab", FinishReason.STOP)


def test_more_than_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens=5 exceeds max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_requests_of_openai_clients_may_set_it(model: Path, path: str, body: dict[str, Any]) -> None:
    tokenizer = Tokenizer(model)
    engine = ScriptedEngine(tokenizer)

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            assert (await client.post(path, json={"model": "tiny", "min_tokens": 3, **body})).status_code == 200

    run(scenario())
    assert [request.sampling.min_tokens for request in engine.requests] == [3]
