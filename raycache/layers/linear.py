"""Linear layers whose weight is split over tp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from raycache.parallel.collectives import Group

# Shapes in this file: T packed tokens, I input features, O output features.


class Matrix(Protocol):
    """A weight [O, I] that is not a plain tensor, such as a quantised one."""

    shape: tuple[int, int]

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, I] -> new [T, O]; `bias` is [O], or None."""
        ...


Weight = Tensor | Matrix


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """F.linear for tensors and other weights."""
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight.multiply(x, bias)


class ColumnLinear:
    """Column-parallel layer: each tp rank computes its own output features, [T, I] -> [T, O / tp].

    Args:
        weight: [O / tp, I]; several matrices with the same input may be stacked.
        bias: [O / tp], or None.
    """

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RowLinear:
    """Row-parallel layer: each tp rank has its own input features, and products are summed, [T, I / tp] -> [T, O].

    Args:
        weight: [O, I / tp].
        bias: [O], or None; added once, to the sum.
        group: the tp group.
    """

    def __init__(self, weight: Weight, bias: Tensor | None, group: Group) -> None:
        self.weight = weight
        self.bias = bias
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        summed = self._group.all_reduce(linear(x, self.weight))
        return summed if self.bias is None else summed.add_(self.bias)
