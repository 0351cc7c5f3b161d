"""Rotary embedding against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from raycache.checkpoint.rope_config import RopeConfig
from raycache.errors import CheckpointError
from raycache.layers.norm import HeadNorm
from raycache.layers.rope import Rotary, inverse_frequencies
from raycache.models.base import read_config
from tests.oracle.tiny import ROPES, SIZES

HEAD_DIM = 64
YARN = ROPES["yarn"]
LLAMA3 = ROPES["llama3"]

PARAMETERS: dict[str, dict[str, Any]] = {
    **ROPES,
    "default-other-theta": {"rope_type": "default", "rope_theta": 1e6},
    "yarn-not-truncated": {**YARN, "truncate": False},
    "yarn-attention-factor": {**YARN, "attention_factor": 0.8},
    "yarn-mscales": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.5},
    "yarn-one-mscale": {**YARN, "mscale": 0.9},
    "yarn-betas": {**YARN, "beta_fast": 12.0, "beta_slow": 3.0},
    "yarn-long": {**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 32768},
    "yarn-all-slowed": {**YARN, "original_max_position_embeddings": 4, "truncate": False},
    "yarn-null-factor": {**YARN, "factor": None},
    "llama3-8b": {**LLAMA3, "original_max_position_embeddings": 8192},
    "llama3-scout": {**LLAMA3, "factor": 16.0, "low_freq_factor": 2.0, "high_freq_factor": 16.0},
}


def write(model_dir: Path, **settings: Any) -> Path:
    config = {"model_type": "llama", "rms_norm_eps": 1e-6, **SIZES, "head_dim": HEAD_DIM, **settings}
    model_dir.mkdir(exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(config))
    return model_dir


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("is_old_style", [False, True], ids=["rope_parameters", "rope_scaling"])
def test_rotation_equals_transformers(tmp_path: Path, name: str, is_old_style: bool) -> None:
    parameters = dict(PARAMETERS[name])
    settings: dict[str, Any] = {"rope_parameters": parameters}
    if is_old_style:
        theta, kind = parameters.pop("rope_theta"), parameters.pop("rope_type")
        scaling = None if kind == "default" else {"type": kind, **parameters}
        settings = {"rope_scaling": scaling, "rope_theta": theta}
    model_dir = write(tmp_path, **settings)
    positions = torch.tensor([0, 1, 2, 63, 64, 65, 500, 4095, 100_000])
    q, k = torch.randn(2, len(positions), 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))

    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(model_dir))
    cos, sin = theirs(q, positions[None])
    config: Any = read_config(model_dir)
    rope = config.attention.rope
    assert torch.equal(inverse_frequencies(rope, HEAD_DIM), theirs.inv_freq)
    wanted_q, wanted_k = apply_rotary_pos_emb(q, k, cos[0], sin[0])

    rotation = Rotary(rope, HEAD_DIM, torch.device("cpu"))(positions, torch.float32)
    torch.testing.assert_close(
        rotation(torch.cat((q, k), dim=1)), torch.cat((wanted_q, wanted_k), dim=1), rtol=0, atol=2e-6
    )


def test_scores_depend_on_the_distance_only() -> None:
    rotary = Rotary(RopeConfig(), HEAD_DIM, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(i: int, j: int) -> torch.Tensor:
        turn = rotary(torch.tensor([i, j], dtype=torch.int32), torch.float64)(torch.stack((q[0], k[0])))
        return (turn[0] * turn[1]).sum()

    torch.testing.assert_close(score(30, 10), score(120, 100), rtol=0, atol=1e-4)
    assert (score(30, 10) - score(30, 11)).abs() > 1e-2


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_wider_heads_are_normalised_whole_and_turned_in_part(is_interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 3, 96, generator=generator), 1 + 0.1 * torch.randn(3, 96, generator=generator)
    rotary = Rotary(RopeConfig(), HEAD_DIM, torch.device("cpu"), is_interleaved=is_interleaved)
    turn = rotary(torch.arange(100, 105), torch.float32)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    wanted = torch.cat((turn(normed[..., :HEAD_DIM]), normed[..., HEAD_DIM:]), dim=-1)
    before = x.clone()
    torch.testing.assert_close(turn(x, norm=HeadNorm(weight, 1e-6)), wanted, rtol=0, atol=1e-5)
    assert torch.equal(x, before)


def test_heads_may_be_turned_in_place() -> None:
    packed = torch.randn(5, 3, 80, generator=torch.Generator().manual_seed(0))
    before, part = packed.clone(), packed[:, :2, 16:]
    turn = Rotary(RopeConfig(), HEAD_DIM, torch.device("cpu"))(torch.arange(5), torch.float32)
    wanted = turn(part)
    assert turn(part, out=part) is part
    assert torch.equal(part, wanted)
    part.copy_(before[:, :2, 16:])
    assert torch.equal(packed, before)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional", "unheard_of"])
def test_other_kinds_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    model_dir = write(tmp_path, rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(CheckpointError, match=f"'{kind}' is not supported; known are default, linear, llama3, yarn"):
        read_config(model_dir)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_scaling": {"type": "linear"}}, "does not say factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor must be a positive number, got -1"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "must be below high_freq_factor"),
        ({"rope_parameters": {"full_attention": ROPES["default"]}}, "per layer type"),
        ({"rope_parameters": {**ROPES["default"], "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, got 'yarn'"),
    ],
)
def test_bad_parameters_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(write(tmp_path, **settings))
