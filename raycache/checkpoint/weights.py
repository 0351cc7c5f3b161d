"""Weight sources for checkpoints that may be quantised."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import torch
from torch import Tensor

from raycache.checkpoint.layout import Layouts, QuantisedTensor
from raycache.checkpoint.quantisation import Quantisation, is_without_effect, read_quantisation
from raycache.checkpoint.read_ahead import Read, ReadAhead
from raycache.checkpoint.slices import chunks, codes_box, cut, read_global_scale, read_scales, read_slice, within
from raycache.checkpoint.stored_slice import Format, StoredSlice
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError

_CHECKED_BYTES = 1 << 16
"""Scales up to this size are checked before anything is loaded; larger ones when they are used."""


class CheckpointWeights:
    """The weights of a checkpoint, dequantised when read (see `WeightSource`).

    Args:
        quantisation: None for plain weights.
        dtype: of dequantised tensors; plain ones keep their own.
        device: of dequantised tensors.
        kept: formats that `stored` returns.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        quantisation: Quantisation | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kept: Collection[Format] = tuple(Format),
    ) -> None:
        self._checkpoint = checkpoint
        self._layouts = Layouts(checkpoint, quantisation)
        self._dtype = dtype
        self._device = device
        self._kept = kept

    def has(self, name: str) -> bool:
        """Whether a tensor exists; a quantised one as codes and scales."""
        return self._layouts.has(name)

    def read(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Read a slice; quantised tensors are dequantised a few rows at a time."""
        tensor = self._layouts.find(name, shape)
        if tensor is None:
            return self._checkpoint.read(name, shape=shape, axis=axis, start=start, stop=stop)
        box = cut(tensor, axis=axis, start=start, stop=stop)
        numbers = torch.empty([len(run) for run in box], dtype=self._dtype, device=self._device)
        for part in chunks(box) if numbers.numel() else ():
            stored = read_slice(self._checkpoint, tensor, part).to(self._device)
            numbers[within(part, box)] = stored.numbers().to(self._dtype)
        return numbers.mT if tensor.is_transposed else numbers

    def planned(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> Read:
        """The part of a file that `read` and `stored` read with these arguments, in order, without scales."""
        tensor = self._layouts.find(name, shape)
        if tensor is None:
            return self._checkpoint.planned(name, shape=shape, axis=axis, start=start, stop=stop)
        box = codes_box(self._checkpoint, tensor, cut(tensor, axis=axis, start=start, stop=stop))
        return self._checkpoint.box(tensor.codes, box)

    def reading_ahead(self, ahead: ReadAhead) -> AbstractContextManager[None]:
        return self._checkpoint.reading_ahead(ahead)

    def stored(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> StoredSlice | None:
        """Return the stored form on the CPU."""
        tensor = self._layouts.find(name, shape)
        if tensor is None:
            self._checkpoint.check(name, shape)
            return None
        if tensor.format not in self._kept:
            return None
        return read_slice(self._checkpoint, tensor, cut(tensor, axis=axis, start=start, stop=stop))


class CheckedNames:
    """A weight source that checks names, shapes and types of tensors without reading data, except small scales."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._quantisation = read_quantisation(checkpoint.model_dir)
        self._layouts = Layouts(checkpoint, self._quantisation)
        self._has_numbers = checkpoint.has_numbers
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return self._layouts.has(name)

    def read(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Return the slice on the meta device."""
        self._check(name, shape)
        sizes = list(shape)
        if axis is not None:
            sizes[axis] = len(range(shape[axis])[start:stop])
        return torch.empty(sizes, device="meta")

    def stored(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> None:
        """Return None: tensors count as unquantised."""
        self._check(name, shape)

    def _check(self, name: str, shape: Sequence[int]) -> None:
        tensor = self._layouts.find(name, shape)
        if tensor is None:
            self._checkpoint.check(name, shape)
        elif name not in self._read:
            self._read.update(tensor.names)
            if self._has_numbers:
                self._check_scales(tensor)
        self._read.add(name)

    def _check_scales(self, tensor: QuantisedTensor) -> None:
        read_global_scale(self._checkpoint, tensor)
        if self._checkpoint.entry(tensor.scales).num_bytes <= _CHECKED_BYTES:
            read_scales(self._checkpoint, tensor, tuple(map(range, tensor.grid)))

    def unread(self) -> list[str]:
        """Names of tensors that were never requested, sorted, without those that have no effect."""
        names = sorted(set(self._checkpoint.names()) - self._read)
        return names if self._quantisation is None else [name for name in names if not is_without_effect(name)]


def plain_dtype(model_dir: Path, *, is_quantised: bool) -> str:
    """Default dtype of a model: the most frequent one among its weights that are not quantised.

    Without weights it is float32, or bfloat16 for quantised models.
    """
    numbers: Counter[str] = Counter()
    with suppress(CheckpointError):  # raised again when the weights are checked
        checkpoint = Checkpoint(model_dir)
        for stored in map(checkpoint.entry, checkpoint.names()):
            numbers[stored.dtype] += math.prod(stored.shape)
    found = [(numbers[dtype], name) for dtype, name in _DTYPES.items() if numbers[dtype]]
    return max(found)[1] if found else "bfloat16" if is_quantised else "float32"


_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
