"""Structured output through the engine: every output follows its grammar, and no row beside it changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from launch.demo.model import make_demo_model
from raycache.api import constraint
from raycache.decider.scheduler import Scheduler
from raycache.errors import RequestError, RequestFailedError
from raycache.llm import LLM, Completion
from raycache.rank import sampler
from raycache.types import FinishReason, SamplingParams
from tests.oracle.families import make_family
from tests.oracle.tiny import make_tiny
from tests.oracle.tiny_tokenizers import byte_level
from tests.selection import mostly_long

VOCAB = 403
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -5, "maximum": 99},
        "b": {"enum": ["x", "yy", None]},
        "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
PATTERN = r"[a-c]{3,5}|[0-9]/x"
CHOICES = ["yes", "no", "not now"]
SPLITS = [
    {},
    {"overlap": "on"},
    {"draft": "ngram", "adaptive_drafts": False},
    {"tp": 2},
    {"pp": 2},
    {"cp": 2},
    {"tp": 2, "draft": "ngram", "adaptive_drafts": False},
    {"pp": 2, "draft": "ngram"},
    {"cp": 2, "draft": "ngram"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(make_tiny(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, num_hidden_layers=2))


def load(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), **{"device": "cpu", "page_size": 8, "num_pages": 200, **settings})


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with load(model) as made:
        yield made


def requests() -> list[SamplingParams]:
    """Free rows beside constrained ones: greedy, at random, with every filter, with penalties."""
    schema = constraint.json_schema(SCHEMA)
    return [
        SamplingParams(temperature=0, max_tokens=30),
        SamplingParams(temperature=0, max_tokens=300, grammar=schema),
        SamplingParams(seed=1, max_tokens=300, grammar=schema, logprobs=2),
        SamplingParams(seed=2, max_tokens=300, grammar=schema, top_k=5, top_p=0.9, min_p=0.01, ignore_eos=True),
        SamplingParams(seed=3, max_tokens=300, grammar=schema, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(seed=4, max_tokens=30),
        SamplingParams(seed=5, max_tokens=30, grammar=constraint.regex(PATTERN)),
        SamplingParams(seed=6, max_tokens=30, grammar=constraint.choice(CHOICES), top_p=0.5),
        SamplingParams(temperature=0, max_tokens=30, grammar=constraint.choice(CHOICES)),
        SamplingParams(seed=7, max_tokens=20, grammar=constraint.json_object(), logit_bias={90: 100.0}),
    ]


def prompts() -> list[str]:
    # Whole characters: an output could not finish one that its prompt begins.
    return ["The quick brown fox jumps over the dog; " * (1 + i) for i in range(len(requests()))]


def check(outputs: list[Completion]) -> None:
    for output in outputs[1:5]:
        jsonschema.validate(json.loads(output.text), SCHEMA)
    assert re.fullmatch(PATTERN, outputs[6].text)
    assert {outputs[7].text, outputs[8].text} <= set(CHOICES)
    ended = [outputs[i].finish_reason for i in (1, 2, 3, 4, 6, 7, 8)]
    assert ended == [FinishReason.STOP] * 7


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Completion]:
    outputs = llm.generate(prompts(), requests())
    check(outputs)
    return outputs


@pytest.mark.parametrize("settings", mostly_long(SPLITS[1:], but=[SPLITS[1], SPLITS[2], SPLITS[6]]))
def test_outputs_are_the_same_under_every_split(
    model: Path, settings: dict[str, Any], expected: list[Completion]
) -> None:
    with load(model, **settings) as llm:
        outputs = llm.generate(prompts(), requests())
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        check(outputs)
        stats = llm.stats()
    if settings.get("adaptive_drafts") is False:
        assert stats.accepted[1] > 0


@pytest.mark.parametrize("split", mostly_long([{}, {"tp": 2}, {"cp": 2}], but=[{}, {"cp": 2}]), ids=str)
def test_outputs_are_the_same_planned_one_step_ahead(
    model: Path, split: dict[str, int], expected: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A row with penalties would hold up the plans of all.
    wanted = [i for i, sampling in enumerate(requests()) if not sampling.has_penalties]
    masked, make = [], Scheduler.masks
    monkeypatch.setattr(Scheduler, "masks", lambda self, batch: masked.extend(batch.rows) or make(self, batch))
    with load(model, overlap="on", **split) as llm:
        outputs = llm.generate([prompts()[i] for i in wanted], [requests()[i] for i in wanted])
    assert [output.token_ids for output in outputs] == [expected[i].token_ids for i in wanted]
    assert sum(row.is_masked and row.is_fed for row in masked) > len(masked) / 3


@pytest.mark.parametrize("family", mostly_long(["llama", "qwen3_next", "nemotron_h", "deepseek_v3"], but=["llama"]))
def test_other_families_and_draft_models_follow_the_same_grammars(tmp_path: Path, family: str) -> None:
    model = byte_level(make_family(tmp_path / "model", family))
    drafts = str(model) if family == "llama" else "ngram"
    outputs = []
    for settings in ({}, {"draft": drafts, "adaptive_drafts": False}):
        with load(model, **settings) as llm:
            outputs.append(llm.generate(prompts(), requests()))
            stats = llm.stats()
        check(outputs[-1])
    assert [output.token_ids for output in outputs[0]] == [output.token_ids for output in outputs[1]]
    assert stats.accepted[1] > 0


@pytest.mark.real_model
@pytest.mark.long
def test_a_trained_model_at_random_gives_valid_answers(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = make_demo_model(tmp_path / "smollm2", dtype="float32")
    grammar = constraint.json_schema(SCHEMA)
    wanted = [SamplingParams(seed=seed, max_tokens=200, grammar=grammar) for seed in range(8)]
    asked = [f"Example {i} of a JSON object:\n" for i in range(8)]
    found = []
    for settings in ({}, {"draft": "ngram", "adaptive_drafts": False}):
        with load(model, page_size=16, **settings) as llm:
            found.append(llm.generate(asked, wanted))
    assert [output.token_ids for output in found[0]] == [output.token_ids for output in found[1]]
    for output in found[0]:
        assert output.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(output.text), SCHEMA)


def test_a_grammar_changes_no_row_beside_it(llm: LLM, expected: list[Completion]) -> None:
    for i in (0, 5):
        (alone,) = llm.generate([prompts()[i]], requests()[i])
        assert alone.token_ids == expected[i].token_ids


def test_an_output_that_the_grammar_allows_anyway_is_the_one_without_it(llm: LLM, expected: list[Completion]) -> None:
    free = SamplingParams(seed=4, max_tokens=30, grammar="start: /(?s:.*)/")
    (output,) = llm.generate([prompts()[5]], free)
    text = expected[5].text
    assert "\ufffd" in text or output.text == text  # a grammar allows whole characters only


def test_requests_that_lose_their_pages_follow_their_grammar(model: Path, expected: list[Completion]) -> None:
    with load(model, num_pages=24) as llm:
        outputs = llm.generate(prompts(), requests())
        assert llm.stats().preemptions > 0
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_without_masks_the_grammar_is_left_and_the_request_fails(
    llm: LLM, expected: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_masked", lambda logits, rows: logits)
    with pytest.raises(RequestFailedError, match="cannot be followed any further"):
        llm.generate(prompts(), requests())
    monkeypatch.undo()
    check(llm.generate(prompts(), requests()))


def test_a_wrong_grammar_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match='cannot be compiled.*unknown name: "missing"$') as error:
        llm.generate([[5]], SamplingParams(grammar="start: missing"))
    assert error.value.field == "grammar"


def test_max_tokens_cuts_a_constrained_output(llm: LLM) -> None:
    (output,) = llm.generate([[5]], SamplingParams(temperature=0, max_tokens=4, grammar=constraint.json_schema(SCHEMA)))
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 4)
