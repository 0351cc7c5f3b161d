"""Any split = no split = transformers: logits at every position, teacher-forced."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from tests.distributed.forced import forced_logits, scripted_plans
from tests.oracle.tiny import ROPES, make_tiny

LENGTHS = (90, 70, 53, 95, 60)
SPLITS = [split for split in itertools.product((1, 2, 4), repeat=3) if np.prod(split) <= 8]
EVERY_CHANGE = ((1, 1, 1), (1, 1, 4), (2, 2, 2))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = ROPES["llama3"] if request.param == "llama" else ROPES["default"]
    return make_tiny(tmp_path_factory.mktemp("model"), request.param, rope_parameters=rope, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    generator = np.random.default_rng(7)
    made = [generator.integers(3, 515, length).tolist() for length in LENGTHS]
    made[3][:40] = made[0][:40]
    made[4][:16] = made[1][:16]
    return made


@pytest.fixture(scope="module")
def reference(model: Path, sequences: list[list[int]]) -> list[NDArray[np.float32]]:
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        return [oracle(torch.tensor([tokens])).logits[0].float().numpy() for tokens in sequences]


@pytest.mark.parametrize(
    ("tp", "pp", "cp"),
    [pytest.param(*split, marks=() if split in EVERY_CHANGE else pytest.mark.long) for split in SPLITS],
)
def test_logits_equal_transformers(
    model: Path, sequences: list[list[int]], reference: list[NDArray[np.float32]], tp: int, pp: int, cp: int
) -> None:
    plans = scripted_plans(sequences, seed=tp + 10 * pp + 100 * cp)
    found = forced_logits(model, plans, tp=tp, pp=pp, cp=cp)
    expected = {(row.slot, row.start + i) for plan in plans for row in plan.rows for i in range(row.num_tokens)}
    assert set(found) == expected
    worst = max(float(np.abs(logits - reference[slot][position]).max()) for (slot, position), logits in found.items())
    assert worst < 1e-4
