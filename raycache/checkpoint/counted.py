"""Memory needed for weights, computed by a weight source that counts instead of reading."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from raycache.checkpoint.layout import Layouts
from raycache.checkpoint.stored_slice import Format
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.checkpoint.weights_form import WeightsForm


class CountedWeights:
    """A weight source that counts the memory of requested tensors.

    Args:
        checkpoint: None for random weights, which have every tensor.
        layouts: of the same checkpoint.
        form: how quantised weights are held in memory, None for plain ones.
        dtype: of all other weights in memory.
    Attributes:
        num_bytes: by format of quantised weights, or dtype.
        formats: number of slices per format of the checkpoint's quantised tensors.
    """

    def __init__(
        self, checkpoint: Checkpoint | None, layouts: Layouts | None, *, form: WeightsForm | None, dtype: torch.dtype
    ) -> None:
        self._checkpoint = checkpoint
        self._layouts = layouts
        self._form = form
        self._dtype = dtype
        self.num_bytes = Counter[str]()
        self.formats = Counter[Format]()

    def has(self, name: str) -> bool:
        """Whether a tensor exists; random weights have only the usual names."""
        return self._layouts is not None and self._layouts.has(name)

    def read(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Return the slice on the meta device."""
        sizes = list(shape)
        if axis is not None:
            sizes[axis] = len(range(shape[axis])[start:stop])
        self._count(name, shape, taken=math.prod(sizes))
        return torch.empty(sizes, device="meta")

    def stored(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> None:
        """Return None, so that `read` counts the tensor."""

    def _count(self, name: str, shape: Sequence[int], *, taken: int) -> None:
        tensor = None if self._layouts is None else self._layouts.find(name, shape)
        if tensor is not None and taken:
            self.formats[tensor.format] += 1
        if tensor is None or self._form is None or self._checkpoint is None or tensor.format not in self._form.stored:
            self.num_bytes[str(self._dtype).removeprefix("torch.")] += taken * self._dtype.itemsize
            return
        whole = sum(self._checkpoint.entry(part).num_bytes for part in tensor.names)
        self.num_bytes[tensor.format.value] += whole * taken // math.prod(shape)
