"""Families made of parts that others have too, against transformers on the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError
from raycache.memory.component import CacheFormat
from raycache.models.base import check_weights, components, read_config
from raycache.models.llama import DenseConfig
from raycache.parallel.sharding import Split
from tests.oracle.families import WINDOW, make_family
from tests.oracle.gang import Piece, gang_logits
from tests.oracle.golden import golden
from tests.oracle.single import single_rank_logits

IDS = np.random.default_rng(5).integers(3, 515, 96).tolist()

LATE_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
KIMI_ROPE = {
    "type": "yarn",
    "rope_theta": 50000.0,
    "factor": 32.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("ministral3", "mistral", "mixtral", "qwen2", "qwen3_5_moe", "smollm3")},
    "qwen2-windows": ("qwen2", LATE_WINDOWS),
    "qwen3-windows": ("qwen3", LATE_WINDOWS),
    "mistral-windows": ("mistral", {"sliding_window": WINDOW}),
    "mixtral-windows": ("mixtral", {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "smollm3-listed": ("smollm3", {"no_rope_layers": [0, 1, 1, 0], "attention_bias": True, "mlp_bias": True}),
    "kimi_k2": ("deepseek_v3", {"rope_parameters": KIMI_ROPE, "n_group": 1, "topk_group": 1}),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")

    def make(variant: str) -> Path:
        name, settings = VARIANTS[variant]
        return root / variant if (root / variant).exists() else make_family(root / variant, name, **settings)

    return make


def rewritten(model_dir: Path, copy: Path, **values: Any) -> Path:
    """The same weights with another config.json; None drops a key."""
    copy.mkdir()
    (copy / "model.safetensors").symlink_to(model_dir / "model.safetensors")
    config = {**json.loads((model_dir / "config.json").read_text()), **values}
    (copy / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return copy


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_in_one_step_and_in_many(tiny: Callable[[str], Path], variant: str) -> None:
    model_dir = tiny(variant)
    oracle = golden(model_dir, [IDS])
    for cuts in ((), (1, 30, 31, 32, 77)):
        ours = single_rank_logits(model_dir, IDS, cuts=cuts)
        assert np.abs(ours - oracle.logits[0]).max() < oracle.atol
    check_weights(read_config(model_dir), Checkpoint(model_dir))


def test_a_mimo_is_a_qwen2(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    copy = rewritten(tiny("qwen2"), tmp_path / "copy", model_type="mimo", attention_bias=True)
    oracle = golden(tiny("qwen2"), [IDS])
    assert np.abs(single_rank_logits(copy, IDS) - oracle.logits[0]).max() < oracle.atol


STEPS: list[list[Piece]] = [[(0, 0, 41)], [(0, 41, 42), (1, 0, 30)], [(1, 30, 31), (0, 42, 96)], [(1, 31, 50)]]


@pytest.mark.parametrize("split", [Split(tp=2, cp=2), Split(tp=8)], ids=str)
@pytest.mark.parametrize("variant", ["qwen2-windows", "ministral3", "mistral-windows", "mixtral", "smollm3"])
def test_splits_equal_transformers(tiny: Callable[[str], Path], variant: str, split: Split) -> None:
    sequences = [IDS, IDS[20:70]]
    oracle = golden(tiny(variant), sequences)
    for ours, theirs in zip(gang_logits(tiny(variant), sequences, STEPS, split=split), oracle.logits, strict=True):
        assert np.abs(ours - theirs).max() < oracle.atol


def test_a_deepseek_under_the_name_of_kimi_is_the_same(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    copy = rewritten(tiny("kimi_k2"), tmp_path / "copy", model_type="kimi_k2", num_nextn_predict_layers=0)
    assert read_config(copy).num_drafts == 0
    assert np.array_equal(single_rank_logits(copy, IDS), single_rank_logits(tiny("kimi_k2"), IDS))


def test_queries_that_grow_with_their_position_are_not_those_that_do_not(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    config = json.loads((tiny("ministral3") / "config.json").read_text())
    rope = {**config["rope_parameters"], "llama_4_scaling_beta": 0}
    logits = single_rank_logits(rewritten(tiny("ministral3"), tmp_path / "copy", rope_parameters=rope), IDS)
    far = np.abs(logits - golden(tiny("ministral3"), [IDS]).logits[0]).max(axis=1)
    assert far[:24].max() < 1e-4 < 1e-2 < far[24:].max()  # from the original context on
    refused = rewritten(tiny("ministral3"), tmp_path / "refused", model_type="mistral")
    with pytest.raises(CheckpointError, match=r"llama_4_scaling_beta=0\.25, which changes what the model computes"):
        read_config(refused)


def test_layers_without_positions_are_not_those_with(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    copy = rewritten(tiny("smollm3"), tmp_path / "copy", no_rope_layers=[1, 1, 1, 1])
    oracle = golden(tiny("smollm3"), [IDS])
    assert np.abs(single_rank_logits(copy, IDS) - oracle.logits[0]).max() > 100 * oracle.atol


def test_a_mistral_that_says_nothing_of_windows_has_that_of_the_first_one(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    def windows(model_dir: Path) -> list[int]:
        return [part.window for part in components(read_config(model_dir), CacheFormat(dtype="float32"))]

    assert windows(tiny("mistral-windows")) == [WINDOW] and windows(tiny("mistral")) == [0]
    assert windows(rewritten(tiny("mistral"), tmp_path / "copy", sliding_window=None)) == [4096]


@pytest.mark.parametrize(("variant", "theta"), [("mistral", 1e4), ("mixtral", 1e6)])
def test_a_base_that_is_not_said_is_that_of_the_family(
    tiny: Callable[[str], Path], tmp_path: Path, variant: str, theta: float
) -> None:
    without = dict.fromkeys(("rope_theta", "rope_parameters"))
    config = read_config(rewritten(tiny(variant), tmp_path / "copy", **without))
    assert isinstance(config, DenseConfig) and config.attention.rope.theta == theta


def test_windows_that_are_on_have_a_size_unless_it_is_null(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    given = json.loads((tiny("qwen2") / "config.json").read_text())
    on = {**given, "use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
    for name, change, window in (("absent", {}, 4096), ("null", {"sliding_window": None}, 0)):
        (tmp_path / name).mkdir()
        config = {key: value for key, value in on.items() if key != "sliding_window"} | change
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        read = read_config(tmp_path / name)
        assert isinstance(read, DenseConfig) and read.attention.window == window


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("ministral3", {"rope_parameters": None}, "has no rope_parameters"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer"),
        ("mixtral", {"num_experts_per_tok": 9}, "cannot choose 9 of 8 experts"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu', which is not supported"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must have 0 or 1 for each layer"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, "x"]}, "no_rope_layers must have 0 or 1"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window=True, which is not supported"),
        ("qwen2", {"hidden_act": "relu"}, "hidden_act='relu', which is not supported"),
    ],
    ids=str,
)
def test_what_a_family_does_not_have_is_refused_by_name(
    tiny: Callable[[str], Path], tmp_path: Path, variant: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(rewritten(tiny(variant), tmp_path / "wrong", **change))


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("qwen2", {"model_type": "llama"}, r"12 tensors that a llama .*k_proj\.bias"),
        ("mistral", {"model_type": "qwen2"}, r"has no tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
        ("mixtral", {"num_local_experts": 4}, r"block_sparse_moe\.gate\.weight .*wants \[4, 64\]"),
    ],
    ids=str,
)
def test_weights_of_another_model_are_refused_by_name(
    tiny: Callable[[str], Path], tmp_path: Path, variant: str, change: dict[str, Any], message: str
) -> None:
    copy = rewritten(tiny(variant), tmp_path / "wrong", **change)
    with pytest.raises(CheckpointError, match=message):
        check_weights(read_config(copy), Checkpoint(copy))
