"""Linear layers whose weight is split over tp."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.layers import fused

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit
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
    if not isinstance(weight, Tensor):
        return weight.multiply(x, bias)
    product = _of_few_tokens(x, weight, bias)
    return F.linear(x, weight, bias) if product is None else product


class RowBlocks:
    """A matrix [O, I] whose output features are in blocks.

    Args:
        blocks: [B, O / B, I], a view of a larger matrix.
    """

    def __init__(self, blocks: Tensor) -> None:
        self._blocks = blocks
        self.shape = (blocks.shape[0] * blocks.shape[1], blocks.shape[2])

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, I] -> new [T, O]; `bias` is [O], or None."""
        few = _of_few_tokens(x, self._blocks, bias)
        if few is not None:
            return few
        num_blocks, size, _ = self._blocks.shape
        product = x.new_empty(len(x), num_blocks * size)
        parts = product.view(len(x), num_blocks, size).transpose(0, 1)
        if x.is_cuda:  # one launch, as fast as if the blocks were one matrix
            torch.bmm(x.expand(num_blocks, -1, -1), self._blocks.mT, out=parts)
        else:
            for block, part in zip(self._blocks, parts, strict=True):
                torch.mm(x, block.T, out=part)
        return product if bias is None else product.add_(bias)


class Projection(Protocol):
    """A linear layer, and what is computed with its output features."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, I] -> new [T, O]."""
        ...

    def over_cp(self, split: CpSplit) -> Projection:
        """The same with its weights split over cp; raises NotSplitError."""
        ...


class ColumnLinear:
    """Column-parallel layer: each tp rank computes its own output features, [T, I] -> [T, O / tp].

    Args:
        weight: [O / tp, I]; several matrices with the same input may be stacked.
        bias: [O / tp], or None.
        gathered: group over which the output features are split once more, and then gathered; None for no split.
    """

    def __init__(self, weight: Weight, bias: Tensor | None, *, gathered: Group | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._gathered = gathered

    def __call__(self, x: Tensor) -> Tensor:
        own = linear(x, self.weight, self.bias)
        return own if self._gathered is None else self._gathered.gather_columns(own)

    def over_cp(self, split: CpSplit) -> ColumnLinear:
        """Each cp rank computes its run of the output features, and gets those of the others."""
        bias = None if self.bias is None else split.numbers(self.bias)
        return ColumnLinear(split.rows(self.weight), bias, gathered=split.cp)

    def own_features(self, split: CpSplit, *, matrices: int = 1) -> ColumnLinear:
        """Each cp rank computes its run of the output features of each of `matrices` stacked matrices."""
        bias = None if self.bias is None else split.numbers(self.bias, matrices=matrices)
        return ColumnLinear(split.rows(self.weight, matrices=matrices), bias)


class RowLinear:
    """Row-parallel layer: each tp rank has its own input features, and products are summed, [T, I / tp] -> [T, O].

    Args:
        weight: [O, I / tp].
        bias: [O], or None; added once, to the sum.
        group: the tp group.
        taken: which features of its input it takes; None for all.
    """

    def __init__(self, weight: Weight, bias: Tensor | None, group: Group, *, taken: slice | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._group = group
        self._taken = taken

    def __call__(self, x: Tensor) -> Tensor:
        own = x if self._taken is None else x[:, self._taken]
        if self._group.size == 1:
            return linear(own, self.weight, self.bias)
        summed = self._group.all_reduce(linear(own, self.weight))
        return summed if self.bias is None else summed.add_(self.bias)

    def over_cp(self, split: CpSplit, *, is_input_split: bool = True) -> RowLinear:
        """Each cp rank multiplies its run of the input features, [T, I / (tp cp)] -> [T, O].

        Args:
            is_input_split: whether its input has only these; else it gets [T, I / tp].
        """
        taken = None if is_input_split else split.part(self.weight.shape[1], what="input features")
        return RowLinear(split.columns(self.weight), self.bias, split.stage, taken=taken)


def _of_few_tokens(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The product by the kernel for one or two tokens, or None where that does not support it."""
    # The number of tokens comes first: most products of a prompt end here.
    if len(x) > 2 or not fused.has_kernels(x) or not (kernels := _kernels()).takes(x, weight, bias):
        return None
    product: Tensor = kernels.multiply(x, weight, bias)
    return product


@cache
def _kernels() -> Any:
    from raycache.layers import vector_kernels

    return vector_kernels
