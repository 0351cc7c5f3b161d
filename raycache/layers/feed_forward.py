"""The feed-forward part of a layer whose tokens all pass through the same weights."""

from __future__ import annotations

from torch import Tensor

from raycache.layers.activation import Activation
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear


class FeedForward:
    """down(activation(up(x))).

    Args:
        up: gate and up stacked, gate first, in front of a gated activation; up alone in front of a plain one.
        down: back to the hidden size, summed over tp.
        activation: what stands between.
    """

    def __init__(self, up: ColumnLinear, down: RowLinear, *, activation: Activation) -> None:
        self._up = up
        self._down = down
        self._activation = activation

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        return self._down(self._activation(self._up(x)))
