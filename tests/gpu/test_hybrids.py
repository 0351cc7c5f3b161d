"""The hybrid matrix on CUDA devices, in part: every family on one GPU, with NCCL on two and four; and in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raycache import LLM, SamplingParams
from raycache.parallel.sharding import Split
from tests.matrix.matrix import Workbench, run_row
from tests.matrix.table import label
from tests.oracle.families import FAMILIES

pytestmark = pytest.mark.gpu

CHOSEN = {
    Split(): ("exact", "branch", "chunked", "batched"),
    Split(tp=2): ("exact", "branch", "chunked"),
    Split(cp=2): ("exact", "branch", "chunked"),
    Split(cp=4): ("exact", "branch", "chunked"),
    Split(tp=2, cp=2): ("exact", "branch", "batched"),
}


@pytest.fixture(scope="module")
def bench() -> Iterator[Workbench]:
    with Workbench("cuda") as made:
        yield made


@pytest.mark.parametrize(
    ("split", "family"),
    [pytest.param(split, family, id=f"{family}-{label(split)}") for split in CHOSEN for family in FAMILIES],
)
def test_logits_and_reuse_are_right(bench: Workbench, split: Split, family: str) -> None:
    if split.world_size > torch.cuda.device_count():
        pytest.skip(f"needs {split.world_size} GPUs")
    cells = run_row(bench, family, split, CHOSEN[split])
    wrong = {name: (str(cell), *cell.problems) for name, cell in cells.items() if cell.refusal or not cell.passes}
    assert not wrong


@pytest.mark.parametrize("name", ["kda_mla", "mamba2_gqa"])
def test_trained_hybrids_answer_in_bfloat16_cold_and_cached(name: str) -> None:
    directory = Path("demos/hybrids") / name
    scene = json.loads((directory / "demo.json").read_text())
    chats = [
        [{"role": "system", "content": scene["system"]}, {"role": "user", "content": question}]
        for question in scene["questions"]
    ]
    greedy = SamplingParams(temperature=0, max_tokens=64, stop=(scene["stop"],))
    with LLM(str(directory), device="cuda", dtype="bfloat16", page_size=16, restore_interval=64, num_pages=256) as llm:
        for _ in range(2):
            answers = [llm.chat([chat], greedy)[0] for chat in chats]
            assert [answer.text for answer in answers] == scene["answers"]
        assert all(answer.cached_tokens == 240 for answer in answers)
        llm.check()
