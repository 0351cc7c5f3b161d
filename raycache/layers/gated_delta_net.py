"""Gated delta net: linear attention with a delta rule and one decay per head (arXiv 2412.06464)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.layers.delta_rule import DeltaRule, GatedHeadNorm
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.precision import precise

# Shapes in this file: T_local new tokens of this rank, C hidden size; of this tp rank Hk key heads of Dk features and
# Hv value heads of Dv. Value head h reads key head h // (Hv / Hk).


class GatedDeltaNet:
    """Projections and gates on this rank's tokens; convolutions and the scan on its share of the heads.

    log decay = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b), one of each per token and value head.

    Args:
        inputs: queries, keys, values, output gate, b and a stacked: 2 Hk Dk + 2 Hv Dv + 2 Hv features.
        out: back to the hidden size, summed over tp.
        rule: convolutions and scan.
        norm: of the scan's output.
        rate: [Hv], exp(A_log), at least float32.
        dt_bias: [Hv], at least float32.
        key_shape, value_shape: (Hk, Dk) and (Hv, Dv).
    """

    def __init__(
        self,
        inputs: ColumnLinear,
        out: RowLinear,
        *,
        rule: DeltaRule,
        norm: GatedHeadNorm,
        rate: Tensor,
        dt_bias: Tensor,
        key_shape: tuple[int, int],
        value_shape: tuple[int, int],
    ) -> None:
        self._inputs = inputs
        self._out = out
        self._rule = rule
        self._norm = norm
        self._rate = rate
        self._dt_bias = dt_bias
        self._key_shape, self._value_shape = key_shape, value_shape
        keys, values = key_shape[0] * key_shape[1], value_shape[0] * value_shape[1]
        self._sizes = (2 * keys, values, values, value_shape[0], value_shape[0])

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T_local, C] -> new [T_local, C]."""
        qk, v, gate, b, a = self._inputs(x).split(self._sizes, dim=-1)
        # One row per head, for heads are what the ranks of cp share out: [T_local, Hk, 2, Dk].
        qk = qk.unflatten(1, (2, *self._key_shape)).transpose(1, 2)
        decay = F.softplus(precise(a) + self._dt_bias).mul_(-self._rate)
        gates = torch.stack((decay, precise(b).sigmoid()), dim=-1)  # [T_local, Hv, 2]
        q, k = run.step.to_heads(qk).unbind(2)
        v = run.step.to_heads(v.unflatten(1, self._value_shape))
        gates = run.step.to_heads(gates)
        out = run.step.to_tokens(self._rule(run, q, k, v, g=gates[..., :1], beta=gates[..., 1]))
        return self._out(self._norm(out, gate.unflatten(1, self._value_shape)).flatten(1))
