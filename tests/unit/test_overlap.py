"""Steps planned ahead give the tokens of steps planned one after the other, with real ranks on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycache.config import Config
from raycache.errors import ConfigError
from raycache.llm import LLM, Completion
from raycache.types import SamplingParams
from tests.oracle.families import make_family
from tests.oracle.tiny import make_tiny
from tests.oracle.tiny_tokenizers import byte_level
from tests.selection import mostly_long

VOCAB = 403
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, top_p=0.9, max_tokens=12, seed=5, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0.7, max_tokens=9, seed=1, logprobs=3, ignore_eos=True),
    "stop token": SamplingParams(temperature=1.0, seed=2, max_tokens=40, stop_token_ids=tuple(range(3, 60))),
    "stop text": SamplingParams(temperature=1.0, seed=3, max_tokens=40, stop=("a", "e", "1", " ")),
    "one token": SamplingParams(temperature=0.0, max_tokens=1),
    "two tokens": SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    "penalty": SamplingParams(temperature=0.0, max_tokens=7, repetition_penalty=1.3, ignore_eos=True),
    "prompt": SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=1, ignore_eos=True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(make_tiny(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, num_hidden_layers=2))


def completions(model: Path, samplings: list[SamplingParams], **settings: Any) -> list[Completion]:
    """Prompts of several lengths twice over, the second time from the cache."""
    random = np.random.default_rng(3)
    prompts = [random.integers(3, VOCAB, 5 + 9 * i).tolist() for i in range(len(samplings))]
    values = {"device": "cpu", "page_size": 8, "num_pages": 60, "max_step_tokens": 48, **settings}
    with LLM(str(model), **values) as llm:
        found = llm.generate(prompts, samplings) + llm.generate(prompts, samplings)
        llm.generate([[1]], SamplingParams(max_tokens=1))
        llm.check()
    return found


def alike(one: Completion, other: Completion) -> bool:
    """Equal, but for the last bits of log-probabilities: batches differ."""
    same = (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
    scores = [
        [entry.logprob for entry in (*each.logprobs, *each.prompt_logprobs) if entry is not None]
        for each in (one, other)
    ]
    return same and len(scores[0]) == len(scores[1]) and np.allclose(*scores, atol=1e-4)


@pytest.mark.parametrize("names", [[name] * 3 for name in SAMPLINGS] + [list(SAMPLINGS)], ids=lambda names: names[-1])
def test_tokens_are_those_of_steps_one_by_one(model: Path, names: list[str]) -> None:
    samplings = [SAMPLINGS[name] for name in names]
    off, on = (completions(model, samplings, overlap=overlap) for overlap in ("off", "on"))
    assert all(alike(one, other) for one, other in zip(off, on, strict=True))


@pytest.mark.parametrize(
    "family",
    mostly_long(["gemma3", "gpt_oss", "qwen3_next", "nemotron_h", "kimi_linear"], but=["gpt_oss", "nemotron_h"]),
)
def test_models_with_windows_and_states_answer_as_step_by_step(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = byte_level(make_family(tmp_path / "model", family))
    samplings = [SAMPLINGS[name] for name in ("greedy", "seeded", "stop token", "two tokens")]
    samplings.append(SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))  # over page borders
    off, on = (completions(model, samplings, overlap=overlap, host_memory="4MiB") for overlap in ("off", "on"))
    assert all(alike(one, other) for one, other in zip(off, on, strict=True))
    assert [each.cached_tokens for each in off] == [each.cached_tokens for each in on]
    assert "overlap" not in caplog.text


def test_it_is_honoured_where_it_is_asked_for_and_off_on_the_cpu_otherwise(model: Path) -> None:
    for overlap, depth in (("on", 2), ("off", 1), ("auto", 1)):
        with LLM(str(model), device="cpu", page_size=8, num_pages=20, overlap=overlap) as llm:
            assert llm._executor.depth == depth


def test_tokens_are_right_with_a_host_tier_below(model: Path) -> None:
    samplings = [SAMPLINGS["greedy"], SAMPLINGS["seeded"], SAMPLINGS["stop token"]]
    off = completions(model, samplings, overlap="off")
    on = completions(model, samplings, overlap="on", host_memory="4MiB", num_pages=16)
    assert all(alike(one, other) for one, other in zip(off, on, strict=True))


def test_what_it_means_is_decided_by_the_device_and_the_stages() -> None:
    assert Config(model="m").plans_ahead(device_type="cuda")
    assert not Config(model="m").plans_ahead(device_type="cpu")
    assert not Config(model="m", pp=2).plans_ahead(device_type="cuda")
    assert Config(model="m", overlap="on").plans_ahead(device_type="cpu")
    assert not Config(model="m", overlap="off").plans_ahead(device_type="cuda")
    assert Config.from_mapping({"overlap": True}).overlap == "on"
    assert Config.from_mapping({"overlap": False}).overlap == "off"


def test_it_is_refused_with_several_stages() -> None:
    with pytest.raises(ConfigError, match="overlap=on needs pp=1, got pp=2.*use overlap=auto"):
        Config(model="m", pp=2, overlap="on")
