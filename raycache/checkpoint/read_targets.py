"""Targets of reads: tensors on the CPU, or on a GPU through pinned buffers."""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from raycache.checkpoint.file_reads import PART_BYTES, Bytes, OpenFile, Part


class Target(Protocol):
    """Tensors of one device."""

    def begin_thread(self) -> None:
        """Called by each thread before its first part."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor to read parts to."""
        ...

    def fill(self, tensor: Tensor, part: Part, file: OpenFile) -> None:
        """Read a part into a tensor; called by threads."""
        ...

    def finish(self) -> None:
        """Called when all parts of a tensor have been read: makes them visible to the caller's stream."""
        ...


def target_on(device: torch.device) -> Target:
    """Tensors on a device."""
    return _Gpu(device) if device.type == "cuda" else _Cpu()


class _Cpu:
    """Target in CPU memory."""

    def __init__(self) -> None:
        self._threads = threading.local()

    def begin_thread(self) -> None:
        self._threads.scratch = np.empty(PART_BYTES, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def fill(self, tensor: Tensor, part: Part, file: OpenFile) -> None:
        file.read(part, bytes_of(tensor)[part.target : part.target + part.num_bytes], scratch=self._threads.scratch)

    def finish(self) -> None: ...


class _Gpu:
    """Target in GPU memory: each thread reads into one of two buffers while the other is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._threads = threading.local()

    def begin_thread(self) -> None:
        torch.cuda.set_device(self._device)
        self._threads.scratch = np.empty(PART_BYTES, np.uint8)
        self._threads.buffers = [_Buffer(), _Buffer()]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        # Its memory may have belonged to another tensor that the caller's stream is still using.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return tensor

    def fill(self, tensor: Tensor, part: Part, file: OpenFile) -> None:
        buffer = self._threads.buffers.pop(0)
        self._threads.buffers.append(buffer)
        buffer.copied.synchronize()
        file.read(part, buffer.bytes[: part.num_bytes], scratch=self._threads.scratch)
        to = tensor.view(-1).view(torch.uint8)[part.target : part.target + part.num_bytes]
        with torch.cuda.stream(self._stream):
            to.copy_(buffer.pinned[: part.num_bytes], non_blocking=True)
            buffer.copied.record(self._stream)

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class _Buffer:
    """Pinned memory, with an event after its last copy."""

    def __init__(self) -> None:
        self.pinned = torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=True)
        self.bytes: Bytes = self.pinned.numpy()
        self.copied = torch.cuda.Event()


def bytes_of(tensor: Tensor) -> Bytes:
    """The bytes of a contiguous tensor on the CPU, as a writable view."""
    found: Bytes = tensor.view(-1).view(torch.uint8).numpy()
    return found
