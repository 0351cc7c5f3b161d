"""Drafted tokens where ranks share the rows that check them: context parallel, tensor parallel, pipeline stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycache.llm import LLM
from tests.oracle.families import make_family
from tests.oracle.golden import golden
from tests.oracle.tiny_tokenizers import byte_level
from tests.unit.test_drafts import GREEDY, PROMPTS, complete, drafting


@pytest.mark.parametrize(
    ("family", "split"),
    [("deepseek_v32", {"cp": 4}), ("nemotron_h", {"tp": 2, "cp": 2}), ("gemma3", {"pp": 2, "cp": 2})],
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
    assert 0 < drafts.num_right < drafts.num_made
    llm.close()
