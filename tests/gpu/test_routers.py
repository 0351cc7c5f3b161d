"""Kernels of routers against torch's operations on the same logits.

Tokens and weights are whole numbers times a power of two, so that logits are exact whatever the order of their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from raycache.layers import router as module
from raycache.layers.router import Router, SigmoidRouter, SoftmaxRouter

pytestmark = pytest.mark.gpu

router_kernels = pytest.importorskip("raycache.layers.router_kernels")


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def draw_weight(count: int) -> Tensor:
    """Weights of twelve bits, more than bfloat16 has."""
    random = torch.Generator("cuda").manual_seed(1)
    return torch.randint(-2048, 2049, (count, 256), generator=random, device="cuda") / 2.0**17


def draw_tokens(num_tokens: int) -> Tensor:
    random = torch.Generator("cuda").manual_seed(num_tokens)
    return torch.randint(-8, 9, (num_tokens, 256), generator=random, device="cuda").bfloat16()


def softmax(count: int, top_k: int, *, renormalise: bool) -> SoftmaxRouter:
    return SoftmaxRouter(draw_weight(count), top_k=top_k, renormalise=renormalise, bias=draw(count, seed=2) / 10)


def gated(count: int, top_k: int, *, num_shared: int) -> SoftmaxRouter:
    *weight, gate = draw_weight(count + 1).split((count, 1))
    return SoftmaxRouter(*weight, top_k=top_k, renormalise=True, num_shared=num_shared, shared_gate=gate)


def sigmoid(count: int, top_k: int, *, groups: tuple[int, int] = (1, 1), renormalise: bool = True) -> SigmoidRouter:
    correction, (num_groups, top_groups) = draw(count, seed=2) / 10, groups
    return SigmoidRouter(
        draw_weight(count),
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
    "a gated shared expert": lambda: gated(512, 10, num_shared=1),
    "two gated shared experts": lambda: gated(60, 7, num_shared=2),
    "a shared expert": lambda: sigmoid(256, 8, groups=(8, 4)).with_shared(1),
    "two shared experts": lambda: sigmoid(128, 6).with_shared(2),
    "three groups": lambda: sigmoid(96, 5, groups=(3, 1)),
}


@pytest.mark.parametrize("num_tokens", [1, 5, 700, 1500])
@pytest.mark.parametrize("name", ROUTERS)
@torch.inference_mode()
def test_choices_and_weights_are_those_of_torch(name: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    router, x = ROUTERS[name](), draw_tokens(num_tokens)
    weights, ids = router(x)
    with monkeypatch.context() as without:
        without.setattr(module, "_kernels_for", lambda *args: None)
        right, right_ids = router(x)
    assert torch.equal(ids, right_ids)
    assert weights.dtype == right.dtype
    torch.testing.assert_close(weights, right, rtol=1e-5, atol=1e-7)


def halved(router: SoftmaxRouter) -> SoftmaxRouter:
    """With weights in bfloat16, of at most eight bits."""
    router._weight = (router._weight * 2.0**13).round().bfloat16() / 2.0**13
    router._bias = None if router._bias is None else router._bias.bfloat16()
    return router


HALVES: dict[str, Callable[[], SoftmaxRouter]] = {
    "qwen3-next": lambda: gated(512, 10, num_shared=1),
    "gpt-oss": lambda: softmax(32, 4, renormalise=True),
    "softmax": lambda: softmax(100, 7, renormalise=False),
    "two gated shared experts": lambda: gated(60, 7, num_shared=2),
}


@pytest.mark.parametrize("num_tokens", [3, 17, 64])
@pytest.mark.parametrize("name", HALVES)
@torch.inference_mode()
def test_logits_of_weights_in_bfloat16_are_rounded_once(name: str, num_tokens: int) -> None:
    router, x = halved(HALVES[name]()), draw_tokens(num_tokens)
    parts, how = router_kernels.logits(x, router._weight), router._how
    weights, ids = router_kernels.choose(parts, None, how, bias=router._bias)

    exact = x.double() @ router._weight.double().T
    logits = (exact if router._bias is None else exact + router._bias.double()).bfloat16().float()
    logits, gate = logits.tensor_split((how.count,), dim=1)
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, : how.top_k]  # rounded logits are often equal
    wanted = logits.softmax(1).gather(1, order)
    if how.renormalise:
        wanted = wanted / wanted.sum(1, keepdim=True)
    assert torch.equal(ids[:, : how.top_k], order)
    torch.testing.assert_close(weights[:, : how.top_k], wanted, rtol=1e-5, atol=1e-7)
    for shared in range(how.num_shared):
        assert bool((ids[:, how.top_k + shared] == how.count + shared).all())
        torch.testing.assert_close(weights[:, how.top_k + shared], gate[:, 0].sigmoid())


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16, 64, 65, 700])
@pytest.mark.parametrize("name", HALVES)
@torch.inference_mode()
def test_routers_in_bfloat16_give_the_same_weights_for_any_number_of_tokens(
    name: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, x = halved(HALVES[name]()), draw_tokens(700)
    all_of_them = router(x)[0]
    with monkeypatch.context() as watched:
        counted = Mock(wraps=router_kernels.logits)
        watched.setattr(router_kernels, "logits", counted)
        some = router(x[:num_tokens])[0]
    assert counted.call_count == (2 < num_tokens <= 64 and num_tokens * router._how.count <= 1 << 13)
    torch.testing.assert_close(some, all_of_them[:num_tokens], rtol=2e-2, atol=1e-4)  # products round differently


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


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 1024])
@pytest.mark.parametrize(("count", "size"), [(128, 2688), (60, 200), (256, 100)])
@torch.inference_mode()
def test_logits_are_those_of_float32(count: int, size: int, num_tokens: int) -> None:
    x, weight = draw(num_tokens, size, seed=3).bfloat16(), draw(count, size, seed=4) / size**0.5
    parts = router_kernels.logits(x, weight)
    torch.testing.assert_close(parts.double().sum(0), x.double() @ weight.double().T, rtol=0, atol=2e-5)
    wide = torch.cat((x, x), dim=1)[:, :size]  # rows apart
    assert torch.equal(router_kernels.logits(wide, weight), parts)


@torch.inference_mode()
def test_recorded_routers_follow_other_tokens() -> None:
    router, x = ROUTERS["nemotron-3-nano"](), draw_tokens(40)
    router(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids = router(x)
    x.copy_(draw_tokens(41)[1:])
    graph.replay()
    found = weights.clone(), ids.clone()
    assert all(torch.equal(one, other) for one, other in zip(found, router(x), strict=True))
