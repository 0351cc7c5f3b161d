"""What a model reads of a checkpoint, and in which order: its loading gone through without numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from raycache.checkpoint.read_ahead import Read


class PlannedSource(Protocol):
    """A weight source that can say what it would read."""

    def has(self, name: str) -> bool: ...

    def planned(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> Read:
        """What `read` with these arguments would read."""
        ...


class ReadPlan:
    """A weight source without numbers that notes what it is asked for.

    Args:
        source: whose reads are planned.
    Attributes:
        reads: so far, in their order; none of them empty.
    """

    def __init__(self, source: PlannedSource) -> None:
        self._source = source
        self.reads: list[Read] = []

    @property
    def num_bytes(self) -> int:
        """Of all reads."""
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
