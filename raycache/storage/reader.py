"""Reads units from storage into host memory, including units written under another split.

An object with the same box as a piece is read in place. Objects with other boxes are read into scratch memory and cut:

    object with another box    k [L, T, H, D], v [L, T, H, D]  --overlap of each field-->  piece in a slab

A slot's header is cleared before the slot is written, and set once all of its content has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raycache.cache.storage_commands import Fetch, StoredUnit
from raycache.memory.arena import Arena
from raycache.memory.box import Box
from raycache.memory.checksum import checksum_of
from raycache.memory.rows import FieldPlace, place_fields
from raycache.storage.base import Storage
from raycache.storage.coverage import Coverage, Group, Place

_SCRATCH_BYTES = 32 << 20
_WORST_LAST = list(Fetch)


_Slot = tuple[int, str, int]
"""(rank, component space, host id)."""


class _Want(NamedTuple):
    """One piece to read.

    Attributes:
        item: index of the unit in the call.
    """

    item: int
    unit: StoredUnit
    group: Group
    place: Place


class _Rows(NamedTuple):
    """A slice of a field.

    Attributes:
        shape: of the whole field: [layers, tokens, heads, bytes per row of one head].
        offset: of the field in the object or envelope, in bytes.
        part: slices of layers, tokens and heads.
    """

    shape: tuple[int, ...]
    offset: int
    part: tuple[slice, slice, slice]

    def of(self, data: memoryview) -> npt.NDArray[np.uint8]:
        """Return a view into an object or envelope."""
        array: npt.NDArray[np.uint8] = np.ndarray(self.shape, np.uint8, data, self.offset)[self.part]
        return array


@dataclass(frozen=True, eq=False)
class _Source:
    """A stored object that overlaps a piece.

    Attributes:
        suffix: end of its key.
        num_bytes: size of its payload.
        copies: per field, (slice of the object, slice of the envelope).
    """

    suffix: bytes
    num_bytes: int
    copies: tuple[tuple[_Rows, _Rows], ...]


class _Join(NamedTuple):
    """A piece and the objects it is assembled from."""

    want: _Want
    sources: tuple[_Source, ...]

    def objects(self) -> dict[bytes, int]:
        """Sizes of the objects in bytes, by key."""
        return {self.want.unit.digest + source.suffix: source.num_bytes for source in self.sources}


class UnitReader:
    """Reads units into their slots. Thread safe for distinct units.

    Args:
        coverage: of the same storage.
        groups: component space -> groups.
    """

    def __init__(
        self, arena: Arena, storage: Storage, *, coverage: Coverage, groups: Mapping[str, Sequence[Group]]
    ) -> None:
        self._storage, self._coverage, self._groups = storage, coverage, groups
        self._ranks = {space: ranks_of(members) for space, members in groups.items()}
        places = [(rank, space) for space, ranks in self._ranks.items() for rank in ranks]
        self._slabs = {(rank, space): arena.slab(rank, space) for rank, space in places}
        self._headers = {(rank, space): arena.headers(rank, space) for rank, space in places}
        self._sources = lru_cache(4096)(partial(_sources, coverage))
        self._scratch = deque[bytearray]()  # reused: page faults of fresh memory cost more than the copy

    def read(self, units: Sequence[StoredUnit]) -> list[Fetch]:
        """Read units into their slots.

        Returns:
            For each unit, the worst result of its pieces. Its slots' headers are set only for HIT.
        Raises:
            OSError: the storage cannot be reached; all slots are marked empty.
        """
        for unit in units:
            for rank in self._ranks.get(unit.space, ()):
                self._headers[rank, unit.space][unit.host, 0] = 0
        wants = [
            _Want(item, unit, group, place)
            for item, unit in enumerate(units)
            for group in self._groups.get(unit.space, ())
            for place in group.places
        ]
        fetches, checksums = self._read_own(wants)
        lacking = [i for i, fetch in enumerate(fetches) if fetch not in (Fetch.HIT, Fetch.UNAVAILABLE)]
        for i, joined in zip(lacking, self._read_joined([wants[i] for i in lacking]), strict=True):
            fetches[i] = joined if joined is Fetch.HIT else _worst(fetches[i], joined)
        found = [Fetch.HIT] * len(units)
        for want, fetch in zip(wants, fetches, strict=True):
            found[want.item] = _worst(found[want.item], fetch)
        for unit, fetch in zip(units, found, strict=True):
            if fetch is Fetch.HIT:
                self._write_headers(unit, checksums)
        return found

    def _read_own(self, wants: Sequence[_Want]) -> tuple[list[Fetch], dict[_Slot, int]]:
        """Read pieces whose box is stored directly into place; also returns known checksums of filled slots."""
        known = {group: set(self._coverage.boxes(group)) for group in {want.group for want in wants}}
        own = [i for i, want in enumerate(wants) if want.place.piece.box in known[want.group]]
        keys = [wants[i].unit.digest + wants[i].place.suffix for i in own]
        into = [self._envelope(wants[i])[wants[i].place.span] for i in own]
        fetches = [Fetch.MISSING] * len(wants)
        for i, fetch in zip(own, self._storage.get(keys, into=into) if keys else (), strict=True):
            fetches[i] = fetch
        whole = [i for i in own if fetches[i] is Fetch.HIT and wants[i].place.is_whole]
        slots = [(wants[i].place.rank, wants[i].unit.space, wants[i].unit.host) for i in whole]
        checksums = self._storage.checksums([wants[i].unit.digest + wants[i].place.suffix for i in whole])
        return fetches, dict(zip(slots, checksums, strict=True))

    def _read_joined(self, wants: Sequence[_Want]) -> list[Fetch]:
        """Assemble pieces from objects with other boxes."""
        stored = self._coverage.present(self._others(wants))
        fetches, joins = [Fetch.MISSING] * len(wants), dict[int, _Join]()
        for i, want in enumerate(wants):
            boxes = stored.get((want.group, want.unit.digest))
            sources = self._sources(want.group, want.place, boxes) if boxes else ()
            if sources:
                joins[i] = _Join(want, sources)
        for batch in _batches(joins):
            for i, fetch in zip(batch, self._join([joins[i] for i in batch]), strict=True):
                fetches[i] = fetch
        return fetches

    def _others(self, wants: Sequence[_Want]) -> dict[Group, tuple[list[bytes], set[Box]]]:
        """For each group, the digests to look up and the stored boxes that overlap a wanted piece."""
        digests: dict[Group, dict[bytes, None]] = {}
        pieces: dict[Group, set[Box]] = {}
        for want in wants:
            digests.setdefault(want.group, {})[want.unit.digest] = None
            pieces.setdefault(want.group, set()).add(want.place.piece.box)
        others: dict[Group, tuple[list[bytes], set[Box]]] = {}
        for group, boxes in pieces.items():
            stored = self._coverage.boxes(group)
            others[group] = (
                list(digests[group]),
                {other for other in stored for box in boxes if other != box and other.common(box)},
            )
        return others

    def _join(self, joins: Sequence[_Join]) -> list[Fetch]:
        """Read the objects of some pieces, each once, and copy their overlaps into place."""
        sizes = {key: size for join in joins for key, size in join.objects().items()}
        scratch = self._take_scratch(sum(sizes.values()))
        views, start = dict[bytes, memoryview](), 0
        for key, size in sizes.items():
            views[key] = memoryview(scratch)[start : start + size]
            start += size
        found = dict(zip(views, self._storage.get(list(views), into=list(views.values())), strict=True))
        fetches = []
        for join in joins:
            fetches.append(_worst(*(found[key] for key in join.objects())))
            if fetches[-1] is Fetch.HIT:
                envelope = self._envelope(join.want)
                for key, source in zip(join.objects(), join.sources, strict=True):
                    for taken, place in source.copies:
                        place.of(envelope)[...] = taken.of(views[key])
        self._scratch.append(scratch)
        return fetches

    def _take_scratch(self, num_bytes: int) -> bytearray:
        try:
            scratch = self._scratch.pop()
        except IndexError:  # all in use: at most one per thread
            return bytearray(num_bytes)
        return scratch if len(scratch) >= num_bytes else bytearray(num_bytes)

    def _envelope(self, want: _Want) -> memoryview:
        envelope: memoryview = self._slabs[want.place.rank, want.unit.space][want.unit.host].data
        return envelope

    def _write_headers(self, unit: StoredUnit, known: Mapping[_Slot, int]) -> None:
        for rank in self._ranks.get(unit.space, ()):
            header = self._headers[rank, unit.space][unit.host]
            # If the object was replaced meanwhile, the checksum is wrong, and loading the slot fails.
            checksum = known.get((rank, unit.space, unit.host), 0)
            header[1] = checksum or checksum_of(self._slabs[rank, unit.space][unit.host].data)
            header[0] = unit.tag  # last: makes the slot valid


def ranks_of(groups: Sequence[Group]) -> list[int]:
    """Ranks that hold a part of these groups."""
    return sorted({place.rank for group in groups for place in group.places})


def _worst(*fetches: Fetch) -> Fetch:
    return max(fetches, key=_WORST_LAST.index)


def _sources(coverage: Coverage, group: Group, place: Place, stored: frozenset[Box]) -> tuple[_Source, ...]:
    """The objects that cover a piece, given the stored boxes; empty if they do not cover it completely."""
    parts: dict[Box, list[Box]] = {}
    for box, part in coverage.fill(group, place.piece.box, stored):
        parts.setdefault(box, []).append(part)
    return tuple(
        _Source(
            group.rows + box.packed(),
            group.num_bytes(box),
            tuple(
                (_rows(source, part.within(box)), _rows(target, part.within(place.piece.box)))
                for part in cut
                for source, target in zip(place_fields(group.component, box), place.piece.fields, strict=True)
            ),
        )
        for box, cut in parts.items()
    )


def _rows(field: FieldPlace, part: tuple[slice, slice, slice]) -> _Rows:
    layers, tokens, heads = field.shape[:3]
    return _Rows((layers, tokens, heads, field.num_bytes // (layers * tokens * heads)), field.offset, part)


def _batches(joins: Mapping[int, _Join]) -> Iterator[list[int]]:
    """Split into batches of about `_SCRATCH_BYTES`; pieces of one unit and group share objects and stay together."""
    together: dict[tuple[bytes, Group], list[int]] = {}
    for i, join in joins.items():
        together.setdefault((join.want.unit.digest, join.want.group), []).append(i)
    batch, num_bytes = list[int](), 0
    for members in together.values():
        batch += members
        num_bytes += sum({key: size for i in members for key, size in joins[i].objects().items()}.values())
        if num_bytes >= _SCRATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
