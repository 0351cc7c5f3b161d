"""Layers with a delta rule between their projections: convolutions, gates and the scan with normalised keys.

    q, k, v = silu(conv(q)), silu(conv(k)), silu(conv(v))
    q, k    = q / |q| * Dk^-0.5, k / |k|
    g       = -rate * softplus(decay + dt_bias)            or with a bound   bound * sigmoid(rate * (decay + dt_bias))
    out     = scan(q, k, v, g, sigmoid(beta))

Gated delta nets have one g per head (arXiv 2412.06464), KDA has one per key feature (arXiv 2510.26692).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.memory.views import StateView

if TYPE_CHECKING:
    from raycache.attention.base import RecurrentStep

L2_EPS = 1e-6
"""Added to the squared norm of queries and keys; the same in all models and not in any config.json."""

# Shapes in this file: T tokens of all cp ranks, Hk key heads and Hv value heads of Dk and Dv features each, K taps.


@dataclass(frozen=True)
class DeltaRule:
    """Weights of this rank's share of the heads over tp x cp, and what a step computes with them.

    Attributes:
        q, k: convolutions [Hk, Dk, K], the tap of the newest input last.
        v: [Hv, Dv, K].
        rate: [Hv, 1], exp(A_log), at least float32.
        dt_bias: [Hv, 1] or [Hv, Dk], at least float32.
        bound: smallest log decay, negative, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rate: Tensor
    dt_bias: Tensor
    bound: float | None = None

    def log_decay(self, decay: Tensor) -> Tensor:
        """[T, Hv, 1] or [T, Hv, Dk] -> the same in at least float32."""
        shifted = decay.to(self.rate.dtype) + self.dt_bias
        if self.bound is None:
            return F.softplus(shifted).mul_(-self.rate)
        return shifted.mul_(self.rate).sigmoid_().mul_(self.bound)

    def run(
        self,
        step: RecurrentStep,
        view: StateView,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
    ) -> Tensor:
        """`RecurrentStep.delta_rule` in terms of its other methods."""
        q = F.silu(step.convolve(view, "q", q, self.q, None), inplace=True)
        k = F.silu(step.convolve(view, "k", k, self.k, None), inplace=True)
        v = F.silu(step.convolve(view, "v", v, self.v, None), inplace=True)
        g, rate = self.log_decay(decay), beta.to(self.rate.dtype).sigmoid()
        return step.scan(view, unit_length(q).mul_(q.shape[-1] ** -0.5), unit_length(k), v, g, rate)


def unit_length(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + L2_EPS) over the last dimension: new, in at least float32."""
    dim = x.shape[-1]
    numbers = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(numbers, (dim,), None, L2_EPS / dim).mul_(dim**-0.5)
