"""The same claims as on the CPU, on CUDA devices: NCCL groups, the torch backend, the whole engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from raycache import LLM, SamplingParams
from tests.distributed.forced import forced_logits, scripted_plans
from tests.oracle import tiny_tokenizers
from tests.oracle.tiny import ROPES, make_tiny

pytestmark = pytest.mark.gpu

LENGTHS = (90, 70, 53, 95, 60)
SPLITS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (4, 1, 1), (1, 1, 4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda") / "tiny"
    make_tiny(folder, "qwen3", rope_parameters=ROPES["default"], tie_word_embeddings=True)
    return tiny_tokenizers.byte_level(folder)


@pytest.mark.parametrize(("tp", "pp", "cp"), SPLITS)
def test_logits_equal_transformers(model: Path, tp: int, pp: int, cp: int) -> None:
    if tp * pp * cp > torch.cuda.device_count():
        pytest.skip(f"needs {tp * pp * cp} GPUs")
    generator = np.random.default_rng(7)
    sequences = [generator.integers(3, 515, length).tolist() for length in LENGTHS]
    sequences[3][:40], sequences[4][:16] = sequences[0][:40], sequences[1][:16]
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        wanted = [oracle(torch.tensor([tokens])).logits[0].float().numpy() for tokens in sequences]
    found = forced_logits(model, scripted_plans(sequences, seed=tp), tp=tp, pp=pp, cp=cp, device="cuda")
    assert len(found) > 300
    worst = max(float(np.abs(logits - wanted[slot][position]).max()) for (slot, position), logits in found.items())
    assert worst < 1e-4 * 5  # the tied model's logits have a standard deviation of 8; float32 sums in another order


@pytest.mark.parametrize(("tp", "pp", "cp"), SPLITS[:6])
def test_greedy_tokens_equal_the_cpu(model: Path, tp: int, pp: int, cp: int) -> None:
    if tp * pp * cp > torch.cuda.device_count():
        pytest.skip(f"needs {tp * pp * cp} GPUs")
    generator = np.random.default_rng(3)
    prompts = [generator.integers(3, 515, length).tolist() for length in (20, 70, 130)]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(str(model), device="cpu", page_size=16, num_pages=64) as llm:
        wanted = [one.token_ids for one in llm.generate(prompts, greedy)]
    split = {"tp": tp, "pp": pp, "cp": cp}
    with LLM(str(model), device="cuda", dtype="float32", page_size=16, num_pages=64, **split) as llm:
        assert [one.token_ids for one in llm.generate(prompts, greedy)] == wanted
        again = llm.generate(prompts, greedy)
        assert [one.token_ids for one in again] == wanted
        assert all(one.cached_tokens > 0 for one in again)
        llm.check()
    with LLM(str(model), device="cuda", dtype="bfloat16", page_size=16, **split) as llm:
        assert all(len(one.token_ids) == 16 for one in llm.generate(prompts, greedy))
        llm.check()
