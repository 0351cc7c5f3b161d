"""Weights of decode steps, split over cp as well as over tp.

Every cp rank holds all weights of its tp rank. In a step whose rows all have one new token, reading them takes most of
the time, so cp ranks do not divide the rows: each computes all of them with its share of the weights. Shares are views:

    column-parallel    [ rank 0 | rank 1 ] of the output features, which are gathered, or stay split until
    row-parallel       [ rank 0 | rank 1 ] of the input features, whose products are summed over tp x cp
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from raycache.layers.linear import RowBlocks

if TYPE_CHECKING:
    from raycache.layers.linear import Weight
    from raycache.parallel.collectives import Group
    from raycache.parallel.context import ParallelContext

_ALIGNED = {"cuda": 8}
"""Device type -> features that runs of input features are multiples of. Where rows of a view do not begin at multiples
of 16 bytes, matrix products of experts cannot be recorded in CUDA graphs, and others are slower."""

# Shapes in this file: T packed tokens, I input features, O output features.


class NotSplitError(Exception):
    """A layer's weights cannot be split over cp; the message says why."""


@dataclass(frozen=True)
class CpSplit:
    """One rank's share of weights that are split over cp.

    Attributes:
        cp: the cp group.
        stage: all ranks of the stage.
        aligned: what runs of input features are multiples of.
    """

    cp: Group
    stage: Group
    aligned: int = 1

    @classmethod
    def of(cls, ctx: ParallelContext, *, device_type: str = "") -> CpSplit:
        """The share of this rank; `device_type` is that of its device, unless weights are only counted."""
        return cls(ctx.cp, ctx.stage, _ALIGNED.get(device_type or ctx.device.type, 1))

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
        return own[0] if matrices == 1 else RowBlocks(own)

    def numbers(self, bias: Tensor, *, matrices: int = 1) -> Tensor:
        """Like `rows`, for a vector [..., O]."""
        blocks = bias.unflatten(-1, (matrices, -1))
        own: Tensor = blocks[..., self.part(blocks.shape[-1], what="output features")]
        return own.flatten(-2)

    def columns(self, weight: Weight) -> Tensor:
        """This rank's input features, [..., O, I / cp].

        Raises:
            NotSplitError: cp does not divide them, their number is not aligned, or the weight is quantised.
        """
        plain = _plain(weight)
        own = self.part(plain.shape[-1], what="input features")
        if (size := own.stop - own.start) % self.aligned:
            raise NotSplitError(f"{size} input features per rank are not a multiple of {self.aligned}")
        return plain[..., own]


def _plain(weight: Weight) -> Tensor:
    if not isinstance(weight, Tensor):
        raise NotSplitError("weights stay quantised on the device")
    return weight
