"""Families with linear attention against transformers in float64 on the same weights, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MiniMaxConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from raycache.attention.delta_rule import DeltaRule, unit_length
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError, ConfigError
from raycache.layers.gated_delta_net import DeltaNetConfig, packed_by_kind, packed_per_key_head
from raycache.layers.lightning import SplitNorm, slope_rates
from raycache.layers.norm import GatedHeadNorm
from raycache.layers.weights import Columns
from raycache.memory.component import CacheFormat
from raycache.models.base import check_split, check_weights, components, read_config
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from tests.oracle.families import FAMILIES, draw_weights, make_family
from tests.oracle.gang import Piece, gang_logits, on_gang
from tests.oracle.golden import Golden, cache_contents, golden
from tests.oracle.single import forced_logits, single_rank, single_rank_logits
from tests.selection import mostly_long

IDS = [
    torch.randint(3, 515, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (90, 23)
]
CUTS = (1, 17, 18, 19, 43, 64)
CHUNKED: list[list[Piece]] = [
    *([(0, start, stop)] for start, stop in zip((0, *CUTS), (*CUTS, 66), strict=True)),
    [(0, 66, 67), (1, 0, 11)],  # a decode beside a chunk
    [(1, 11, 12), (0, 67, 68)],  # decodes only: of more than two cp ranks some have no token
    [(0, 68, 90), (1, 12, 23)],
]

FULL_EVERYWHERE = {"layer_types": ["full_attention"] * 4}
LINEAR_EVERYWHERE = {"layer_types": ["linear_attention"] * 4}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {}),
    "next-some-dense": ("qwen3_next", {"mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": False}),
    "next-one-key-head": (
        "qwen3_next",
        {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 2, "attention_bias": True},
    ),
    "next-no-groups": ("qwen3_next", {"linear_num_key_heads": 8, "rms_norm_eps": 1e-3}),
    "qwen3_5": ("qwen3_5", {}),
    "3_5-tied": ("qwen3_5", {"tie_word_embeddings": True, "num_key_value_heads": 1, "linear_num_key_heads": 2}),
    "3_5-linear-only": ("qwen3_5", LINEAR_EVERYWHERE),
    "3_5-full-only": ("qwen3_5", {**FULL_EVERYWHERE, "attention_bias": True}),
    "kimi_linear": ("kimi_linear", {}),
    "kimi-groups": ("kimi_linear", {"n_group": 4, "topk_group": 2, "q_lora_rank": 48, "norm_topk_prob": False}),
    "kimi-wide": ("kimi_linear", {"linear_head_dim": 24, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-3}),
    "bailing_hybrid": ("bailing_hybrid", {}),
    "bailing-no-bound": ("bailing_hybrid", {"kda_safe_gate": False, "mlp_layer_types": ["sparse", "dense"] * 2}),
    "bailing-low-bound": ("bailing_hybrid", {"kda_lower_bound": -2.5, "rope_theta": 1e4, "head_dim": 24}),
    "bailing-linear-only": ("bailing_hybrid", LINEAR_EVERYWHERE),
    "minimax": ("minimax", {"seed": 2}),  # the first one's router has a near tie
    "minimax-alternating": ("minimax", {"layer_types": None, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("linear")

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
    mostly_long(
        [Split(tp=2), Split(tp=8), Split(cp=2), Split(cp=8), Split(tp=2, cp=4)], but=[Split(tp=8), Split(tp=2, cp=4)]
    ),
    ids=str,
)
@pytest.mark.parametrize("variant", ["qwen3_next", "next-one-key-head", "qwen3_5", "kimi_linear", "bailing_hybrid",
                                     "minimax"])  # fmt: skip
def test_any_split_gives_the_logits_of_transformers(
    tiny: Callable[[str], Path], truth: Callable[[str], Golden], variant: str, split: Split
) -> None:
    ours = gang_logits(tiny(variant), IDS, CHUNKED, split=split)
    assert furthest(ours, truth(variant)) <= truth(variant).atol


# Without positions: angles of the rope are float32, here as everywhere.
@pytest.mark.parametrize("variant", ["3_5-linear-only", "kimi_linear", "bailing-linear-only"])
def test_in_float64_only_rounding_is_left(
    tiny: Callable[[str], Path], truth: Callable[[str], Golden], variant: str
) -> None:
    ours = gang_logits(tiny(variant), IDS, CHUNKED, split=Split(tp=2, cp=2), dtype=torch.float64)
    assert furthest(ours, truth(variant)) < 1e-11


@pytest.mark.parametrize("variant", ["qwen3_next", "qwen3_5", "kimi_linear", "bailing_hybrid", "minimax"])
def test_bfloat16_stays_close(tiny: Callable[[str], Path], truth: Callable[[str], Golden], variant: str) -> None:
    exact = truth(variant).logits[0]
    ours = single_rank_logits(tiny(variant), IDS[0], cuts=CUTS, dtype=torch.bfloat16)
    assert np.abs(ours - exact).mean() < 0.1 * exact.std()


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["qwen3_next", "qwen3_5", "kimi_linear", "bailing_hybrid", "minimax"])
def test_the_states_are_those_of_transformers(tiny: Callable[[str], Path], variant: str) -> None:
    rank, ids = single_rank(tiny(variant)), IDS[0]
    forced_logits(rank, ids, cuts=CUTS)
    slot, wanted = len(CUTS) % 2, cache_contents(tiny(variant), ids)
    for layer in range(3):
        view = rank.pool.state(layer)
        assert view.state.dtype == torch.float32
        np.testing.assert_allclose(view.state[slot], wanted[layer, "state"], rtol=0, atol=1e-4)
        if variant != "minimax":
            ours = torch.cat([view.conv[name][slot].flatten(0, 1) for name in ("q", "k", "v")])
            np.testing.assert_allclose(ours, wanted[layer, "conv"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", ["qwen3_next", "kimi_linear", "minimax"])
def test_states_are_float32_and_convolutions_of_the_type_of_the_activations(
    tiny: Callable[[str], Path], variant: str
) -> None:
    (state,) = (
        part for part in components(read_config(tiny(variant)), CacheFormat("bfloat16")) if part.name == "state"
    )
    fields = {field.name: field for field in state.fields}
    assert state.layers == (0, 1, 2) and fields["state"].dtype == "float32"
    convolved = [] if variant == "minimax" else ["conv_q", "conv_k", "conv_v"]
    assert [name for name in fields if name != "state"] == convolved
    assert all(fields[name].dtype == "bfloat16" and fields[name].shape[-1] == 3 for name in convolved)


# --- other forms of the same model ------------------------------------------------------------------------------------


def test_a_kimi_as_published_is_the_same_model(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model_dir = make_family(tmp_path, "kimi_linear", seed=1)
    change(
        model_dir,
        drop=("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"),
        first_k_dense_replace=1,
        linear_attn_config={"head_dim": 16, "num_heads": 8, "short_conv_kernel_size": 4, "full_attn_layers": [4],
                            "kda_layers": [1, 2, 3]},
    )  # fmt: skip
    path = model_dir / "model.safetensors"
    old, new = ".0.block_sparse_moe.", ".0.mlp."
    save_file({name.replace(old, new): tensor for name, tensor in load_file(path).items()}, path)
    check_weights(read_config(model_dir), Checkpoint(model_dir))
    ours, saved = (single_rank_logits(directory, IDS[0]) for directory in (model_dir, tiny("kimi_linear")))
    assert np.array_equal(ours, saved)


def test_files_that_name_no_kinds_of_layers_have_them_at_intervals(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    def kinds(variant: str, **values: Any) -> tuple[int, ...]:
        (tmp_path / "config.json").write_text((tiny(variant) / "config.json").read_text())
        drop = ("layer_types",)
        config: Any = read_config(change(tmp_path, drop=drop, num_hidden_layers=8, mlp_layer_types=None, **values))
        assert sorted(config.kinds.full + config.kinds.linear) == list(range(8))
        return config.kinds.full

    assert kinds("qwen3_next") == (3, 7)
    assert kinds("qwen3_5", full_attention_interval=2) == (1, 3, 5, 7)
    assert kinds("bailing_hybrid", layer_group_size=5) == (4,)
    assert kinds("minimax") == (0, 2, 4, 6)
    assert kinds("kimi_linear") == (4,)


def test_a_published_bailing_says_the_head_size_of_kda(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny("bailing_hybrid") / "config.json").read_text())
    saved: Any = read_config(tiny("bailing_hybrid"))
    drop = ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "mlp_layer_types")
    published: Any = read_config(change(tmp_path, drop=drop, head_dim=16, first_k_dense_replace=2))
    assert published.kda == saved.kda and published.mlp_layers == (0, 1)


def test_the_text_model_of_a_checkpoint_with_a_vision_part_is_served(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=dict(FAMILIES["qwen3_5"].settings), vision_config=vision)
    model = Qwen3_5ForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
    model.config.tie_word_embeddings = False
    draw_weights(model, seed=1)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        theirs = model(torch.tensor(IDS[:1]), use_cache=False).logits[0].numpy()
    assert np.abs(single_rank_logits(tmp_path, IDS[0], cuts=CUTS) - theirs).max() < 1e-4
    check_weights(read_config(tmp_path), Checkpoint(tmp_path))


def test_layers_for_drafts_are_passed_over_and_other_surplus_is_not(tmp_path: Path) -> None:
    model_dir = make_family(tmp_path, "bailing_hybrid")
    path = model_dir / "model.safetensors"
    save_file({**load_file(path), "model.layers.4.eh_proj.weight": torch.zeros(64, 128)}, path)
    check_weights(read_config(change(model_dir, num_nextn_predict_layers=1)), Checkpoint(model_dir))
    with pytest.raises(CheckpointError, match=r"1 tensors .* model\.layers\.4\.eh_proj\.weight"):
        check_weights(read_config(change(model_dir, num_nextn_predict_layers=0)), Checkpoint(model_dir))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen3_next", {"layer_types": ["linear_attention", "mamba"] * 2}, "layer_types has 'mamba'"),
        ("qwen3_next", {"layer_types": ["full_attention"]}, "has 1 layer_types and num_hidden_layers=4"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_key_heads=3 does not divide linear_num_value_heads=8"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1"),
        ("qwen3_next", {"head_dim": 20}, "head_dim=20"),
        ("qwen3_next", {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
        ("qwen3_next", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("qwen3_next", {"num_experts_per_tok": 9}, "cannot choose 9 of 8 experts"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("qwen3_5", {"linear_num_value_heads": None}, "does not say linear_num_value_heads"),
        ("qwen3_5", {"model_type": "qwen3_5"}, "no text_config"),
        ("qwen3_5", {"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic' is not supported"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False"),
        ("kimi_linear", {"mlp_layer_types": ["dense"]}, "has 1 mlp_layer_types"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
        ("kimi_linear", {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [3]}},
         "must name each layer from 1 to 4 once"),
        ("kimi_linear", {"linear_conv_kernel_dim": 1}, "convolution with 1 tap"),
        ("bailing_hybrid", {"rope_interleave": False}, "rope_interleave=False"),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be a positive"),
        ("bailing_hybrid", {"kda_lower_bound": 1.0}, "kda_lower_bound=1.0 must be below zero"),
        ("bailing_hybrid", {"kda_lower_bound": "-5"}, "kda_lower_bound must be a number"),
        ("minimax", {"sliding_window": 64}, "sliding_window"),
        ("minimax", {"postnorm": False}, "postnorm=False"),
        ("minimax", {"attention_bias": True}, "attention_bias=True"),
        ("minimax", {"mlp_beta_factor": 0}, "mlp_beta_factor must be a positive number"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    family: str, values: dict[str, Any], message: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((tiny(family) / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        read_config(change(tmp_path, **values))


def test_recurrent_heads_limit_tp_times_cp(tiny: Callable[[str], Path]) -> None:
    for variant in ("qwen3_next", "kimi_linear", "bailing_hybrid", "minimax"):
        for served in (Split(tp=8), Split(cp=8), Split(tp=4, cp=2)):
            check_split(read_config(tiny(variant)), served)
    with pytest.raises(ConfigError, match=r"cp=4 at tp=4 does not divide linear_num_value_heads=8 .* \[1, 2\]"):
        check_split(read_config(tiny("qwen3_next")), Split(tp=4, cp=4))
    with pytest.raises(ConfigError, match=r"cp=16 does not divide linear_num_heads=8"):
        check_split(read_config(tiny("kimi_linear")), Split(cp=16))


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_layers", "num_heads"), [(2, 4), (80, 64), (5, 6)])
def test_slope_rates_are_those_of_transformers_to_the_last_bit(num_layers: int, num_heads: int) -> None:
    config = MiniMaxConfig(num_hidden_layers=num_layers, num_attention_heads=num_heads, hidden_size=num_heads * 2)
    for layer in {0, 1, num_layers - 1}:
        theirs = MiniMaxLightningAttention(config, layer).slope_rate.flatten()
        assert torch.equal(slope_rates(layer, num_layers=num_layers, num_heads=num_heads), theirs)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_norm_over_all_heads_is_the_same_however_tp_splits_them(tp: int) -> None:
    generator = torch.Generator().manual_seed(tp)
    x, weight = torch.randn(5, 32, generator=generator), torch.randn(32, generator=generator)
    gate = torch.randn(5, 32, generator=generator)

    def part(ctx: ParallelContext) -> Tensor:
        norm = SplitNorm(weight.chunk(tp)[ctx.tp.rank], 32, 1e-3, ctx.tp)
        return norm(x.chunk(tp, dim=1)[ctx.tp.rank], gate.chunk(tp, dim=1)[ctx.tp.rank])

    wanted = F.rms_norm(x, (32,), weight, 1e-3) * gate.sigmoid()
    torch.testing.assert_close(torch.cat(on_gang(Split(tp=tp), part), dim=1), wanted)


def test_unit_length_survives_zeros_and_keeps_float64() -> None:
    x = torch.randn(4, 2, 16, dtype=torch.float64)
    torch.testing.assert_close(unit_length(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    assert not unit_length(torch.zeros(1, 1, 16, dtype=torch.bfloat16)).isnan().any()


def test_a_bounded_forget_gate_stays_above_its_bound_and_a_free_one_below_zero() -> None:
    x, dt_bias = torch.linspace(-100, 100, 32).view(4, 1, 8), torch.full((1, 8), 0.5)
    rate = torch.full((1, 1), 2.0)
    free = DeltaRule(*[torch.empty(0)] * 3, rate=rate, dt_bias=dt_bias)
    bounded = replace(free, bound=-5.0).log_decay(x)
    torch.testing.assert_close(bounded, -5 / (1 + torch.exp(-2 * (x + 0.5))))
    assert bounded.min() >= -5 and bounded.max() <= 0
    torch.testing.assert_close(free.log_decay(x), -2 * torch.logaddexp(x + 0.5, torch.zeros(1)))


def test_a_gated_norm_of_no_tokens_is_no_tokens() -> None:
    norm = GatedHeadNorm(torch.ones(8), 1e-6, activation="sigmoid")
    assert norm(torch.empty(0, 2, 8), torch.empty(0, 2, 8)).shape == (0, 2, 8)


def test_both_packings_take_the_same_rows_of_the_same_projection() -> None:
    net = DeltaNetConfig(key_heads=2, key_dim=2, value_heads=4, value_dim=3, kernel=4)
    # One label per row, (kind, head, feature): packed per key head as qwen3_next does, and by kind as qwen3_5 does.
    labels = {
        kind: [(kind, head, i) for head in range(heads) for i in range(dim)]
        for kind, heads, dim in (("q", 2, 2), ("k", 2, 2), ("v", 4, 3), ("z", 4, 3), ("b", 4, 1), ("a", 4, 1))
    }
    per_head = {kind: len(rows) // 2 for kind, rows in labels.items()}

    def of(kinds: str) -> list[tuple[str, int, int]]:
        return [row for g in (0, 1) for kind in kinds for row in labels[kind][g * per_head[kind] :][: per_head[kind]]]

    tensors = {
        "in_proj_qkvz": of("qkvz"),
        "in_proj_ba": of("ba"),
        "in_proj_qkv": labels["q"] + labels["k"] + labels["v"],
        **{f"in_proj_{kind}": labels[kind] for kind in "zba"},
    }

    def rows(columns: list[Columns]) -> list[tuple[str, int, int]]:
        assert all(len(tensors[part.name]) == part.size for part in columns)
        return [tensors[part.name][i] for part in columns for i in part.taken]

    for keys, values in ((range(2), range(4)), (range(1, 2), range(2, 4)), (range(1, 2), range(3, 4))):
        wanted = [row for kind in "qkvzba" for row in labels[kind] if row[1] in (keys if kind in "qk" else values)]
        assert rows(packed_per_key_head(net, keys, values)) == wanted
        assert rows(packed_by_kind(net, keys, values)) == wanted
