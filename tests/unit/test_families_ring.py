"""Ling and Ring 2.5 against a slow twin in float64 on the same weights, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError, ConfigError
from raycache.layers.lightning import GroupNorm, LightningAttention, alibi_rates
from raycache.memory.component import CacheFormat
from raycache.models.base import check_split, check_weights, components, load_model, read_config
from raycache.models.decoder import Decoder
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from tests.oracle.families import make_family, write_config
from tests.oracle.gang import Piece, gang_logits
from tests.oracle.golden import Golden, cache_contents, cached_logits, golden
from tests.oracle.single import forced_logits, single_rank, single_rank_logits
from tests.published import ring_2_5

FAMILY = "bailing_moe_v2_5"
CPU = ParallelContext.single(torch.device("cpu"))
IDS = [
    torch.randint(3, 515, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (60, 23)
]
CUTS = (1, 17, 18, 19, 43)
CHUNKED: list[list[Piece]] = [
    *([(0, start, stop)] for start, stop in zip((0, *CUTS), (*CUTS, 50), strict=True)),
    [(0, 50, 51), (1, 0, 11)],  # a decode beside a chunk
    [(1, 11, 12), (0, 51, 52)],  # decodes only
    [(0, 52, 60), (1, 12, 23)],
]
VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "one-group": {"group_norm_size": 1, "q_lora_rank": None, "norm_topk_prob": True},
    "six-heads": {"num_attention_heads": 6, "group_norm_size": 3, "layer_group_size": 2, "rope_theta": 6e6},
    "all-turned": {"partial_rotary_factor": 1.0, "head_dim": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("ring")

    def make(variant: str) -> Path:
        model_dir = root / variant
        return model_dir if model_dir.exists() else make_family(model_dir, FAMILY, seed=1, **VARIANTS[variant])

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


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_twin_in_one_piece_and_in_many(
    tiny: Callable[[str], Path], truth: Callable[[str], Golden], variant: str
) -> None:
    for cuts in ((), CUTS, tuple(range(30, 60))):
        ours = [single_rank_logits(tiny(variant), ids, cuts=[cut for cut in cuts if cut < len(ids)]) for ids in IDS]
        assert furthest(ours, truth(variant)) <= truth(variant).atol
    check_weights(read_config(tiny(variant)), Checkpoint(tiny(variant)))


@pytest.mark.parametrize(
    ("variant", "split"),
    [
        ("usual", Split(tp=4)),
        ("usual", Split(cp=8)),
        ("usual", Split(tp=2, cp=4)),
        ("one-group", Split(tp=8)),
        ("six-heads", Split(tp=3, cp=2)),
    ],
    ids=str,
)
def test_any_split_gives_the_logits_of_the_twin(
    tiny: Callable[[str], Path], truth: Callable[[str], Golden], variant: str, split: Split
) -> None:
    ours = gang_logits(tiny(variant), IDS, CHUNKED, split=split)
    assert furthest(ours, truth(variant)) <= truth(variant).atol


def test_bfloat16_stays_close(tiny: Callable[[str], Path], truth: Callable[[str], Golden]) -> None:
    exact = truth("usual").logits[0]
    ours = single_rank_logits(tiny("usual"), IDS[0], cuts=CUTS, dtype=torch.bfloat16)
    assert np.abs(ours - exact).mean() < 0.1 * exact.std()


def test_the_twin_finds_the_same_with_its_cache(tiny: Callable[[str], Path], truth: Callable[[str], Golden]) -> None:
    cached = cached_logits(tiny("usual"), IDS[0], num_prefill=20)
    np.testing.assert_allclose(cached, truth("usual").logits[0], rtol=0, atol=1e-10)


# --- states and decays ------------------------------------------------------------------------------------------------


def test_states_are_those_of_the_twin_in_float32(tiny: Callable[[str], Path]) -> None:
    rank, ids = single_rank(tiny("usual")), IDS[0]
    forced_logits(rank, ids, cuts=CUTS)
    wanted = cache_contents(tiny("usual"), ids)
    for layer in range(3):
        found = rank.pool.state(layer).state[len(CUTS) % 2]
        np.testing.assert_allclose(found, wanted[layer, "state"], rtol=0, atol=1e-4)
    latents, states = components(read_config(tiny("usual")), CacheFormat("bfloat16"))
    assert latents.layers == (3,) and states.layers == (0, 1, 2)
    assert [(field.name, field.dtype) for field in states.fields] == [("state", "float32")]


def test_rates_are_those_of_alibi() -> None:
    assert alibi_rates(8).tolist() == [2.0**-i for i in range(1, 9)]
    # Of 8 heads every second rate between those of 4: 2^-1, 2^-3.
    assert alibi_rates(6).tolist() == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3], abs=1e-15)


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["rates", "logarithms"])
def test_slopes_of_a_checkpoint_take_the_place_of_computed_ones(tmp_path: Path, sign: float) -> None:
    model_dir = make_family(tmp_path, FAMILY, seed=1)
    path = model_dir / "model.safetensors"
    tensors, plain = load_file(path), single_rank_logits(model_dir, IDS[0])
    # Decays of the vendor's code, whose layers count from -1.
    for layer in range(3):
        tensors[f"model.layers.{layer}.attention.slope"] = sign * alibi_rates(8).float() * (1 - (layer - 1) / 3 + 1e-5)
    save_file(tensors, path, metadata={"format": "pt"})
    exact = golden(model_dir, IDS[:1])
    check_weights(read_config(model_dir), Checkpoint(model_dir))
    assert np.abs(plain - exact.logits[0]).max() > 100 * exact.atol
    assert np.abs(single_rank_logits(model_dir, IDS[0]) - exact.logits[0]).max() <= exact.atol
    ours = gang_logits(model_dir, IDS[:1], [[(0, 0, 60)]], split=Split(tp=2, cp=2))
    assert furthest(ours, exact) <= exact.atol


def test_slopes_stay_float32_where_weights_are_bfloat16(tmp_path: Path) -> None:
    model_dir = make_family(tmp_path, FAMILY, seed=1)
    path, name = model_dir / "model.safetensors", "model.layers.0.attention.slope"
    stored = torch.rand(8)
    save_file({**load_file(path), name: stored}, path, metadata={"format": "pt"})
    model = load_model(
        read_config(model_dir), Checkpoint(model_dir), CPU, torch.bfloat16, on_progress=lambda done, total: None
    )
    assert isinstance(model, Decoder)
    lightning = [part._mixer for part in model._parts if isinstance(part._mixer, LightningAttention)]
    decays = [layer._log_decay.flatten() for layer in lightning]
    assert torch.equal(decays[0], -stored)
    assert torch.equal(decays[1], -(alibi_rates(8) * (1 - 1 / 3 + 1e-5)).float())


def test_groups_of_a_norm_are_counted() -> None:
    x, weight = torch.randn(3, 12, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    gate = torch.randn(3, 12, dtype=torch.float64)
    found = GroupNorm(weight, 3, 1e-3)(x, gate)
    for group in range(3):
        part = x[:, 4 * group : 4 * group + 4]
        wanted = part / (part.square().mean(1, keepdim=True) + 1e-3).sqrt() * weight[4 * group : 4 * group + 4]
        wanted = wanted * gate[:, 4 * group : 4 * group + 4].sigmoid()
        torch.testing.assert_close(found[:, 4 * group : 4 * group + 4], wanted)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 5}, "layer_group_size=4 does not divide num_hidden_layers=5"),
        ({"linear_silu": True}, "linear_silu=True"),
        ({"use_qkv_bias": True}, "use_qkv_bias=True"),
        ({"use_qk_norm": False}, "use_qk_norm=False"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, "rope type 'linear'"),
        ({"full_attention_type": "gqa"}, "full_attention_type='gqa'"),
        ({"score_function": "softmax"}, "score_function='softmax'"),
        ({"partial_rotary_factor": None}, "does not say partial_rotary_factor"),
        ({"partial_rotary_factor": 0.2}, "rotates 3 of 16 features"),
        ({"partial_rotary_factor": 1.5}, "rotates 24 of 16 features"),
        ({"rotary_dim": 16}, "rotary_dim=16"),
        ({"group_norm_size": 7}, "group_norm_size=7 does not divide 128"),
        ({"layer_group_size": [1, 1, 1, 0]}, "layer_group_size must be a positive integer"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(write_config(tmp_path, FAMILY, **values))


def test_groups_of_the_norm_limit_tp_and_heads_limit_tp_times_cp(tiny: Callable[[str], Path]) -> None:
    for served in (Split(tp=4), Split(cp=8), Split(tp=4, cp=2)):
        check_split(read_config(tiny("usual")), served)
    with pytest.raises(ConfigError, match=r"tp=8 does not divide group_norm_size=4"):
        check_split(read_config(tiny("usual")), Split(tp=8))
    with pytest.raises(ConfigError, match=r"cp=4 at tp=4 does not divide num_attention_heads=8"):
        check_split(read_config(tiny("usual")), Split(tp=4, cp=4))


def test_the_architecture_tells_it_from_a_ling_3(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ring_2_5.CONFIG))
    assert read_config(tmp_path).model_type == FAMILY
    (tmp_path / "config.json").write_text(json.dumps({**ring_2_5.CONFIG, "architectures": ["BailingMoeV3ForCausalLM"]}))
    assert read_config(tmp_path).model_type == "bailing_hybrid"
