"""Carriers, which copy the units of a move: one for a pool in CPU memory, one for CUDA.

    CPU    save   unit by unit, while it is in the processor's cache: copy | checksum, tag
           load   check all | copy turn by turn
    CUDA   cuda_carrier.py

A turn is some layers of all units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from raycache.errors import ConfigError
from raycache.memory.host import HostSpace, Strip
from raycache.memory.moves import Batch, Run, runs
from raycache.memory.streams import Event, Passed
from raycache.parallel.sharding import even_range

Spaces = Mapping[str, HostSpace]
"""Component space -> its units."""

Units = Mapping[str, Batch]
"""Component space -> units of a move, at least one each."""

Release = Callable[[Iterable[int], Event], None]
"""Called with layers of a load that may be used by work after the event."""

CPU_TURNS = 8
"""Turns of a load on the CPU; with more, calls would cost as much as the copies."""

SAVE_BUFFER_BYTES = 64 << 20
LOAD_BUFFER_BYTES = 128 << 20
"""CUDA: size of each of the two buffers for saves and for loads. A load's is copied in 2.4 ms. Within that time the
thread that loads must get Python's lock and submit the next copies, or the link is idle."""

SUMS_BYTES = 320 << 20
"""CUDA: size of the partial checksums of a load, which are a 16th of its bytes; loads that need more are done in
parts."""

STAGING_BYTES = 2 * (SAVE_BUFFER_BYTES + LOAD_BUFFER_BYTES) + SUMS_BYTES
"""CUDA: most memory of the device that a carrier takes if a unit fits a buffer."""


class Carrier(Protocol):
    """Copies units of one rank; a save and a load may run concurrently, but not two saves or two loads."""

    def save(self, units: Units, *, after: Event) -> None:
        """Copy the device's content after the event to the host; done on return, headers included."""

    def load(self, units: Units, *, after: Event, release: Release) -> str:
        """Copy to the device after the event; done on return.

        Layers may be released before all units are checked: the decider uses no result of a step before its loads are
        acknowledged.

        Returns:
            What is wrong with a unit on the host; empty if nothing is.
        """

    def close(self) -> None:
        """Release resources; no move may be in progress."""


def open_carrier(spaces: Spaces, *, device: torch.device) -> Carrier:
    """Make the carrier for a device.

    Raises:
        ConfigError: host memory cannot be pinned, or Triton is missing.
    """
    if device.type != "cuda":
        return CpuCarrier(spaces)
    try:
        from raycache.memory.cuda_carrier import CudaCarrier
    except ImportError as cause:
        raise ConfigError(
            f"page moves between a GPU and the host need Triton ({cause}); install it, or run without --host-memory"
        ) from cause
    return CudaCarrier(spaces, device=device)


class CpuCarrier:
    """Carrier for a pool in CPU memory.

    Uses numpy, which copies on the calling thread; torch would use the threads that compute.
    """

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces
        self._turns = _turns(spaces)
        self._saves = {name: arrays_of(space.saves(space.own_slab)) for name, space in spaces.items()}
        self._loads = [
            {name: arrays_of(space.loads_between(layers[0], layers[-1])) for name, space in spaces.items()}
            for layers in self._turns
        ]

    def save(self, units: Units, *, after: Event) -> None:
        """Copy and compute checksums unit by unit, while the envelope is in the processor's cache."""
        after.synchronize()
        for name, of_space in units.items():
            space = self._spaces[name]
            for at in range(len(of_space)):
                one = of_space[at : at + 1]
                space.begin_save(one)
                copy_units(self._saves[name], one)
                space.end_save(one, space.checksums(one))

    def load(self, units: Units, *, after: Event, release: Release) -> str:
        """Check all, then copy."""
        after.synchronize()
        for name, of_space in units.items():
            space = self._spaces[name]
            if fault := space.foreign(of_space) or space.damaged(of_space):
                return fault
        joined = {name: runs(of_space) for name, of_space in units.items()}
        for layers, strips in zip(self._turns, self._loads, strict=True):
            for name, taken in joined.items():
                copy_runs(strips[name], taken)
            release(layers, Passed())
        return ""

    def close(self) -> None:
        """There are no resources to release."""


Arrays = Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]]
"""Pool [L, U, B] and envelopes [U, L, B] of each strip."""


def arrays_of(strips: Sequence[Strip]) -> Arrays:
    """Strips of a pool in CPU memory as arrays."""
    return [(strip.pool.numpy(), strip.envelopes.numpy()) for strip in strips]


def copy_units(arrays: Arrays, units: Batch) -> None:
    """Copy all layers of units to the host, unit by unit."""
    for device, host in zip(units.devices.tolist(), units.hosts.tolist(), strict=True):
        for pool, envelopes in arrays:
            envelopes[host] = pool[:, device]


def copy_runs(arrays: Arrays, taken: Sequence[Run]) -> None:
    """Copy all layers of many units to the pool."""
    for pool, envelopes in arrays:
        for device, host, count in taken:
            pool[:, device : device + count] = envelopes[host : host + count].swapaxes(0, 1)


def _turns(spaces: Spaces) -> list[Sequence[int]]:
    """Split the layers that loads fill into turns."""
    layers = sorted({layer for space in spaces.values() for layer in space.layers})
    count = min(len(layers), CPU_TURNS)
    parts = (even_range(len(layers), turn, count) for turn in range(count))
    return [layers[part.start : part.stop] for part in parts]
