"""Records steps, or parts of them, as CUDA graphs, one after the other.

The graphs share memory: what a tensor needed is used again as soon as nothing refers to it. So a graph may read what
another one wrote only if they are replayed in the order in which they were recorded, without others in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

_TRIALS = 3

Replay = Callable[[], None]
"""Launches the kernels of a graph again."""


class Recorder(Protocol):
    """Records graphs, one after the other, that share memory."""

    def trying(self) -> AbstractContextManager[None]:
        """Layers run within it as they will be recorded, so that they compile and allocate before."""
        ...

    def times(self, run: Callable[[], object]) -> Sequence[tuple[float, float]]:
        """Seconds until what was tried is launched, and until it has ended, of some runs."""
        ...

    def recording(self) -> AbstractContextManager[None]:
        """Begin a graph; its end is that of the last one."""
        ...

    def cut(self) -> Replay:
        """End a graph and begin the next one."""
        ...

    def last(self) -> Replay:
        """The last graph, after its end."""
        ...

    def borrow(self, tensor: Tensor) -> Tensor:
        """The same memory, without keeping it from being used by later graphs."""
        ...


class CudaRecorder:
    """Records CUDA graphs. Garbage that holds device memory must have been collected (`gc.collect`): freeing it while
    something is recorded is an error.

    Attributes:
        num_bytes: device memory that they use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, torch.cuda.graph_pool_handle()
        # One stream for all of them: each has a workspace of its own for matrix products.
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()
        self._is_capturing = False
        self._free, _ = torch.cuda.mem_get_info(device)

    @property
    def num_bytes(self) -> int:
        return self._free - torch.cuda.mem_get_info(self._device)[0]

    @contextmanager
    def trying(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # after an error, too: what the stream still reads would be freed, and be used for something else
            torch.cuda.synchronize(self._device)

    def times(self, run: Callable[[], object]) -> Sequence[tuple[float, float]]:
        found = []
        with torch.cuda.stream(self._stream):
            for _ in range(_TRIALS):
                begin_s = time.perf_counter()
                run()
                launched_s = time.perf_counter()
                torch.cuda.synchronize(self._device)
                found.append((launched_s - begin_s, time.perf_counter() - begin_s))
        return found

    @contextmanager
    def recording(self) -> Iterator[None]:
        torch.cuda.empty_cache()  # what steps needed that were tried stays with the stream
        with torch.cuda.stream(self._stream):
            self._begin()
            try:
                yield
            finally:
                if self._is_capturing:  # after an error, too: the stream would go on capturing
                    self._end()

    def cut(self) -> Replay:
        self._end()
        replay = self._graph.replay
        self._begin()
        return replay

    def last(self) -> Replay:
        return self._graph.replay

    def borrow(self, tensor: Tensor) -> Tensor:
        same: Tensor = torch.as_tensor(_Address(tensor), device=tensor.device)
        return same.view(tensor.dtype)

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._memory)
        self._is_capturing = True

    def _end(self) -> None:
        self._is_capturing = False
        self._graph.capture_end()


_INTEGERS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}


class _Address:
    """Device memory as an array of integers, in the CUDA array interface (version 3)."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": _INTEGERS[size],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
