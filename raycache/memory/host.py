"""Host units as one rank sees them: which bytes of the slabs are which bytes of its device pool.

Rows are bytes here, whatever their type:

    device   a field's rows    [layers, units, bytes of a unit in a layer]
    host     a slab            [units, envelope]; the same field in it [units, layers, bytes of a unit in a layer]

A rank saves into its own envelopes alone. It loads from them and, for what it and its replicas hold alike and store
once, from theirs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.cache.storage.base import checksum_of
from raycache.memory.arena import Arena
from raycache.memory.device import DevicePool
from raycache.memory.moves import Unit
from raycache.memory.rows import EnvelopeLayout, FieldPlace, Piece

# Shapes in this file: L layers of a strip, U units, B bytes of one unit in one layer and field.


class Run(NamedTuple):
    """Units that lie behind each other in both places.

    Attributes:
        device, host: ids of the first.
        num_units: how many.
    """

    device: int
    host: int
    num_units: int


def runs(units: Iterable[Unit]) -> list[Run]:
    """Units of one space, joined where ids follow each other; each device id at most once."""
    joined: list[Run] = []
    for device, host in sorted((unit.device, unit.host) for unit in units):
        last = joined[-1] if joined else None
        if last is not None and (device, host) == (last.device + last.num_units, last.host + last.num_units):
            joined[-1] = last._replace(num_units=last.num_units + 1)
        else:
            joined.append(Run(device, host, 1))
    return joined


class Strip(Protocol):
    """One field of one piece, in a slab and in the pool; copies are given to the current stream."""

    def save(self, unit: Unit) -> None:
        """Copy all layers of a unit to the host."""

    def load(self, layers: slice, taken: Sequence[Run]) -> None:
        """Copy some layers (their places in the strip) of many units to the device."""


class ArrayStrip:
    """A strip of a pool in the CPU's memory.

    numpy copies with the calling thread alone; torch would take the threads that compute.

    Args:
        host: [U, L, B], a view of the slab.
        device: [L, U, B], a view of the pool.
    """

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self._host: NDArray[np.uint8] = host.numpy()
        self._device: NDArray[np.uint8] = device.numpy()

    def save(self, unit: Unit) -> None:
        """Copy, done on return."""
        self._host[unit.host] = self._device[:, unit.device]

    def load(self, layers: slice, taken: Sequence[Run]) -> None:
        """Copy, done on return."""
        for device, host, count in taken:
            self._device[layers, device : device + count] = self._host[host : host + count, layers].swapaxes(0, 1)


class TensorStrip:
    """A strip of a pool on CUDA; arguments as of `ArrayStrip`.

    One copy per unit: only contiguous ones go to and from pinned memory without a detour.
    """

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self._host, self._device = host, device

    def save(self, unit: Unit) -> None:
        """Copy, done when the stream is past it."""
        self._host[unit.host].copy_(self._device[:, unit.device], non_blocking=True)

    def load(self, layers: slice, taken: Sequence[Run]) -> None:
        """Copy, done when the stream is past it."""
        for layer in range(layers.start, layers.stop):
            for run in taken:
                for i in range(run.num_units):
                    self._device[layer, run.device + i].copy_(self._host[run.host + i, layer], non_blocking=True)


class HostSpace:
    """The units of one component space.

    Args:
        space: component space.
        pool: of the rank.
        arena: of its node.
        layout: of the arena.
        rank: world rank.
    Attributes:
        layers: model layers that loads fill, ascending.
        slabs: those that are read or written.
    """

    def __init__(self, space: str, *, pool: DevicePool, arena: Arena, layout: EnvelopeLayout, rank: int) -> None:
        self._space, self._layout, self._rank = space, layout, rank
        self._num_units = (pool.sizes[space], arena.sizes[space])
        self._saves: list[Strip] = []
        self._loads: list[tuple[Sequence[int], Strip]] = []
        sources = layout.sources(rank, space)
        readers = dict.fromkeys(peer for peer, _ in sources)
        self._sources = {peer: (arena.slab(peer, space), arena.headers(peer, space)) for peer in readers}
        for peer, piece in sources:
            for place in piece.fields:
                strip = _strip(piece, place, self._sources[peer][0], self._device_bytes(piece, place, pool))
                if peer == rank:
                    self._saves.append(strip)
                self._loads.append((piece.group.layers[piece.box.first_layer : piece.box.end_layer], strip))
        self.layers = sorted({layer for layers, _ in self._loads for layer in layers})
        self.slabs = [slab for slab, _ in self._sources.values()]

    def check(self, unit: Unit) -> None:
        """Refuse ids that are out of range: a negative one would name a unit at the end.

        Raises:
            IndexError: there is no such unit.
        """
        for unit_id, count in zip((unit.device, unit.host), self._num_units, strict=True):
            if not 0 <= unit_id < count:
                raise IndexError(f"{unit} is not among {self._num_units} units of device and host")

    def begin_save(self, unit: Unit) -> None:
        """Say that nothing valid is in the rank's envelope, then copy into it."""
        if self._saves:
            self._sources[self._rank][1][unit.host] = 0
        for strip in self._saves:
            strip.save(unit)

    def end_save(self, unit: Unit) -> None:
        """Once the copy is complete: say what the envelope holds. The tag is last, until then it is worth nothing."""
        if self._saves:
            slab, headers = self._sources[self._rank]
            headers[unit.host, 1] = checksum_of(slab[unit.host].data)
            headers[unit.host, 0] = unit.tag

    def fault(self, unit: Unit) -> str:
        """What is wrong with a unit on the host, in any envelope that a load reads; empty if nothing is."""
        for peer, (slab, headers) in self._sources.items():
            tag, checksum = headers[unit.host].tolist()
            if tag != unit.tag:
                return f"{unit} holds {tag:#x} in the slab of rank {peer}"
            if checksum_of(slab[unit.host].data) != checksum:
                return f"{unit} does not have its checksum in the slab of rank {peer}"
        return ""

    def load(self, first: int, last: int, taken: Sequence[Run]) -> None:
        """Copy the rows of many units to the device, in the model layers from `first` to `last`."""
        for layers, strip in self._loads:
            strip.load(slice(bisect_left(layers, first), bisect_right(layers, last)), taken)

    def _device_bytes(self, piece: Piece, place: FieldPlace, pool: DevicePool) -> Tensor:
        """Where a field of a piece lies in the pool [L, U, B]."""
        held = self._layout.device_box(piece.group, self._rank)
        assert held is not None, "a source has rows that the device holds"
        layers, tokens, heads = piece.box.within(held)
        assert (heads.start, heads.stop) == (0, held.shape[2]), "pieces are not cut by heads"
        rows = pool.rows(piece.group.name)[place.field.name].flatten(2).view(torch.uint8)
        token = rows.shape[2] // held.shape[1]
        return rows[layers, :, tokens.start * token : tokens.stop * token]


def _strip(piece: Piece, place: FieldPlace, slab: NDArray[np.uint8], device: Tensor) -> Strip:
    num_layers = piece.box.shape[0]
    # unflatten makes a view or raises; numpy's reshape would copy in silence.
    host = torch.from_numpy(slab[:, place.offset : place.offset + place.num_bytes]).unflatten(1, (num_layers, -1))
    assert device.shape[::2] == host.shape[1:], (
        f"{place} has {host.shape[1:]} on the host, {device.shape} on the device"
    )
    return TensorStrip(host, device) if device.is_cuda else ArrayStrip(host, device)
