"""Families of grouped-query attention with experts and windows, against transformers on the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError
from raycache.memory.component import CacheFormat, Reuse
from raycache.models.base import check_weights, components, read_config
from raycache.models.gemma4_text import Gemma4Config
from raycache.parallel.sharding import Split
from tests.oracle.families import WINDOW, make_family
from tests.oracle.gang import Piece, gang_logits
from tests.oracle.golden import golden
from tests.oracle.single import single_rank_logits
from tests.selection import mostly_long

IDS = np.random.default_rng(5).integers(3, 515, 96).tolist()

LINEAR = {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}
"""Of the full layers of the larger Gemmas."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-dense-layers": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "qwen3_moe-weights-as-they-are": ("qwen3_moe", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss-one-kv-head": ("gpt_oss", {"num_key_value_heads": 1, "layer_types": ["sliding_attention"] * 4}),
    "gpt_oss-full": ("gpt_oss", {"layer_types": ["full_attention"] * 4, "swiglu_alpha": 1.25}),
    "gemma4": ("gemma4", {}),
    "gemma4-dense": (
        "gemma4",
        {
            "enable_moe_block": False,
            "attention_k_eq_v": False,
            "num_key_value_heads": 2,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 9}),
    "gemma3-biases": ("gemma3", {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma3-linear": (
        "gemma3",
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}},
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")

    def make(variant: str) -> Path:
        name, settings = VARIANTS[variant]
        return root / variant if (root / variant).exists() else make_family(root / variant, name, **settings)

    return make


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_in_one_step_and_in_many(tiny: Callable[[str], Path], variant: str) -> None:
    model_dir = tiny(variant)
    oracle = golden(model_dir, [IDS])
    for cuts in ((), (1, 30, 31, 32, 77)):
        ours = single_rank_logits(model_dir, IDS, cuts=cuts)
        assert np.abs(ours - oracle.logits[0]).max() < oracle.atol


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_is_used(tiny: Callable[[str], Path], variant: str) -> None:
    check_weights(read_config(tiny(variant)), Checkpoint(tiny(variant)))


@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss", "gemma3"])
def test_in_float64_only_the_rounding_of_angles_is_left(tiny: Callable[[str], Path], variant: str) -> None:
    ours = single_rank_logits(tiny(variant), IDS, cuts=(50,), dtype=torch.float64)
    assert np.abs(ours - golden(tiny(variant), [IDS]).logits[0]).max() < 5e-6  # they are float32 whatever the dtype


STEPS: list[list[Piece]] = [
    [(0, 0, 41)],
    [(0, 41, 42), (1, 0, 30)],  # a decode beside a chunk that is longer than the window
    [(1, 30, 31), (0, 42, 43)],
    [(0, 43, 96), (1, 31, 50)],
]


@pytest.mark.parametrize(
    "split",
    mostly_long([Split(tp=2), Split(tp=8), Split(cp=2), Split(tp=2, cp=4)], but=[Split(tp=8), Split(tp=2, cp=4)]),
    ids=str,
)
@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss", "gpt_oss-one-kv-head", "gemma3", "gemma4"])
def test_any_split_gives_the_same_logits(tiny: Callable[[str], Path], variant: str, split: Split) -> None:
    sequences = [IDS, IDS[40:90]]
    oracle = golden(tiny(variant), sequences)
    for ours, theirs in zip(gang_logits(tiny(variant), sequences, STEPS, split=split), oracle.logits, strict=True):
        assert np.abs(ours - theirs).max() < oracle.atol


@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss", "gemma3"])
def test_bfloat16_stays_close_to_transformers(tiny: Callable[[str], Path], variant: str) -> None:
    ours = single_rank_logits(tiny(variant), IDS, dtype=torch.bfloat16)
    assert np.median(np.abs(ours - golden(tiny(variant), [IDS]).logits[0])) < 0.03


# What tokens leave behind -------------------------------------------------------------------------------------------


def test_windowed_layers_keep_the_rows_of_a_window(tiny: Callable[[str], Path]) -> None:
    full, window = components(read_config(tiny("gemma3")), CacheFormat("bfloat16"))
    assert (full.layers, full.reuse, full.window) == ((3,), Reuse.EVERY_PAGE, 0)
    assert (window.layers, window.reuse, window.window) == ((0, 1, 2), Reuse.LAST_WINDOW, WINDOW)
    assert [field.shape for field in (*full.fields, *window.fields)] == [(2, 16)] * 4


@pytest.mark.parametrize(("variant", "name"), [("gpt_oss-one-kv-head", "window"), ("gpt_oss-full", "kv")])
def test_layers_that_are_all_alike_have_one_component(tiny: Callable[[str], Path], variant: str, name: str) -> None:
    (only,) = components(read_config(tiny(variant)), CacheFormat("float32"))
    assert (only.name, only.layers) == (name, (0, 1, 2, 3))


SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
GRANITE = {"hidden_size": 96, "mamba_d_head": 24, "layer_types": ["full_attention"] * 4}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3_moe", {**SIX_HEADS, "mlp_only_layers": [1], "intermediate_size": 64}),
        ("gpt_oss", SIX_HEADS),
        ("deepseek_v3", {"num_attention_heads": 6, "num_key_value_heads": 6}),  # with a shared expert
        ("granitemoehybrid", {**SIX_HEADS, **GRANITE, "shared_intermediate_size": 7, "num_local_experts": 0}),
        ("granitemoehybrid", {**SIX_HEADS, **GRANITE}),  # all experts in one tensor
    ],
    ids=str,
)
@pytest.mark.parametrize("inner", [32, 2])
def test_inner_features_need_not_be_even(tmp_path: Path, name: str, settings: dict[str, Any], inner: int) -> None:
    """Of 32 inner features, three ranks take 11, 11 and 10; of two, the last takes none."""
    key = {"gpt_oss": "intermediate_size", "granitemoehybrid": "intermediate_size"}.get(name, "moe_intermediate_size")
    model_dir = make_family(tmp_path, name, **settings, **{key: inner})
    oracle = golden(model_dir, [IDS[:40]])
    (ours,) = gang_logits(model_dir, [IDS[:40]], [[(0, 0, 40)]], split=Split(tp=3))
    assert np.abs(ours - oracle.logits[0]).max() < oracle.atol


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size_per_layer_input": 16}, "hidden_size_per_layer_input=16"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers=2"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, r"must name the layers with full attention, \[1, 3\]"),
        ({"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 16}}}, "must have the same"),
        ({"per_layer_config": {"1": {"head_dim": 32, "x": 1}, "3": {"head_dim": 32}}}, "and nothing else"),
    ],
)
def test_gemmas_of_other_kinds_are_refused(
    tiny: Callable[[str], Path], tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(rewritten(tiny("gemma4"), tmp_path / "copy", values))


def test_a_gemma_config_that_leaves_out_positions_and_layers(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """As transformers has it: a quarter of the full layers' heads turns, and the last layer sees everything."""
    copy = rewritten(tiny("gemma4"), tmp_path / "copy", {}, without=("rope_parameters", "layer_types"))
    config = read_config(rewritten(copy, tmp_path / "more", {"num_hidden_layers": 8}, without=("per_layer_config",)))
    assert isinstance(config, Gemma4Config)
    assert config.full.layers == (5, 7) and config.full.rope.share == 0.25
    said = {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6}}
    config = read_config(rewritten(copy, tmp_path / "said", {"rope_parameters": said}, without=("per_layer_config",)))
    assert isinstance(config, Gemma4Config) and config.full.rope.share == 1.0


def test_a_gemma_config_as_published_reads_the_same(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    published = {"global_head_dim": 32, "num_global_key_value_heads": 2}
    copy = rewritten(tiny("gemma4"), tmp_path / "copy", published, without=("per_layer_config",))
    assert same_config(copy, tiny("gemma4"))


# Configs as others write them ---------------------------------------------------------------------------------------


def rewritten(model_dir: Path, copy: Path, change: Mapping[str, Any], *, without: tuple[str, ...] = ()) -> Path:
    """A copy with another config.json and the same weights."""
    copy.mkdir()
    for file in ("model.safetensors", "generation_config.json"):
        (copy / file).symlink_to(model_dir / file)
    config = json.loads((model_dir / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in without}
    (copy / "config.json").write_text(json.dumps({**kept, **change}))
    return copy


def same_config(one: Path, other: Path) -> bool:
    return replace(read_config(one), name="") == replace(read_config(other), name="")


def test_a_gemma_config_of_transformers_4_reads_the_same(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    new = ("rope_parameters", "tie_word_embeddings", "layer_types", "_sliding_window_pattern")
    old = {
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 4,
    }
    copy = rewritten(tiny("gemma3-linear"), tmp_path / "old", old, without=new)
    assert same_config(copy, tiny("gemma3-linear"))


def test_a_gpt_oss_config_of_transformers_4_reads_the_same(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    rope = json.loads((tiny("gpt_oss") / "config.json").read_text())["rope_parameters"]
    old = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    without = ("rope_parameters", "layer_types", "swiglu_alpha")
    assert same_config(rewritten(tiny("gpt_oss"), tmp_path / "old", old, without=without), tiny("gpt_oss"))


def test_a_qwen_config_of_transformers_4_reads_the_same(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    old = {"num_experts": 8, "rope_theta": 10000.0, "rope_scaling": None}
    without = ("num_local_experts", "rope_parameters", "mlp_only_layers")
    assert same_config(rewritten(tiny("qwen3_moe"), tmp_path / "old", old, without=without), tiny("qwen3_moe"))


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("gpt_oss", {"layer_types": ["sliding_attention", "linear_attention"] * 2}, "'linear_attention', which is not"),
        ("gpt_oss", {"layer_types": ["sliding_attention"] * 3}, "3 layer_types and num_hidden_layers=4"),
        ("gpt_oss", {"layer_types": "full_attention"}, "layer_types must be a list"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu', which is not supported"),
        ("gpt_oss", {"sliding_window": None}, "does not say sliding_window"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window must be a positive integer"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias=False, which is not supported"),
        ("gpt_oss", {"num_experts_per_tok": 9}, "cannot choose 9 of 8 experts"),
        ("gpt_oss", {"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0, which is not supported"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0, which is not supported"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation='gelu', which is not supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "dynamic"}}},
            "rope type 'dynamic' is not supported",
        ),
        ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "'chunked_attention', which is not supported"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True, which is not supported"),
        ("qwen3_moe", {"mlp_only_layers": [4]}, "mlp_only_layers must be a list of layer numbers"),
        ("qwen3_moe", {"num_local_experts": None}, "does not say num_local_experts"),
        ("qwen3_moe", {"hidden_act": "relu"}, "hidden_act='relu', which is not supported"),
    ],
    ids=str,
)
def test_what_a_family_does_not_have_is_refused_by_name(
    tiny: Callable[[str], Path], tmp_path: Path, variant: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(rewritten(tiny(variant), tmp_path / "wrong", change))


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        (
            "qwen3_moe",
            {"moe_intermediate_size": 48},
            r"layers\.0\.mlp\.experts\.0\.gate_proj.weight .*wants \[48, 64\]",
        ),
        ("qwen3_moe", {"num_local_experts": 16}, r"mlp\.gate\.weight .* \[8, 64\], config\.json wants \[16, 64\]"),
        ("qwen3_moe", {"num_hidden_layers": 3}, r"has 33 tensors that a qwen3_moe .* model\.layers\.3"),
        ("qwen3_moe", {"mlp_only_layers": [2]}, r"has no tensor model\.layers\.2\.mlp\.gate_proj\.weight"),
        ("gpt_oss", {"intermediate_size": 64}, r"gate_up_proj_bias .* \[8, 64\], config\.json wants \[8, 128\]"),
        ("gemma3", {"attention_bias": True}, r"has no tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
    ],
    ids=str,
)
def test_weights_of_another_model_are_refused_by_name(
    tiny: Callable[[str], Path], tmp_path: Path, variant: str, change: dict[str, Any], message: str
) -> None:
    copy = rewritten(tiny(variant), tmp_path / "wrong", change)
    with pytest.raises(CheckpointError, match=message):
        check_weights(read_config(copy), Checkpoint(copy))


@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss", "gemma3"])
def test_a_surplus_tensor_is_refused_by_name(tiny: Callable[[str], Path], tmp_path: Path, variant: str) -> None:
    copy = rewritten(tiny(variant), tmp_path / "wrong", {})
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    save_file({**tensors, "model.layers.1.mlp.surplus.weight": torch.ones(2)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors that a .*: model\.layers\.1\.mlp\.surplus\.weight"):
        check_weights(read_config(copy), Checkpoint(copy))
