"""Plans which parts of a checkpoint a model reads, and in which order, by loading it without reading data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from raycache.checkpoint.read_ahead import Read


class PlannedSource(Protocol):
    """A weight source that can plan its reads."""

    def has(self, name: str) -> bool: ...

    def planned(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> Read:
        """The part of a file that `read` would read with these arguments."""
        ...


class ReadPlan:
    """A weight source that records reads instead of reading.

    Attributes:
        reads: recorded so far, in order, without empty ones.
    """

    def __init__(self, source: PlannedSource) -> None:
        self._source = source
        self.reads: list[Read] = []

    @property
    def num_bytes(self) -> int:
        """Total size of the reads."""
        return sum(read.num_bytes for read in self.reads)

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def read(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Return the slice on the meta device."""
        read = self._source.planned(name, shape=shape, axis=axis, start=start, stop=stop)
        if read.num_bytes:
            self.reads.append(read)
        cut = list(shape)
        if axis is not None:
            cut[axis] = len(range(shape[axis])[start:stop])
        return torch.empty(cut, device="meta")

    def stored(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> None:
        """Return None, so that the caller uses `read`, which reads the same bytes."""
