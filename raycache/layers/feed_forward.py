"""The feed-forward part of a layer whose tokens all pass through the same weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from raycache.layers.activation import Activation, silu_gated
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.weights import Columns, ShardedWeights


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


@dataclass(frozen=True)
class Products:
    """Tensors of one feed-forward block or expert, without ".weight".

    Attributes:
        up: gate and up, in this order, or up alone.
        down: back to the hidden size.
    """

    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


GATED = Products()
MIXTRAL = Products(up=("w1", "w3"), down="w2")
"""As Mixtral and those after it call them."""

UNGATED = Products(up=("up_proj",))
"""Up and down without a gate."""


def load_feed_forward(
    weights: ShardedWeights,
    *,
    size: int,
    inner: int,
    names: Products = GATED,
    activation: Activation = silu_gated,
    has_bias: bool = False,
) -> FeedForward:
    """Read this rank's part of `inner` features between `size`."""
    taken = weights.heads(inner)
    parts = [Columns(name, inner, taken) for name in names.up]
    return FeedForward(
        weights.column(parts, inputs=size, has_bias=has_bias),
        weights.row(names.down, outputs=size, inputs=inner, taken=taken, has_bias=has_bias),
        activation=activation,
    )
