"""In which order copies happen: at once on the CPU, on streams of their own on CUDA.

A lane of the mover has one `CopyStream`. On CUDA a copy is only given to the device when the call returns, so what
follows it, and what it follows, are tied together by events:

    compute   [ forward 6 ]--event-->[ forward 7:  layer 0 ......... layer 1 ......... ]
    save                      [ pages of step 6 ]     ^ event           ^ event
    load                      [ layer 0 ]-------------'  [ layer 1 ]----'
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from raycache.errors import ConfigError
from raycache.memory.rows import ALIGN

_log = logging.getLogger(__name__)


class Event(Protocol):
    """A point in what a device was given to do."""

    def synchronize(self) -> None:
        """Return when the device is past it."""

    def wait(self) -> None:
        """Let what the calling thread gives its device from now on come after it; returns at once."""


class CopyStream(Protocol):
    """Copies in their order."""

    def after_compute(self) -> Event:
        """What the calling thread's device was given so far."""

    def copying(self, *, after: Event) -> AbstractContextManager[None]:
        """Within it, copies are given to this stream and come after the event."""

    def mark(self) -> Event:
        """What this stream was given so far."""


def open_stream(device: torch.device) -> CopyStream:
    """A new stream to and from a device's memory."""
    return CudaStream(device) if device.type == "cuda" else InOrder()


class Passed:
    """An event on the CPU, where all that was given is done."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


class InOrder:
    """The CPU: a copy is done when its call returns."""

    def after_compute(self) -> Event:
        """Already passed."""
        return Passed()

    def copying(self, *, after: Event) -> AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()

    def mark(self) -> Event:
        """Already passed."""
        return Passed()


class CudaStream:
    """A stream of a CUDA device.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def after_compute(self) -> Event:
        """What the calling thread's current stream was given so far."""
        event: Event = torch.cuda.current_stream(self._stream.device).record_event()
        return event

    @contextlib.contextmanager
    def copying(self, *, after: Event) -> Iterator[None]:
        """Within it, this stream is the current one."""
        with torch.cuda.stream(self._stream):
            after.wait()
            yield

    def mark(self) -> Event:
        """What this stream was given so far."""
        event: Event = self._stream.record_event()
        return event


class PinnedSlabs:
    """Slabs that the device reads and writes itself, registered with CUDA until `close`.

    Args:
        slabs: [units, envelope_bytes] each, page aligned. What another rank of this process has pinned is left alone.
    Raises:
        ConfigError: the system does not let so much memory be pinned.
    """

    def __init__(self, slabs: Sequence[NDArray[np.uint8]]) -> None:
        self._pinned: list[int] = []
        for chunk in (chunk for slab in slabs for chunk in _chunks(slab)):
            address = chunk.ctypes.data
            if torch.from_numpy(chunk).is_pinned():
                continue
            code = int(torch.cuda.cudart().cudaHostRegister(address, chunk.nbytes, 0))
            if code:
                self.close()
                raise ConfigError(
                    f"CUDA cannot pin {chunk.nbytes / 2**20:.0f} MiB of the host tier (error {code}); use a smaller "
                    "--host-memory, or raise the limit of locked memory (ulimit -l)"
                )
            self._pinned.append(address)

    def close(self) -> None:
        """Unpin; no copy may be on its way."""
        for address in self._pinned:
            code = int(torch.cuda.cudart().cudaHostUnregister(address))
            if code:
                _log.warning("CUDA could not unpin host memory (error %d)", code)
        self._pinned.clear()


_CHUNK_BYTES = 2**30
_PAGE = 4096


def _chunks(slab: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """Runs of whole envelopes that begin on a page: CUDA copies nothing that reaches over two registered ranges."""
    units, width = slab.shape
    if not width:
        return
    assert width % ALIGN == 0 and slab.ctypes.data % _PAGE == 0, "envelopes and slabs are aligned"
    step = _PAGE // math.gcd(_PAGE, width)
    step *= max(1, _CHUNK_BYTES // (step * width))
    for first in range(0, units, step):
        yield slab[first : first + step]
