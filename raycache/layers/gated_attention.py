"""Attention whose output passes a gate per feature, and whose heads are turned in part only."""

from __future__ import annotations

from torch import Tensor

from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.norm import HeadNorm
from raycache.layers.rope import Rotary

# Shapes in this file: T packed tokens of this rank, C hidden size, Hq query and Hkv key heads, D head size.


class GatedAttention:
    """Projections, norms of query and key heads, rotary embedding, attention, sigmoid gate, output projection
    ("Gated Attention for Large Language Models", arXiv 2505.06708).

    Args:
        layer: its number in the whole model.
        inputs: queries, keys, values and gates stacked: (2 Hq + 2 Hkv) D features.
        out: back to the hidden size, summed over tp.
        num_heads, num_kv_heads: Hq and Hkv of this rank.
        head_dim: D.
        rotary: position embedding of the first features of each head.
        qk_norm: normalises query and key heads before they are rotated.
    """

    def __init__(
        self,
        layer: int,
        inputs: ColumnLinear,
        out: RowLinear,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: Rotary,
        qk_norm: HeadNorm,
    ) -> None:
        self._layer = layer
        self._inputs = inputs
        self._out = out
        self._head_dim = head_dim
        self._kinds = (num_heads + num_kv_heads, num_kv_heads, num_heads)
        self._qk_kinds = (num_heads, num_kv_heads)
        self._rotary = rotary
        self._qk_norm = qk_norm

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        heads = self._inputs(x).unflatten(1, (-1, self._head_dim))
        qk, v, gate = heads.split(self._kinds, dim=1)
        qk = run.rotation(self._rotary, qk.dtype)(qk, norm=self._qk_norm)
        q, k = qk.split(self._qk_kinds, dim=1)
        out = run.step.attend(run.pool.kv(self._layer), q, k, v, scale=self._head_dim**-0.5, sinks=None)
        return self._out((out * gate.sigmoid()).flatten(1))
