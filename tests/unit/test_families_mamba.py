"""Families with Mamba2 layers against transformers in float64 on the same weights, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError, ConfigError
from raycache.layers.mamba2 import GatedGroupNorm
from raycache.memory.component import CacheFormat
from raycache.models.base import check_split, check_weights, components, read_config
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split, shared_head_range
from tests.oracle.families import ALIKE, KNOWN, make_family
from tests.oracle.gang import Piece, gang_logits, on_gang
from tests.oracle.golden import Golden, cached_logits, golden
from tests.selection import mostly_long

IDS = [
    torch.randint(3, 515, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (70, 23)
]
CUTS = (1, 17, 18, 19, 43, 64)
WHOLE: list[list[Piece]] = [[(0, 0, 70), (1, 0, 23)]]
CHUNKED: list[list[Piece]] = [
    *([(0, start, stop)] for start, stop in zip((0, *CUTS), (*CUTS, 66), strict=True)),
    [(0, 66, 67), (1, 0, 11)],  # a decode beside a chunk
    [(1, 11, 12), (0, 67, 68)],  # decodes only: of more than two cp ranks some have no token
    [(0, 68, 70), (1, 12, 23)],
]

ONE = Split()
WITHOUT_MOE = {"layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mlp_bias": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h-biases": ("nemotron_h", {**WITHOUT_MOE, "use_bias": True}),
    "nemotron_h-no-conv-bias": ("nemotron_h", {**WITHOUT_MOE, "use_conv_bias": False, "n_groups": 4}),
    "nemotron_h-one-group": ("nemotron_h", {**WITHOUT_MOE, "n_groups": 1}),
    # Steps that transformers holds at time_step_min are all above it, or held there by time_step_limit too.
    "nemotron_h-steps-as-published": ("nemotron_h", {**WITHOUT_MOE, "time_step_min": 0.001, "time_step_floor": 0.2}),
    "nemotron_h-limited-steps": (
        "nemotron_h",
        {**WITHOUT_MOE, "time_step_min": 0.05, "time_step_limit": (0.05, float("inf"))},
    ),
    "nemotron_h-latent-experts": (
        "nemotron_h",
        {"layers_block_type": ["mamba", "moe", "attention", "moe"], "moe_latent_size": 24},
    ),
    "granite": ("granitemoehybrid", {}),
    "granite-dense-rope": (
        "granitemoehybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "tie_word_embeddings": False},
    ),
    "granite-one-group": ("granitemoehybrid", {"num_local_experts": 0, "mamba_n_groups": 1, "mamba_proj_bias": True}),
    "granite-eight-groups": ("granitemoehybrid", {"num_local_experts": 0, "mamba_n_groups": 8}),
    "granite-attention-only": (
        "granitemoehybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "layer_types": ["full_attention"] * 4},
    ),
    "granite-mamba-only": ("granitemoehybrid", {"num_local_experts": 0, "layer_types": ["linear_attention"] * 4}),
    "granite-limited-steps": ("granitemoehybrid", {"num_local_experts": 0, "time_step_limit": (0.03, 0.08)}),
    "falcon_h1": ("falcon_h1", {"key_multiplier": 1.25}),
    "falcon_h1-no-norm": ("falcon_h1", {"mamba_rms_norm": False, "time_step_limit": (0.03, 0.08)}),
    "falcon_h1-biases": (
        "falcon_h1",
        {
            **dict.fromkeys(("mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias"), True),
            "mamba_n_groups": 1,
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1-no-factors": (
        "falcon_h1",
        {
            **{key: 1.0 for key in ALIKE["falcon_h1"].settings if key.endswith("_multiplier")},
            **{"mlp_multipliers": None, "ssm_multipliers": None, "mamba_d_ssm": None, "mamba_d_head": "auto"},
        },
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("mamba")

    def make(variant: str) -> Path:
        family, settings = VARIANTS[variant]
        model_dir = root / variant
        return model_dir if model_dir.exists() else make_family(model_dir, family, **settings)

    return make


def change(model_dir: Path, *, drop: tuple[str, ...] = (), **values: Any) -> Path:
    path = model_dir / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps({**config, **values}))
    return model_dir


@pytest.fixture(scope="module")
def truth(tiny: Callable[[str], Path]) -> Callable[[str], Golden]:
    known: dict[str, Golden] = {}

    def compute(variant: str) -> Golden:
        if variant not in known:
            known[variant] = golden(tiny(variant), IDS)
        return known[variant]

    return compute


def worst(found: list[Any], true: Golden) -> float:
    return max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(found, true.logits, strict=True))


@pytest.mark.parametrize("steps", [WHOLE, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_at_every_position(
    tiny: Callable[[str], Path], truth: Callable[[str], Golden], variant: str, steps: list[list[Piece]]
) -> None:
    true = truth(variant)
    assert worst(gang_logits(tiny(variant), IDS, steps, split=ONE), true) < true.atol


@pytest.mark.parametrize(
    "split",
    mostly_long(
        [Split(tp=2), Split(tp=4), Split(cp=2), Split(cp=4), Split(tp=2, cp=2)], but=[Split(tp=4), Split(tp=2, cp=2)]
    ),
    ids=str,
)
@pytest.mark.parametrize(
    "variant",
    [
        "nemotron_h",
        "nemotron_h-latent-experts",
        "granite",
        "granite-one-group",
        "granite-eight-groups",
        "falcon_h1",
        "falcon_h1-no-norm",
    ],
)
def test_any_split_gives_the_same_logits(
    tiny: Callable[[str], Path], truth: Callable[[str], Golden], variant: str, split: Split
) -> None:
    true = truth(variant)
    assert worst(gang_logits(tiny(variant), IDS, CHUNKED, split=split), true) < true.atol


@pytest.mark.parametrize("variant", ["nemotron_h", "granite"])
def test_in_float64_only_rounding_is_left(
    tiny: Callable[[str], Path], truth: Callable[[str], Golden], variant: str
) -> None:
    found = gang_logits(tiny(variant), IDS, CHUNKED, split=Split(tp=2, cp=2), dtype=torch.float64)
    assert worst(found, truth(variant)) < 1e-11


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_wants_every_tensor_of_the_checkpoint_and_no_other(tiny: Callable[[str], Path], variant: str) -> None:
    check_weights(read_config(tiny(variant)), Checkpoint(tiny(variant)))


def test_short_steps_are_clamped_in_decode_as_in_prefill(
    tiny: Callable[[str], Path], truth: Callable[[str], Golden]
) -> None:
    # transformers does so without a cache; with one it clamps the prompt's steps only, and leaves its own truth.
    true = truth("nemotron_h-limited-steps")
    decodes: list[list[Piece]] = [[(0, 0, 40)], *([(0, i, i + 1)] for i in range(40, 70)), [(1, 0, 23)]]
    assert worst(gang_logits(tiny("nemotron_h-limited-steps"), IDS, decodes, split=ONE), true) < true.atol
    theirs = cached_logits(tiny("nemotron_h-limited-steps"), IDS[0], num_prefill=40)
    assert np.abs(theirs - true.logits[0]).max() > 100 * true.atol


@pytest.mark.parametrize("tp, num_groups", [(1, 1), (1, 4), (2, 4), (2, 2), (2, 1), (4, 2), (4, 1)])
def test_gated_norm_is_that_of_whole_groups_however_tp_splits_them(tp: int, num_groups: int) -> None:
    generator = torch.Generator().manual_seed(tp)
    y, z = torch.randn(2, 5, 32, generator=generator).unbind(0)
    weight = torch.randn(32, generator=generator)
    gated = (y * z * torch.sigmoid(z)).view(5, num_groups, -1)
    wanted = (gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * weight

    def part(ctx: ParallelContext) -> Tensor:
        norm = GatedGroupNorm(
            weight.chunk(tp)[ctx.tp.rank],
            groups=shared_head_range(num_groups, ctx.tp.rank, tp),
            num_groups=num_groups,
            size=32 // num_groups,
            eps=1e-5,
            group=ctx.tp,
        )
        return norm(y.chunk(tp, dim=1)[ctx.tp.rank], z.chunk(tp, dim=1)[ctx.tp.rank])

    torch.testing.assert_close(torch.cat(on_gang(Split(tp=tp), part), dim=1), wanted)


def test_gated_norm_of_no_tokens_is_no_tokens() -> None:
    norm = GatedGroupNorm(torch.ones(8), groups=range(2), num_groups=2, size=4, eps=1e-5, group=Group())
    assert norm(torch.empty(0, 8), torch.empty(0, 8)).shape == (0, 8)


# --- config.json ------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    """A directory with the config.json that transformers writes, without weights."""
    from transformers import AutoConfig

    def make(family: str) -> Path:
        model_dir = tmp_path / family
        AutoConfig.for_model(KNOWN[family].model_type, **KNOWN[family].settings).save_pretrained(model_dir)
        return model_dir

    return make


def test_a_pattern_of_letters_says_the_same_as_the_list_of_kinds(saved: Callable[[str], Path]) -> None:
    listed = read_config(saved("nemotron_h"))
    drawn = change(saved("nemotron_h"), drop=("layers_block_type",), hybrid_override_pattern="ME*-M-*E")
    assert read_config(drawn) == listed
    old_names = ["mamba", "moe", "attention", "mlp", "mamba", "mlp", "attention", "moe"]
    assert read_config(change(drawn, layers_block_type=old_names, hybrid_override_pattern="MM")) == listed


def test_older_names_and_spellings_of_granite_are_read(saved: Callable[[str], Path]) -> None:
    listed = read_config(saved("granitemoehybrid"))
    older = change(
        saved("granitemoehybrid"),
        layer_types=["mamba", "mamba", "attention", "mamba"],
        position_embedding_type="nope",
        mamba_d_head="auto",
        time_step_limit=[0.0, float("inf")],
    )
    assert read_config(older) == listed


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("nemotron_h", {"layers_block_type": ["linear_attention", "sliding"]}, "layers_block_type has 'sliding'"),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX*"}, "hybrid_override_pattern has 'X'"),
    ("nemotron_h", {"layers_block_type": None}, "layers_block_type must be a list"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
    ("nemotron_h", {"mlp_bias": True}, "mlp_bias=True"),  # experts have none
    ("nemotron_h", {"attention_bias": True}, "attention_bias=True"),
    ("nemotron_h", {"n_groups": 3}, "3 groups do not divide the 8 heads"),
    ("nemotron_h", {"sliding_window": 64}, "sliding_window=64"),
    ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ("nemotron_h", {"time_step_limit": [0.001]}, "time_step_limit must be two numbers"),
    ("nemotron_h", {"time_step_limit": [0.0, "many"]}, "time_step_limit must be two numbers"),
    ("nemotron_h", {"time_step_limit": [0.0, float("nan")]}, "time_step_limit must be two numbers"),
    ("nemotron_h", {"time_step_limit": [True, 2.0]}, "time_step_limit must be two numbers"),
    ("nemotron_h", {"conv_kernel": 1}, "convolution with 1 tap"),
    ("granitemoehybrid", {"layer_types": ["mamba", "window", "mamba", "mamba"]}, "layer_types has 'window'"),
    ("granitemoehybrid", {"layer_types": ["mamba"]}, "has 1 layer_types and num_hidden_layers=4"),
    ("granitemoehybrid", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
    ("granitemoehybrid", {"normalization_function": "layernorm"}, "normalization_function='layernorm'"),
    ("granitemoehybrid", {"mamba_d_head": 8}, "mamba_n_heads=8 of 8 features"),
    ("granitemoehybrid", {"num_local_experts": 2}, "cannot choose 3 of 2 experts"),
    ("granitemoehybrid", {"time_step_limit": [1.0, 0.5]}, "time_step_limit must be two numbers"),
    ("granitemoehybrid", {"time_step_limit": "none"}, "time_step_limit must be two numbers"),
    ("falcon_h1", {"mamba_norm_before_gate": True}, "mamba_norm_before_gate=True"),
    ("falcon_h1", {"projectors_bias": True}, "projectors_bias=True"),
    ("falcon_h1", {"mamba_use_mlp": False}, "mamba_use_mlp=False"),
    ("falcon_h1", {"attn_layer_indices": [0, 2]}, r"attn_layer_indices=\[0, 2\]"),
    ("falcon_h1", {"mamba_d_ssm": 128}, "mamba_n_heads=8 of 12 features are not mamba_d_ssm=128"),
    ("falcon_h1", {"ssm_multipliers": [1.0, 1.0]}, "ssm_multipliers must be 5 numbers"),
    ("falcon_h1", {"mlp_multipliers": [1.0, "x"]}, r"mlp_multipliers\[1\] must be a positive number"),
    ("falcon_h1", {"key_multiplier": 0}, "key_multiplier must be a positive number"),
]


@pytest.mark.parametrize("family, values, message", REFUSED, ids=lambda value: str(value)[:40])
def test_what_a_family_cannot_do_is_refused_by_name(
    saved: Callable[[str], Path], family: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(change(saved(family), **values))


@pytest.mark.parametrize(
    "split, message",
    [
        (Split(tp=2, cp=8), r"cp=8 at tp=2 does not divide mamba_num_heads=8 .* use one of \[1, 2, 4\]"),
        (Split(tp=16), "tp=16 does not divide num_attention_heads=8"),
    ],
    ids=str,
)
def test_splits_that_heads_do_not_allow_are_refused(saved: Callable[[str], Path], split: Split, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_split(read_config(saved("nemotron_h")), split)


def test_groups_that_only_tp_times_cp_can_share_are_refused_over_tp(saved: Callable[[str], Path]) -> None:
    # 6 groups over tp=4 would be uneven, although 12 ranks could share them evenly.
    odd = change(saved("nemotron_h"), mamba_num_heads=24, num_attention_heads=24, n_groups=6)
    with pytest.raises(ConfigError, match="tp=4 neither divides nor is a multiple of n_groups=6"):
        check_split(read_config(odd), Split(tp=4, cp=3))


def test_layers_without_a_kind_have_no_component_of_it(saved: Callable[[str], Path]) -> None:
    fmt = CacheFormat("bfloat16")
    only_mamba = read_config(change(saved("nemotron_h"), layers_block_type=["mamba", "mlp"]))
    assert [part.name for part in components(only_mamba, fmt)] == ["state"]
    only_attention = read_config(change(saved("nemotron_h"), layers_block_type=["attention", "mlp"]))
    assert [part.name for part in components(only_attention, fmt)] == ["kv"]
