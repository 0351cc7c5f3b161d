"""The projections around attention; attention itself comes with the pass, so no model knows where keys and values
live."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.norm import HeadNorm
from raycache.layers.precision import precise
from raycache.layers.rope import Rotary

if TYPE_CHECKING:
    from raycache.parallel.collectives import Group

# Shapes in this file: T packed tokens of this rank, C hidden size, Q, K and V features of this rank's query, key and
# value heads.


class SelfAttention:
    """Query, key and value projection, rotary embedding, attention, output projection.

    Args:
        layer: its number in the whole model.
        qkv: the three matrices stacked, queries first, so that they are one product.
        out: back to the hidden size, summed over tp.
        num_heads: query heads of this rank.
        num_kv_heads: KV heads of this rank.
        head_dim: D.
        rotary: position embedding, or None.
        qk_norm: normalises query and key heads before they are rotated, or None.
        scale: of the scores; None is D ** -0.5.
        sinks: [num_heads] scores of a key without value per head, or None.
    """

    def __init__(
        self,
        layer: int,
        qkv: ColumnLinear | NormedProjection,
        out: RowLinear,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: Rotary | None,
        qk_norm: HeadNorm | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self._layer = layer
        self._qkv = qkv
        self._out = out
        self._num_heads = num_heads
        self._num_rotated = num_heads + num_kv_heads
        self._shape = (num_heads + 2 * num_kv_heads, head_dim)
        self._rotary = rotary
        self._qk_norm = qk_norm
        self._scale = head_dim**-0.5 if scale is None else scale
        self._sinks = sinks

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        qkv = self._qkv(x).view(x.shape[0], *self._shape)
        qk, v = qkv[:, : self._num_rotated], qkv[:, self._num_rotated :]
        rotation = None if self._rotary is None else run.rotation(self._rotary, qk.dtype)
        if rotation is not None:
            qk = rotation(qk, norm=self._qk_norm)
        elif self._qk_norm is not None:
            qk = self._qk_norm(qk)
        q, k = qk[:, : self._num_heads], qk[:, self._num_heads :]
        if rotation is not None and rotation.query_scale is not None:
            q = q * rotation.query_scale
        view = run.pool.kv(self._layer)
        return self._out(run.step.attend(view, q, k, v, scale=self._scale, sinks=self._sinks).flatten(1))


class NormedProjection:
    """Queries, keys and values, the first two each normalised over the features of all heads of all tp ranks.

    All ranks have equally many features, and KV heads that are shared are on equally many ranks, so that the mean over
    all heads is the mean of what ranks have.

    Args:
        qkv: the three matrices stacked.
        q_weight, k_weight: [Q] and [K], of the norms.
        eps: keeps zeros finite.
        group: the tp group, which sums the squares.
    """

    def __init__(self, qkv: ColumnLinear, q_weight: Tensor, k_weight: Tensor, *, eps: float, group: Group) -> None:
        self._qkv = qkv
        self._weights = (q_weight, k_weight)
        self._eps = eps
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] -> new [T, Q + K + V]; means are taken in at least float32."""
        qkv = self._qkv(x)
        q_size, k_size = (len(weight) for weight in self._weights)
        parts = qkv[:, :q_size], qkv[:, q_size : q_size + k_size]
        means = torch.stack([precise(part).square().mean(-1) for part in parts], dim=-1)
        factors = torch.rsqrt(self._group.all_reduce(means) / self._group.size + self._eps)
        for part, factor, weight in zip(parts, factors.unbind(-1), self._weights, strict=True):
            part.copy_((precise(part) * factor[:, None]).to(part.dtype) * weight)
        return qkv
