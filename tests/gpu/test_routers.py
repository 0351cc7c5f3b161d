"""The kernel that chooses experts against torch's operations on the same logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from raycache.layers import router as module
from raycache.layers.router import Router, SigmoidRouter, SoftmaxRouter

pytestmark = pytest.mark.gpu


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def softmax(count: int, top_k: int, *, renormalise: bool) -> SoftmaxRouter:
    return SoftmaxRouter(
        draw(count, 256, seed=1) / 10, top_k=top_k, renormalise=renormalise, bias=draw(count, seed=2) / 10
    )


def sigmoid(count: int, top_k: int, *, groups: tuple[int, int] = (1, 1), renormalise: bool = True) -> SigmoidRouter:
    correction, (num_groups, top_groups) = draw(count, seed=2) / 10, groups
    return SigmoidRouter(
        draw(count, 256, seed=1) / 10,
        correction,
        top_k=top_k,
        num_groups=num_groups,
        top_groups=top_groups,
        renormalise=renormalise,
        scale=2.5,
    )


ROUTERS: dict[str, Callable[[], Router]] = {
    "qwen3-next": lambda: softmax(512, 10, renormalise=True),
    "gpt-oss": lambda: softmax(32, 4, renormalise=True),
    "softmax": lambda: softmax(100, 7, renormalise=False),
    "one": lambda: softmax(8, 1, renormalise=False),
    "nemotron-3-nano": lambda: sigmoid(128, 6),
    "nemotron-3-super": lambda: sigmoid(512, 22),
    "deepseek-v3": lambda: sigmoid(256, 8, groups=(8, 4)),
    "sigmoid": lambda: sigmoid(60, 5, renormalise=False),
    "three groups": lambda: sigmoid(96, 5, groups=(3, 1)),
}


@pytest.mark.parametrize("num_tokens", [1, 5, 700])
@pytest.mark.parametrize("name", ROUTERS)
@torch.inference_mode()
def test_choices_and_weights_are_those_of_torch(name: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    router, x = ROUTERS[name](), draw(num_tokens, 256, seed=num_tokens).bfloat16()
    weights, ids = router(x)
    with monkeypatch.context() as without:
        without.setattr(module, "_kernels_for", lambda *args: None)
        right, right_ids = router(x)
    assert torch.equal(ids, right_ids)
    assert weights.dtype == right.dtype
    torch.testing.assert_close(weights, right, rtol=1e-5, atol=1e-7)


@torch.inference_mode()
def test_equal_scores_choose_the_first_experts() -> None:
    x = torch.zeros(3, 256, device="cuda", dtype=torch.bfloat16)
    router = SoftmaxRouter(torch.zeros(64, 256, device="cuda"), top_k=4, renormalise=True)
    weights, ids = router(x)
    assert torch.equal(ids, torch.arange(4, device="cuda").expand(3, 4))
    assert torch.equal(weights, torch.full((3, 4), 0.25, device="cuda"))


@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-3-nano", "deepseek-v3"])
@torch.inference_mode()
def test_without_numbers_the_choice_is_of_experts_that_exist(name: str) -> None:
    x = torch.full((2, 256), float("nan"), device="cuda", dtype=torch.bfloat16)
    x[1] = float("inf")
    weights, ids = ROUTERS[name]()(x)
    assert all(len(set(row)) == len(row) and min(row) >= 0 and max(row) < 512 for row in ids.tolist())
    assert bool(weights[0].isnan().all())
