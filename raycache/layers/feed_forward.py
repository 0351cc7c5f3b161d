"""Dense feed-forward blocks (MLPs)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from raycache.layers.activation import Activation, silu_gated
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.weights import Columns, ShardedWeights

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit


class FeedForward:
    """down(activation(up(x))).

    Args:
        up: for gated activations, gate and up stacked, gate first.
    """

    is_position_wise = True

    def __init__(self, up: ColumnLinear, down: RowLinear, *, activation: Activation) -> None:
        self._up = up
        self._down = down
        self._activation = activation

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        return self._down(self._activation(self._up(x)))

    def over_cp(self, split: CpSplit) -> FeedForward:
        """The same with its inner features split over cp."""
        matrices = self._up.weight.shape[0] // self._down.weight.shape[1]  # gate and up, or up alone
        up = self._up.own_features(split, matrices=matrices)
        return FeedForward(up, self._down.over_cp(split), activation=self._activation)


@dataclass(frozen=True)
class FeedForwardNames:
    """Names of the tensors of a feed-forward block or expert, without ".weight".

    Attributes:
        up: gate and up, in this order, or up alone.
    """

    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


GATED = FeedForwardNames()
MIXTRAL = FeedForwardNames(up=("w1", "w3"), down="w2")
UNGATED = FeedForwardNames(up=("up_proj",))


def load_feed_forward(
    weights: ShardedWeights,
    *,
    size: int,
    inner: int,
    names: FeedForwardNames = GATED,
    activation: Activation = silu_gated,
    has_bias: bool = False,
) -> FeedForward:
    """Read this rank's share of a block of hidden size `size` with `inner` inner features."""
    taken = weights.heads(inner)
    parts = [Columns(name, inner, taken) for name in names.up]
    return FeedForward(
        weights.column(parts, inputs=size, has_bias=has_bias),
        weights.row(names.down, outputs=size, inputs=inner, taken=taken, has_bias=has_bias),
        activation=activation,
    )
