"""Host units of one rank: which bytes of the slabs correspond to which bytes of its device pool.

Rows are treated as bytes:

    device   a field's rows    [layers, units, bytes of a unit in a layer]
    host     a slab            [units, envelope]; the same field in it [units, layers, bytes of a unit in a layer]

A rank saves to its own envelopes only. It loads from them and, for data that replicas share and store once, from those
of its replicas.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.memory.arena import Arena
from raycache.memory.checksum import checksum_of
from raycache.memory.device import DevicePool
from raycache.memory.moves import Batch
from raycache.memory.rows import EnvelopeLayout, FieldPlace, Piece

# Shapes in this file: L layers of a strip, U units, B bytes of one unit in one layer and field.


class Strip(NamedTuple):
    """One field of one piece, in the pool and in envelopes, as bytes.

    Attributes:
        pool: [L, U, B], a view of the device pool.
        slab: [U, envelope_bytes].
        offset: in each envelope, bytes.
        layers: model layers of the L layers, ascending.
        peer: rank that the envelopes belong to.
    """

    pool: Tensor
    slab: Tensor
    offset: int
    layers: Sequence[int]
    peer: int

    @property
    def num_bytes(self) -> int:
        """Bytes in one envelope."""
        return self.pool.shape[0] * self.pool.shape[2]

    @property
    def envelopes(self) -> Tensor:
        """Its bytes in the slab [U, L, B], as a view."""
        rows: Tensor = self.slab[:, self.offset : self.offset + self.num_bytes].unflatten(1, self.pool.shape[::2])
        return rows

    def between(self, first: int, last: int) -> Strip:
        """Restrict to the model layers from `first` to `last`, maybe none."""
        start, stop = bisect_left(self.layers, first), bisect_right(self.layers, last)
        offset = self.offset + start * self.pool.shape[2]
        return self._replace(pool=self.pool[start:stop], offset=offset, layers=self.layers[start:stop])


class HostSpace:
    """The units of one component space.

    Attributes:
        layers: model layers that loads fill, ascending.
        loads: strips to copy on load.
        num_device_units: units in the pool.
        envelope_bytes: of the rank's own envelope of a unit; 0 for none.
        own_slab: the rank's own envelopes [U, envelope_bytes].
        slabs: all slabs that are read or written.
    """

    def __init__(self, space: str, *, pool: DevicePool, arena: Arena, layout: EnvelopeLayout, rank: int) -> None:
        self._layout, self._pool, self._rank = layout, pool, rank
        self._num_units = (pool.sizes[space], arena.sizes[space])
        self.num_device_units = pool.sizes[space]
        self.envelope_bytes = layout.envelope_bytes(rank, space)
        self.own_slab = torch.from_numpy(arena.slab(rank, space))
        self._own_headers = arena.headers(rank, space)
        sources = layout.sources(rank, space)
        readers = dict.fromkeys(peer for peer, _ in sources)
        self._sources = {peer: (arena.slab(peer, space), arena.headers(peer, space)) for peer in readers}
        self.slabs = [slab for slab, _ in self._sources.values()]
        self.loads = [strip for peer, piece in sources for strip in self._strips(piece, peer)]
        self.layers = sorted({layer for strip in self.loads for layer in strip.layers})

    def saves(self, slab: Tensor) -> list[Strip]:
        """Strips to copy on save, to a slab with the layout of the rank's own [U, envelope_bytes]."""
        return [strip._replace(slab=slab) for strip in self.loads if strip.peer == self._rank]

    def loads_between(self, first: int, last: int) -> list[Strip]:
        """Strips to copy on load for the model layers from `first` to `last`."""
        return [strip for cut in self.loads if (strip := cut.between(first, last)).layers]

    def owns(self, strip: Strip) -> bool:
        """Whether a strip belongs to the rank's own envelopes."""
        return strip.peer == self._rank

    def check(self, units: Batch) -> None:
        """Check that ids are in range; negative ones would silently select units at the end.

        Raises:
            IndexError: there is no such unit.
        """
        wrong = np.zeros(len(units), bool)
        for ids, count in zip((units.devices, units.hosts), self._num_units, strict=True):
            wrong |= (ids < 0) | (ids >= count)
        if wrong.any():
            raise IndexError(f"{units.first(wrong)} is not among {self._num_units} units of device and host")

    def begin_save(self, units: Batch) -> None:
        """Mark the rank's envelopes as invalid before they are overwritten."""
        if self.envelope_bytes:
            self._own_headers[units.hosts] = 0

    def end_save(self, units: Batch, checksums: NDArray[np.uint64]) -> None:
        """Mark the rank's envelopes as valid after they were written. Tags, which make them valid, are set last."""
        if self.envelope_bytes:
            self._own_headers[units.hosts, 1] = checksums
            self._own_headers[units.hosts, 0] = units.tags

    def checksums(self, units: Batch) -> NDArray[np.uint64]:
        """Compute the checksums of the rank's envelopes."""
        slab = self.own_slab.numpy()
        return np.array([checksum_of(slab[host].data) for host in units.hosts], np.uint64)

    def foreign(self, units: Batch) -> str:
        """Message about the first unit that the host no longer holds, judging by the tags; empty for none."""
        for peer, (_, headers) in self._sources.items():
            tags = headers[units.hosts, 0]
            if (wrong := tags != units.tags).any():
                return f"{units.first(wrong)} holds {int(tags[wrong][0]):#x} in the slab of rank {peer}"
        return ""

    def damaged(self, units: Batch) -> str:
        """Message about the first unit with a wrong checksum in any envelope that a load reads; empty for none."""
        for peer, (slab, headers) in self._sources.items():
            for at, host in enumerate(units.hosts):
                if checksum_of(slab[host].data) != headers[host, 1]:
                    return _damage(units[at:], peer)
        return ""

    def differing(self, units: Batch, checksums: NDArray[np.uint64]) -> str:
        """Message about the first unit whose checksum differs from that of the rank's own envelope; empty for none."""
        wrong = self._own_headers[units.hosts, 1] != checksums
        return _damage(units[int(wrong.argmax()) :], self._rank) if wrong.any() else ""

    def _strips(self, piece: Piece, peer: int) -> list[Strip]:
        layers = piece.group.layers[piece.box.first_layer : piece.box.end_layer]
        slab = torch.from_numpy(self._sources[peer][0])
        return [Strip(self._in_pool(piece, place), slab, place.offset, layers, peer) for place in piece.fields]

    def _in_pool(self, piece: Piece, place: FieldPlace) -> Tensor:
        """Rows of a field of a piece in the pool, [L, U, B]."""
        held = self._layout.device_box(piece.group, self._rank)
        assert held is not None, "sources contain only rows that the device holds"
        layers, tokens, heads = piece.box.within(held)
        assert (heads.start, heads.stop) == (0, held.shape[2]), "pieces are not cut by heads"
        rows = self._pool.rows(piece.group.name)[place.field.name].flatten(2).view(torch.uint8)
        token = rows.shape[2] // held.shape[1]
        return rows[layers, :, tokens.start * token : tokens.stop * token]


def _damage(units: Batch, peer: int) -> str:
    """Message about the first unit."""
    return f"{units.first(np.ones(1, bool))} does not have its checksum in the slab of rank {peer}"
