"""Experts in fused kernels against one expert after another in float32, and routes against torch's stable sort."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from raycache.layers.activation import (
    Activation,
    clamped_swiglu,
    gelu_tanh_gated,
    recipe,
    relu2,
    silu_clamped,
    silu_gated,
    situ,
)
from raycache.layers.experts import Experts, MixtureOfExperts, SharedExpert
from raycache.layers.fused_experts import FusedExperts
from raycache.layers.linear import ColumnLinear
from raycache.layers.router import SoftmaxRouter
from raycache.parallel.collectives import Group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

BOUND = 6e-3
"""Of the norm: inputs and weights are the same, inner features and each expert's output are rounded to bfloat16."""
ACTIVATIONS: dict[str, Activation] = {
    "silu": silu_gated,
    "gelu_tanh": gelu_tanh_gated,
    "relu2": relu2,
    "clamped_swiglu": clamped_swiglu(alpha=1.702, limit=0.7),
    "silu_clamped": silu_clamped(limit=0.5),
    "situ": situ(beta=1.0, linear_beta=2.0),
}


def draw(*shape: int, seed: int) -> Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=random, device="cuda") / shape[-1] ** 0.5).to(torch.bfloat16)


def error(found: Tensor, right: Tensor) -> float:
    return float(torch.linalg.norm(found.float() - right) / torch.linalg.norm(right))


def choose(num_tokens: int, count: int, chosen: int) -> tuple[Tensor, Tensor]:
    scores = torch.rand(num_tokens, count, generator=torch.Generator("cuda").manual_seed(num_tokens), device="cuda")
    scores[:, 3] = -1  # nobody's choice
    weights, ids = scores.topk(chosen)
    return weights, ids


def make(
    activation: Activation, count: int, size: int, inner: int, *, has_bias: bool = False
) -> tuple[Experts, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Experts of the kernels, and the same in float32, one after another."""
    found = recipe(activation)
    assert found is not None
    features = inner * (1 + found.is_gated)
    up, down = draw(count, features, size, seed=1), draw(count, size, inner, seed=2)
    bias = {"up_bias": draw(count, features, seed=3), "down_bias": draw(count, size, seed=4)} if has_bias else {}
    fast = Experts(up, down, activation=activation, held=range(count), **bias)
    exact = {name: tensor.float() for name, tensor in bias.items()}
    slow = Experts(up.float(), down.float(), activation=activation, held=range(count), **exact)
    assert fast._fused is not None
    return fast, lambda x, weights, ids: slow(x.float(), weights, ids)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@torch.inference_mode()
def test_activations(kind: str) -> None:
    fast, slow = make(ACTIVATIONS[kind], 16, 128, 96)
    for num_tokens in (1, 3, 200):
        x, (weights, ids) = draw(num_tokens, 128, seed=5) * 128**0.5, choose(num_tokens, 16, 4)
        assert error(fast(x, weights, ids), slow(x, weights, ids)) < BOUND


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("activation", [silu_gated, relu2])
@pytest.mark.parametrize(
    ("count", "size", "inner", "chosen"), [(16, 128, 96, 4), (12, 200, 72, 3), (512, 256, 64, 10), (8, 320, 211, 2)]
)
@torch.inference_mode()
def test_sizes(count: int, size: int, inner: int, chosen: int, activation: Activation, has_bias: bool) -> None:
    fast, slow = make(activation, count, size, inner, has_bias=has_bias)
    for num_tokens in (1, 2, 7, 33, 64, 300, 2100):
        x, (weights, ids) = draw(num_tokens, size, seed=5) * size**0.5, choose(num_tokens, count, chosen)
        found = fast(x, weights, ids)
        assert error(found, slow(x, weights, ids)) < BOUND, num_tokens
        for _ in range(3):
            assert torch.equal(fast(x, weights, ids), found), "nothing races"


@pytest.mark.parametrize("num_tokens", [1, 7, 20, 300, 3000])
@torch.inference_mode()
def test_recorded_steps_follow_other_choices(num_tokens: int) -> None:
    fast, slow = make(silu_gated, 64, 256, 128)
    x, (weights, ids) = draw(num_tokens, 256, seed=5) * 16, choose(num_tokens, 64, 4)
    fast(x, weights, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = fast(x, weights, ids)
    for shift in (0, 1, 5):
        ids.copy_((ids + shift) % 64)
        x.mul_(0.5)
        graph.replay()
        assert error(recorded, slow(x, weights, ids)) < BOUND
    ids.copy_(torch.tensor([7, 9, 11, 63], device="cuda").expand_as(ids))  # all tokens to the same experts
    graph.replay()
    assert error(recorded, slow(x, weights, ids)) < BOUND


@pytest.mark.parametrize("activation", [silu_gated, relu2])
@pytest.mark.parametrize("num_shared", [1, 2])
@torch.inference_mode()
def test_a_shared_expert_among_the_routed_ones(num_shared: int, activation: Activation) -> None:
    count, size, inner, matrices = 64, 256, 96, 1 if activation is relu2 else 2
    up, down = draw(count, matrices * inner, size, seed=1), draw(count, size, inner, seed=2)
    shared_up, shared_down = draw(matrices * num_shared * inner, size, seed=3), draw(size, num_shared * inner, seed=4)
    weight, gate = draw(count, size, seed=5), draw(1, size, seed=6)

    def mixture(dtype: torch.dtype, *, is_last: bool) -> MixtureOfExperts:
        matrices = [each.to(dtype) for each in (up, down, shared_up, shared_down, weight, gate)]
        shared = SharedExpert(ColumnLinear(matrices[2], None), matrices[3], activation=activation, gate=matrices[5])
        last = shared.as_routed(inner, activation) if is_last else None
        rows = matrices[:2] if last is None else [torch.cat(pair) for pair in zip(matrices[:2], last, strict=True)]
        chosen = {"num_shared": num_shared, "shared_gate": matrices[5]} if is_last else {}
        router = SoftmaxRouter(matrices[4], top_k=4, renormalise=True, **chosen)
        experts = Experts(*rows, activation=activation, held=range(len(rows[1])))
        return MixtureOfExperts(router, experts, Group(), shared=None if is_last else shared)

    for num_tokens in (1, 5, 64, 2000):
        x = draw(num_tokens, size, seed=num_tokens) * 16
        right = mixture(torch.float32, is_last=False)(x.float(), None)  # type: ignore[arg-type]
        found = mixture(torch.bfloat16, is_last=True)(x, None)  # type: ignore[arg-type]
        # Rounding of the logits may swap two experts of almost equal weights.
        errors = torch.linalg.norm(found.float() - right, dim=1) / torch.linalg.norm(right, dim=1)
        assert float(errors.median()) < 2 * BOUND, num_tokens
        assert float((errors > 4 * BOUND).float().mean()) < 0.05, num_tokens


@pytest.mark.parametrize("num_tokens", [64, 1100])
@torch.inference_mode()
def test_a_tokens_result_does_not_depend_on_the_others(num_tokens: int) -> None:
    """Another order puts a token's rows into other tiles, some of half the size."""
    fast, _ = make(silu_gated, 16, 256, 128)
    x, (weights, ids) = draw(num_tokens, 256, seed=5) * 16, choose(num_tokens, 16, 4)
    found = fast(x, weights, ids)
    order = torch.randperm(num_tokens, device="cuda")
    assert torch.equal(fast(x[order], weights[order], ids[order]), found[order])


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 129, 191, 193, 256])
@torch.inference_mode()
def test_last_tiles_of_any_size(rows: int) -> None:
    """The first expert has so many rows, and the others enough for large tiles and listed blocks."""
    fast, slow = make(silu_gated, 16, 256, 128)
    x, weights = draw(4200, 256, seed=5) * 16, torch.ones(4200, 1, device="cuda")
    ids = torch.randint(1, 16, (4200, 1), device="cuda")
    ids[:rows] = 0
    found, right = fast(x, weights, ids), slow(x, weights, ids)
    assert error(found[:rows], right[:rows]) < BOUND
    assert error(found[rows:], right[rows:]) < BOUND


@pytest.mark.parametrize("num_tokens", [1, 5, 100, 3000])
@torch.inference_mode()
def test_choices_of_experts_elsewhere_contribute_nothing(num_tokens: int) -> None:
    up, down = draw(16, 128, 128, seed=1), draw(16, 128, 64, seed=2)
    x, (weights, ids) = draw(num_tokens, 128, seed=5) * 11, choose(num_tokens, 16, 4)
    fast = Experts(up[:9], down[:9], activation=silu_gated, held=range(9))
    slow = Experts(up.float(), down.float(), activation=silu_gated, held=range(16))
    ids[0, :] = torch.tensor([9, 15, 2, 10], device="cuda")
    found, right = fast(x, weights, ids), slow(x.float(), weights * (ids < 9), ids)
    assert error(found, right) < BOUND


@torch.inference_mode()
def test_matrices_in_two_tensors_that_are_not_contiguous() -> None:
    up, down = draw(16, 256, 192, seed=1), draw(16, 192, 128, seed=2)
    own = up.unflatten(1, (2, -1))[:, :, 64:]
    fast = Experts(own.unbind(1), down[..., 64:], activation=silu_gated, held=range(16))
    assert fast._fused is not None
    slow = Experts(own.flatten(1, 2).float(), down[..., 64:].float(), activation=silu_gated, held=range(16))
    for num_tokens in (1, 9, 400):
        x, (weights, ids) = draw(num_tokens, 192, seed=5) * 14, choose(num_tokens, 16, 4)
        assert error(fast(x, weights, ids), slow(x.float(), weights, ids)) < BOUND


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 3), (64, 4), (3000, 7)])
@torch.inference_mode()
def test_launches(num_tokens: int, most: int) -> None:
    fast, _ = make(silu_gated, 16, 128, 96)
    x, (weights, ids) = draw(num_tokens, 128, seed=5), choose(num_tokens, 16, 4)
    fast(x, weights, ids)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        fast(x, weights, ids)
        torch.cuda.synchronize()
    launched = [event.name for event in trace.events() if event.device_type == DeviceType.CUDA]
    assert len(launched) == most, launched


@torch.inference_mode()
def test_other_weights_are_noticed() -> None:
    fast, slow = make(silu_gated, 16, 128, 96)
    x, (weights, ids) = draw(64, 128, seed=5) * 11, choose(64, 16, 4)
    assert error(fast(x, weights, (ids + 1) % 16), slow(x, weights, ids)) > 10 * BOUND
    assert error(fast(x, weights.roll(1, 1), ids), slow(x, weights, ids)) > 3 * BOUND


@pytest.mark.parametrize(("num_tokens", "chosen", "count"), [(1, 4, 16), (64, 10, 512), (600, 7, 128), (9000, 10, 512)])
@torch.inference_mode()
def test_routes_are_a_stable_sort(num_tokens: int, chosen: int, count: int) -> None:
    from raycache.layers.routing_kernels import LISTED, Routes

    _, ids = choose(num_tokens, count, chosen)
    for held in (count, count - 5):
        routes = Routes.of(ids, held, rows_per_block=128)
        sorted_ids, order = ids.flatten().clamp(max=held).sort(stable=True)
        inside = int((sorted_ids < held).sum())
        assert torch.equal(routes.order[:inside], order[:inside])
        assert torch.equal(routes.experts[:inside].long(), sorted_ids[:inside])
        assert bool((routes.experts[inside:] >= held).all())
        assert torch.equal(routes.ends, torch.searchsorted(sorted_ids, torch.arange(held, device="cuda"), right=True))
        assert (routes.blocks is not None) == (ids.numel() > LISTED)
        if routes.blocks is not None:
            bounds = enumerate(pairwise([0, *routes.ends.tolist()]))
            blocks = [[expert, row] for expert, (start, end) in bounds for row in range(start, end, 128)]
            assert routes.blocks[: len(blocks)].tolist() == blocks
            assert bool((routes.blocks[len(blocks) :, 0] == held).all())


def test_experts_without_a_recipe_have_no_kernels() -> None:
    up, down = draw(4, 64, 32, seed=1), draw(4, 32, 64, seed=2)
    assert FusedExperts.of([up], down, activation=torch.tanh) is None
    assert FusedExperts.of([up.float()], down.float(), activation=relu2) is None
    assert FusedExperts.of([up.mT], down, activation=relu2) is None
