"""Families whose heads are turned in part: GLM-4.5 and MiniMax-M2 against transformers on the same weights, and
MiniMax-Text-01, of which transformers turns all, against a slow twin."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError
from raycache.layers.linear import ColumnLinear
from raycache.layers.self_attention import NormedProjection
from raycache.models.base import check_weights, read_config
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from tests.oracle.families import make_family
from tests.oracle.gang import Piece, gang_logits, on_gang
from tests.oracle.golden import golden
from tests.oracle.minimax import minimax_logits
from tests.oracle.single import single_rank_logits
from tests.selection import mostly_long

IDS = np.random.default_rng(5).integers(3, 515, 96).tolist()
QUARTER = {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-groups": ("glm4_moe", {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False}),
    "glm4_moe-plain": (
        "glm4_moe",
        {"use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": 0, "rope_parameters": QUARTER},
    ),
    "minimax_m2": ("minimax_m2", {}),
    "minimax_m2-whole-heads": ("minimax_m2", {"rotary_dim": 16}),
    "minimax_m2-one-kv-head": ("minimax_m2", {"num_key_value_heads": 1}),
    "minimax-whole-heads": ("minimax", {"rotary_dim": 16}),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")

    def make(variant: str) -> Path:
        name, settings = VARIANTS[variant]
        return root / variant if (root / variant).exists() else make_family(root / variant, name, **settings)

    return make


def changed(model_dir: Path, copy: Path, *, drop: tuple[str, ...] = (), **values: Any) -> Path:
    """A copy with another config.json and the same weights."""
    copy.mkdir()
    (copy / "model.safetensors").symlink_to(model_dir / "model.safetensors")
    config = {**json.loads((model_dir / "config.json").read_text()), **values}
    (copy / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key not in drop}))
    return copy


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_in_one_step_and_in_many(tiny: Callable[[str], Path], variant: str) -> None:
    model_dir = tiny(variant)
    oracle = golden(model_dir, [IDS])
    for cuts in ((), (1, 30, 31, 32, 77)):
        ours = single_rank_logits(model_dir, IDS, cuts=cuts)
        assert np.abs(ours - oracle.logits[0]).max() < oracle.atol
    config = read_config(model_dir)
    check_weights(config, Checkpoint(model_dir))
    assert config.unknown_keys == ()


@pytest.mark.parametrize("variant", ["glm4_moe", "minimax_m2"])
def test_in_float64_only_the_rounding_of_angles_is_left(tiny: Callable[[str], Path], variant: str) -> None:
    ours = single_rank_logits(tiny(variant), IDS, cuts=(50,), dtype=torch.float64)
    assert np.abs(ours - golden(tiny(variant), [IDS]).logits[0]).max() < 5e-6


@pytest.mark.parametrize("variant", ["glm4_moe", "minimax_m2"])
def test_bfloat16_stays_close_to_transformers(tiny: Callable[[str], Path], variant: str) -> None:
    ours = single_rank_logits(tiny(variant), IDS, dtype=torch.bfloat16)
    assert np.median(np.abs(ours - golden(tiny(variant), [IDS]).logits[0])) < 0.03


STEPS: list[list[Piece]] = [
    [(0, 0, 41)],
    [(0, 41, 42), (1, 0, 30)],
    [(1, 30, 31), (0, 42, 43)],
    [(0, 43, 96), (1, 31, 50)],
]


@pytest.mark.parametrize(
    "split",
    mostly_long([Split(tp=2), Split(tp=8), Split(cp=2), Split(tp=2, cp=4)], but=[Split(tp=8), Split(tp=2, cp=4)]),
    ids=str,
)
@pytest.mark.parametrize("variant", ["glm4_moe", "minimax_m2"])
def test_any_split_gives_the_same_logits(tiny: Callable[[str], Path], variant: str, split: Split) -> None:
    sequences = [IDS, IDS[40:90]]
    oracle = golden(tiny(variant), sequences)
    for ours, theirs in zip(gang_logits(tiny(variant), sequences, STEPS, split=split), oracle.logits, strict=True):
        assert np.abs(ours - theirs).max() < oracle.atol


@pytest.mark.parametrize(("variant", "share"), [("glm4_moe", 1.0), ("minimax_m2", 0.25)])
def test_another_share_of_turned_features_is_another_model(
    tiny: Callable[[str], Path], tmp_path: Path, variant: str, share: float
) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    other = changed(tiny(variant), tmp_path / "other", rope_parameters=rope, drop=("rotary_dim",))
    true = golden(tiny(variant), [IDS])
    assert np.abs(single_rank_logits(other, IDS) - true.logits[0]).max() > 100 * true.atol


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_norm_over_all_heads_is_that_of_the_whole_model_however_tp_splits_it(tp: int) -> None:
    """8 query heads and 2 KV heads of 4 features: from tp=4, ranks share KV heads."""
    generator = torch.Generator().manual_seed(tp)
    x, matrix = torch.randn(5, 12, generator=generator), torch.randn(48, 12, generator=generator)
    weight = torch.randn(40, generator=generator)
    q, k, v = (x @ matrix.T).split([32, 8, 8], dim=1)
    wanted = [part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() for part in (q, k)]
    wanted = [part * own for part, own in zip(wanted, weight.split([32, 8]), strict=True)] + [v]

    def part(ctx: ParallelContext) -> tuple[Tensor, Tensor]:
        kv_rank, num_kv = ctx.tp.rank * 2 // tp if tp > 2 else ctx.tp.rank, min(tp, 2)
        rows = [
            torch.arange(size).chunk(parts)[rank] + start
            for start, size, parts, rank in (
                (0, 32, tp, ctx.tp.rank),
                (32, 8, num_kv, kv_rank),
                (40, 8, num_kv, kv_rank),
            )
        ]
        norms = weight[rows[0]], weight[rows[1]]
        taken = torch.cat(rows)
        return NormedProjection(ColumnLinear(matrix[taken], None), *norms, eps=1e-5, group=ctx.tp)(x), taken

    for ours, taken in on_gang(Split(tp=tp), part):
        torch.testing.assert_close(ours, torch.cat(wanted, dim=1)[:, taken])


# MiniMax-Text-01 ----------------------------------------------------------------------------------------------------

LONGER = {
    f"{ours}_{factor}_factor": f"layernorm_{theirs}_{factor}"
    for ours, theirs in {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}.items()
    for factor in ("alpha", "beta")
}


def as_published(model_dir: Path, copy: Path, model_type: str = "minimax_text_01", **values: Any) -> Path:
    """A copy under the keys of the vendor's config.json."""
    config = json.loads((model_dir / "config.json").read_text())
    published = {
        "model_type": model_type,
        "attn_type_list": [int(kind == "full_attention") for kind in config["layer_types"]],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "postnorm": True,
        "shared_intermediate_size": 0,
        **{theirs: config[ours] for ours, theirs in LONGER.items()},
    }
    return changed(model_dir, copy, drop=("layer_types", "rope_parameters", *LONGER), **{**published, **values})


@pytest.fixture(scope="module")
def partly_turned(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_published(tiny("minimax-whole-heads"), tmp_path_factory.mktemp("minimax") / "published", rotary_dim=8)


def test_the_twin_of_minimax_equals_transformers_where_whole_heads_are_turned(tiny: Callable[[str], Path]) -> None:
    model_dir = tiny("minimax-whole-heads")
    exact = golden(model_dir, [IDS]).logits[0]
    assert np.abs(minimax_logits(model_dir, IDS, rotary_dim=16) - exact).max() < 5e-6  # of angles in float32
    assert np.abs(minimax_logits(model_dir, IDS, rotary_dim=8) - exact).max() > 0.1


@pytest.mark.parametrize(
    ("split", "dtype", "atol"),
    [
        (Split(), torch.float64, 5e-6),
        (Split(tp=2), torch.float32, 1e-4),
        (Split(cp=4), torch.float32, 1e-4),
        (Split(tp=2, cp=2), torch.float32, 1e-4),
    ],
    ids=str,
)
def test_a_published_minimax_gives_the_logits_of_the_twin(
    tiny: Callable[[str], Path], partly_turned: Path, split: Split, dtype: torch.dtype, atol: float
) -> None:
    sequences = [IDS, IDS[40:90]]
    found = gang_logits(partly_turned, sequences, STEPS, split=split, dtype=dtype)
    for ours, ids in zip(found, sequences, strict=True):
        twin = minimax_logits(tiny("minimax-whole-heads"), ids, rotary_dim=8)
        assert np.abs(ours - twin).max() < atol


@pytest.mark.parametrize("model_type", ["minimax_text_01", "minimax_m1"])
def test_published_keys_say_what_those_of_transformers_say(
    tiny: Callable[[str], Path], tmp_path: Path, model_type: str
) -> None:
    copy = as_published(tiny("minimax-whole-heads"), tmp_path / "published", model_type)
    config = read_config(copy)
    check_weights(config, Checkpoint(copy))
    saved = read_config(tiny("minimax-whole-heads"))
    assert replace(config, name="", model_type="") == replace(saved, name="", model_type="")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"postnorm": False}, "postnorm=False"),
        ({"postnorm": None}, "postnorm=False"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size=64"),
        ({"attn_type_list": [0, 0, 0, 2]}, "attn_type_list must be a list of 0 and 1"),
        ({"attn_type_list": [0, 1]}, "has 2 layer_types and num_hidden_layers=4"),
        ({"rotary_dim": 32}, "32 of head_dim=16 features"),
        ({"layernorm_mlp_alpha": 0}, "layernorm_mlp_alpha must be a positive number"),
    ],
    ids=str,
)
def test_other_minimax_models_are_refused_by_name(
    tiny: Callable[[str], Path], tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(as_published(tiny("minimax-whole-heads"), tmp_path / "wrong", **values))


# Configs as others write them ---------------------------------------------------------------------------------------


def test_a_glm_config_of_transformers_4_reads_the_same(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    old = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    copy = changed(tiny("glm4_moe"), tmp_path / "old", drop=("rope_parameters",), **old)
    assert replace(read_config(copy), name="") == replace(read_config(tiny("glm4_moe")), name="")


def test_a_published_minimax_says_how_many_features_are_turned(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    published = {
        "rope_theta": 5e6,
        "rotary_dim": 8,
        "partial_rotary_factor": 0.5,
        "attn_type_list": [1] * 4,
        "num_mtp_modules": 3,
    }
    copy = changed(tiny("minimax_m2"), tmp_path / "old", drop=("rope_parameters",), **published)
    config = read_config(copy)
    assert [rf"^model\.layers\.{layer}\." for layer in (4, 5, 6)] == [*config.ignored_tensors]
    assert replace(config, name="", ignored_tensors=()) == replace(read_config(tiny("minimax_m2")), name="")


@pytest.mark.parametrize(
    ("variant", "values", "message"),
    [
        ("glm4_moe", {"partial_rotary_factor": 0.3}, "contradict each other"),
        ("glm4_moe", {"rope_parameters": {**QUARTER, "partial_rotary_factor": 0.1}}, "1 of head_dim=16 features"),
        ("glm4_moe", {"rope_parameters": {**QUARTER, "partial_rotary_factor": 1.5}}, "24 of head_dim=16 features"),
        ("glm4_moe", {"mlp_bias": True}, "mlp_bias=True"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("glm4_moe", {"n_group": 3}, "cannot choose 1 of 3 groups of 8 experts"),
        ("glm4_moe", {"layer_types": ["sliding_attention"] * 4}, "'sliding_attention'"),
        ("minimax_m2", {"rotary_dim": 18, "rope_parameters": None, "rope_theta": 1e4}, "18 of head_dim=16 features"),
        ("minimax_m2", {"rotary_dim": 4}, "contradict each other"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type='per_head'"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm=False"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=False"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size=64"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list must be 1"),
        ("minimax_m2", {"num_experts_per_tok": 9}, "cannot choose 9 of 8 experts"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(
    tiny: Callable[[str], Path], tmp_path: Path, variant: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(changed(tiny(variant), tmp_path / "wrong", **values))
