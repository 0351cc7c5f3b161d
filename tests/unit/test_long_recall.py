"""Mamba2 layers whose steps are far below `time_step_min` remember a token for thousands of others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from raycache.models.base import read_config
from raycache.parallel.sharding import Split
from tests.oracle.families import make_family
from tests.oracle.gang import Piece, gang_logits
from tests.oracle.golden import golden
from tests.oracle.mamba import Array, mamba_logits

NEEDLES = (511, 512)
"""Tokens that alone have large steps."""

LENGTH = 3000
TEXT = torch.randint(3, 500, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
WITH_NEEDLES = [[*TEXT[:10], needle, *TEXT[11:]] for needle in NEEDLES]
CUTS = (0, 700, 1500, 2950, *range(2980, LENGTH + 1))  # chunks, and then one token at a time


@pytest.fixture(scope="module")
def forgetting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two Mamba2 layers. The first feature of what they read says how large the step of a token is: about 5 for
    needles, 6e-6 for others. With the rates of its heads, half of a state is left after 1,800 of those or more."""
    model_dir = tmp_path_factory.mktemp("forgetting")
    make_family(model_dir, "nemotron_h", layers_block_type=["mamba", "mamba"], time_step_min=0.001)
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    embeddings = tensors["backbone.embeddings.weight"]
    embeddings[:, 0] = 0
    embeddings[list(NEEDLES), 0] = 8
    heads = torch.arange(8)
    for layer in range(2):
        at = f"backbone.layers.{layer}.mixer"
        tensors[f"{at}.in_proj.weight"][-8:] = 0
        tensors[f"{at}.in_proj.weight"][-8:, 0] = 3
        tensors[f"{at}.dt_bias"][:] = -12
        tensors[f"{at}.A_log"][:] = torch.log(4.0 + 8 * heads)
        tensors[f"{at}.out_proj.weight"][0] = 0
    save_file(tensors, path, {"format": "pt"})
    return model_dir


def logits(model_dir: Path, sequences: Sequence[Sequence[int]]) -> list[Array]:
    steps: list[list[Piece]] = [[(i, start, stop) for i in range(len(sequences))] for start, stop in pairwise(CUTS)]
    return gang_logits(model_dir, sequences, steps, split=Split(), dtype=torch.float64)


def change(model_dir: Path, **values: Any) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def recalled(found: Sequence[Array]) -> float:
    """How much the last 20 tokens' logits know of the needle: the largest difference between two of them."""
    return float(np.abs(found[0][-20:] - found[1][-20:]).max())


def test_the_twin_equals_transformers_where_no_step_is_below_the_floor(tmp_path: Path) -> None:
    model_dir = make_family(tmp_path, "nemotron_h", layers_block_type=["mamba", "mamba"])
    exact = golden(model_dir, [TEXT[:60]])
    assert np.abs(mamba_logits(model_dir, TEXT[:60]) - exact.logits[0]).max() < 1e-9


def test_a_token_is_remembered_for_thousands_of_others(forgetting: Path) -> None:
    twin = [mamba_logits(forgetting, ids) for ids in WITH_NEEDLES]
    assert recalled(twin) > 1
    ours = logits(forgetting, WITH_NEEDLES)
    assert max(float(np.abs(one - other).max()) for one, other in zip(ours, twin, strict=True)) < 1e-6


def test_a_floor_of_the_steps_would_forget_it(forgetting: Path, tmp_path: Path) -> None:
    """The negative control, by the key that sets limits: it is the floor that transformers takes from time_step_min."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((forgetting / name).read_bytes())
    change(tmp_path, time_step_limit=[0.001, float("inf")])
    floored, twin = logits(tmp_path, WITH_NEEDLES), mamba_logits(forgetting, WITH_NEEDLES[0], limit=(0.001, np.inf))
    assert np.abs(floored[0] - twin).max() < 1e-6
    assert recalled(floored) < 0.05


@pytest.mark.parametrize(
    "written",
    ["null", "[0.0, Infinity]", '[0.0, "Infinity"]', '[0, "inf"]', '[0.0, {"__float__": "Infinity"}]', "[0.0, 1e308]",
     "[0, 1" + "0" * 400 + "]"],
)  # fmt: skip
def test_no_limits_have_many_spellings(forgetting: Path, tmp_path: Path, written: str) -> None:
    config = json.loads((forgetting / "config.json").read_text())
    config.pop("time_step_limit")
    text = json.dumps(config)
    (tmp_path / "config.json").write_text(text[:-1] + f', "time_step_limit": {written}}}')
    found: Any = read_config(tmp_path)
    assert found.mamba.dt_limit == (0.0, float("inf"))
