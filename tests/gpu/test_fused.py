"""Fused kernels against plain torch in float32 on the same values.

A kernel computes in float32 and rounds once, so that it differs from the exact result by half a step of its dtype:
2^-8 of it in bfloat16, 2^-11 in float16, and `SLACK` for float32's own rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from raycache.attention.base import LatentProjection
from raycache.attention.sinks import apply_sinks
from raycache.checkpoint.rope_config import RopeConfig
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.layers import fused
from raycache.layers.activation import (
    Activation,
    clamped_swiglu,
    gelu_tanh_gated,
    relu2,
    silu_clamped,
    silu_gated,
    situ,
)
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.norm import HeadNorm
from raycache.layers.rope import Rotary
from raycache.models.base import load_model, read_config
from raycache.parallel.context import ParallelContext
from tests.oracle.families import make_family

pytestmark = pytest.mark.gpu

STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SLACK = 1e-5
each_dtype = pytest.mark.parametrize("dtype", STEP, ids=str)
each_count = pytest.mark.parametrize("tokens", [1, 3, 257])

ACTIVATIONS: dict[str, Activation] = {
    "silu": silu_gated,
    "silu_clamped": silu_clamped(limit=2.0),
    "gelu_tanh": gelu_tanh_gated,
    "clamped_swiglu": clamped_swiglu(alpha=1.702, limit=7.0),
    "situ": situ(beta=4.0, linear_beta=25.0),
    "relu2": relu2,
}
HIDDEN = {"qwen3-8b": 4096, "gpt-oss": 2880, "deepseek-v3": 7168, "tiny": 64}
HEADS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {"heads": 40, "dim": 128, "has_norm": True},
    "gpt-oss": {"heads": 72, "dim": 64, "has_norm": False},
    "qwen3-next": {"heads": 18, "dim": 256, "turned": 64, "has_norm": True},
    "partial": {"heads": 40, "dim": 128, "turned": 64, "has_norm": True, "is_interleaved": True},
    "deepseek-v3": {"heads": 128, "dim": 64, "has_norm": False, "is_interleaved": True},
    "odd": {"heads": 5, "dim": 80, "has_norm": True},
    "one": {"heads": 1, "dim": 16, "has_norm": False, "is_interleaved": True},
}


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def assert_rounded_once(ours: Tensor, exact: Tensor, *, slack: float = SLACK) -> None:
    assert exact.dtype == torch.float32
    torch.testing.assert_close(ours.float(), exact, rtol=STEP[ours.dtype] * (1 + 1e-3), atol=slack)


def kernels(work: Callable[[], object]) -> list[str]:
    """What it launches, after a first call that builds kernels."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    return [event.name for event in trace.events() if event.device_type == DeviceType.CUDA]


@each_dtype
@each_count
@pytest.mark.parametrize("is_centered", [False, True], ids=["plain", "centered"])
@pytest.mark.parametrize("size", HIDDEN.values(), ids=HIDDEN)
def test_norms_round_once(size: int, is_centered: bool, tokens: int, dtype: torch.dtype) -> None:
    hidden, delta = draw(tokens, size, dtype=dtype), 3 * draw(tokens, size, dtype=dtype, seed=1)
    weight = 0.1 * draw(size, dtype=dtype, seed=2) + (0 if is_centered else 1)
    kind = {"eps": 1e-6, "is_centered": is_centered}
    exact = fused.rms_norm(hidden.float(), weight.float(), **kind)
    assert_rounded_once(fused.rms_norm(hidden, weight, **kind), exact)
    before = hidden.clone()
    ours, total = fused.add_rms_norm(hidden, delta.clone(), weight, **kind)
    assert torch.equal(total, (hidden.float() + delta.float()).to(dtype))
    assert torch.equal(hidden, before)
    assert torch.equal(ours, fused.rms_norm(total, weight, **kind))


@each_dtype
@each_count
def test_a_norm_of_a_part_of_the_features(tokens: int, dtype: torch.dtype) -> None:
    features = draw(tokens, 1536 + 512 + 64, dtype=dtype)
    for part in (features[:, :1536], features[:, 1536:2048], features[:, 4:516], features[:, 3:50]):
        weight = 1 + 0.1 * draw(part.shape[1], dtype=dtype, seed=1)
        exact = fused.rms_norm(part.float(), weight.float(), 1e-6)
        assert_rounded_once(fused.rms_norm(part, weight, 1e-6), exact)


@each_dtype
@each_count
@pytest.mark.parametrize("inner", [12288, 2880, 2048, 100, 27])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_round_once(name: str, inner: int, tokens: int, dtype: torch.dtype) -> None:
    gate_up = 4 * draw(tokens, 2 * inner, dtype=dtype)
    before = gate_up.clone()
    # The kernel of situ makes tanh from a sigmoid: float32's rounding of 1, times both bounds (4 and 25).
    slack = 2e-5 if name == "situ" else SLACK
    # In float64: 1 + tanh of a negative number has few digits left.
    assert_rounded_once(ACTIVATIONS[name](gate_up), ACTIVATIONS[name](before.double()).float(), slack=slack)
    apart = torch.cat((before, before), dim=1)[:, inner : 3 * inner]  # up first, rows apart
    assert_rounded_once(ACTIVATIONS[name](apart), ACTIVATIONS[name](apart.double()).float(), slack=slack)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_extremes_are_those_of_torch(name: str) -> None:
    values = torch.tensor([0.0, 1e4, -1e4, 3e38, -3e38, float("inf"), float("nan")], device="cuda")
    gate_up = torch.cartesian_prod(values, values).T.flatten()[None].bfloat16()
    exact = ACTIVATIONS[name](gate_up.float())
    torch.testing.assert_close(ACTIVATIONS[name](gate_up), exact.bfloat16(), rtol=2**-7, atol=SLACK, equal_nan=True)


@each_dtype
@each_count
@pytest.mark.parametrize("model", HEADS)
def test_heads_are_normalised_and_turned_and_rounded_once(model: str, tokens: int, dtype: torch.dtype) -> None:
    about = {"turned": HEADS[model]["dim"], "is_interleaved": False, **HEADS[model]}
    heads, dim = about["heads"], about["dim"]
    # Between others on both sides, as heads are in the product that makes queries, keys and values.
    packed = draw(tokens, heads + 8, dim + 16, dtype=dtype)
    x = packed[:, 3 : heads + 3, 16:]
    positions = torch.randint(0, 100_000, (tokens,), device="cuda")
    rotary = Rotary(RopeConfig(), about["turned"], x.device, is_interleaved=about["is_interleaved"])
    turn = rotary(positions, dtype)
    angles = {"cos": turn._cos.float(), "sin": turn._sin.float(), "is_interleaved": about["is_interleaved"]}
    norms = [None]
    if about["has_norm"]:
        weight = 1 + 0.1 * draw(heads, dim, dtype=torch.float32, seed=1)
        norms = [HeadNorm(weight, 1e-6), HeadNorm(weight.to(dtype), 1e-6)]
    for norm in norms:
        exact = fused.rotate_heads(x.float(), **angles, weight=None if norm is None else norm.weight.float(), eps=1e-6)
        before = packed.clone()
        assert_rounded_once(turn(x, norm=norm), exact)
        assert torch.equal(packed, before)
        copy = packed.clone()
        part = copy[:, 3 : heads + 3, 16:]
        assert turn(part, norm=norm, out=part) is part
        assert_rounded_once(part, exact)
        copy[:, 3 : heads + 3, 16:] = x
        assert torch.equal(copy, packed)  # nothing beside it was written


GATED_NORMS: dict[str, dict[str, Any]] = {
    "nemotron-3-nano": {"groups": 8, "size": 512, "activation": "silu", "is_gated_first": True},
    "qwen3-next": {"groups": 32, "size": 128, "activation": "silu", "has_shared_weight": True},
    "kimi-linear": {"groups": 32, "size": 128, "activation": "sigmoid", "has_shared_weight": True},
    "minimax": {"groups": 1, "size": 8192, "activation": "sigmoid"},
    "odd": {"groups": 5, "size": 24, "activation": "silu", "is_gated_first": True},
    "one": {"groups": 3, "size": 1, "activation": "sigmoid"},
}


@each_dtype
@each_count
@pytest.mark.parametrize("model", GATED_NORMS)
def test_gated_norms_round_once(model: str, tokens: int, dtype: torch.dtype) -> None:
    about = dict(GATED_NORMS[model])
    groups, size, has_shared_weight = about.pop("groups"), about.pop("size"), about.pop("has_shared_weight", False)
    x = 3 * draw(tokens, groups, size, dtype=dtype)
    packed = draw(tokens, groups * size + 40, dtype=dtype, seed=1)
    gate = packed[:, 8 : 8 + groups * size].unflatten(1, (groups, size))
    for to in (dtype, torch.float32):
        weight = 1 + 0.1 * draw(size if has_shared_weight else groups * size, dtype=to, seed=2)
        exact = fused.gated_norm(x.float(), gate.float(), weight.float(), 1e-6, **about)
        assert_rounded_once(fused.gated_norm(x, gate, weight, 1e-6, **about), exact)


@each_dtype
@each_count
@pytest.mark.parametrize(("heads", "dim"), [(16, 256), (5, 24)])
def test_sigmoid_gates_round_once(heads: int, dim: int, tokens: int, dtype: torch.dtype) -> None:
    x, packed = 3 * draw(tokens, heads, dim, dtype=dtype), draw(tokens, heads + 8, dim, dtype=dtype, seed=1)
    gate = packed[:, 5 : 5 + heads]
    for each in (gate, gate.contiguous(), packed[:, 1 : 1 + heads]):
        assert_rounded_once(fused.sigmoid_gated(x, each), fused.sigmoid_gated(x.float(), each.float()))


@each_dtype
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_angles_equal_those_of_torch(scale: float, dtype: torch.dtype) -> None:
    positions = torch.cat((torch.arange(3000), torch.tensor([40_959, 131_072, 1_000_000]))).cuda()
    rotary = Rotary(RopeConfig(theta=1e6, attention_factor=scale), 128, positions.device)
    ours = fused.angles(positions, rotary._inverse, scale=scale, dtype=dtype)
    exact = fused.angles(positions, rotary._inverse, scale=scale, dtype=torch.float32)
    for found, wanted in zip(ours, exact, strict=True):
        assert_rounded_once(found, wanted)


@each_dtype
@each_count
@pytest.mark.parametrize(("heads", "dim"), [(64, 64), (8, 128), (5, 80)])
def test_sinks_round_once(heads: int, dim: int, tokens: int, dtype: torch.dtype) -> None:
    out, sinks = draw(tokens, heads, dim, dtype=dtype), 3 * draw(heads, dtype=dtype, seed=1)
    lse = 4 * draw(tokens, heads, dtype=torch.float32, seed=2)
    lse[0, 0] = float("-inf")
    scores = torch.stack((lse * math.log(2), sinks.float().expand_as(lse)))
    exact = out.float() * scores.softmax(0)[0][..., None]
    assert_rounded_once(apply_sinks(out.clone(), lse, sinks), exact)
    several = torch.stack((lse, lse), -1)[..., 0]
    assert torch.equal(apply_sinks(out.clone(), several, sinks), apply_sinks(out.clone(), lse, sinks))


def cases(dtype: torch.dtype, *, tokens: int = 3) -> dict[str, Callable[[], Any]]:
    """Each operation, which leaves its tensors as they are."""
    hidden, delta, gate_up = (draw(tokens, 4096, dtype=dtype, seed=seed) for seed in range(3))
    weight, heads = draw(4096, dtype=dtype), draw(tokens, 48, 128, dtype=dtype)
    norm = HeadNorm(1 + 0.1 * draw(40, 128, dtype=dtype), 1e-6)
    rotary = Rotary(RopeConfig(), 128, hidden.device)
    positions = torch.arange(tokens, device="cuda")
    turn = rotary(positions, dtype)
    lse, sinks, own = draw(tokens, 48, dtype=torch.float32), draw(48, dtype=dtype), heads.clone()
    return {
        "norm": lambda: fused.rms_norm(hidden, weight, 1e-6),
        "add": lambda: fused.add_rms_norm(hidden, delta, weight, 1e-6),
        **{name: partial(activation, gate_up) for name, activation in ACTIVATIONS.items()},
        "angles": lambda: fused.angles(positions, rotary._inverse, scale=1.0, dtype=dtype),
        "heads": lambda: turn(heads[:, :40], norm=norm),
        "gated norm": lambda: fused.gated_norm(heads, heads, weight[:128], 1e-6, activation="silu"),
        "sigmoid gate": lambda: fused.sigmoid_gated(heads, heads),
        "sinks": lambda: apply_sinks(own, lse, sinks),
    }


@each_dtype
@pytest.mark.parametrize(
    "name", ["norm", "add", *ACTIVATIONS, "angles", "heads", "gated norm", "sigmoid gate", "sinks"]
)
def test_each_is_one_launch(name: str, dtype: torch.dtype) -> None:
    launched = kernels(cases(dtype)[name])
    assert len(launched) == 1, launched


def test_no_tokens_launch_nothing() -> None:
    empty = torch.empty(0, 128, device="cuda", dtype=torch.bfloat16)
    weight = empty.new_ones(128)
    assert fused.rms_norm(empty, weight, 1e-6).shape == (0, 128)
    assert [part.shape for part in fused.add_rms_norm(empty, empty.clone(), weight, 1e-6)] == [(0, 128)] * 2
    assert fused.silu_gated(empty).shape == (0, 64)
    heads = empty.view(0, 2, 64)
    assert fused.gated_norm(heads, heads, weight[:64], 1e-6, activation="silu").shape == (0, 2, 64)
    turn = Rotary(RopeConfig(), 64, empty.device)(torch.empty(0, device="cuda", dtype=torch.int64), torch.bfloat16)
    assert turn(empty.view(0, 2, 64)).shape == (0, 2, 64)


def test_a_graph_gives_what_single_launches_give() -> None:
    dtype = torch.bfloat16
    inputs = [draw(3, 4096, dtype=dtype, seed=seed) for seed in range(2)]
    gate_up, heads = draw(3, 8192, dtype=dtype, seed=2), draw(3, 48, 128, dtype=dtype, seed=3)
    positions, weight = torch.arange(3, device="cuda"), draw(4096, dtype=dtype, seed=4)
    norm, rotary = HeadNorm(1 + 0.1 * draw(40, 128, dtype=dtype), 1e-6), Rotary(RopeConfig(), 128, weight.device)

    def work() -> list[Tensor]:
        normed, total = fused.add_rms_norm(*inputs, weight, 1e-6)
        turned = rotary(positions, dtype)(heads[:, :40], norm=norm)
        activated = [activation(gate_up) for activation in ACTIVATIONS.values()]
        return [normed, total, fused.rms_norm(total, weight, 1e-6), *activated, turned]

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = work()
    for seed in range(2):
        for i, static in enumerate((*inputs, gate_up, heads)):
            static.copy_(draw(*static.shape, dtype=dtype, seed=10 * seed + i))
        positions.add_(1000)
        graph.replay()
        for found, wanted in zip(recorded, work(), strict=True):
            assert torch.equal(found, wanted)


@each_count
def test_kernels_that_start_early_read_nothing_too_soon(tokens: int) -> None:
    dtype = torch.bfloat16
    up, down = draw(512, 1024, dtype=dtype) / 23, draw(512, 512, dtype=dtype, seed=1) / 23
    weight, start = draw(512, dtype=dtype, seed=2), draw(tokens, 512, dtype=dtype, seed=3)
    turn = Rotary(RopeConfig(), 64, start.device)(torch.arange(tokens, device="cuda"), dtype)

    def chain(after_each: Callable[[], None]) -> Tensor:
        hidden, delta = start, start.flip(0)
        for _ in range(100):
            x, hidden = fused.add_rms_norm(hidden, delta.clone(), weight, 1e-6)
            after_each()
            x = turn(x.view(tokens, 8, 64)).flatten(1)
            after_each()
            x = fused.silu_gated(x @ up)
            after_each()
            delta = fused.rms_norm(fused.rms_norm(x @ down, weight, 1e-6), weight, 1e-6)
            after_each()
        return hidden

    slow = chain(torch.cuda.synchronize)
    assert slow.isfinite().all()
    for _ in range(3):
        assert torch.equal(chain(lambda: None), slow)


# --- whole models -----------------------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "gemma3": {},
    "gpt_oss": {"num_experts_per_tok": 8},  # all of them: with rounding, routers choose others
    "deepseek_v3": {"first_k_dense_replace": 4},
}


class Causal:
    """Attention over one whole sequence, without a cache, windows or sinks."""

    def kv(self, layer: int) -> int:
        return layer

    latent = kv

    def attend(self, view: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sinks: Tensor | None) -> Tensor:
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True, scale=scale)
        return out[0].transpose(0, 1)

    def attend_latent(
        self,
        view: int,
        q: Tensor,
        latent: Tensor,
        rope: Tensor,
        projection: LatentProjection,
        *,
        scale: float,
        **_: Any,
    ) -> Tensor:
        plain = torch.einsum("tr,hdr->thd", latent, projection.key)
        k = torch.cat((plain, rope[:, None].expand(-1, plain.shape[1], -1)), dim=-1)
        v = torch.einsum("tr,hdr->thd", latent, projection.value)
        return self.attend(view, q, k, v, scale=scale, sinks=None)


def run_model(model_dir: Path, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Logits of 60 tokens, and how many kernels were launched for them."""
    causal, ctx = Causal(), ParallelContext.single(torch.device("cuda", 0))
    model = load_model(read_config(model_dir), Checkpoint(model_dir), ctx, dtype, on_progress=lambda done, total: None)
    ids = torch.randint(3, 515, (60,), generator=torch.Generator().manual_seed(1)).cuda()
    found: list[Tensor] = []

    @torch.inference_mode()
    def work() -> None:
        run = ForwardPass(causal, causal, torch.arange(len(ids), device="cuda"))
        found.append(model.logits(model.forward(model.embed(ids), run)))

    launched = kernels(work)
    assert torch.equal(found[0], found[1])
    return found[1], len(launched)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_fused_kernels_is_as_exact_as_without(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = make_family(tmp_path / name, name, **MODELS[name])
    exact, _ = run_model(model_dir, torch.float32)
    ours, launched = run_model(model_dir, torch.bfloat16)
    monkeypatch.setattr(fused, "_kernels_for", lambda x, dtype=None: None)
    plain, launched_plain = run_model(model_dir, torch.bfloat16)
    error, error_plain = ((found - exact).norm() / exact.norm() for found in (ours, plain))
    assert launched < launched_plain
    assert error < 1.25 * error_plain
    assert error < 0.1
