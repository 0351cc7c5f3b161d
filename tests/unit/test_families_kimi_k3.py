"""Kimi K3 against a slow twin in float64 on the same weights, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError
from raycache.models.base import check_weights, load_model, read_config
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from tests.oracle.families import make_family
from tests.oracle.gang import Piece, gang_logits
from tests.oracle.golden import Array
from tests.oracle.kimi_k3 import SETTINGS, KimiK3Twin, make_kimi_k3
from tests.oracle.single import single_rank_logits
from tests.selection import mostly_long

IDS = [
    torch.randint(3, 515, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (60, 31)
]
CUTS = (1, 17, 18, 43)
CHUNKED: list[list[Piece]] = [
    *([(0, start, stop)] for start, stop in zip((0, *CUTS), (*CUTS, 44), strict=True)),
    [(0, 44, 45), (1, 0, 21)],  # a decode beside a chunk
    [(1, 21, 22), (0, 45, 46)],
    [(0, 46, 60), (1, 22, 31)],
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kimi_k3(tmp_path_factory.mktemp("k3") / "tiny")


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[Array]:
    twin = KimiK3Twin(tiny)
    return [twin.logits(ids).numpy() for ids in IDS]


def distance(found: Array, expected: Array) -> float:
    return float(np.abs(found - expected).max())


def test_the_names_of_a_checkpoint_are_those_that_it_reads(tiny: Path) -> None:
    check_weights(read_config(tiny), Checkpoint(tiny))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-4)])
def test_logits_are_those_of_the_twin_however_the_prompt_is_cut(
    tiny: Path, expected: list[Array], dtype: torch.dtype, tolerance: float
) -> None:
    for cuts in ((), CUTS):
        assert distance(single_rank_logits(tiny, IDS[0], cuts=cuts, dtype=dtype), expected[0]) < tolerance


@pytest.mark.parametrize(
    "split",
    mostly_long([Split(tp=2), Split(cp=2), Split(tp=2, cp=2), Split(tp=4)], but=[Split(tp=2, cp=2), Split(tp=4)]),
    ids=str,
)
def test_logits_are_the_same_under_every_split(tiny: Path, expected: list[Array], split: Split) -> None:
    found = gang_logits(tiny, IDS, CHUNKED, split=split, dtype=torch.float64)
    assert max(map(distance, found, expected)) < 1e-12


def test_stages_pass_on_all_sums_of_blocks(tiny: Path) -> None:
    config, cpu = read_config(tiny), torch.device("cpu")
    widths = [config.stream_width(layer) // config.hidden_size for layer in range(6)]
    assert widths == [1, 2, 2, 3, 3, 4]
    model: Any = load_model(
        config, Checkpoint(tiny), ParallelContext.single(cpu), torch.float32, on_progress=lambda done, total: None
    )
    assert model.normed(torch.ones(2, 4 * config.hidden_size)).shape == (2, config.hidden_size)


@pytest.mark.parametrize(
    ("key", "value"),
    [("attn_res_block_size", 3), ("activation_situ_beta", 1.6), ("activation_situ_linear_beta", 2.6)],
)
def test_the_twin_notices_another_value(tmp_path: Path, expected: list[Array], key: str, value: Any) -> None:
    other = make_kimi_k3(tmp_path, **{key: value})
    assert distance(single_rank_logits(other, IDS[0]), expected[0]) > 1e-2


@pytest.mark.parametrize("name", ["mlp_res_norm", "self_attention_res_proj", "routed_expert_norm", "g_proj"])
def test_the_twin_notices_weights_that_are_not_used(tiny: Path, expected: list[Array], name: str) -> None:
    twin = KimiK3Twin(tiny)
    for key in [key for key in twin.weights if key.endswith(f"{name}.weight")]:
        twin.weights[key] = 1.05 * twin.weights[key] + 0.05
    assert distance(twin.logits(IDS[0]).numpy(), expected[0]) > 1e-3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act='silu'"),
        ({"mla_use_output_gate": False}, "mla_use_output_gate=False"),
        ({"latent_moe_use_norm": False}, "latent_moe_use_norm=False"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5"),
        ({"attn_res_block_size": None}, "does not say attn_res_block_size"),
        ({"activation_situ_linear_beta": None}, "does not say activation_situ_linear_beta"),
        ({"linear_attn_config": {**SETTINGS["text_config"]["linear_attn_config"], "use_full_rank_gate": False}},
         "use_full_rank_gate=False"),
        ({"linear_attn_config": {**SETTINGS["text_config"]["linear_attn_config"], "num_heads": 32}},
         "num_heads=32 of linear_attn_config exceeds head_dim=16"),
        ({"linear_attn_config": {**SETTINGS["text_config"]["linear_attn_config"], "gate_lower_bound": 5.0}},
         "below zero"),
    ],
)  # fmt: skip
def test_what_was_never_published_is_refused_by_name(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(make_kimi_k3(tmp_path, **values))


def test_a_kimi_linear_with_attention_residuals_is_not_taken_for_one_without(tmp_path: Path) -> None:
    model_dir = make_family(tmp_path, "kimi_linear", attn_res_block_size=2)
    with pytest.raises(CheckpointError, match="attn_res_block_size=2, which changes what the model computes"):
        read_config(model_dir)
