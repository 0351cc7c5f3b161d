"""Ordering of copies: synchronous on the CPU, on separate streams on CUDA.

On CUDA, copies are asynchronous, so events order them before and after other work:

    compute   [ forward 6 ]--event-->[ forward 7:  layer 0 ......... layer 1 ......... ]
    save                      [ pages of step 6 ]     ^ event           ^ event
    load                      [ layer 0 ]-------------'  [ layer 1 ]----'
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from raycache.errors import ConfigError
from raycache.memory.rows import ALIGN

_log = logging.getLogger(__name__)

MOST_COPIES = 512
"""Copies of one call. With 2,295 in a call, CUDA 13.0 crashed on an H200 that was slow to begin them, since others used
it, too: with a segmentation fault, or "unspecified launch failure" for all later work; with 1,024 it did not
(benchmarks/results/2026-11-29-h200-decode-attention.md)."""


class Event(Protocol):
    """A point in the work submitted to a device."""

    def synchronize(self) -> None:
        """Block until the device has passed it."""

    def wait(self) -> None:
        """Order further work of the calling thread's current stream after it; returns immediately."""


class Passed:
    """An event on the CPU, where submitted work is always done."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


def cuda_major() -> int:
    """Major version of the CUDA runtime that torch is built with; 0 for none."""
    return int((torch.version.cuda or "0").split(".")[0])


def after_compute(device: torch.device) -> Event:
    """An event after all work submitted so far to the calling thread's current stream."""
    if device.type != "cuda":
        return Passed()
    event: Event = torch.cuda.current_stream(device).record_event()
    return event


class PinnedUse:
    """Use of pinned memory that is filled again and again, each time to be copied to the device.

        with use:
            ...  # fill the memory, and submit the copy to the current stream

    Entering waits for the last copy, so that it does not take what is filled in now.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copied: Event = Passed()

    def __enter__(self) -> None:
        self._copied.synchronize()

    def __exit__(self, *_: object) -> None:
        self._copied = after_compute(self._device)


class CopyEngine:
    """Many copies between a device and pinned memory in one call, since separate calls take longer than the copies.

    torch has no such function; it is called from the CUDA runtime that torch has loaded.

    Args:
        has_batches: whether the runtime is version 13.0 or later; older ones make a call per copy.
    Raises:
        ConfigError: the runtime is not found.
    """

    def __init__(self, *, has_batches: bool) -> None:
        name = f"libcudart.so.{cuda_major()}"
        try:
            runtime = ctypes.CDLL(name)
        except OSError as cause:
            raise ConfigError(
                f"the CUDA runtime {name} of PyTorch is not found ({cause}); reinstall PyTorch"
            ) from cause
        self._batch = runtime.cudaMemcpyBatchAsync if has_batches else None
        self._one = runtime.cudaMemcpyAsync

    def copy(self, copies: NDArray[np.uint64], stream: torch.cuda.Stream, *, is_early: bool = False) -> None:
        """Submit copies to a stream; their order among each other is arbitrary.

        Args:
            copies: (to, from, bytes) [3, N], contiguous; none may span two registered ranges.
            is_early: whether their sources do not change, so that they may be read ahead of stream order.
        Raises:
            RuntimeError: CUDA rejects them.
        """
        if self._batch is not None:
            for first in range(0, copies.shape[1], MOST_COPIES):
                self._submit(copies[:, first : first + MOST_COPIES], stream, is_early=is_early)
            return
        for to, source, num_bytes in copies.T.tolist():
            place = ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(num_bytes)
            _check(self._one(*place, _EITHER_WAY, ctypes.c_void_p(stream.cuda_stream)))

    def _submit(self, copies: NDArray[np.uint64], stream: torch.cuda.Stream, *, is_early: bool) -> None:
        assert self._batch is not None
        to, source, num_bytes = (ctypes.c_void_p(row.ctypes.data) for row in copies)
        # CUDA determines the location of memory by itself.
        attributes, of_all = (ctypes.c_int * 6)(_ANY_TIME if is_early else _IN_ORDER), ctypes.c_size_t(0)
        code = self._batch(
            to,
            source,
            num_bytes,
            ctypes.c_size_t(copies.shape[1]),
            attributes,
            ctypes.byref(of_all),
            ctypes.c_size_t(1),
            ctypes.c_void_p(stream.cuda_stream),
        )
        _check(code)


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA rejected copies to or from the host (error {code})")


class PinnedSlabs:
    """Slabs registered with CUDA (pinned) until `close`.

    Several threads register chunks in parallel, since the system takes time for each page.

    Args:
        slabs: [units, envelope_bytes] each, page aligned. Slabs pinned by another rank of this process are skipped.
    Raises:
        ConfigError: the system does not allow pinning this much memory.
    """

    def __init__(self, slabs: Sequence[NDArray[np.uint8]], *, device: torch.device) -> None:
        self._device = device
        self._pinned: list[NDArray[np.uint8]] = []
        chunks = [chunk for slab in slabs for chunk in _chunks(slab) if not torch.from_numpy(chunk).is_pinned()]
        total, pinned, said_s = sum(chunk.nbytes for chunk in chunks), 0, time.monotonic()
        for chunk, code in zip(chunks, self._each(_register, chunks), strict=True):
            if code:
                continue
            self._pinned.append(chunk)
            pinned += chunk.nbytes
            if time.monotonic() - said_s > _SAY_EVERY_S:
                said_s = time.monotonic()
                _log.info("%.1f of %.1f GiB of the host tier are pinned", pinned / 2**30, total / 2**30)
        if len(self._pinned) < len(chunks):
            self.close()
            raise ConfigError(
                f"CUDA pinned only {pinned / 2**30:.1f} of {total / 2**30:.1f} GiB of the host tier; use a smaller "
                "--host-memory, or raise the limit of locked memory (ulimit -l)"
            )

    def close(self) -> None:
        """Unpin; no copies may be in progress."""
        if any(list(self._each(_unregister, self._pinned))):
            _log.warning("CUDA could not unpin all of the host tier")
        self._pinned.clear()

    def _each(self, call: Callable[[int, int], int], chunks: Sequence[NDArray[np.uint8]]) -> Iterator[int]:
        """CUDA's error code for each chunk, in order, as they become available."""

        def on_device(chunk: NDArray[np.uint8]) -> int:
            with torch.cuda.device(self._device):  # new threads start with the first device
                return call(chunk.ctypes.data, chunk.nbytes)

        with ThreadPoolExecutor(_PIN_THREADS) as threads:
            yield from threads.map(on_device, chunks)


def _register(address: int, num_bytes: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))


def _unregister(address: int, num_bytes: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))


_EITHER_WAY = 4  # cudaMemcpyDefault
_IN_ORDER, _ANY_TIME = 1, 3  # cudaMemcpySrcAccessOrderStream, cudaMemcpySrcAccessOrderAny
_PIN_THREADS = 4
_SAY_EVERY_S = 3.0
_CHUNK_BYTES = 2**28
_PAGE = 4096


def _chunks(slab: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """Runs of whole envelopes that begin on a page: CUDA copies cannot span two registered ranges."""
    units, width = slab.shape
    if not width:
        return
    assert width % ALIGN == 0 and slab.ctypes.data % _PAGE == 0, "envelopes and slabs are aligned"
    step = _PAGE // math.gcd(_PAGE, width)
    step *= max(1, _CHUNK_BYTES // (step * width))
    for first in range(0, units, step):
        yield slab[first : first + step]
