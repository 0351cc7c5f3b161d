"""Staging buffers on the device for envelopes, or parts of them, in the host's layout (page first).

    save    pool -> [ unit | whole envelope          ] -> host
    load    host -> [ unit | its parts of some layers ] -> pool

A kernel copies between pool and buffer, the copy engine between buffer and host, for which few long copies are fastest.
Checksums are computed on the device, from the buffer.

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
"""Thread blocks for copies and checksums: many times as fast as the link, and a small part of the device."""


def checksums_of(space: HostSpace, device: torch.device) -> DeviceChecksums | None:
    """Checksums of the rank's own envelopes; None if it has none, or if the host checks them because they are short."""
    return DeviceChecksums(space.envelope_bytes, device) if space.envelope_bytes >= MIN_BYTES else None


class SaveStage:
    """Whole envelopes of one space in a buffer.

    Args:
        space: must have own envelopes.
        buffer: bytes, at least one envelope; shared with other spaces.
    Attributes:
        num_units: capacity of the buffer.
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
        """Copy units [U] from the pool, on the current stream; `ids` are on the device."""
        if self._has_gaps:
            self._rows.zero_()  # leftovers of other spaces in gaps would change checksums
        self._table.copy(ids, to_pool=False, num_programs=COPY_PROGRAMS)

    def checksums(self, num_units: int) -> Tensor:
        """Checksums of the first envelopes in the buffer, [U]; empty if the host computes them."""
        if self._checksums is None:
            return torch.empty(0, dtype=torch.int64, device=self._rows.device)
        sums = self._checksums.zeros(num_units)
        self._checksums.add(sums, self._rows[:num_units], self._runs, num_programs=SUM_PROGRAMS)
        return self._checksums.finish(sums)

    def copies(self, hosts: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Copies from the buffer to these units on the host: (to, from, bytes) [3, U]."""
        width = self._rows.shape[1]
        rows = self._rows.data_ptr() + np.arange(len(hosts)) * width
        return np.stack([self._host.data_ptr() + hosts * width, rows, np.full(len(hosts), width)]).astype(np.uint64)


class LoadStage:
    """Parts of the envelopes of one space, those of some layers, in a buffer.

    A part consists of whole stripes, so that its checksum can be accumulated; its first and last stripe may overlap
    with other parts.

    Args:
        strips: of the layers, at least one.
        buffer: bytes; shared with other stages.
        checksums: of the rank's own envelopes.
    Attributes:
        num_units: capacity of the buffer.
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
        """Copies from these units on the host to the buffer: (to, from, bytes) [3, R * U]."""
        rows = self._rows.data_ptr() + np.arange(len(hosts)) * self._rows.shape[1]
        to = rows + self._places[:, None]
        source = self._from[:, None] + hosts * self._steps[:, None]
        lengths = np.broadcast_to(self._lengths[:, None], to.shape)
        return np.stack([to.ravel(), source.ravel(), lengths.ravel()]).astype(np.uint64)

    def scatter(self, ids: Tensor, sums: Tensor) -> None:
        """Copy to the pool, and accumulate the checksums of the rank's own envelopes.

        Args:
            ids: of the units in the pool [U], on the device.
            sums: [U, K, 8]; K is 0 if the host checks the units.
        """
        self._table.copy(ids, to_pool=True, num_programs=COPY_PROGRAMS)
        if self._checksums is not None and len(self._runs):
            self._checksums.add(sums, self._rows[: len(ids)], self._runs, num_programs=SUM_PROGRAMS)


def _end_stripe(space: HostSpace, strip: Strip) -> int:
    """End of the stripes that a part adds to checksums; 0 for parts of a peer's envelope, which the peer checks."""
    if not space.owns(strip):
        return 0
    end = strip.offset + strip.num_bytes
    # A stripe shared with the following part of the piece belongs to that part; after a piece there are zeros.
    goes_on = any(other.offset <= end < other.offset + other.num_bytes for other in space.loads if space.owns(other))
    return end // STRIPE if goes_on else -(-end // STRIPE)


def _table(runs: Sequence[Stripes], device: torch.device) -> Tensor:
    """[runs, 3], int64, on the device."""
    return torch.tensor(runs, dtype=torch.int64).reshape(-1, len(Stripes._fields)).to(device)
