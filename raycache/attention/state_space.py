"""Mamba2 between its projections: convolutions, time steps, recurrence and skip connection (arXiv 2405.21060).

    x, B, C  = silu(conv(x)), silu(conv(B)), silu(conv(C))
    dt       = clamp(softplus(dt + dt_bias))
    S       <- exp(-exp(A_log) dt) S + B (dt x)^T          one S [N, P] per head
    y        = S^T C + D x

**One clamp for all tokens.** transformers and the kernels of mamba-ssm clamp dt in prefill but not in decode, so that a
state depends on how its tokens were computed. A cached prefix must equal a recomputed one, so dt is clamped for every
token here. Most models have no limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from raycache.memory.views import StateView

if TYPE_CHECKING:
    from raycache.attention.base import RecurrentStep

# Shapes in this file: T tokens of all cp ranks, H heads of P features, G groups of N state features (the heads of a
# group share B and C), K taps of the convolution.


@dataclass(frozen=True)
class Taps:
    """Weights of a short convolution.

    Attributes:
        weight: [heads, features, K], the tap of the newest input last.
        bias: [heads, features], or None.
    """

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class StateSpace:
    """Weights of this rank's share of the heads over tp x cp, and what a step computes with them.

    Attributes:
        x, b, c: convolutions of H, G and G heads.
        dt_bias, decay, skip: [H], at least float32; decay is -exp(A_log), skip is D.
        dt_limit: smallest and largest time step.
    """

    x: Taps
    b: Taps
    c: Taps
    dt_bias: Tensor
    decay: Tensor
    skip: Tensor
    dt_limit: tuple[float, float]

    def run(self, step: RecurrentStep, view: StateView, *, x: Tensor, b: Tensor, c: Tensor, dt: Tensor) -> Tensor:
        """`RecurrentStep.state_space` in terms of its other methods."""
        x = F.silu(step.convolve(view, "x", x, self.x.weight, self.x.bias), inplace=True)
        b = F.silu(step.convolve(view, "b", b, self.b.weight, self.b.bias), inplace=True)
        c = F.silu(step.convolve(view, "c", c, self.c.weight, self.c.bias), inplace=True)
        return self.scan(step, view, x=x, b=b, c=c, dt=dt)

    def scan(self, step: RecurrentStep, view: StateView, *, x: Tensor, b: Tensor, c: Tensor, dt: Tensor) -> Tensor:
        """`run` behind its convolutions."""
        rounded, x = x.dtype, x.to(self.decay.dtype)
        low, high = self.dt_limit
        dt = F.softplus(dt.to(self.decay.dtype) + self.dt_bias).clamp(low, high)[..., None]
        y = step.scan(view, c, b, dt * x, dt * self.decay[:, None], None)
        return y.addcmul_(x, self.skip[:, None]).to(rounded)
