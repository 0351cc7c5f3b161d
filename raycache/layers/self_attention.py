"""The projections around attention; attention itself comes with the pass, so no model knows where keys and values
live."""

from __future__ import annotations

from torch import Tensor

from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.norm import HeadNorm
from raycache.layers.rope import Rotary

# Shapes in this file: T packed tokens of this rank, C hidden size.


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
        qkv: ColumnLinear,
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
        if self._rotary is not None:
            qk = run.rotation(self._rotary, qk.dtype)(qk, norm=self._qk_norm)
        elif self._qk_norm is not None:
            qk = self._qk_norm(qk)
        q, k = qk[:, : self._num_heads], qk[:, self._num_heads :]
        view = run.pool.kv(self._layer)
        return self._out(run.step.attend(view, q, k, v, scale=self._scale, sinks=self._sinks).flatten(1))
