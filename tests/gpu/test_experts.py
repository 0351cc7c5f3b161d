"""All experts in kernels, and in grouped products of torch, against one expert after another."""

from __future__ import annotations

import pytest
import torch

from raycache.layers import experts as module
from raycache.layers.activation import clamped_swiglu, relu2, silu_gated
from raycache.layers.experts import Experts

pytestmark = pytest.mark.gpu

BOUND = 1e-2  # of the norm: inputs and weights are the same, inner features are rounded to bfloat16 once more


def draw(*shape: int, seed: int) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=random, device="cuda") / shape[-1] ** 0.5).to(torch.bfloat16)


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 300])
@pytest.mark.parametrize("kind", ["gated", "plain", "biased"])
@pytest.mark.parametrize("has_kernels", [True, False], ids=["kernels", "grouped"])
@torch.inference_mode()
def test_experts_together_are_as_one_after_another(
    has_kernels: bool, kind: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", 100)
    count, size, inner, chosen = 16, 128, 96, 4
    activation = {"gated": silu_gated, "plain": relu2, "biased": clamped_swiglu(alpha=1.7, limit=7.0)}[kind]
    up = draw(count, inner if kind == "plain" else 2 * inner, size, seed=1)
    down = draw(count, size, inner, seed=2)
    bias = {}
    if kind == "biased":
        bias = {"up_bias": draw(count, 2 * inner, seed=3), "down_bias": draw(count, size, seed=4)}
    x = draw(num_tokens, size, seed=5) * size**0.5
    scores = torch.rand(num_tokens, count, device="cuda")
    scores[:, 3] = -1  # nobody's choice
    weights, ids = scores.topk(chosen)
    fast = Experts(up, down, activation=activation, held=range(count), **bias)
    if not has_kernels:
        fast._fused = None
    exact = {name: tensor.float() for name, tensor in bias.items()}
    slow = Experts(up.float(), down.float(), activation=activation, held=range(count), **exact)
    found, right = fast(x, weights, ids), slow(x.float(), weights, ids)
    assert torch.linalg.norm(found.float() - right) <= BOUND * torch.linalg.norm(right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = fast(x, weights, ids)
    ids.copy_(ids.roll(1, 0))
    x.mul_(0.5)
    graph.replay()
    right = slow(x.float(), weights, ids)
    assert torch.linalg.norm(recorded.float() - right) <= BOUND * torch.linalg.norm(right)
