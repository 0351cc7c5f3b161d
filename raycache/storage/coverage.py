"""Finds stored objects, from any writer, that fill the envelopes of a split.

    wanted, pieces of tp=4     [ 0 ][ 1 ][ 2 ][ 3 ]
    stored under tp=2          [  0   1 ][  2   3 ]      cut
    stored under tp=8          [][][][][][][][]          joined

The suffixes of stored keys show which boxes exist at all; which of them exist for a given page takes a lookup.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from raycache.cache.keys import object_keys, row_format, stored_boxes
from raycache.memory.box import Box, cover
from raycache.memory.component import Component
from raycache.memory.rows import EnvelopeLayout, Piece, place_fields
from raycache.storage.base import Storage

_KNOWN_FOR_S = 5.0
_LOOK_AGAIN_S = 0.5

Part = tuple[Box, Box]
"""(box of a stored object, part of it to use)."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where the rows of one object lie.

    Attributes:
        rank: rank whose slab holds them.
        piece: index of the piece in its envelope.
        span: byte range of the piece in the envelope.
        suffix: suffix of the object's key.
        is_whole: whether the piece is the whole envelope, so that both have the same checksum.
    """

    rank: int
    piece: Piece
    span: slice
    suffix: bytes
    is_whole: bool


@dataclass(frozen=True, eq=False)
class Group:
    """Fields of a unit that are split alike, so that one object holds them together.

    Attributes:
        component: with only the fields of the group.
        rows: row format, as in keys.
        places: pieces of the node's ranks; no two overlap.
        own_boxes: boxes of those pieces.
        whole: box of all rows of the model.
        wanted: boxes that the pieces cover together: the whole, or their own if other nodes hold the rest.
    """

    component: Component
    rows: bytes
    places: tuple[Place, ...]
    own_boxes: frozenset[Box]
    whole: Box
    wanted: tuple[Box, ...]

    def num_bytes(self, box: Box) -> int:
        """Size of an object with a box."""
        return sum(place.num_bytes for place in place_fields(self.component, box))


def groups_of(layout: EnvelopeLayout, space: str) -> list[Group]:
    """Groups of a space of which the node holds pieces."""
    found = (_group_of(layout, component) for component in layout.groups(space))
    return [group for group in found if group.places]


def formats_of(layout: EnvelopeLayout) -> tuple[bytes, ...]:
    """Row formats of all groups, including those held only by other nodes."""
    return tuple(row_format(group) for space in layout.spaces for group in layout.groups(space))


def _group_of(layout: EnvelopeLayout, component: Component) -> Group:
    rows = row_format(component)
    places = [
        Place(
            rank,
            piece,
            slice(piece.offset, piece.offset + piece.num_bytes),
            rows + piece.box.packed(),
            is_whole=piece.num_bytes == layout.envelope_bytes(rank, component.space),
        )
        for rank in layout.ranks
        for piece in layout.pieces(rank, component.space)
        if piece.group == component
    ]
    boxes, whole = frozenset(place.piece.box for place in places), layout.whole_box(component)
    wanted = (whole,) if cover(whole, boxes) else tuple(boxes)
    return Group(component, rows, tuple(places), boxes, whole, wanted)


class Coverage:
    """The boxes stored of each group, refreshed periodically. Thread safe.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(self, storage: Storage, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage, self._clock = storage, clock
        self._lock = threading.Lock()
        self._suffixes = frozenset[bytes]()
        self._asked_at_s = -math.inf
        self._is_bounded = False
        self._boxes = lru_cache(256)(_boxes)
        self._fill = lru_cache(4096)(_fill)
        self._same = lru_cache(4096)(lambda boxes: boxes)  # interns equal sets, so that they compare fast

    @property
    def is_bounded(self) -> bool:
        """Whether the storage has a size limit, so that uses matter."""
        return self._is_bounded

    @property
    def suffixes(self) -> frozenset[bytes]:
        """Known suffixes of stored keys."""
        return self._suffixes

    def boxes(self, group: Group) -> list[Box]:
        """The boxes of a group's stored objects, the largest first. Raises OSError like the storage."""
        self._look(_KNOWN_FOR_S)
        boxes = self._boxes(group, self._suffixes)
        if not all(self.fill(group, wanted, frozenset(boxes)) for wanted in group.wanted):
            self._look(_LOOK_AGAIN_S)
        return self._boxes(group, self._suffixes)

    def fill(self, group: Group, wanted: Box, stored: frozenset[Box]) -> list[Part]:
        """The parts of stored boxes that fill the wanted one; empty if they do not fill it."""
        return self._fill(group, wanted, stored)

    def learn(self, suffixes: Iterable[bytes]) -> None:
        """Note that objects with these suffixes are stored."""
        new = frozenset(suffixes) - self._suffixes
        if new:
            with self._lock:
                self._suffixes |= new

    def present(self, wanted: Mapping[Group, tuple[Sequence[bytes], Iterable[Box]]]) -> Present:
        """Look up, in one call, which boxes are stored of the given groups and digests. Raises OSError."""
        keys, names = list[bytes](), list[tuple[Group, bytes, Box]]()
        for group, (digests, boxes) in wanted.items():
            for box in boxes:
                keys += object_keys(digests, rows=group.rows, box=box)
                names += [(group, digest, box) for digest in digests]
        found: dict[tuple[Group, bytes], set[Box]] = {}
        if keys:
            for (group, digest, box), is_there in zip(names, self._storage.contains(keys, touch=False), strict=True):
                if is_there:
                    found.setdefault((group, digest), set()).add(box)
        return {name: self._same(frozenset(boxes)) for name, boxes in found.items()}

    def _look(self, known_for_s: float) -> None:
        with self._lock:
            now_s = self._clock()
            if now_s - self._asked_at_s >= known_for_s:
                self._suffixes = frozenset(self._storage.suffixes())
                self._is_bounded = self._storage.stats().bytes_limit > 0
                self._asked_at_s = now_s


Present = dict[tuple[Group, bytes], frozenset[Box]]
"""(group, digest of a unit) -> stored boxes."""


class Lookup:
    """Looks up which units are completely stored, and caches the results.

    Args:
        groups: component space -> groups.
    """

    def __init__(self, coverage: Coverage, groups: Mapping[str, Sequence[Group]]) -> None:
        self._coverage, self._groups = coverage, groups
        self._present: Present = {}
        self._known: dict[tuple[str, bytes], bool] = {}

    def are_stored(self, units: Iterable[tuple[str, bytes]]) -> list[bool]:
        """Which units (space, digest) are stored, in objects of any boxes. Raises OSError like the storage."""
        units = list(units)
        new = [unit for unit in dict.fromkeys(units) if unit not in self._known]
        # First the boxes written by this split, usually the only ones.
        self._ask(new, is_own=True)
        self._ask([unit for unit in new if not self._is_whole(*unit)], is_own=False)
        self._known |= {unit: self._is_whole(*unit) for unit in new}
        return [self._known[unit] for unit in units]

    def boxes(self, group: Group, digest: bytes) -> list[Box]:
        """The stored boxes that a unit would be read from; empty if a part is missing."""
        present, found = self._present.get((group, digest), _NO_BOXES), dict[Box, None]()
        for wanted in group.wanted:
            parts = self._coverage.fill(group, wanted, present)
            if not parts:
                return []
            found |= dict.fromkeys(box for box, _ in parts)
        return list(found)

    def _ask(self, units: Sequence[tuple[str, bytes]], *, is_own: bool) -> None:
        by_space: dict[str, list[bytes]] = {}
        for space, digest in units:
            by_space.setdefault(space, []).append(digest)
        wanted = {}
        for space, digests in by_space.items():
            for group in self._groups.get(space, ()):
                boxes = [box for box in self._coverage.boxes(group) if (box in group.own_boxes) == is_own]
                wanted[group] = (digests, boxes)
        for name, stored in self._coverage.present(wanted).items():
            self._present[name] = self._present.get(name, _NO_BOXES) | stored

    def _is_whole(self, space: str, digest: bytes) -> bool:
        return all(self.boxes(group, digest) for group in self._groups.get(space, ()))


_NO_BOXES = frozenset[Box]()


def _boxes(group: Group, suffixes: frozenset[bytes]) -> list[Box]:
    return stored_boxes(suffixes, rows=group.rows, whole=group.whole)


def _fill(group: Group, wanted: Box, stored: frozenset[Box]) -> list[Part]:
    return cover(wanted, sorted(stored, key=group.num_bytes, reverse=True))
