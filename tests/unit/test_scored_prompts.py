"""Prompts that are scored, in models with states or windows: what they leave for the next request is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raycache.llm import LLM
from raycache.types import SamplingParams
from tests.oracle.families import make_family
from tests.oracle.tiny_tokenizers import byte_level

_VOCAB = 403
_PROMPT = np.random.default_rng(3).integers(3, _VOCAB, 90).tolist()
_SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
_GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("family", ["qwen3_next", "gpt_oss", "falcon_h1"])
def test_the_next_request_goes_on_from_a_scored_prompt(tmp_path: Path, family: str) -> None:
    model = byte_level(make_family(tmp_path, family, vocab_size=_VOCAB))
    answers = []
    for is_scored in (False, True):
        with LLM(str(model), device="cpu", page_size=16, num_pages=64, restore_interval=32) as llm:
            if is_scored:
                (first,) = llm.generate([_PROMPT], _SCORED)
                (again,) = llm.generate([_PROMPT], _SCORED)
                assert first.cached_tokens == again.cached_tokens == 0
                found = [[entry and entry.logprob for entry in one.prompt_logprobs] for one in (first, again)]
                assert found[0][1:] == pytest.approx(found[1][1:], abs=1e-5)
            answers.append(llm.generate([[*_PROMPT, 7, 8, 9]], _GREEDY)[0])
            inside = llm.generate([[*_PROMPT[:70], 5]], _GREEDY)[0]
            assert inside.cached_tokens == 64
    fresh, reused = answers
    assert (fresh.cached_tokens, reused.cached_tokens) == (0, 80)
    assert reused.token_ids == fresh.token_ids
