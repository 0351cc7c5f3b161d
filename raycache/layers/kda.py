"""Kimi delta attention (KDA): a gated delta net whose key features decay each at its own rate (arXiv 2510.26692)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.layers.delta_rule import DeltaRule, GatedHeadNorm
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.precision import precise

Projection = Callable[[Tensor], Tensor]
"""[T_local, C] -> [T_local, H D]."""

# Shapes in this file: T_local new tokens of this rank, T of all cp ranks, C hidden size, H heads of this tp rank, D
# features of a head.


class KimiDeltaAttention:
    """Projections and gates on this rank's tokens; convolutions and the scan on its share of the heads.

    Args:
        inputs: queries, keys, values and the numbers whose sigmoids are beta, stacked: 3 H D + H features.
        decay: what the forget gate takes.
        forget: makes log decays of it.
        gate: of the output.
        out: back to the hidden size, summed over tp.
        rule: convolutions and scan.
        norm: of the scan's output.
        num_heads, head_dim: H and D.
    """

    def __init__(
        self,
        inputs: ColumnLinear,
        out: RowLinear,
        *,
        decay: Projection,
        forget: ForgetGate,
        gate: Projection,
        rule: DeltaRule,
        norm: GatedHeadNorm,
        num_heads: int,
        head_dim: int,
    ) -> None:
        self._inputs = inputs
        self._out = out
        self._decay = decay
        self._forget = forget
        self._gate = gate
        self._rule = rule
        self._norm = norm
        self._shape = (num_heads, head_dim)
        self._sizes = (3 * num_heads * head_dim, num_heads)

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T_local, C] -> new [T_local, C]."""
        qkv, b = self._inputs(x).split(self._sizes, dim=-1)
        # One row per head, for heads are what the ranks of cp share out: [T_local, H, 3, D] and [T_local, H, D + 1].
        qkv = qkv.unflatten(1, (3, *self._shape)).transpose(1, 2)
        log_decay = self._forget(self._decay(x).unflatten(1, self._shape))
        gates = torch.cat((log_decay, precise(b).sigmoid()[..., None]), dim=-1)
        q, k, v = run.step.to_heads(qkv).unbind(2)
        gates = run.step.to_heads(gates)
        out = run.step.to_tokens(self._rule(run, q, k, v, g=gates[..., :-1], beta=gates[..., -1]))
        return self._out(self._norm(out, self._gate(x).unflatten(1, self._shape)).flatten(1))


class ForgetGate:
    """Log decays, in float32 at least: [T, H, D] -> [T, H, D].

        -exp(A_log) * softplus(x + dt_bias)               without a bound
        bound * sigmoid(exp(A_log) * (x + dt_bias))       with one, which chunks of products can count on

    Args:
        rate: [H, 1], exp(A_log), at least float32.
        dt_bias: [H, D], at least float32.
        bound: smallest log decay, below zero, or None.
    """

    def __init__(self, rate: Tensor, dt_bias: Tensor, *, bound: float | None) -> None:
        self._rate = rate
        self._dt_bias = dt_bias
        self._bound = bound

    def __call__(self, x: Tensor) -> Tensor:
        shifted = precise(x) + self._dt_bias
        if self._bound is None:
            return F.softplus(shifted).mul_(-self._rate)
        return shifted.mul_(self._rate).sigmoid_().mul_(self._bound)


class LowRank:
    """A product of two matrices: up(down x).

    Args:
        down: [R, C], whole on every rank.
        up: of this rank's heads.
    """

    def __init__(self, down: Tensor, up: ColumnLinear) -> None:
        self._down = down
        self._up = up

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] -> [T, O / tp]."""
        return self._up(F.linear(x, self._down))
