"""Tensors of a checkpoint, read by many threads before they are asked for.

    files  --- pread --->  [ pinned buffers, two per thread ]  --- copies on a stream --->  tensors on the GPU
    files  --- pread --------------------------------------------------------------------->  tensors on the CPU

The order in which tensors will be asked for is known (read_plan.py). What is read before it is asked for is at most
`AHEAD_BYTES`, so that is all that a rank takes beside its weights, and the buffers.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from raycache.checkpoint.file_reads import OpenFile, Part, parts_of
from raycache.checkpoint.read_targets import Target, bytes_of, target_on

AHEAD_BYTES = 512 << 20
"""Of tensors that are being read before they are asked for; a larger one is read by itself."""

MAX_THREADS = 16
"""Enough to be as fast as the link to a GPU out of the page cache, and to keep a disk busy."""


@dataclass(frozen=True)
class Read:
    """A box of a tensor in a file.

    Attributes:
        file: that it lies in.
        offset: of the tensor in the file.
        dtype: of its numbers.
        shape: of the tensor.
        box: a run of every dimension.
    """

    file: OpenFile
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: tuple[range, ...]

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Of what is read."""
        return tuple(map(len, self.box))

    @property
    def num_bytes(self) -> int:
        """Of what is read."""
        return math.prod(self.box_shape) * self.dtype.itemsize

    @property
    def place(self) -> tuple[OpenFile, int]:
        """Which tensor it is of."""
        return self.file, self.offset

    def holds(self, other: Read) -> bool:
        """Whether the other is this, or a part of it."""
        return other.place == self.place and all(
            mine.start <= theirs.start and theirs.stop <= mine.stop
            for mine, theirs in zip(self.box, other.box, strict=True)
        )

    @property
    def parts(self) -> list[Part]:
        """What threads can read one by one."""
        return list(parts_of(self.shape, self.box, itemsize=self.dtype.itemsize, offset=self.offset))

    def now(self) -> Tensor:
        """Read it in this thread.

        Returns:
            On the CPU, the caller's own.
        Raises:
            CheckpointError: the file cannot be read.
        """
        tensor = torch.empty(self.box_shape, dtype=self.dtype)
        into = bytes_of(tensor)
        for part in self.parts:
            self.file.read(part, into[part.target : part.target + part.num_bytes])
        return tensor


class ReadAhead:
    """Reads in the order of a plan. A context manager: its threads end when it is left.

    Args:
        reads: in the order in which they will be asked for.
        device: that tensors are read to.
        num_threads: that read.
        on_bytes: told (bytes read, bytes of all reads) after each read of the plan.
    """

    def __init__(
        self, reads: Sequence[Read], *, device: torch.device, num_threads: int, on_bytes: Callable[[int, int], None]
    ) -> None:
        self._waiting, self._begun = deque(reads), list[_Reading]()
        self._are_waiting = Counter(read.place for read in reads)
        self._on_bytes, self._total = on_bytes, sum(read.num_bytes for read in reads)
        self._done = self._ahead = 0
        self._target = target_on(device)
        self._threads = ThreadPoolExecutor(num_threads, "weights", initializer=self._target.begin_thread)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._target.finish()

    def take(self, read: Read) -> Tensor:
        """The numbers of a read, the caller's own.

        A read can be a part of what was planned; its last numbers are asked for last. What is not in the plan is read
        at once, to the CPU. Reads of the plan that are not asked for in their turn are dropped when others need their
        place.

        Raises:
            CheckpointError: a file cannot be read.
        """
        if not read.num_bytes:  # asked for a tensor's other dimensions: nothing is to give way to it
            return read.now()
        self._begin()
        while (found := self._find(read)) is None and self._are_waiting[read.place]:
            self._begun[0].wait()
            self._drop(self._begun[0])
            self._begin()
        if found is None:
            return read.now()
        pairs = list(zip(read.box, found.read.box, strict=True))
        if all(theirs.stop == mine.stop for theirs, mine in pairs):
            self._drop(found)
            self._begin()
        return found.wait()[tuple(slice(theirs.start - mine.start, theirs.stop - mine.start) for theirs, mine in pairs)]

    def _find(self, read: Read) -> _Reading | None:
        exact = (one for one in self._begun if one.read == read)
        return next(exact, None) or next((one for one in self._begun if one.read.holds(read)), None)

    def _begin(self) -> None:
        """Begin reads: one at least, and as many as may be ahead."""
        while self._waiting and (not self._begun or self._ahead + self._waiting[0].num_bytes <= AHEAD_BYTES):
            read = self._waiting.popleft()
            self._are_waiting[read.place] -= 1
            self._ahead += read.num_bytes
            self._begun.append(_Reading(read, self._threads, self._target))

    def _drop(self, reading: _Reading) -> None:
        self._begun.remove(reading)
        self._ahead -= reading.read.num_bytes
        self._done += reading.read.num_bytes
        self._on_bytes(self._done, self._total)


class _Reading:
    """A read that threads are at."""

    def __init__(self, read: Read, threads: ThreadPoolExecutor, target: Target) -> None:
        self.read, self.tensor, self._target = read, target.empty(read.box_shape, read.dtype), target
        self._parts = [threads.submit(target.fill, self.tensor, part, read.file) for part in read.parts]

    def wait(self) -> Tensor:
        """The tensor with its numbers."""
        for part in self._parts:
            part.result()
        if self._parts:
            self._parts.clear()
            self._target.finish()
        return self.tensor
