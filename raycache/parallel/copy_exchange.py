"""Exchange of large tensors between GPUs of a host by copy engines, beside kernels that leave no multiprocessor free.

A member copies its tensors into the other members' memory and then writes the number of the exchange there. Members
wait for that number in their own memory with an operation of the stream. Neither occupies a multiprocessor.

    memory of a member    [number of each other member][half 0: an area of each other member][half 1: the same]

Exchange n uses half n mod 2. No area is overwritten before it is read:

- A submits all that reads B's tensors of exchange n before it sends exchange n + 1 to B. Copies come after all work
  submitted before them, so when B has received n + 1, A has read n.
- B sends exchange n + 2 to A, which takes the area of n, after it has received n + 1.

All copies and waits of a member are on one stream, in the order of the exchanges. When a member's compute stream is
behind a wait, it is also behind the copies before it, so the tensors that were sent may be freed.

No member waits for what another submits later than its own wait: a copy depends on earlier work of its sender only.
So neither streams that share a queue of the GPU nor calls for which the host waits for the GPU end in a deadlock.

A wait has no limit of its own. The decider notices that a rank does not answer, and kills the gang; a rank that leaves
by itself releases its stream (`close`), as NCCL's groups do.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

_HEAD = 4096
"""Bytes of the numbers, at the start of a member's memory."""
_ALIGNED = 256
_FAR = 1 << 30
"""What `close` adds to a number; the GPU compares modulo 2^32."""

Shape = tuple[int, ...]


class CopyStream(Protocol):
    """Submits copies and waits; all are done in order."""

    def after_compute(self) -> None:
        """Order what follows after all work submitted so far to the calling thread's current stream."""

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy between contiguous tensors of the same shape and dtype."""

    def write(self, to: Tensor, number: int) -> None:
        """Write a number of 32 bits into an int32 [1] of any member, after all copies before it."""

    def wait(self, source: Tensor, number: int) -> None:
        """Wait until an int32 [1] of this member has the number or a later one, modulo 2^32."""

    def before_compute(self) -> None:
        """Order further work of the calling thread's current stream after all that was submitted here."""

    def release(self, numbers: Tensor, number: int) -> None:
        """Write the number into all of an int32 [n], while this stream may be waiting for one of them."""


class CopyExchange:
    """A member's side of all exchanges.

    In each exchange a member sends to every other one, then receives from all of them. What a member has sent must be
    read by work that is submitted before the next `send` to it.

    Args:
        rank: of this member in its group.
        memories: uint8 [bytes] of every member, as `memory_bytes` says, zero at the start.
    Attributes:
        area_bytes: most bytes that a member can send to another in one exchange.
        others: the other members, beginning with the next one, so that not all send to the same one first.
    """

    def __init__(self, rank: int, memories: Sequence[Tensor], stream: CopyStream) -> None:
        self._rank, self._stream = rank, stream
        num_others = len(memories) - 1
        self.area_bytes = (len(memories[0]) - _HEAD) // (2 * num_others)
        self._numbers = [memory[: 4 * num_others].view(torch.int32) for memory in memories]
        self._areas = [memory[_HEAD:].view(2, num_others, -1) for memory in memories]
        self.others = [(rank + step) % len(memories) for step in range(1, len(memories))]
        self._number = 0
        self._sent: set[int] = set()
        self._held: list[Tensor] = []

    def send(self, to: int, *parts: Tensor) -> None:
        """Send tensors to a member, which must fit into an area (`sent_bytes`). They must not be written before the
        next `receive`, and are held until then."""
        assert to not in self._sent, "what a member has sent is received before it is sent to again"
        if not self._sent:
            self._number += 1
        self._sent.add(to)
        owned = [part.contiguous() for part in parts]
        self._held += owned
        self._stream.after_compute()
        slot = self._rank - (self._rank > to)
        area = self._areas[to][self._number % 2, slot]
        for part, begin in zip(owned, _begins(owned), strict=True):
            if part.numel():
                self._stream.copy(area[begin : begin + part.nbytes], part.view(-1).view(torch.uint8))
        self._stream.write(self._numbers[to][slot : slot + 1], self._number)

    def receive(self) -> None:
        """Let the current stream wait for what all other members send in this exchange."""
        assert len(self._sent) == len(self.others), "all members are sent to before they are received from"
        own = self._numbers[self._rank]
        for slot in range(len(self.others)):
            self._stream.wait(own[slot : slot + 1], self._number)
        self._stream.before_compute()
        self._held.clear()
        self._sent.clear()

    def received(self, source: int, *shapes: tuple[Shape, torch.dtype]) -> tuple[Tensor, ...]:
        """What a member has sent in the last exchange, in this member's memory; call it before the next `send`."""
        slot = source - (source > self._rank)
        return tuple(part[slot] for part in self.received_of_all(*shapes))

    def received_of_all(self, *shapes: tuple[Shape, torch.dtype]) -> tuple[Tensor, ...]:
        """What all other members have sent, in rank order, [members - 1, *shape]; their areas are not contiguous."""
        areas, found, begin = self._areas[self._rank][self._number % 2], [], 0
        for shape, dtype in shapes:
            num_bytes = math.prod(shape) * dtype.itemsize
            found.append(areas[:, begin : begin + num_bytes].view(dtype).view(len(areas), *shape))
            begin += _aligned(num_bytes)
        return tuple(found)

    def close(self) -> None:
        """Release the stream, if it is waiting for a member; no exchange may follow."""
        self._stream.release(self._numbers[self._rank], self._number + _FAR)
        self._held.clear()


def sent_bytes(*part_bytes: int) -> int:
    """Bytes of an area that tensors take which are sent at once."""
    return sum(map(_aligned, part_bytes))


def memory_bytes(area_bytes: int, *, size: int) -> int:
    """Bytes of a member's memory, in a group of `size`, for areas of at least so many bytes."""
    return _HEAD + 2 * (size - 1) * _aligned(area_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _begins(parts: Sequence[Tensor]) -> list[int]:
    """Where parts begin in an area."""
    found = [0]
    for part in parts:
        found.append(found[-1] + _aligned(part.nbytes))
    return found[:-1]


class CudaCopyStream:
    """Copies and waits on a stream of a GPU. CUDA's driver has the operations on numbers, torch has no such functions.

    Raises:
        OSError: the driver's library is not found.
    """

    def __init__(self, device: torch.device) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        self._write, self._wait = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
        for call in (self._write, self._wait):
            call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        # Made now: allocating pinned memory could wait for the GPU.
        self._releasing = torch.cuda.Stream(device)
        self._pinned = torch.empty(_HEAD // 4, dtype=torch.int32, pin_memory=True)

    def after_compute(self) -> None:
        """See CopyStream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy by cudaMemcpyAsync, for which a copy engine is used between GPUs."""
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def write(self, to: Tensor, number: int) -> None:
        """See CopyStream; the driver puts a barrier of memory before it.

        Raises:
            RuntimeError: CUDA rejects it.
        """
        _check(self._write(self._stream.cuda_stream, to.data_ptr(), number & 0xFFFFFFFF, _WITH_BARRIER))

    def wait(self, source: Tensor, number: int) -> None:
        """See CopyStream.

        Raises:
            RuntimeError: CUDA rejects it.
        """
        _check(self._wait(self._stream.cuda_stream, source.data_ptr(), number & 0xFFFFFFFF, _AT_LEAST))

    def before_compute(self) -> None:
        """See CopyStream."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def release(self, numbers: Tensor, number: int) -> None:
        """See CopyStream. From the host by a copy engine: a kernel could be queued behind the wait."""
        signed = (number + (1 << 31)) % (1 << 32) - (1 << 31)
        host = self._pinned[: len(numbers)].fill_(signed)
        # After a fault every call fails, and nothing waits any more.
        with suppress(RuntimeError), torch.cuda.stream(self._releasing):
            numbers.copy_(host, non_blocking=True)
            self._releasing.synchronize()


_WITH_BARRIER = 0  # CU_STREAM_WRITE_VALUE_DEFAULT
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA rejected an operation on a number in memory (error {code})")
