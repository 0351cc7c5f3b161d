"""One tp rank's share of the layers of a model, cut out of a weight source.

    column   rows of [O, I] are output features; a rank takes the rows of its heads
    row      columns of [O, I] are input features; a rank takes the columns of its heads
    vocab    rows are tokens; ceil(V / tp) each, zeros past the end
    cut      a run along one axis of any tensor, such as the heads of a bias
    whole    every rank has all of it

What was read is used as it is where it can be. Otherwise a matrix is allocated once on the device and slices are copied
into it: loading peaks at one slice above the model, and what is read ahead. Allocated after a tensor of its size was
found, so that a config that lies takes no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.checkpoint.tensor_files import WeightSource
from raycache.errors import CheckpointError
from raycache.layers.kept_weights import Cut, KeptWeights
from raycache.layers.linear import ColumnLinear, RowLinear, Weight
from raycache.layers.precision import precise_dtype
from raycache.layers.quantised_experts import ExpertMatrices
from raycache.parallel.sharding import even_range, shared_head_range, state_part, vocab_range

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class Columns:
    """Rows of one weight matrix that a rank takes.

    Attributes:
        name: of the tensor, without ".weight".
        size: output features of the whole matrix.
        taken: those of this rank.
    """

    name: str
    size: int
    taken: range


class ShardedWeights:
    """Reads what one rank needs.

    Args:
        source: of the weights.
        ctx: whose share.
        dtype: that weights are converted to.
    Attributes:
        ctx: as given.
    """

    def __init__(self, source: WeightSource, ctx: ParallelContext, dtype: torch.dtype) -> None:
        self._source = source
        self.ctx = ctx
        self._dtype = dtype
        self._kept = KeptWeights(source, ctx.device, dtype)
        self._prefix = ""

    def under(self, name: str) -> ShardedWeights:
        """The same tensors, by what follows `name` and a dot in their names."""
        inner = copy.copy(self)
        inner._prefix = f"{self._prefix}{name}."
        return inner

    def heads(self, count: int, *, is_shared: bool = False, over_cp: bool = False) -> range:
        """Those of `count` heads, or features, that this rank takes; the arguments are those of `HeadCount`."""
        tp = self.ctx.tp
        part = state_part(self.ctx.split, self.ctx.coords) if over_cp else (tp.rank, tp.size)
        return (shared_head_range if is_shared else even_range)(count, *part)

    @property
    def precise(self) -> torch.dtype:
        """Of weights that are used in at least float32 whatever the activations are, such as decays."""
        return precise_dtype(self._dtype)

    def has(self, name: str) -> bool:
        """Whether there is a tensor that checkpoints may lack, or have under another name."""
        return self._source.has(self._prefix + name)

    def fits(self, name: str, *shape: int) -> bool:
        """Whether a tensor that is there has this shape."""
        try:
            self._read(name, shape, taken=range(0))
        except CheckpointError:
            return False
        return True

    def whole(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that every rank has, in `dtype` or that of the activations."""
        return self._own(self._source.read(self._prefix + name, shape=shape), dtype)

    def integers(self, name: str, count: int) -> Tensor:
        """A list of `count` numbers that every rank has, int64."""
        return self._source.read(self._prefix + name, shape=(count,)).to(self.ctx.device, torch.int64)

    def cut(
        self, name: str, shape: Sequence[int], *, axis: int, taken: range, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The run `taken` along an axis of a tensor of `shape`, in `dtype` or that of the activations."""
        return self._own(self._read(name, shape, axis=axis, taken=taken), dtype)

    def column(self, parts: Sequence[Columns], *, inputs: int, has_bias: bool) -> ColumnLinear:
        """Matrices over the same `inputs` features, stacked in the order of `parts`."""
        cuts = [Cut(f"{part.name}.weight", (part.size, inputs), axis=0, taken=part.taken) for part in parts]
        weight: Weight = self._kept.matrix(self._prefixed(cuts)) or self._stack(parts, ".weight", (inputs,))
        return ColumnLinear(weight, self._stack(parts, ".bias", ()) if has_bias else None)

    def row(self, name: str, *, outputs: int, inputs: int, taken: range, has_bias: bool) -> RowLinear:
        """A matrix whose input features are split; the bias is whole, for it is added after the sum."""
        weight = self.inner(f"{name}.weight", outputs=outputs, inputs=inputs, taken=taken)
        return RowLinear(weight, self.whole(f"{name}.bias", outputs) if has_bias else None, self.ctx.tp)

    def inner(self, name: str, *, outputs: int, inputs: int, taken: range) -> Weight:
        """The input features `taken` of a matrix [outputs, inputs], in any form."""
        own = Cut(name, (outputs, inputs), axis=1, taken=taken)
        return self._kept.matrix(self._prefixed([own])) or self.cut(name, own.shape, axis=1, taken=taken)

    def kept_experts(
        self, groups: Sequence[Sequence[Cut]], *, rows: Sequence[int] | None = None
    ) -> ExpertMatrices | None:
        """Experts that stay quantised, see `KeptWeights.experts`; None for those that are read as numbers."""
        return self._kept.experts([self._prefixed(cuts) for cuts in groups], rows=rows)

    def vocab(self, name: str, *, vocab_size: int, features: int) -> Tensor:
        """[ceil(V / tp), features], the rows of this rank."""
        tp = self.ctx.tp
        taken = vocab_range(vocab_size, tp.rank, tp.size)
        rows = self._read(name, (vocab_size, features), taken=taken)
        if len(taken) * tp.size == vocab_size:
            return self._own(rows)
        weight = torch.zeros(-(-vocab_size // tp.size), features, dtype=self._dtype, device=self.ctx.device)
        weight[: len(taken)] = rows
        return weight

    def _stack(self, parts: Sequence[Columns], suffix: str, inputs: tuple[int, ...]) -> Tensor:
        for name, size in {part.name: part.size for part in parts}.items():
            self._read(name + suffix, (size, *inputs), taken=range(0))  # of no rows: it is there
        cuts = (self._read(part.name + suffix, (part.size, *inputs), taken=part.taken) for part in parts)
        if len(parts) == 1:
            return self._own(next(cuts))
        stacked = self._empty(sum(len(part.taken) for part in parts), *inputs)
        done = 0
        for part, cut in zip(parts, cuts, strict=True):
            stacked[done : done + len(part.taken)] = cut
            done += len(part.taken)
        return stacked

    def _read(self, name: str, shape: Sequence[int], *, axis: int = 0, taken: range) -> Tensor:
        return self._source.read(self._prefix + name, shape=shape, axis=axis, start=taken.start, stop=taken.stop)

    def _prefixed(self, cuts: Sequence[Cut]) -> list[Cut]:
        """The same cuts, by the names that the source knows."""
        return [replace(cut, name=self._prefix + cut.name) for cut in cuts]

    def _own(self, read: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """What was read, if it is as it should be and nobody else's, or a copy."""
        is_whole = read.is_contiguous() and read.untyped_storage().nbytes() == read.nbytes
        if is_whole and read.dtype == (dtype or self._dtype) and read.device == self.ctx.device:
            return read
        return self._empty(*read.shape, dtype=dtype).copy_(read)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self.ctx.device)


def features(heads: range, dim: int) -> range:
    """Features of a run of heads of `dim` features each."""
    return range(heads.start * dim, heads.stop * dim)


def whole_columns(name: str, size: int) -> Columns:
    """All output features, on every rank."""
    return Columns(name, size, range(size))
