"""Weights of decode steps, split over cp as well as over tp.

Every cp rank holds all weights of its tp rank. In a step whose rows all have one new token, reading them takes most of
the time, so cp ranks do not divide the rows: each computes all of them with its share of the weights. Shares are views:

    column-parallel    [ rank 0 | rank 1 ] of the output features, which are gathered, or stay split until
    row-parallel       [ rank 0 | rank 1 ] of the input features, whose products are summed over tp x cp
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from raycache.layers.linear import Weight
    from raycache.parallel.collectives import Group
    from raycache.parallel.context import ParallelContext

# Shapes in this file: T packed tokens, I input features, O output features.


class NotSplitError(Exception):
    """A layer's weights cannot be split over cp; the message says why."""


@dataclass(frozen=True)
class CpSplit:
    """One rank's share of weights that are split over cp.

    Attributes:
        cp: the cp group.
        stage: all ranks of the stage.
    """

    cp: Group
    stage: Group

    @classmethod
    def of(cls, ctx: ParallelContext) -> CpSplit:
        """The share of this rank."""
        return cls(ctx.cp, ctx.stage)

    def part(self, size: int, *, what: str) -> slice:
        """This rank's part of `size` features or heads, `what` for the message.

        Raises:
            NotSplitError: cp does not divide them.
        """
        if size % self.cp.size:
            raise NotSplitError(f"cp={self.cp.size} does not divide the {size} {what} of a rank")
        share = size // self.cp.size
        return slice(self.cp.rank * share, (self.cp.rank + 1) * share)

    def rows(self, weight: Weight, *, matrices: int = 1) -> Weight:
        """This rank's output features of each of `matrices` stacked matrices of the same size, [O / cp, I].

        Raises:
            NotSplitError: cp does not divide them, or the weight is quantised.
        """
        blocks = _plain(weight).unflatten(0, (matrices, -1))
        own = blocks[:, self.part(blocks.shape[1], what="output features")]
        return own[0] if matrices == 1 else RowBlocks(own.unbind(0))

    def numbers(self, bias: Tensor, *, matrices: int = 1) -> Tensor:
        """Like `rows`, for a vector [..., O]."""
        blocks = bias.unflatten(-1, (matrices, -1))
        own: Tensor = blocks[..., self.part(blocks.shape[-1], what="output features")]
        return own.flatten(-2)

    def columns(self, weight: Weight) -> Tensor:
        """This rank's input features, [..., O, I / cp].

        Raises:
            NotSplitError: cp does not divide them, or the weight is quantised.
        """
        plain = _plain(weight)
        return plain[..., self.part(plain.shape[-1], what="input features")]


class RowBlocks:
    """A matrix [O, I] whose output features are in several tensors [o, I]."""

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        self._blocks = blocks
        self._sizes = [len(block) for block in blocks]
        self.shape = (sum(self._sizes), blocks[0].shape[1])

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, I] -> new [T, O]; `bias` is [O], or None."""
        product = x.new_empty(len(x), self.shape[0])
        for block, part in zip(self._blocks, product.split(self._sizes, dim=1), strict=True):
            torch.mm(x, block.T, out=part)
        return product if bias is None else product.add_(bias)


def _plain(weight: Weight) -> Tensor:
    if not isinstance(weight, Tensor):
        raise NotSplitError("weights stay quantised on the device")
    return weight
