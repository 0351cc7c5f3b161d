"""Moves units between a CUDA device and the host at the speed of the link.

    save   gather, check  [ chunk 0 ][ chunk 1 ][ chunk 2 ]                kernels, pool to buffer
           copy                      [ chunk 0  ][ chunk 1  ][ chunk 2  ]  copy engine, buffer to host
    load   copy           [ turn 0 ][ turn 1        ][ turn 2        ]     copy engine, host to buffer
           scatter, check           [ turn 0 ][ turn 1 ]      [ turn 2 ]   kernels, buffer to pool

There are two buffers per direction. A turn is some layers of all units, split into chunks that fit a buffer.

Checksums are computed on the device from the buffers: the host is too slow, and errors of the link are found as well. A
load is checked at its end. Each rank checks its own envelopes; a load that fails on one rank fails for all.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from raycache.memory.carriers import LOAD_BUFFER_BYTES, SAVE_BUFFER_BYTES, SUMS_BYTES, Release, Spaces, Units
from raycache.memory.host import HostSpace
from raycache.memory.moves import Batch
from raycache.memory.rows import ALIGN
from raycache.memory.staging import LoadStage, SaveStage, checksums_of
from raycache.memory.streams import CopyEngine, Event, PinnedSlabs, cuda_major
from raycache.parallel.sharding import even_range
from raycache.parallel.uploads import upload

TURN_BYTES = 768 << 10
"""Bytes of a unit per turn, enough for copies at full speed."""

FIRST_TURN_BYTES = 256 << 10
"""Bytes of a unit in the first turn; fewer would not arrive earlier, since launching copies takes longer."""


Item = TypeVar("Item")


class Turn(NamedTuple):
    """Some layers of all units.

    Attributes:
        layers: ascending.
        stages: component space -> one per buffer; only spaces that have these layers.
    """

    layers: Sequence[int]
    stages: Mapping[str, Sequence[LoadStage]]


class Chunk(NamedTuple):
    """Units of a turn that fit a buffer.

    Attributes:
        units: slice of the load's units.
        stages: one per buffer.
        layers: layers that are complete with this chunk.
    """

    space: str
    units: slice
    stages: Sequence[LoadStage]
    layers: Sequence[int]


class Lane:
    """Two stages of work: the first one fills one of two buffers while the second one empties the other.

    Args:
        num_bytes: size of a buffer.
        spaces: component space -> maximum number of units of a move.
    Attributes:
        firsts: streams of the first stage, one per buffer.
        second: stream of the second stage.
    """

    def __init__(self, device: torch.device, *, num_bytes: int, spaces: Mapping[str, int]) -> None:
        self._device = device
        self._ids = {name: torch.empty(count, dtype=torch.int64).pin_memory() for name, count in spaces.items()}
        self.buffers = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self.firsts, self.second = [torch.cuda.Stream(device) for _ in self.buffers], torch.cuda.Stream(device)
        self._emptied = [torch.cuda.Event(blocking=True) for _ in self.buffers]
        self._next = itertools.cycle(range(len(self.buffers)))

    def begin(self, after: Event) -> None:
        """Order all further work after an event and after all work submitted before."""
        for first in self.firsts:
            first.wait_stream(self.second)
            with torch.cuda.stream(first):
                after.wait()
        self.hand_over()

    def ids(self, units: Batch) -> Tensor:
        """Copy the pool ids of units to the device, [U], on the current stream; once per move."""
        pinned = self._ids[units.space][: len(units)]
        pinned.numpy()[:] = units.devices
        ids = torch.empty_like(pinned, device=self._device)
        upload(pinned, ids)
        return ids

    def fill(self) -> int:
        """Wait for the buffer that its first stream may fill next; returns its index.

        The host waits, not the stream, so that no more than two chunks are queued at a time.
        """
        buffer = next(self._next)
        self._emptied[buffer].synchronize()
        return buffer

    def hand_over(self) -> None:
        """Let the second stream wait for the first ones."""
        for first in self.firsts:
            self.second.wait_stream(first)

    def empty(self, buffer: int) -> None:
        """Mark a buffer as empty once the second stream has done its work so far."""
        self._emptied[buffer].record(self.second)

    def wait(self) -> None:
        """Wait until all streams are done, without blocking other threads."""
        self.hand_over()
        done = torch.cuda.Event(blocking=True)
        done.record(self.second)
        done.synchronize()


class CudaCarrier:
    """Carrier for the pool of a CUDA device.

    Raises:
        ConfigError: host memory cannot be pinned.
    """

    def __init__(self, spaces: Spaces, *, device: torch.device) -> None:
        self._spaces, self._device = spaces, device
        self._copies = CopyEngine(has_batches=cuda_major() >= 13)
        self._checksums = {name: checksums_of(space, device) for name, space in spaces.items()}
        # Parts of an envelope are extended to whole stripes.
        widest = max(sum(strip.num_bytes + 2 * ALIGN for strip in space.loads) for space in spaces.values())
        num_units = {name: space.num_device_units for name, space in spaces.items()}
        self._saves, self._loads = (
            Lane(device, num_bytes=max(size, widest), spaces=num_units)
            for size in (SAVE_BUFFER_BYTES, LOAD_BUFFER_BYTES)
        )
        sums = {name: self._num_sums(name) for name in spaces}
        most = min(SUMS_BYTES // 8, sum(num_units[name] * count for name, count in sums.items()))
        self._sums = torch.empty(max(most, *sums.values()), dtype=torch.int64, device=device)
        self._stages = {
            name: [SaveStage(space, buffer, self._checksums[name]) for buffer in self._saves.buffers]
            for name, space in spaces.items()
            if space.envelope_bytes
        }
        self._turns = [self._turn(layers) for layers in _turns(spaces)]
        self._compile()
        # Last, since a failure of the constructor after it would leave the slabs pinned.
        self._pinned = PinnedSlabs([slab for space in spaces.values() for slab in space.slabs], device=device)

    def save(self, units: Units, *, after: Event) -> None:
        """Gather, copy and compute checksums, chunk by chunk."""
        self._saves.begin(after)
        for name, of_space in units.items():
            if name in self._stages:
                self._save_space(self._spaces[name], of_space, self._stages[name])

    def load(self, units: Units, *, after: Event, release: Release) -> str:
        """Copy and check; returns "", or which unit is damaged."""
        for name, of_space in units.items():
            space = self._spaces[name]
            fault = space.foreign(of_space)
            if not fault and self._checksums[name] is None:
                fault = space.damaged(of_space)
            if fault:
                return fault
        self._loads.begin(after)
        parts = list(self._fitting(units))
        for part in parts:
            if fault := self._load_part(part, release if part is parts[-1] else _not_yet):
                return fault
        return ""

    def close(self) -> None:
        """Unpin."""
        self._pinned.close()

    def _save_space(self, space: HostSpace, units: Batch, stages: Sequence[SaveStage]) -> None:
        lane = self._saves
        space.begin_save(units)
        with self._finishing(lane), torch.cuda.stream(lane.firsts[0]):
            ids = lane.ids(units)
            found = []
            for chunk in _parts(len(units), stages[0].num_units):
                buffer = lane.fill()
                stages[buffer].gather(ids[chunk])
                lane.hand_over()
                self._copies.copy(stages[buffer].copies(units.hosts[chunk]), lane.second)
                found.append(stages[buffer].checksums(len(ids[chunk])))
                lane.empty(buffer)
            checksums = torch.cat(found).to("cpu", non_blocking=True)
        space.end_save(units, checksums.numpy().view(np.uint64) if len(checksums) else space.checksums(units))

    def _load_part(self, units: Units, release: Release) -> str:
        """Load units whose partial checksums fit; returns "", or what is wrong."""
        lane = self._loads
        with self._finishing(lane), torch.cuda.stream(lane.second):
            arrivals = _ahead(self._arrivals(units))
            ids = {name: lane.ids(of_space) for name, of_space in units.items()}
            sums = self._zeros(units)
            for chunk, buffer, arrived in arrivals:
                lane.second.wait_event(arrived)
                chunk.stages[buffer].scatter(ids[chunk.space][chunk.units], sums[chunk.space][chunk.units])
                lane.empty(buffer)
                if chunk.layers:
                    release(chunk.layers, lane.second.record_event())
            found = {
                name: checksums.finish(sums[name]).to("cpu", non_blocking=True)
                for name, checksums in self._checksums.items()
                if checksums is not None and name in units
            }
        faults = (
            self._spaces[name].differing(units[name], checksums.numpy().view(np.uint64))
            for name, checksums in found.items()
        )
        return next((fault for fault in faults if fault), "")

    @contextmanager
    def _finishing(self, lane: Lane) -> Iterator[None]:
        """Wait for all work of the block, even after a failure, since the units of a failed move may be reassigned."""
        try:
            yield
        finally:
            lane.wait()

    def _arrivals(self, units: Units) -> Iterator[tuple[Chunk, int, torch.cuda.Event]]:
        """Submit the copies of a load, chunk by chunk; yields each with its buffer and the event of its arrival.

        A copy engine goes on with a stream as long as more of it is queued. With a stream per buffer it changes after
        each chunk, so that copies of a step get in between.
        """
        lane = self._loads
        for chunk in self._chunks(units):
            buffer = lane.fill()
            copies = chunk.stages[buffer].copies(units[chunk.space].hosts[chunk.units])
            self._copies.copy(copies, lane.firsts[buffer], is_early=True)
            yield chunk, buffer, lane.firsts[buffer].record_event()

    def _chunks(self, units: Units) -> list[Chunk]:
        """Chunks of a load, in order."""
        chunks: list[Chunk] = []
        waiting: list[int] = []
        for turn in self._turns:
            of_turn = [
                Chunk(name, part, stages, ())
                for name, stages in turn.stages.items()
                if name in units
                for part in _parts(len(units[name]), stages[0].num_units)
            ]
            waiting += turn.layers
            if of_turn:
                of_turn[-1] = of_turn[-1]._replace(layers=waiting)
                waiting = []
            chunks += of_turn
        return chunks

    def _turn(self, layers: Sequence[int]) -> Turn:
        stages = {}
        for name, space in self._spaces.items():
            if strips := space.loads_between(layers[0], layers[-1]):
                stages[name] = [
                    LoadStage(space, strips, buffer, self._checksums[name]) for buffer in self._loads.buffers
                ]
        return Turn(layers, stages)

    def _fitting(self, units: Units) -> Iterator[dict[str, Batch]]:
        """Split units into parts whose partial checksums fit into `SUMS_BYTES`."""
        part, left = dict[str, Batch](), len(self._sums)
        for name, of_space in units.items():
            first, size = 0, self._num_sums(name)
            while first < len(of_space):
                if left < size:
                    yield part
                    part, left = {}, len(self._sums)
                taken = of_space[first : first + left // size] if size else of_space
                part[name] = taken
                first, left = first + len(taken), left - len(taken) * size
        yield part

    def _num_sums(self, space: str) -> int:
        """Number of partial checksums per unit."""
        checksums = self._checksums[space]
        return 0 if checksums is None else checksums.num_blocks * 8

    def _zeros(self, units: Units) -> dict[str, Tensor]:
        """Zeroed partial checksums of all units, [U, K, 8]; K is 0 for units checked by the host."""
        sizes = [len(of_space) * self._num_sums(name) for name, of_space in units.items()]
        cut = self._sums[: sum(sizes)].zero_().split(sizes)
        return {
            name: sums.view(len(units[name]), self._num_sums(name) // 8, 8)
            for name, sums in zip(units, cut, strict=True)
        }

    def _compile(self) -> None:
        """Launch all kernels of moves once on empty data, so that the first move does not wait for compilation."""
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        for saves in self._stages.values():
            saves[0].gather(none)
            saves[0].checksums(0)
        for turn in self._turns:
            for name, loads in turn.stages.items():
                loads[0].scatter(none, self._sums[:0].view(0, self._num_sums(name) // 8, 8))
        for checksums in self._checksums.values():
            if checksums is not None:
                checksums.finish(checksums.zeros(1))
        torch.cuda.synchronize(self._device)


def _turns(spaces: Spaces) -> list[Sequence[int]]:
    """Split layers into turns: a short first one, then runs of equal length."""
    per_layer = Counter[int]()
    for space in spaces.values():
        for strip in space.loads:
            per_layer.update(dict.fromkeys(strip.layers, strip.pool.shape[2]))
    layers = sorted(per_layer)
    ends = itertools.accumulate(per_layer[layer] for layer in layers)
    num_first = next((count for count, end in enumerate(ends, 1) if end >= FIRST_TURN_BYTES), len(layers))
    rest = layers[num_first:]
    count = min(len(rest), -(-sum(per_layer[layer] for layer in rest) // TURN_BYTES))
    runs = (even_range(len(rest), turn, count) for turn in range(count))
    return [part for part in (layers[:num_first], *(rest[run.start : run.stop] for run in runs)) if part]


def _parts(count: int, size: int) -> Iterator[slice]:
    """Slices of range(count), `size` at a time."""
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def _ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The items, each produced before the previous one is used; the first one immediately."""
    return _behind(next(items, None), items)


def _behind(made: Item | None, items: Iterator[Item]) -> Iterator[Item]:
    while made is not None:
        following = next(items, None)
        yield made
        made = following


def _not_yet(layers: Iterable[int], filled: Event) -> None:
    """Keep layers locked, since units of a later part are still missing."""
