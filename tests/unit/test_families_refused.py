"""Configs that say too little, too much or what cannot be, of every family: refused by name before memory is taken."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from raycache.errors import CheckpointError
from raycache.models.base import read_config
from tests.oracle.families import FAMILIES

FOUR = ["full_attention"] * 4


def written(model_dir: Path, name: str, drop: tuple[str, ...] = (), **values: Any) -> Path:
    """config.json of a family as transformers writes it, but for `values` and without the keys of `drop`."""
    family = FAMILIES[name]
    AutoConfig.for_model(family.model_type, **copy.deepcopy(dict(family.settings))).save_pretrained(model_dir)
    path = model_dir / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in drop}))
    return model_dir


# What is fine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen3_moe", "shared_expert_intermediate_size"),
        ("nemotron_h", "moe_latent_size"),
        ("deepseek_v3", "n_shared_experts"),
        ("kimi_linear", "num_nextn_predict_layers"),
    ],
)
def test_none_of_something_can_be_said_as_zero(tmp_path: Path, name: str, key: str) -> None:
    assert read_config(written(tmp_path, name, **{key: 0})).num_layers > 0


def test_yarn_without_a_factor_for_latents_can_say_so_as_zero(tmp_path: Path) -> None:
    rope = {**FAMILIES["deepseek_v3"].settings["rope_parameters"], "mscale": 0, "mscale_all_dim": 0}
    config: Any = read_config(written(tmp_path, "deepseek_v3", rope_parameters=rope))
    assert config.attention.rope.score_factor == 1.0


@pytest.mark.parametrize("name", ["bailing_hybrid", "kimi_linear"])
def test_the_context_has_two_names(tmp_path: Path, name: str) -> None:
    only = written(tmp_path / "only", name, drop=("model_max_length",), max_position_embeddings=77)
    both = written(tmp_path / "both", name, model_max_length=88, max_position_embeddings=77)
    assert [read_config(model_dir).max_position_embeddings for model_dir in (only, both)] == [77, 88]


def test_bailing_can_have_queries_of_low_rank(tmp_path: Path) -> None:
    config: Any = read_config(written(tmp_path, "bailing_hybrid", q_lora_rank=48))
    assert config.attention.query_rank == 48


@pytest.mark.parametrize(("name", "theta"), [("gemma3", 1e6), ("minimax", 1e6), ("llama", 1e4), ("deepseek_v3", 1e4)])
def test_a_missing_theta_is_that_of_the_family(tmp_path: Path, name: str, theta: float) -> None:
    config: Any = read_config(written(tmp_path, name, drop=("rope_parameters", "rope_theta")))
    assert config.attention.rope.theta == theta


def test_the_base_of_windowed_layers_is_not_that_of_the_others(tmp_path: Path) -> None:
    ropes = {"full_attention": {}, "sliding_attention": {"rope_type": "default"}}
    config: Any = read_config(written(tmp_path, "gemma3", rope_parameters=ropes, rope_theta=5e5))
    assert (config.attention.rope.theta, config.window_rope.theta) == (5e5, 1e4)


def test_nemotron_layers_have_two_names(tmp_path: Path) -> None:
    kinds = FAMILIES["nemotron_h"].settings["layers_block_type"]
    one = read_config(written(tmp_path / "model", "nemotron_h"))
    assert read_config(written(tmp_path / "model", "nemotron_h", layers_block_type=None, layer_types=kinds)) == one


# What is refused ----------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "rope_theta": 10000.0}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"layer_types": ["foo"] * 4}, "layer_types has 'foo'") for name in ("llama", "qwen3", "deepseek_v3")),
    *((name, {"layer_types": ["sliding_attention"] * 4}, "'sliding_attention'") for name in ("llama", "qwen3_moe")),
    *((name, {"layer_types": "x"}, "layer_types must be a list") for name in ("llama", "qwen3", "qwen3_moe")),
    *((name, {"layer_types": FOUR[:3]}, "has 3 layer_types") for name in ("llama", "qwen3", "qwen3_moe")),
    ("nemotron_h", {"layers_block_type": None, "layer_types": ["foo"] * 8}, "layer_types has 'foo'"),
    ("nemotron_h", {"layers_block_type": ["mlp"] * 3, "num_hidden_layers": 4}, "has 3 layers_block_type"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64"),
    ("gpt_oss", {"rope_parameters": None}, "has no rope_scaling"),
    ("gpt_oss", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "does not say rope_theta"),
    ("qwen3", {"rope_parameters": None}, "does not say rope_theta"),
    ("llama", {"rope_parameters": YARN}, "does not say factor"),
    ("llama", {"rope_parameters": {**YARN, "factor": 2, "rope_theta": 1}}, "rope_theta=1.0 is not supported for yarn"),
    ("llama", {"rope_parameters": {**YARN, "factor": 2, "beta_fast": 1e308}}, "beta_fast=1e[+]308 of yarn"),
    ("llama", {"rope_parameters": {**YARN, "factor": 2, "mscale": False}}, "mscale must be a positive number"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 100000"),
    ("llama", {"vocab_size": 2**31}, "vocab_size must be at most 2147483647"),
    ("llama", {"head_dim": 10**9}, "head_dim must be at most 65536"),
    ("llama", {"head_dim": None, "hidden_size": 10**9, "num_attention_heads": 1, "num_key_value_heads": 1},
     "head_dim=1000000000 must be at most"),
    ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
    ("deepseek_v3", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers must be at most"),
    ("deepseek_v3", {"qk_rope_head_dim": 10**9}, "qk_rope_head_dim must be at most"),
    ("deepseek_v32", {"index_head_dim": 10**9}, "index_head_dim must be at most"),
    ("minimax", {"num_attention_heads": 10**9}, "num_attention_heads must be at most"),
    ("qwen3_next", {"linear_num_value_heads": 10**9}, "linear_num_value_heads must be at most"),
    ("kimi_linear", {"linear_num_heads": 10**9}, "linear_num_heads must be at most"),
    ("nemotron_h", {"mamba_num_heads": 10**9}, "mamba_num_heads must be at most"),
    ("granitemoehybrid", {"num_local_experts": 10**9}, "num_local_experts must be at most"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_is_refused_by_name_at_once(
    tmp_path: Path, name: str, values: dict[str, Any], message: str
) -> None:
    model_dir = written(tmp_path, name, **values)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message):
        read_config(model_dir)
    assert time.process_time() - start < 10.0


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"], ids=["deep", "long"])
def test_a_config_that_cannot_be_parsed_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not readable JSON"):
        read_config(tmp_path)
