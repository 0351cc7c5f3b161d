"""The projections around attention; attention itself is passed in, so no model knows where keys and values live."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.norm import HeadNorm
from raycache.layers.rope import Rotation

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D].

`layer` counts over the whole model. T are this rank's new tokens, Hq and Hkv the heads of this tp rank. Query head i
reads KV head i // (Hq / Hkv); scores are scaled by D ** -0.5. q, k, v and the result may be views with strides.
"""


class SelfAttention:
    """Query, key and value projection, rotary embedding, attention, output projection.

    Args:
        qkv: the three matrices stacked, queries first, so that they are one product.
        out: back to the hidden size, summed over tp.
        num_heads: query heads of this rank.
        num_kv_heads: KV heads of this rank.
        head_dim: D.
        qk_norm: normalises query and key heads before they are rotated, or None.
    """

    def __init__(
        self,
        qkv: ColumnLinear,
        out: RowLinear,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qk_norm: HeadNorm | None = None,
    ) -> None:
        self._qkv = qkv
        self._out = out
        self._num_heads = num_heads
        self._num_rotated = num_heads + num_kv_heads
        self._shape = (num_heads + 2 * num_kv_heads, head_dim)
        self._qk_norm = qk_norm

    def __call__(self, layer: int, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[T, C] -> new [T, C]."""
        qkv = self._qkv(x).view(x.shape[0], *self._shape)
        qk, v = qkv[:, : self._num_rotated], qkv[:, self._num_rotated :]
        if self._qk_norm is not None:
            qk = self._qk_norm(qk)
        qk = rotation(qk)
        q, k = qk[:, : self._num_heads], qk[:, self._num_heads :]
        return self._out(attend(layer, q, k, v).flatten(1))
