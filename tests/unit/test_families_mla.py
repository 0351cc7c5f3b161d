"""Families with latent attention against transformers in float64 on the same weights, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GlmMoeDsaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

from raycache.checkpoint.rope_config import RopeConfig
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError, ConfigError
from raycache.layers.rope import Rotary
from raycache.memory.component import CacheFormat
from raycache.models.base import check_split, check_weights, components, load_model, read_config
from raycache.models.deepseek_v3 import DeepseekConfig
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from tests.oracle.families import TOPK, make_family
from tests.oracle.gang import Piece, gang_logits
from tests.oracle.golden import Golden, cache_contents, golden
from tests.oracle.kept_selections import count_selections
from tests.oracle.single import forced_logits, single_rank, single_rank_logits
from tests.selection import mostly_long

IDS = [
    torch.randint(3, 515, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (90, 41)
]  # both longer than the indexers' top k
CUTS = (1, 17, 18, 19, 43, 64)
CHUNKED: list[list[Piece]] = [
    *([(0, start, stop)] for start, stop in zip((0, *CUTS), (*CUTS, 66), strict=True)),
    [(0, 66, 67), (1, 0, 31)],  # a decode beside a chunk
    [(1, 31, 32), (0, 67, 68)],  # decodes only: of more than two cp ranks some have no token
    [(0, 68, 90), (1, 32, 41)],
]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {}),
    "v3-plain-queries": ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 4}),
    "v3-halves": ("deepseek_v3", {"rope_interleave": False, "first_k_dense_replace": 4}),
    "v3-biases": ("deepseek_v3", {"attention_bias": True, "first_k_dense_replace": 4}),
    "v3-plain-rope": ("deepseek_v3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "v3-experts-only": ("deepseek_v3", {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": 2}),
    "deepseek_v32": ("deepseek_v32", {}),
    "v32-mixed": ("deepseek_v32", {"mlp_layer_types": ["sparse", "dense"] * 2, "attention_bias": True}),
    "v32-few": ("deepseek_v32", {"index_topk": 3, "index_head_dim": 8, "v_head_dim": 24}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "glm-period": ("glm_moe_dsa", {"indexer_types": None, "index_topk_freq": 3, "rms_norm_eps": 1e-3, "seed": 3}),
    "glm-yarn": ("glm_moe_dsa", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0,
                                 "mscale_all_dim": 0.7, "original_max_position_embeddings": 512}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("mla")

    def make(variant: str) -> Path:
        family, settings = VARIANTS[variant]
        model_dir = root / variant
        return model_dir if model_dir.exists() else make_family(model_dir, family, **{"seed": 1, **settings})

    return make


@pytest.fixture(scope="module")
def truth(tiny: Callable[[str], Path]) -> Callable[[str], Golden]:
    known: dict[str, Golden] = {}

    def compute(variant: str) -> Golden:
        if variant not in known:
            known[variant] = golden(tiny(variant), IDS)
            assert known[variant].gap > 2 * known[variant].noise, "a correct choice could be another one"
        return known[variant]

    return compute


def furthest(ours: list[np.ndarray], exact: Golden) -> float:
    return max(float(np.abs(mine - theirs).max()) for mine, theirs in zip(ours, exact.logits, strict=True))


def change(model_dir: Path, *, drop: tuple[str, ...] = (), **values: Any) -> Path:
    path = model_dir / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps({**config, **values}))
    return model_dir


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_in_one_piece_and_in_many(
    tiny: Callable[[str], Path], truth: Callable[[str], Golden], variant: str
) -> None:
    exact = truth(variant)
    for cuts in ((), CUTS, tuple(range(30, 90))):
        ours = [single_rank_logits(tiny(variant), ids, cuts=[cut for cut in cuts if cut < len(ids)]) for ids in IDS]
        assert furthest(ours, exact) <= exact.atol
    check_weights(read_config(tiny(variant)), Checkpoint(tiny(variant)))


@pytest.mark.parametrize(
    "split",
    mostly_long([Split(tp=2), Split(tp=8), Split(cp=2), Split(tp=2, cp=4)], but=[Split(tp=8), Split(tp=2, cp=4)]),
    ids=str,
)
@pytest.mark.parametrize("variant", ["deepseek_v3", "v3-plain-queries", "v32-mixed", "glm_moe_dsa"])
def test_any_split_gives_the_logits_of_transformers(
    tiny: Callable[[str], Path], truth: Callable[[str], Golden], variant: str, split: Split
) -> None:
    ours = gang_logits(tiny(variant), IDS, CHUNKED, split=split)
    assert furthest(ours, truth(variant)) <= truth(variant).atol


@pytest.mark.parametrize("variant", ["deepseek_v32", "glm_moe_dsa"])
def test_one_selected_token_more_is_felt(
    tiny: Callable[[str], Path], truth: Callable[[str], Golden], variant: str, tmp_path: Path
) -> None:
    model_dir = make_family(tmp_path, variant, seed=1)
    ours = single_rank_logits(change(model_dir, index_topk=TOPK + 1), IDS[0])
    far = np.abs(ours - truth(variant).logits[0]).max(axis=1)
    assert far[:TOPK].max() <= truth(variant).atol < 100 * truth(variant).atol < far[TOPK + 8 :].min()


def test_bfloat16_stays_close(tiny: Callable[[str], Path], truth: Callable[[str], Golden]) -> None:
    exact = truth("deepseek_v3").logits[0]
    ours = single_rank_logits(tiny("deepseek_v3"), IDS[0], cuts=CUTS, dtype=torch.bfloat16)
    assert np.abs(ours - exact).mean() < 0.1 * exact.std()


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def test_the_cache_holds_what_that_of_transformers_holds(tiny: Callable[[str], Path], variant: str) -> None:
    rank, ids = single_rank(tiny(variant)), IDS[0]
    forced_logits(rank, ids, cuts=CUTS)
    wanted = cache_contents(tiny(variant), ids)
    assert {layer for layer, _ in wanted} == set(range(4))
    for layer in range(4):
        latent, rope = rank.pool.latent(layer).read([(0, len(ids))], dtype=torch.float32)
        np.testing.assert_allclose(latent, wanted[layer, "latent"], rtol=0, atol=1e-4)
        np.testing.assert_allclose(rope, wanted[layer, "rope"], rtol=0, atol=1e-4)
    with_index = {layer for layer, name in wanted if name == "index"}
    assert with_index == {"deepseek_v3": set(), "deepseek_v32": {0, 1, 2, 3}, "glm_moe_dsa": {0, 2}}[variant]
    for layer in with_index:
        keys = rank.pool.index(layer).read([(0, len(ids))])
        np.testing.assert_allclose(keys, wanted[layer, "index"], rtol=0, atol=1e-4)


def test_the_norms_of_small_latents_and_index_keys_are_guarded_as_in_transformers(tmp_path: Path) -> None:
    model_dir = make_family(tmp_path, "glm_moe_dsa", rms_norm_eps=1e-3)
    path, shrunk = model_dir / "model.safetensors", ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "wk.weight")
    tensors = {name: 1e-3 * x if name.endswith(shrunk) else x for name, x in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    rank, ids = single_rank(model_dir), IDS[1][:TOPK]  # all tokens are selected
    exact = golden(model_dir, [ids])
    assert np.abs(forced_logits(rank, ids) - exact.logits[0]).max() <= exact.atol
    wanted = cache_contents(model_dir, ids)[0, "index"]
    np.testing.assert_allclose(rank.pool.index(0).read([(0, len(ids))]), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_a_float8_cache_costs_little_accuracy(family: str, tmp_path: Path) -> None:
    model_dir = make_family(tmp_path, family, seed=1, kv_lora_rank=128)
    exact = golden(model_dir, IDS[:1])
    wide, small = single_rank(model_dir), single_rank(model_dir, fp8=True)
    assert np.abs(forced_logits(wide, IDS[0], cuts=CUTS) - exact.logits[0]).max() <= exact.atol
    off = np.abs(forced_logits(small, IDS[0], cuts=CUTS) - exact.logits[0])
    assert exact.atol < off.max() and off.mean() < 0.1 * exact.logits[0].std()


def test_rows_take_the_bytes_of_their_format(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model_dir = make_family(tmp_path, "deepseek_v32")
    config = read_config(change(model_dir, kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128))

    def row_bytes(fmt: CacheFormat) -> dict[str, int]:
        return {part.name: sum(field.num_bytes for field in part.fields) for part in components(config, fmt)}

    assert row_bytes(CacheFormat("bfloat16", has_fp8_latent=True)) == {"latent": 512 + 16 + 128, "index": 256}
    assert row_bytes(CacheFormat("bfloat16")) == {"latent": 2 * 576, "index": 256}
    with pytest.raises(ConfigError, match="kv_lora_rank that is a multiple of 128, this model has 32"):
        components(read_config(tiny("deepseek_v3")), CacheFormat("bfloat16", has_fp8_latent=True))


def test_layers_that_share_a_selection_keep_no_index_keys(tiny: Callable[[str], Path]) -> None:
    latent, index = components(read_config(tiny("glm_moe_dsa")), CacheFormat("float32"))
    assert (latent.name, latent.layers, index.name, index.layers) == ("latent", (0, 1, 2, 3), "index", (0, 2))
    assert all(field.head_axis is None for part in (latent, index) for field in part.fields)


def test_selections_of_earlier_layers_are_freed(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a long step have 64 MiB per layer in DeepSeek-V3.2."""
    kept = count_selections(monkeypatch)
    single_rank_logits(tiny("deepseek_v32"), IDS[0], cuts=[60])
    assert len(kept) == 8 and max(kept) == 1


# --- splits -----------------------------------------------------------------------------------------------------------


def test_layers_that_share_a_selection_stay_in_its_stage(tiny: Callable[[str], Path]) -> None:
    config = read_config(tiny("glm_moe_dsa"))
    assert config.bound_layers == (1, 3)
    check_split(config, Split(pp=2))
    with pytest.raises(ConfigError, match=r"pp=4 exceeds num_hidden_layers=4 minus 2 that .*; use at most 2"):
        check_split(config, Split(pp=4))
    with pytest.raises(ConfigError, match=r"pp_layers=1,3 starts a stage at layer 1 of .*; use auto, or 2,2$"):
        check_split(config, Split(pp=2, stages=(1, 3)))
    check_split(read_config(tiny("deepseek_v32")), Split(pp=4))


def test_only_heads_and_features_that_are_there_limit_tp(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"tp=16 does not divide num_attention_heads=8 .* \[1, 2, 4, 8\]"):
        check_split(read_config(tiny("deepseek_v32")), Split(tp=16))
    config = read_config(tiny("v3-plain-queries"))
    assert isinstance(config, DeepseekConfig) and config.mlp_layers == (0, 1, 2, 3)
    check_split(dataclasses.replace(config, experts=dataclasses.replace(config.experts, inner=3)), Split(tp=2))


# --- configs and checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"index_topk_freq": 1},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FFSSFS"},
        {"index_topk_pattern": ["full", "shared"] * 3},
        {"index_topk_pattern": "FSSSSS", "index_topk_freq": 1},
        {"indexer_types": ["full"] + ["shared"] * 5, "index_topk_freq": 1},
    ],
    ids=str,
)
def test_who_has_an_indexer_is_read_as_transformers_reads_it(settings: dict[str, Any], tmp_path: Path) -> None:
    model_dir = make_family(tmp_path, "glm_moe_dsa", num_hidden_layers=6, indexer_types=["full"] * 6)
    change(model_dir, drop=("indexer_types",), **settings)
    config = read_config(model_dir)
    theirs = GlmMoeDsaConfig(num_hidden_layers=6, **settings).indexer_types
    assert isinstance(config, DeepseekConfig) and config.indexer is not None
    assert config.indexer.layers == tuple(layer for layer, kind in enumerate(theirs) if kind == "full")
    last = [max(full for full in config.indexer.layers if full <= layer) for layer in range(6)]
    assert config.indexer.sources == tuple(last)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def test_layers_for_drafts_are_passed_over_and_other_surplus_is_not(family: str, tmp_path: Path) -> None:
    model_dir = make_family(tmp_path, family)
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    drafts = {"model.layers.4.eh_proj.weight": torch.zeros(64, 128), "model.layers.4.enorm.weight": torch.zeros(64)}
    save_file({**tensors, **drafts}, path, metadata={"format": "pt"})
    check_weights(read_config(model_dir), Checkpoint(model_dir))
    check_weights(read_config(change(model_dir, num_nextn_predict_layers=1)), Checkpoint(model_dir))
    with pytest.raises(CheckpointError, match=r"2 tensors .* model\.layers\.4\.eh_proj\.weight"):
        check_weights(read_config(change(model_dir, num_nextn_predict_layers=0)), Checkpoint(model_dir))
    save_file({**tensors, "model.layers.40.norm": torch.zeros(1)}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 tensors .* model\.layers\.40\.norm"):
        check_weights(read_config(change(model_dir, num_nextn_predict_layers=1)), Checkpoint(model_dir))


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "bailing_hybrid"])
def test_a_last_layer_that_the_config_does_not_count_is_not_taken_for_drafts(family: str, tmp_path: Path) -> None:
    model_dir = make_family(tmp_path, family)
    config = json.loads((model_dir / "config.json").read_text())
    kinds = {key: config[key][:3] for key in ("layer_types", "mlp_layer_types", "indexer_types") if key in config}
    change(model_dir, num_hidden_layers=3, num_nextn_predict_layers=1, **kinds)
    with pytest.raises(CheckpointError, match=r"tensors that a .* model\.layers\.3\."):
        check_weights(read_config(model_dir), Checkpoint(model_dir))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model_dir = make_family(tmp_path, "deepseek_v32")
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.2.self_attn.indexer.wk.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.self_attn\.indexer\.wk\.weight"):
        load_model(
            read_config(model_dir),
            Checkpoint(model_dir),
            ParallelContext.single(torch.device("cpu")),
            torch.float32,
            on_progress=lambda done, total: None,
        )


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2.* only 8"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 must be even"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank must be a positive integer, got 0"),
        ("deepseek_v3", {"rope_interleave": "yes"}, "rope_interleave must be true or false"),
        (
            "deepseek_v3",
            {"first_k_dense_replace": -1},
            "first_k_dense_replace must be a positive integer or zero, got -1",
        ),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ("deepseek_v32", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v32", {"mlp_bias": True}, "mlp_bias=True"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 4}, "layer_types has 'full_attention'"),
        ("deepseek_v32", {"layer_types": ["indexed_attention"]}, "has 1 layer_types and num_hidden_layers=4"),
        ("deepseek_v32", {"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types has 'moe'"),
        ("deepseek_v32", {"q_lora_rank": None}, "no q_lora_rank"),
        ("deepseek_v32", {"index_head_dim": 4}, "index_head_dim=4 is less than qk_rope_head_dim=8"),
        ("deepseek_v32", {"index_topk": None}, "does not say index_topk"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave=False"),
        ("glm_moe_dsa", {"indexer_types": ["full", "none", "full", "full"]}, "indexer_types has 'none'"),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 3}, "has 3 indexer_types"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full"] * 2}, "layer 0 has no indexer of its own"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FSX?"}, "index_topk_pattern has 'X'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    family: str, values: dict[str, Any], message: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((tiny(family) / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        read_config(change(tmp_path, **values))


# --- interleaved rope -------------------------------------------------------------------------------------------------


def test_interleaved_rotation_equals_transformers_and_turns_neighbours() -> None:
    positions = torch.tensor([0, 1, 2, 63, 64, 500, 4095])
    q, k = torch.randn(2, len(positions), 3, 64, generator=torch.Generator().manual_seed(0))
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    angles = (positions.float()[:, None] * frequencies).repeat(1, 2)
    wanted_q, wanted_k = apply_rotary_pos_emb_interleave(q, k, angles.cos(), angles.sin())

    turn = Rotary(RopeConfig(), 64, torch.device("cpu"), is_interleaved=True)(positions, torch.float32)
    torch.testing.assert_close(turn(q), wanted_q, rtol=0, atol=2e-6)
    torch.testing.assert_close(turn(k), wanted_k, rtol=0, atol=2e-6)
    # As complex numbers: feature 2i + i * feature 2i+1, turned.
    turned = torch.view_as_complex(q.unflatten(-1, (32, 2)).contiguous()) * torch.polar(
        torch.ones(1), angles[:, None, :32]
    )
    torch.testing.assert_close(turn(q), torch.cat((turned.real, turned.imag), dim=-1), rtol=0, atol=2e-6)
