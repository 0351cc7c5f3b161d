"""Reads tensors of a checkpoint with many threads before they are requested.

    files  --- pread --->  [ pinned buffers, two per thread ]  --- copies on a stream --->  tensors on the GPU
    files  --- pread --------------------------------------------------------------------->  tensors on the CPU

The order of requests is known (read_plan.py). At most `AHEAD_BYTES` are read ahead, so that a rank needs no more memory
than that besides its weights and the buffers.
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
"""Limit of tensors that are read ahead; a larger one is read alone."""

MAX_THREADS = 16
"""Enough to saturate the link to a GPU from the page cache, and to keep a disk busy."""


@dataclass(frozen=True)
class Read:
    """A read of a box of a tensor.

    Attributes:
        offset: of the tensor in the file.
        shape: of the tensor.
        box: a range of each dimension.
    """

    file: OpenFile
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: tuple[range, ...]

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(map(len, self.box))

    @property
    def num_bytes(self) -> int:
        """Size of the box."""
        return math.prod(self.box_shape) * self.dtype.itemsize

    @property
    def place(self) -> tuple[OpenFile, int]:
        """Identifies the tensor."""
        return self.file, self.offset

    def holds(self, other: Read) -> bool:
        """Whether the other read is equal to or a part of this one."""
        return other.place == self.place and all(
            mine.start <= theirs.start and theirs.stop <= mine.stop
            for mine, theirs in zip(self.box, other.box, strict=True)
        )

    @property
    def parts(self) -> list[Part]:
        """Parts that threads can read independently."""
        return list(parts_of(self.shape, self.box, itemsize=self.dtype.itemsize, offset=self.offset))

    def now(self) -> Tensor:
        """Read on this thread, into a new tensor on the CPU.

        Raises:
            CheckpointError: the file cannot be read.
        """
        tensor = torch.empty(self.box_shape, dtype=self.dtype)
        into = bytes_of(tensor)
        for part in self.parts:
            self.file.read(part, into[part.target : part.target + part.num_bytes])
        return tensor


class ReadAhead:
    """Reads in the order of a plan. A context manager: its threads end with the block.

    Args:
        reads: in the order in which they will be requested.
        device: of the tensors.
        on_bytes: called with (bytes read, bytes of all reads) after each read of the plan.
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
        """Return the data of a read, owned by the caller.

        It can be a part of a planned read, of which the last part is requested last. Reads that were not planned are
        done immediately, to the CPU. Planned reads that are not requested in order are dropped when others need memory.

        Raises:
            CheckpointError: a file cannot be read.
        """
        if not read.num_bytes:  # only checks a tensor: must not drop other reads
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
        """Start reads: at least one, and as many as fit into `AHEAD_BYTES`."""
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
    """A read in progress."""

    def __init__(self, read: Read, threads: ThreadPoolExecutor, target: Target) -> None:
        self.read, self.tensor, self._target = read, target.empty(read.box_shape, read.dtype), target
        self._parts = [threads.submit(target.fill, self.tensor, part, read.file) for part in read.parts]

    def wait(self) -> Tensor:
        """Wait for the data, and return the tensor."""
        for part in self._parts:
            part.result()
        if self._parts:
            self._parts.clear()
            self._target.finish()
        return self.tensor
