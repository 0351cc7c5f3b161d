"""Reads one rank's share of a model's weights.

    column   column-parallel: a rank reads the rows of [O, I] (output features) of its heads
    row      row-parallel: a rank reads the columns of [O, I] (input features) of its heads
    vocab    ceil(V / tp) rows per rank, zeros beyond the vocabulary
    cut      a slice along one axis of any tensor, such as the heads of a bias
    whole    all of it on every rank

Tensors are used as they were read where possible. Otherwise a matrix is allocated once on the device and slices are
copied into it: loading needs memory for one slice, and what is read ahead, besides the model. A matrix is allocated
after the sizes of its tensors were checked, so that a wrong config.json does not allocate memory.
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
    """Rows (output features) of a weight matrix.

    Attributes:
        name: of the tensor, without ".weight".
        size: number of rows of the whole matrix.
        taken: rows of this rank.
    """

    name: str
    size: int
    taken: range


class ShardedWeights:
    """One rank's view of a model's weights; tensors are converted to `dtype`."""

    def __init__(self, source: WeightSource, ctx: ParallelContext, dtype: torch.dtype) -> None:
        self._source = source
        self.ctx = ctx
        self._dtype = dtype
        self._kept = KeptWeights(source, ctx.device, dtype)
        self._prefix = ""

    def under(self, name: str) -> ShardedWeights:
        """The tensors whose names begin with `name` and a dot, by the rest of their names."""
        inner = copy.copy(self)
        inner._prefix = f"{self._prefix}{name}."
        return inner

    def heads(self, count: int, *, is_shared: bool = False, over_cp: bool = False) -> range:
        """This rank's share of `count` heads or features; see `HeadCount` for the other arguments."""
        tp = self.ctx.tp
        part = state_part(self.ctx.split, self.ctx.coords) if over_cp else (tp.rank, tp.size)
        return (shared_head_range if is_shared else even_range)(count, *part)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that weights are converted to, that of the activations."""
        return self._dtype

    @property
    def precise(self) -> torch.dtype:
        """The dtype of weights that are used in at least float32, such as decays."""
        return precise_dtype(self._dtype)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return self._source.has(self._prefix + name)

    def fits(self, name: str, *shape: int) -> bool:
        """Whether an existing tensor has this shape."""
        try:
            self._read(name, shape, taken=range(0))
        except CheckpointError:
            return False
        return True

    def whole(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Read all of a tensor, in `dtype` or that of the activations."""
        return self._own(self._source.read(self._prefix + name, shape=shape), dtype)

    def integers(self, name: str, count: int) -> Tensor:
        """Read all of a tensor of `count` integers, as int64."""
        return self._source.read(self._prefix + name, shape=(count,)).to(self.ctx.device, torch.int64)

    def cut(
        self, name: str, shape: Sequence[int], *, axis: int, taken: range, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Read the slice `taken` along an axis of a tensor of `shape`, in `dtype` or that of the activations."""
        return self._own(self._read(name, shape, axis=axis, taken=taken), dtype)

    def column(self, parts: Sequence[Columns], *, inputs: int, has_bias: bool) -> ColumnLinear:
        """Read matrices with the same `inputs` features, stacked in the order of `parts`."""
        cuts = [Cut(f"{part.name}.weight", (part.size, inputs), axis=0, taken=part.taken) for part in parts]
        weight: Weight = self._kept.matrix(self._prefixed(cuts)) or self._stack(parts, ".weight", (inputs,))
        return ColumnLinear(weight, self._stack(parts, ".bias", ()) if has_bias else None)

    def row(self, name: str, *, outputs: int, inputs: int, taken: range, has_bias: bool) -> RowLinear:
        """Read a matrix whose input features are split; the bias is not, since it is added to the sum."""
        weight = self.inner(f"{name}.weight", outputs=outputs, inputs=inputs, taken=taken)
        return RowLinear(weight, self.whole(f"{name}.bias", outputs) if has_bias else None, self.ctx.tp)

    def inner(self, name: str, *, outputs: int, inputs: int, taken: range) -> Weight:
        """Read the columns `taken` of a matrix [outputs, inputs], quantised if it stays so."""
        own = Cut(name, (outputs, inputs), axis=1, taken=taken)
        return self._kept.matrix(self._prefixed([own])) or self.cut(name, own.shape, axis=1, taken=taken)

    def kept_experts(
        self, groups: Sequence[Sequence[Cut]], *, rows: Sequence[int] | None = None
    ) -> ExpertMatrices | None:
        """Read experts that stay quantised (see `KeptWeights.experts`), or return None."""
        return self._kept.experts([self._prefixed(cuts) for cuts in groups], rows=rows)

    def vocab(self, name: str, *, vocab_size: int, features: int) -> Tensor:
        """Read this rank's rows of a vocabulary matrix: [ceil(V / tp), features]."""
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
            self._read(name + suffix, (size, *inputs), taken=range(0))  # checks name and shape
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
        """The same cuts with the source's names."""
        return [replace(cut, name=self._prefix + cut.name) for cut in cuts]

    def _own(self, read: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return `read` itself if it has the right dtype and device and owns its storage, else a copy."""
        is_whole = read.is_contiguous() and read.untyped_storage().nbytes() == read.nbytes
        if is_whole and read.dtype == (dtype or self._dtype) and read.device == self.ctx.device:
            return read
        return self._empty(*read.shape, dtype=dtype).copy_(read)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self.ctx.device)


def features(heads: range, dim: int) -> range:
    """Features of a range of heads with `dim` features each."""
    return range(heads.start * dim, heads.stop * dim)


def whole_columns(name: str, size: int) -> Columns:
    """All rows, on every rank."""
    return Columns(name, size, range(size))
