"""Buffers on the device that hold envelopes, or parts of them, page first as the host does.

    save    pool -> [ unit | whole envelope          ] -> host
    load    host -> [ unit | its parts of some layers ] -> pool

Between pool and buffer a kernel copies, between buffer and host the copy engine, which likes few long copies. What
passes through a buffer is checked on the device.

Imports Triton: only what runs on CUDA may import this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.memory.checksum_kernels import MIN_BYTES, STRIPE, DeviceChecksums, Stripes
from raycache.memory.copy_kernels import CopyTable
from raycache.memory.host import HostSpace, Strip

# Shapes in this file: U units of a chunk, K blocks of an envelope, R parts of an envelope.

COPY_PROGRAMS = 48
SUM_PROGRAMS = 48
"""Thread blocks that copy and check: many times as fast as the link, and a small part of the device."""


def checksums_of(space: HostSpace, device: torch.device) -> DeviceChecksums | None:
    """Of the rank's own envelopes; None where there are none, or such short ones that the host checks them."""
    return DeviceChecksums(space.envelope_bytes, device) if space.envelope_bytes >= MIN_BYTES else None


class SaveStage:
    """Whole envelopes of one space in a buffer.

    Args:
        space: of the envelopes; the rank has some.
        buffer: bytes, at least one envelope; other spaces use it too.
        checksums: of the envelopes.
    Attributes:
        num_units: that have room.
    """

    def __init__(self, space: HostSpace, buffer: Tensor, checksums: DeviceChecksums | None) -> None:
        width = space.envelope_bytes
        self.num_units = len(buffer) // width
        self._rows = buffer[: self.num_units * width].view(self.num_units, width)
        self._host = space.own_slab
        strips = space.saves(self._rows)
        self._has_gaps = sum(strip.num_bytes for strip in strips) < width
        self._table = CopyTable(strips)
        self._checksums = checksums
        self._runs = _table([Stripes(0, 0, width // STRIPE)], buffer.device)

    def gather(self, ids: Tensor) -> None:
        """Copy from the pool these units [U], ids on the device; given to the current stream."""
        if self._has_gaps:
            self._rows.zero_()  # what was there of another space would change checksums
        self._table.copy(ids, to_pool=False, num_programs=COPY_PROGRAMS)

    def checksums(self, num_units: int) -> Tensor:
        """Of the first envelopes in the buffer [U]; empty if the host is to compute them."""
        if self._checksums is None:
            return torch.empty(0, dtype=torch.int64, device=self._rows.device)
        sums = self._checksums.zeros(num_units)
        self._checksums.add(sums, self._rows[:num_units], self._runs, num_programs=SUM_PROGRAMS)
        return self._checksums.finish(sums)

    def copies(self, hosts: NDArray[np.int64]) -> NDArray[np.uint64]:
        """What the copy engine is to do, to these units on the host: (to, from, bytes) [3, U]."""
        width = self._rows.shape[1]
        rows = self._rows.data_ptr() + np.arange(len(hosts)) * width
        return np.stack([self._host.data_ptr() + hosts * width, rows, np.full(len(hosts), width)]).astype(np.uint64)


class LoadStage:
    """Parts of the envelopes of one space, those of some layers, in a buffer.

    A part is whole stripes, so that its checksum can be added up; the first and the last may be of another part too.

    Args:
        space: of the envelopes.
        strips: of the layers, at least one.
        buffer: bytes; other stages use it too.
        checksums: of the rank's own envelopes.
    Attributes:
        num_units: that have room.
    """

    def __init__(
        self, space: HostSpace, strips: Sequence[Strip], buffer: Tensor, checksums: DeviceChecksums | None
    ) -> None:
        firsts = np.array([strip.offset // STRIPE * STRIPE for strip in strips])
        ends = np.array([-(-(strip.offset + strip.num_bytes) // STRIPE) * STRIPE for strip in strips])
        places = np.cumsum([0, *(ends - firsts)])
        width = int(places[-1])
        self.num_units = len(buffer) // width
        self._rows = buffer[: self.num_units * width].view(self.num_units, width)
        self._from = np.array([strip.slab.data_ptr() for strip in strips]) + firsts
        self._steps = np.array([strip.slab.shape[1] for strip in strips])
        self._places, self._lengths = places[:-1], ends - firsts
        offsets = [int(place) + strip.offset % STRIPE for place, strip in zip(places, strips, strict=False)]
        self._table = CopyTable(
            [strip._replace(slab=self._rows, offset=offset) for strip, offset in zip(strips, offsets, strict=True)]
        )
        self._checksums = checksums
        runs = [
            Stripes(int(place), strip.offset // STRIPE, end - strip.offset // STRIPE)
            for place, strip in zip(places, strips, strict=False)
            if (end := _end_stripe(space, strip)) > strip.offset // STRIPE
        ]
        self._runs = _table(runs, buffer.device)

    def copies(self, hosts: NDArray[np.int64]) -> NDArray[np.uint64]:
        """What the copy engine is to do, from these units on the host: (to, from, bytes) [3, R * U]."""
        rows = self._rows.data_ptr() + np.arange(len(hosts)) * self._rows.shape[1]
        to = rows + self._places[:, None]
        source = self._from[:, None] + hosts * self._steps[:, None]
        lengths = np.broadcast_to(self._lengths[:, None], to.shape)
        return np.stack([to.ravel(), source.ravel(), lengths.ravel()]).astype(np.uint64)

    def scatter(self, ids: Tensor, sums: Tensor) -> None:
        """Copy to the pool, and add to the sums of the rank's own envelopes.

        Args:
            ids: of the units in the pool [U], on the device.
            sums: of the units [U, K, 8]; K is 0 if the host checks them.
        """
        self._table.copy(ids, to_pool=True, num_programs=COPY_PROGRAMS)
        if self._checksums is not None and len(self._runs):
            self._checksums.add(sums, self._rows[: len(ids)], self._runs, num_programs=SUM_PROGRAMS)


def _end_stripe(space: HostSpace, strip: Strip) -> int:
    """Up to which stripe a part counts; 0 for parts of a peer's envelope, which its rank checks."""
    if not space.owns(strip):
        return 0
    end = strip.offset + strip.num_bytes
    # Where another part of the piece goes on, a stripe of both is the other's; behind a piece come zeros.
    goes_on = any(other.offset <= end < other.offset + other.num_bytes for other in space.loads if space.owns(other))
    return end // STRIPE if goes_on else -(-end // STRIPE)


def _table(runs: Sequence[Stripes], device: torch.device) -> Tensor:
    """[runs, 3], int64, on the device."""
    return torch.tensor(runs, dtype=torch.int64).reshape(-1, len(Stripes._fields)).to(device)
