"""Reads boxes of row-major tensors from files, in parts that threads can read in parallel.

A box is a range of each dimension. If it does not cover whole rows, the rows are read in blocks, from which the wanted
columns are copied:

    file    [ row 0 ........ | row 1 ........ | row 2 ........ ]
    wanted        [====]           [====]           [====]
    read          [---------------------------------------]        one call, and one copy without what lies between
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raycache.errors import CheckpointError

PART_BYTES = 8 << 20
"""Bytes per read call: large enough that calls are cheap, small enough that many threads can share a tensor."""

_LONG_RUN = 256 << 10
"""Runs of at least this many bytes are read separately, without the gaps between rows."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Part:
    """Equally long runs of a file, equally far apart, at most `PART_BYTES` from the first to the last byte.

    Attributes:
        offset: of the first run in the file.
        num_runs, run_bytes: of the part.
        stride: from the begin of a run to that of the next.
        target: where the first run belongs in the box; the others follow without gaps.
    """

    offset: int
    num_runs: int
    run_bytes: int
    stride: int
    target: int

    @property
    def num_bytes(self) -> int:
        """Of the box."""
        return self.num_runs * self.run_bytes

    @property
    def span(self) -> int:
        """Bytes of the file from the first to the last of them."""
        return (self.num_runs - 1) * self.stride + self.run_bytes


def parts_of(shape: Sequence[int], box: Sequence[range], *, itemsize: int, offset: int) -> Iterator[Part]:
    """Split a box of a tensor into parts, in order.

    Args:
        shape: of the tensor.
        box: a range of each dimension.
        itemsize: bytes per element.
        offset: of the tensor in its file.
    """
    if not all(map(len, box)):
        return
    *outer, (num_rows, rows), (width, columns) = _merged(shape, box)
    run, stride, target = len(columns) * itemsize, width * itemsize, 0
    for at in itertools.product(*(taken for _, taken in outer)):
        first = 0
        for (size, _), place in zip(outer, at, strict=True):
            first = first * size + place
        begin = offset + ((first * num_rows + rows.start) * width + columns.start) * itemsize
        yield from _parts(begin, len(rows), run, stride, target)
        target += len(rows) * run


def _parts(begin: int, num_runs: int, run: int, stride: int, target: int) -> Iterator[Part]:
    if run == stride:  # rows without gaps
        num_runs, run, stride = 1, num_runs * run, num_runs * run
    if num_runs == 1 or run >= _LONG_RUN:
        for row, done in itertools.product(range(num_runs), range(0, run, PART_BYTES)):
            length = min(PART_BYTES, run - done)
            yield Part(begin + row * stride + done, 1, length, length, target + row * run + done)
        return
    step = max(1, PART_BYTES // stride)
    for row in range(0, num_runs, step):
        yield Part(begin + row * stride, min(step, num_runs - row), run, stride, target + row * run)


def _merged(shape: Sequence[int], box: Sequence[range]) -> list[tuple[int, range]]:
    """(size, run) of two or more dimensions, with those joined that a whole one follows; outermost first."""
    merged: list[tuple[int, range]] = []
    for size, taken in zip(reversed(shape), reversed(box), strict=True):
        inner = merged[-1] if merged else (1, range(1))
        if len(inner[1]) == inner[0]:
            joined = (size * inner[0], range(taken.start * inner[0], taken.stop * inner[0]))
            merged[-1:] = [joined]
        else:
            merged.append((size, taken))
    while len(merged) < 2:
        merged.append((1, range(1)))
    return merged[::-1]


class OpenFile:
    """A file that threads can read concurrently; closed when it is garbage collected.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as cause:
            raise CheckpointError(self._problem(cause)) from cause
        weakref.finalize(self, os.close, self._handle)

    def read(self, part: Part, into: Bytes, *, scratch: Bytes | None = None) -> None:
        """Read a part.

        Args:
            part: which.
            into: the bytes of the part, without gaps.
            scratch: at least `part.span` bytes, for parts of many runs; made if there is none.
        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """
        if part.num_runs == 1:
            self._fill(into, part.offset)
            return
        span = (np.empty(part.span, np.uint8) if scratch is None else scratch)[: part.span]
        self._fill(span, part.offset)
        runs = np.lib.stride_tricks.as_strided(span, (part.num_runs, part.run_bytes), (part.stride, 1))
        np.copyto(into.reshape(part.num_runs, part.run_bytes), runs)

    def _fill(self, into: Bytes, offset: int) -> None:
        view, done = into.data, 0
        while done < len(view):
            try:
                count = os.preadv(self._handle, [view[done:]], offset + done)
            except OSError as cause:
                raise CheckpointError(self._problem(cause)) from cause
            if count == 0:
                raise CheckpointError(self._problem("it ends too early"))
            done += count

    def _problem(self, cause: object) -> str:
        return f"{self._path} cannot be read ({cause}); was it changed while it was open?"
