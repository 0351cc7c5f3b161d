"""Small copies between the host and a GPU: the inputs of steps and their results.

A GPU has a copy engine per direction, which stays with one stream while more copies are queued there. Behind a load or
a save of pages, the inputs or results of a step would wait for all of it: 22 ms for 1.2 GB. So a kernel copies them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from subprocess import SubprocessError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 256
"""Bytes; that of tensors which torch allocates is a multiple."""

_log = logging.getLogger(__name__)


def upload(host: Tensor, to: Tensor) -> None:
    """Copy pinned memory to a device asynchronously, on the current stream.

    Args:
        host: contiguous; unchanged, and not freed, until the copy has ended (see `keep`).
        to: of the same shape and dtype, contiguous.
    """
    _copy(to.device)(host, to)


def uploaded(host: Tensor, device: torch.device) -> Tensor:
    """Copy to a device asynchronously, on the current stream; a tensor for the CPU is returned as it is.

    Not while a graph is captured.
    """
    if device.type != "cuda":
        return host
    # Copies from unpinned memory may wait for all work submitted to the device.
    pinned = host.contiguous().pin_memory()
    on_device = torch.empty(host.shape, dtype=host.dtype, device=device)
    upload(pinned, on_device)
    _in_use.keep(pinned, device)
    return on_device


class Uploads:
    """Arrays that are copied to a device together, since each copy costs a launch.

    Args:
        device: that gets them.
        room: bytes that are copied together, with each array padded to a multiple of 256; more take further copies.
    """

    def __init__(self, device: torch.device, *, room: int) -> None:
        self._device, self._room = device, room
        self._used = 0
        self._source, self._bytes, self._target = self._memory(0)

    def add(self, numbers: NDArray[Any]) -> Tensor:
        """A new tensor on the device, which has these numbers after `send`. Not while a graph is captured."""
        array = np.ascontiguousarray(numbers)
        if self._used + array.nbytes > len(self._bytes):
            self.send()
            self._source, self._bytes, self._target = self._memory(max(self._room, array.nbytes))
        span = slice(self._used, self._used + array.nbytes)
        self._bytes[span] = array.reshape(-1).view(np.uint8)
        # Kernels are compiled for aligned addresses.
        self._used = -(-span.stop // _ALIGNMENT) * _ALIGNMENT
        return self._target[span].view(torch.from_numpy(array).dtype).view(array.shape)

    def integers(self, numbers: Sequence[int] | NDArray[np.integer[Any]]) -> Tensor:
        """`add`, as int64."""
        return self.add(np.asarray(numbers, np.int64))

    def send(self) -> None:
        """Copy what was added, on the current stream. Not while a graph is captured."""
        if self._used:
            words = min(self._used, len(self._source)) // 8
            upload(self._source.view(torch.int64)[:words], self._target.view(torch.int64)[:words])
            if self._device.type == "cuda":
                _in_use.keep(self._source, self._device)
        self._used, self._bytes = 0, self._bytes[:0]

    def _memory(self, num_bytes: int) -> tuple[Tensor, NDArray[np.uint8], Tensor]:
        """For arrays that are copied together: on the host, the same for numpy, which copies short arrays sooner than
        torch, and on the device."""
        size, is_pinned = -(-num_bytes // 8) * 8, self._device.type == "cuda" and num_bytes > 0
        source = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        return source, source.numpy(), torch.empty(size, dtype=torch.uint8, device=self._device)


def download(on_device: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Copy to pinned memory asynchronously, on the current stream; the event is after the copy."""
    source = on_device.contiguous()
    pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    _copy(source.device)(source, pinned)
    return pinned, _in_use.keep(pinned, source.device)


class _InUse(threading.local):
    """Pinned memory that kernels of this thread still use; torch keeps only what its own copies use."""

    def __init__(self) -> None:
        self._kept = deque[tuple[torch.cuda.Event, Tensor]]()

    def keep(self, pinned: Tensor, device: torch.device) -> torch.cuda.Event:
        """Keep memory until the work submitted so far to the current stream has ended; returns that event."""
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()
        event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
        self._kept.append((event, pinned))
        return event


_in_use = _InUse()


def keep(pinned: Tensor, device: torch.device) -> None:
    """Keep memory that `upload` copies from until the work submitted so far to the current stream has ended."""
    if device.type == "cuda":
        _in_use.keep(pinned, device)


@cache
def _copy(device: torch.device) -> Callable[[Tensor, Tensor], object]:
    """The kernel; a plain copy without Triton, or on the CPU. Must not first be called while a graph is captured."""
    if device.type != "cuda":
        return _plain
    try:
        from raycache.parallel.upload_kernels import copy_words

        for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
            copy_words(torch.zeros(1, dtype=dtype).pin_memory(), torch.empty(1, dtype=dtype, device=device))
        torch.cuda.synchronize(device)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (ImportError, OSError, RuntimeError, SubprocessError) as cause:
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        _log.warning("steps wait for moves of pages, since their inputs are copied without Triton: %s", lines[0])
        return _plain
    return copy_words


def _plain(source: Tensor, to: Tensor) -> None:
    to.copy_(source, non_blocking=True)
