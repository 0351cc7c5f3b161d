"""A layer's router and experts with bfloat16 weights on one GPU: fused kernels, and torch's operations.

    python -m benchmarks.experts --shapes nemotron-3-nano --tokens 1,64,8192

Decode steps run inside a CUDA graph of several calls whose tokens choose other experts, so that weights do not stay in
the L2 cache. The floor is what reading the chosen experts takes, or multiplying, whichever is more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.figures import write_json
from raycache.layers import router as module
from raycache.layers.activation import Activation, clamped_swiglu, relu2, silu_gated
from raycache.layers.experts import Experts
from raycache.layers.router import Router, SigmoidRouter, SoftmaxRouter

RECORDED = 512
"""Up to this many tokens, calls are recorded in a graph."""


@dataclass(frozen=True)
class Shape:
    """A layer's experts.

    Attributes:
        count, chosen: experts, and of each token.
        size, inner: hidden size, and inner features of each expert.
    """

    count: int
    chosen: int
    size: int
    inner: int
    activation: Activation
    is_gated: bool = True
    has_bias: bool = False
    is_sigmoid: bool = False

    @property
    def numbers(self) -> int:
        """In the matrices of one expert."""
        return self.size * self.inner * (3 if self.is_gated else 2)


SHAPES = {
    "nemotron-3-nano": Shape(128, 6, 2688, 1856, relu2, is_gated=False, is_sigmoid=True),
    "qwen3-next": Shape(512, 10, 2048, 512, silu_gated),
    "kimi-linear": Shape(256, 8, 2304, 1024, silu_gated, is_sigmoid=True),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, clamped_swiglu(alpha=1.702, limit=7.0), has_bias=True),
}


@dataclass(frozen=True)
class Calls:
    """Inputs of several calls: x [T, C], weights [T, k] and ids [T, k] of each."""

    inputs: list[tuple[Tensor, Tensor, Tensor]]

    @classmethod
    def draw(cls, shape: Shape, num_tokens: int) -> Calls:
        """Draw tokens that choose every expert as often."""
        inputs = []
        for _ in range(8 if num_tokens <= RECORDED else 2):
            weights, ids = torch.rand(num_tokens, shape.count, device="cuda").topk(shape.chosen)
            x = torch.randn(num_tokens, shape.size, device="cuda", dtype=torch.bfloat16)
            inputs.append((x, weights / weights.sum(1, keepdim=True), ids))
        return cls(inputs)

    def floor_us(self, shape: Shape, *, gbytes_per_s: float, tflops: float) -> float:
        """Time of a call that only reads its experts, or only multiplies."""
        met = sum(len(ids.unique()) for *_, ids in self.inputs) / len(self.inputs)
        pairs = self.inputs[0][2].numel()
        return max(2 * met * shape.numbers / gbytes_per_s / 1e3, 2 * pairs * shape.numbers / tflops / 1e6)

    def time_us(self, run: Callable[[Tensor, Tensor, Tensor], Tensor], *, repeats: int = 5) -> float:
        """Of one call, the fastest of some repeats."""

        def all_calls() -> None:
            for inputs in self.inputs:
                run(*inputs)

        all_calls()
        again = all_calls
        if len(self.inputs[0][0]) <= RECORDED:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                all_calls()
            again = graph.replay
        again()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            again()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times) * 1e3 / len(self.inputs)


def draw_experts(shape: Shape) -> tuple[Tensor, Tensor, Experts, Experts]:
    """Draw matrices, and make experts of them that use kernels and grouped products."""

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, device="cuda", dtype=torch.bfloat16) * sizes[-1] ** -0.5

    features = shape.inner * (1 + shape.is_gated)
    up, down = draw(shape.count, features, shape.size), draw(shape.count, shape.size, shape.inner)
    biases = {}
    if shape.has_bias:
        biases = {"up_bias": draw(shape.count, features), "down_bias": draw(shape.count, shape.size)}
    fast, slow = (Experts(up, down, activation=shape.activation, held=range(shape.count), **biases) for _ in range(2))
    slow._fused = None
    return up, down, fast, slow


def draw_router(shape: Shape) -> Router:
    """Draw a router."""
    weight = torch.randn(shape.count, shape.size, device="cuda") * shape.size**-0.5
    if not shape.is_sigmoid:
        return SoftmaxRouter(weight.to(torch.bfloat16), top_k=shape.chosen, renormalise=True)
    correction = torch.zeros(shape.count, device="cuda")
    one = {"num_groups": 1, "top_groups": 1}
    return SigmoidRouter(weight, correction, top_k=shape.chosen, **one, renormalise=True, scale=2.5)


def bare_us(shape: Shape, up: Tensor, down: Tensor, calls: Calls) -> float:
    """Time of the two grouped products of torch alone."""

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        rows, ends = prepared[ids]
        F.grouped_mm(rows, up.mT, offs=ends)
        return F.grouped_mm(rows[:, : shape.inner], down.mT, offs=ends)

    prepared = {}
    for x, _, ids in calls.inputs:
        chosen, order = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(chosen, torch.arange(shape.count, device="cuda"), right=True).to(torch.int32)
        prepared[ids] = x[order // shape.chosen], ends
    return calls.time_us(run)


def routers_us(router: Router, calls: Calls) -> tuple[float, float]:
    """Time of the router by its kernel, and by torch."""

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return router(x)[0]

    with mock.patch.object(module, "_kernels_for", lambda *args: None):
        by_torch = calls.time_us(run)
    return calls.time_us(run), by_torch


@torch.inference_mode()
def main() -> int:
    options = _options()
    figures = []
    print(
        "us of one layer: experts by kernels and by grouped products, with their ratio to the floor; of these the two"
    )
    print("products alone; the router by its kernel and by torch")
    print(
        f"{'shape':16} {'tokens':>6} {'floor':>8} {'kernels':>15} {'grouped':>15} {'bare':>8} "
        f"{'router':>7} {'torch':>8}"
    )
    for name in options.shapes.split(","):
        shape = SHAPES[name]
        up, down, fast, slow = draw_experts(shape)
        router = draw_router(shape)
        for num_tokens in map(int, options.tokens.split(",")):
            torch.manual_seed(num_tokens)
            calls = Calls.draw(shape, num_tokens)
            floor = calls.floor_us(shape, gbytes_per_s=options.gbytes_per_s, tflops=options.tflops)
            found, before = calls.time_us(fast), calls.time_us(slow)
            bare = bare_us(shape, up, down, calls)
            choosing, by_torch = routers_us(router, calls)
            print(
                f"{name:16} {num_tokens:6} {floor:8.1f} {found:8.1f} {found / floor:6.2f} "
                f"{before:8.1f} {before / floor:6.2f} {bare:8.1f} {choosing:7.1f} {by_torch:8.1f}",
                flush=True,
            )
            times = {"floor_us": floor, "kernels_us": found, "grouped_us": before, "bare_us": bare}
            routing = {"router_us": choosing, "router_torch_us": by_torch}
            figures.append({"shape": name, "tokens": num_tokens, **times, **routing})
    if options.json:
        write_json(options.json, {"device": torch.cuda.get_device_name(), "calls": figures})
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated (default: all)")
    parser.add_argument("--tokens", default="1,8,64,256,8192", help="comma-separated (default: %(default)s)")
    parser.add_argument("--gbytes-per-s", type=float, default=4225, help="of reading memory (default: %(default)s)")
    parser.add_argument("--tflops", type=float, default=771, help="of a large matrix product (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
