"""Gemma 3 270M, past its window of 512 tokens: what transformers says, cold and from cache, on one rank and split.

15 of its 18 layers have the window; it has 4 query heads and 1 KV head, which every tp rank keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from raycache import LLM, SamplingParams
from raycache.api.tokenizer import Tokenizer
from raycache.llm import Completion
from raycache.memory.component import window_pages

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "gemma3-270m"
WINDOW, PAGE_SIZE = 512, 64
NUM_NEW = 14
# float32 alone moves them by 3e-5 to 2e-4, a window that is off by one token by 2e-2.
ATOL = 1e-3

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.timeout(900),  # a minute or two when the machine is idle
    pytest.mark.skipif(not MODEL.is_dir(), reason=f"needs {MODEL.relative_to(ROOT)}; run scripts/fetch_gemma.py on it"),
]


@dataclass(frozen=True)
class Case:
    """A prompt, what follows greedily, and the log-probabilities of all tokens at each of those positions."""

    prompt: list[int]
    tokens: list[int]
    logprobs: NDArray[np.float64]


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    text = Tokenizer(MODEL).encode((ROOT / "LICENSE").read_text(), add_special_tokens=True)
    # The second one leaves the first within a page.
    prompts = {"whole": text[:877], "branch": text[:721] + text[1200:1290]}
    oracle = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
    oracle.generation_config.eos_token_id = None
    return {name: continued(oracle, prompt) for name, prompt in prompts.items()}


def continued(oracle: torch.nn.Module, prompt: list[int]) -> Case:
    """Tokens with transformers' cache; one pass without it gives the logits, and must choose the same."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False)
        logits = oracle(out[:, :-1], logits_to_keep=NUM_NEW).logits[0].double()
    tokens = out[0, len(prompt) :].tolist()
    assert logits.argmax(-1).tolist() == tokens
    return Case(prompt, tokens, logits.log_softmax(-1).numpy())


@pytest.mark.parametrize(("tp", "pp", "cp"), [(1, 1, 1), (2, 1, 1), (1, 1, 2)])
def test_tokens_and_logprobs_equal_transformers_past_the_window(
    cases: dict[str, Case], tp: int, pp: int, cp: int
) -> None:
    settings = {"page_size": PAGE_SIZE, "num_pages": 48, "max_running": 4, "restore_interval": 5 * PAGE_SIZE}
    with LLM(str(MODEL), device="cpu", tp=tp, pp=pp, cp=cp, **settings) as llm:
        cold = generate(llm, cases["whole"])
        exact = generate(llm, cases["whole"])
        partial = generate(llm, cases["branch"])
        at_branch = generate(llm, cases["branch"])
        stats = llm.stats()
    assert (cold.cached_tokens, cold.cut_by) == (0, "")
    assert (exact.cached_tokens, exact.cut_by) == (13 * PAGE_SIZE, "")
    # Of the 11 whole pages that both have, the window is there at the interval only.
    assert (partial.cached_tokens, partial.cut_by) == (10 * PAGE_SIZE, "window")
    assert (at_branch.cached_tokens, at_branch.cut_by) == (12 * PAGE_SIZE, "")
    total, free = stats.spaces["window"]
    assert total - free <= stats.restore_points * window_pages(WINDOW, PAGE_SIZE), "only restore points keep windows"


def generate(llm: LLM, case: Case) -> Completion:
    """Continue a prompt, compare and check the balances."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=20)
    done = llm.generate([case.prompt], sampling)[0]
    llm.check()
    assert list(done.token_ids) == case.tokens
    for found, wanted in zip(done.logprobs, case.logprobs, strict=True):
        ids, logprobs = zip(*found.top, strict=True)
        np.testing.assert_allclose(logprobs, wanted[list(ids)], rtol=0, atol=ATOL)
    return done
