"""Attention whose queries, keys and values are all normalised per head, as in Gemma 4."""

from __future__ import annotations

import torch
from torch import Tensor

from raycache.layers import fused
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.norm import HeadNorm
from raycache.layers.rope import Rotary

# Shapes in this file: T packed tokens of this rank, C hidden size.


class NormedAttention:
    """As SelfAttention, with a norm of the values that has no weight, and maybe no projection of their own.

    Args:
        layer: its number in the whole model.
        inputs: queries, keys and, where they are not the keys before norm and rotation, values, stacked.
        out: back to the hidden size, summed over tp.
        num_heads, num_kv_heads: of this rank.
        head_dim: D.
        rotary: position embedding.
        qk_norm: normalises query and key heads before they are rotated.
        eps: of the values' norm.
        has_values: whether `inputs` has values.
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
        eps: float,
        has_values: bool,
    ) -> None:
        self._layer = layer
        self._inputs = inputs
        self._out = out
        self._num_heads = num_heads
        self._num_rotated = num_heads + num_kv_heads
        self._first_value = self._num_rotated if has_values else num_heads
        self._shape = (self._first_value + num_kv_heads, head_dim)
        self._rotary = rotary
        self._qk_norm = qk_norm
        self._ones = torch.ones(num_kv_heads, head_dim, dtype=qk_norm.weight.dtype, device=qk_norm.weight.device)
        self._eps = eps

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]. Scores are not scaled: the norms of queries and keys say how large they are."""
        rows = self._inputs(x).view(x.shape[0], *self._shape)
        v = fused.head_norm(rows[:, self._first_value :], self._ones, self._eps)
        qk = run.rotation(self._rotary, rows.dtype)(rows[:, : self._num_rotated], norm=self._qk_norm)
        q, k = qk[:, : self._num_heads], qk[:, self._num_heads :]
        return self._out(run.step.attend(run.pool.kv(self._layer), q, k, v, scale=1.0, sinks=None).flatten(1))
