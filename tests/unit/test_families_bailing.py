"""Ling 3 in its published form, and the limits of its experts' activations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError
from raycache.models.base import check_weights, read_config
from tests.oracle.families import FAMILIES, make_family
from tests.oracle.ring_2_5 import experts
from tests.oracle.single import single_rank_logits
from tests.published import ling_3

IDS = torch.randint(3, 515, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def written(model_dir: Path, **values: Any) -> Path:
    """The published config.json, but for `values`."""
    (model_dir / "config.json").write_text(json.dumps({**ling_3.CONFIG, **values}))
    return model_dir


def limited_logits(model_dir: Path, limits: dict[int, tuple[float | None, float | None]]) -> torch.Tensor:
    """What transformers computes, [T, V] float64, with other experts in some layers."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    model.set_experts_implementation("eager")
    model.double()
    tensors = {name: tensor.double() for name, tensor in load_file(model_dir / "model.safetensors").items()}
    for layer, pair in limits.items():

        def run(x: torch.Tensor, layer: int = layer, pair: tuple[float | None, float | None] = pair) -> torch.Tensor:
            return experts(x[0], tensors, f"model.layers.{layer}.mlp", FAMILIES["bailing_hybrid"].settings, pair)[None]

        model.model.layers[layer].mlp.forward = run
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([IDS]), use_cache=False).logits[0]
    return logits


# --- limits -----------------------------------------------------------------------------------------------------------


def test_limits_of_activations_are_those_of_each_layer(tmp_path: Path) -> None:
    routed, shared = [0.1, 0.2, None, 0.4], [9.0, 0, 0.3]  # layer 0 has an MLP, and the second list no limit of layer 3
    model_dir = make_family(
        tmp_path, "bailing_hybrid", seed=1, expert_swiglu_limit_list=routed, share_expert_swiglu_limit_list=shared
    )
    limits = {1: (0.2, None), 2: (None, 0.3), 3: (0.4, None)}
    ours = torch.from_numpy(single_rank_logits(model_dir, IDS)).double()
    assert (ours - limited_logits(model_dir, limits)).abs().max() < 1e-4
    for layer in limits:  # each of them is felt
        without = {other: pair if other != layer else (None, None) for other, pair in limits.items()}
        assert (ours - limited_logits(model_dir, without)).abs().max() > 1e-2


@pytest.mark.parametrize("key", ["expert_swiglu_limit_list", "share_expert_swiglu_limit_list"])
@pytest.mark.parametrize("value", [7.0, [7.0, "7"], [7.0, -1.0], [True]])
def test_what_is_no_list_of_limits_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{key} must be a list of limits"):
        read_config(written(tmp_path, **{key: value}))


# --- the published form -----------------------------------------------------------------------------------------------


def test_published_names_of_output_projections_give_the_same_model(tmp_path: Path) -> None:
    saved = make_family(tmp_path / "saved", "bailing_hybrid", seed=1)
    published = make_family(tmp_path / "published", "bailing_hybrid", seed=1)
    path = published / "model.safetensors"
    renamed = {
        name if ".layers.3." in name else name.replace("attention.dense", "attention.o_proj"): tensor
        for name, tensor in load_file(path).items()
    }
    assert sum("o_proj" in name for name in renamed) == 3
    save_file(renamed, path, metadata={"format": "pt"})
    check_weights(read_config(published), Checkpoint(published))
    assert (single_rank_logits(saved, IDS) == single_rank_logits(published, IDS)).all()


def test_a_missing_output_projection_is_asked_for_under_its_published_name(tmp_path: Path) -> None:
    model_dir = make_family(tmp_path, "bailing_hybrid")
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    for layer, name in ((0, "o_proj"), (3, "dense")):
        kept = {key: tensor for key, tensor in tensors.items() if f".{layer}.attention.dense" not in key}
        save_file(kept, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=rf"no tensor model\.layers\.{layer}\.attention\.{name}\.weight"):
            check_weights(read_config(model_dir), Checkpoint(model_dir))


def test_all_features_of_the_rotary_part_are_turned_whatever_the_published_factor(tmp_path: Path) -> None:
    config: Any = read_config(written(tmp_path))
    assert config.attention.rope.theta == 6e6 and config.attention.rope_dim == 8
    assert config.experts.shared_inner == 48


@pytest.mark.parametrize(
    "values",
    [
        {"use_mla_nope": True},
        {"no_kda_lora": False},
        {"gated_attention_proj_granularity_type": "element_wise"},
        {"router_type": "MultiRouter"},
        {"moe_router_enable_expert_bias": False},
    ],
    ids=str,
)
def test_other_forms_are_refused_by_name(tmp_path: Path, values: dict[str, Any]) -> None:
    ((key, value),) = values.items()
    with pytest.raises(CheckpointError, match=f"{key}={value!r}"):
        read_config(written(tmp_path, **values))
