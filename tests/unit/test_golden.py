"""The oracle itself: transformers in float64 agrees with itself, and its tiny models feel what they should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from tests.oracle.families import FAMILIES, TOPK, WINDOW, make_family
from tests.oracle.golden import Array, InFloat64, SplitSums, cache_contents, cached_logits, golden, greedy

IDS = np.random.default_rng(7).integers(3, 515, size=96).tolist()


@pytest.mark.parametrize("name", ["kimi_linear", "deepseek_v32"])
def test_float64_logits_are_the_same_with_and_without_transformers_cache(name: str, tmp_path: Path) -> None:
    model = make_family(tmp_path, name)
    exact = golden(model, [IDS])
    assert exact.logits[0].shape == (96, 515) and exact.logits[0].dtype == np.float64
    # One cast to float32 on the way would cost 1e-7.
    np.testing.assert_allclose(cached_logits(model, IDS, num_prefill=60), exact.logits[0], rtol=0, atol=1e-12)
    assert 1e-7 < exact.noise < 1e-4
    assert exact.margin > 2 * exact.noise and exact.gap > 2 * exact.noise


def test_greedy_tokens_are_the_best_of_the_teacher_forced_logits(tmp_path: Path) -> None:
    model = make_family(tmp_path, "granitemoehybrid")
    tokens = greedy(model, IDS, 12)
    exact = golden(model, [IDS + tokens])
    assert tokens == exact.logits[0].argmax(1)[95:-1].tolist()
    assert len(set(tokens)) > 6  # and no stutter, which any cache would get right


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_start_of_a_prompt_is_felt_at_its_end(name: str, tmp_path: Path) -> None:
    model = make_family(tmp_path, name)
    other = [*np.random.default_rng(8).integers(3, 515, size=40).tolist(), *IDS[40:]]
    exact = golden(model, [IDS, other])
    assert 0.2 < exact.logits[0].std() < 2
    assert np.abs(exact.logits[0][-1] - exact.logits[1][-1]).max() > 1000 * exact.atol


def test_the_cache_holds_each_kind_of_state_by_name(tmp_path: Path) -> None:
    kimi = cache_contents(make_family(tmp_path / "kimi", "kimi_linear"), IDS)
    assert _shapes(kimi, 0) == {"conv": (3 * 8 * 16, 3), "state": (8, 16, 16)}
    assert _shapes(kimi, 3) == {"latent": (96, 32), "rope": (96, 8)}
    glm = cache_contents(make_family(tmp_path / "glm", "glm_moe_dsa"), IDS)
    assert _shapes(glm, 2) == {"latent": (96, 32), "rope": (96, 8), "index": (96, 16)}
    assert _shapes(glm, 3) == {"latent": (96, 32), "rope": (96, 8)}  # shares the choice of layer 2
    gemma = cache_contents(make_family(tmp_path / "gemma", "gemma3"), IDS)
    assert _shapes(gemma, 0) == {"keys": (WINDOW - 1, 2, 16), "values": (WINDOW - 1, 2, 16)}
    assert _shapes(gemma, 3) == {"keys": (96, 2, 16), "values": (96, 2, 16)}
    nemotron = cache_contents(make_family(tmp_path / "nemotron", "nemotron_h"), IDS[:2])
    assert _shapes(nemotron, 0) == {"conv": (8 * 16 + 2 * 2 * 24, 3), "state": (8, 16, 24)}
    assert not nemotron[0, "conv"][:, 0].any() and nemotron[0, "conv"][:, 1:].all()  # only two tokens so far
    minimax = cache_contents(make_family(tmp_path / "minimax", "minimax"), IDS)
    assert _shapes(minimax, 0) == {"state": (8, 16, 16)}


def test_what_a_token_leaves_in_the_cache_does_not_change_later(tmp_path: Path) -> None:
    model = make_family(tmp_path, "deepseek_v32")
    short, long = cache_contents(model, IDS[:50]), cache_contents(model, IDS)
    assert TOPK < 50 and short.keys() == long.keys()
    for key, rows in short.items():
        np.testing.assert_allclose(rows, long[key][:50], rtol=0, atol=1e-12)


def test_a_family_is_drawn_alike_every_time_under_published_names(tmp_path: Path) -> None:
    first, second = (make_family(tmp_path / name, "deepseek_v3") / "model.safetensors" for name in "ab")
    other = make_family(tmp_path / "c", "deepseek_v3", seed=1, n_routed_experts=16) / "model.safetensors"
    assert first.read_bytes() == second.read_bytes()
    with safe_open(other, framework="np") as tensors:
        assert {"model.layers.3.mlp.experts.15.up_proj.weight", "lm_head.weight"} <= set(tensors.keys())


def test_casts_to_float32_become_float64() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    with InFloat64():
        made = [
            half.float(),
            half.to(torch.float32),
            F.softmax(half, dim=-1, dtype=torch.float32),
            torch.zeros(1).float(),
        ]
    assert {tensor.dtype for tensor in made} == {torch.float64}


def test_split_sums_move_a_linear_layer_by_rounding_only() -> None:
    inputs, layer = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), torch.nn.Linear(64, 32)
    usual = layer(inputs)
    with SplitSums(4):
        split = layer(inputs)
    assert 0 < (split - usual).abs().max() < 1e-5


def _shapes(contents: dict[tuple[int, str], Array], layer: int) -> dict[str, tuple[int, ...]]:
    return {name: rows.shape for (i, name), rows in contents.items() if i == layer}
