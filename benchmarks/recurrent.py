"""Decode step of one recurrent layer between its projections on a GPU: separate operations, fused ones, and the floor.

    python -m benchmarks.recurrent
    python -m benchmarks.recurrent --batches 1,64 --json out.json

Each figure is the time per layer of a CUDA graph of many layers, whose states do not fit into the L2 cache together.
"separate" launches each operation by itself, as prefill does; "fused" is what decode steps do. The floor is the time to
read and write the states, windows, inputs and outputs at the speed of a copy. All are measured in turns in one run; the
median of the repeats counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.attention import recorded, times_us
from benchmarks.ceilings import Ceilings
from benchmarks.figures import write_json
from raycache.attention.delta_rule import DeltaRule
from raycache.attention.layout import StepLayout
from raycache.attention.state_space import StateSpace, Taps
from raycache.layers import fused
from raycache.memory.component import CacheFormat, recurrent
from raycache.memory.device import DevicePool
from raycache.memory.views import StateView
from raycache.parallel.context import ParallelContext
from raycache.step.inputs import build_inputs
from raycache.wire.plan import Row, StepPlan

DEVICE = torch.device("cuda")
HALF = torch.bfloat16
TAPS = 4
MIN_STATE_BYTES = 256 << 20
"""States of all layers of a graph, several times the L2 cache of an H200."""


@dataclass(frozen=True)
class Kind:
    """A recurrent layer.

    Attributes:
        of_keys, of_values: heads and features.
        convolutions: names of those of queries, keys and values, or none.
        decays: projected features per value head from which the decay is computed.
        norm: (features of a group, activation, is_gated_first) of the norm.
    """

    of_keys: tuple[int, int]
    of_values: tuple[int, int]
    convolutions: tuple[str, ...]
    decays: int
    norm: tuple[int, str, bool]


KINDS = {
    "Mamba2 (nemotron-3-nano)": Kind((8, 128), (64, 64), ("c", "b", "x"), 1, (512, "silu", True)),
    "gated delta net (qwen3-next)": Kind((16, 128), (32, 128), ("q", "k", "v"), 1, (128, "silu", False)),
    "KDA (kimi-linear)": Kind((32, 128), (32, 128), ("q", "k", "v"), 128, (128, "sigmoid", False)),
    "lightning (minimax-01)": Kind((64, 128), (64, 128), (), 0, (8192, "sigmoid", False)),
}


class Bench:
    """Layers of a kind in a decode batch."""

    def __init__(self, kind: Kind, *, batch: int) -> None:
        self.kind, self.batch = kind, batch
        (heads, value_dim), (_, key_dim) = kind.of_values, kind.of_keys
        state_bytes = 4 * batch * heads * key_dim * value_dim
        self.num_layers = max(4, MIN_STATE_BYTES // state_bytes)
        conv = [(name, *size) for name, size in zip(kind.convolutions, self._sizes(), strict=False)]
        sizes: dict[str, Any] = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim}
        component = recurrent(
            range(self.num_layers), **sizes, fmt=CacheFormat("bfloat16"), conv=conv, conv_kernel=TAPS if conv else 0
        )
        ctx = ParallelContext.single(DEVICE)
        self._pool = DevicePool(
            [component],
            num_layers=self.num_layers,
            sizes={component.space: batch},
            page_size=64,
            ctx=ctx,
        )
        for field in self._pool.rows(component.name).values():
            field.normal_()
        plan = StepPlan(1, [Row(i, 9, bytes(4), read_state=i, write_state=i) for i in range(batch)])
        inputs = build_inputs(plan, {i: {} for i in range(batch)}, page_size=64, windows={}, ctx=ctx)
        # It needs Triton, which is there on GPU machines only.
        from raycache.attention.recurrent_kernels import KernelRecurrence

        self._step = KernelRecurrence(StepLayout(inputs))
        q, k, v = (prod(size) for size in self._sizes())
        projected = drawn(batch, q + k + v + v + heads + heads * max(kind.decays, 1))
        parts = projected.split([q, k, v, v, heads, heads * max(kind.decays, 1)], dim=1)
        self._q, self._k, self._v, self._gate = (
            part.unflatten(1, size) for part, size in zip(parts, (*self._sizes(), kind.of_values), strict=False)
        )
        self._beta, self._decay = parts[4], parts[5].unflatten(1, (heads, -1))
        self._weights = self._draw_weights()
        self._norm_weight = torch.randn(v if kind.norm[0] > value_dim else value_dim, device=DEVICE)
        self._slopes = -torch.rand(1, heads, 1, device=DEVICE)

    @property
    def num_bytes(self) -> float:
        """That a layer must read and write."""
        (heads, value_dim), (_, key_dim) = self.kind.of_values, self.kind.of_keys
        state = 2 * 4 * heads * key_dim * value_dim
        q, k, v = (prod(size) for size in self._sizes())
        windows = 2 * 2 * (q + k + v) * (TAPS - 1) if self.kind.convolutions else 0
        taps = 2 * (q + k + v) * TAPS if self.kind.convolutions else 0
        inputs = 2 * (q + k + 3 * v + heads * (1 + self.kind.decays))
        return self.batch * (state + windows + inputs) + taps

    def run(self, *, is_fused: bool) -> Tensor:
        """All layers."""
        out = self._v
        for layer in range(self.num_layers):
            out = self._layer(self._pool.state(layer), is_fused=is_fused)
        return out

    def _layer(self, view: StateView, *, is_fused: bool) -> Tensor:
        step, weights = self._step, self._weights
        if isinstance(weights, StateSpace):
            inputs = {"x": self._v, "b": self._k, "c": self._q, "dt": self._beta}
            y = step.state_space(view, weights, **inputs) if is_fused else weights.run(step, view, **inputs)
        elif isinstance(weights, DeltaRule):
            inputs = {"q": self._q, "k": self._k, "v": self._v, "decay": self._decay, "beta": self._beta}
            y = step.delta_rule(view, weights, **inputs) if is_fused else weights.run(step, view, **inputs)
        else:
            q, k, v = (F.silu(part) for part in (self._q, self._k, self._v))
            y = step.scan(view, q, k, v, self._slopes.expand(self.batch, -1, -1), None)
        return self._norm(y, is_fused=is_fused)

    def _norm(self, y: Tensor, *, is_fused: bool) -> Tensor:
        size, activation, is_gated_first = self.kind.norm
        y, gate = (part.flatten(1).unflatten(1, (-1, size)) for part in (y, self._gate))
        if is_fused:
            kind: dict[str, Any] = {"activation": activation, "is_gated_first": is_gated_first}
            return fused.gated_norm(y, gate, self._norm_weight, 1e-5, **kind)
        active = (F.silu if activation == "silu" else torch.sigmoid)(gate.float())
        number = y.float() * active if is_gated_first else y.float()
        normed = F.rms_norm(number, (size,), None, 1e-5) * self._norm_weight.view(-1, size)
        return (normed if is_gated_first else normed * active).to(y.dtype)

    def _sizes(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Of queries, keys and values."""
        return self.kind.of_keys, self.kind.of_keys, self.kind.of_values

    def _draw_weights(self) -> StateSpace | DeltaRule | None:
        if not self.kind.convolutions:
            return None
        heads = self.kind.of_values[0]
        q, k, v = (drawn(*size, TAPS) for size in self._sizes())
        rate, bias = torch.rand(heads, device=DEVICE), torch.randn(heads, self.kind.decays, device=DEVICE)
        if self.kind.convolutions[0] == "q":
            return DeltaRule(q.float(), k.float(), v.float(), rate=rate[:, None], dt_bias=bias)
        c, b, x = (Taps(taps, drawn(*taps.shape[:2])) for taps in (q, k, v))
        return StateSpace(x, b, c, dt_bias=bias[:, 0], decay=-rate, skip=rate, dt_limit=(0.0, float("inf")))


def prod(size: tuple[int, int]) -> int:
    return size[0] * size[1]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=HALF, device=DEVICE)


def launches(call: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in trace.events())


def measure(kind: Kind, *, batch: int, repeats: int, copy_bytes_s: float) -> Mapping[str, float]:
    """Us per layer, and launches."""
    bench = Bench(kind, batch=batch)
    calls = {"separate": lambda: bench.run(is_fused=False), "fused": lambda: bench.run(is_fused=True)}
    recordings = {name: recorded(call) for name, call in calls.items()}
    us = {name: total / bench.num_layers for name, total in times_us(recordings, repeats=repeats).items()}
    floor = bench.num_bytes / copy_bytes_s * 1e6
    counts = {f"launches {name}": launches(call) / bench.num_layers for name, call in calls.items()}
    return {
        **us,
        "floor": floor,
        "separate / floor": us["separate"] / floor,
        "fused / floor": us["fused"] / floor,
        **counts,
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 64])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ceilings = Ceilings.measure(DEVICE, HALF)
    print(f"{torch.cuda.get_device_name()}: {ceilings.describe()}")
    figures: dict[str, Mapping[str, float]] = {"ceilings": vars(ceilings)}
    for name, kind in KINDS.items():
        for batch in args.batches:
            found = measure(kind, batch=batch, repeats=args.repeats, copy_bytes_s=ceilings.copy_bytes_s)
            figures[f"{name}, batch {batch}"] = found
            row = "  ".join(f"{key} {value:.2f}" for key, value in found.items())
            print(f"{name + ', batch ' + str(batch):40}{row}", flush=True)
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
