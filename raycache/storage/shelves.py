"""Allocation and eviction of objects in a directory of segments. Moves no payloads; not thread safe.

Objects with the same slot size share a shelf, whose slots come in segments (segment.py). A new object replaces the
least recently used one of its shelf, unless another shelf has a segment whose objects were all last used even earlier:
then that segment is dropped. So the sizes share the disk according to use, and the limit always holds.

A place is an int: segment number << 24 | slot.
"""

from __future__ import annotations

import errno
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from raycache.cache.storage_commands import Fetch
from raycache.storage.base import Header, StorageStats, suffix_of
from raycache.storage.change_log import ChangeLog
from raycache.storage.segment import SUFFIX, UNFINISHED, Segment, segment_bytes_for, slot_bytes_for

SLOT_MASK = (1 << 24) - 1
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_SEGMENTS = 64  # target number of files at the limit: few are open
_MIN_SEGMENT_BYTES = 256 << 10  # of which at least 8 KiB are overhead
_MAX_SEGMENT_BYTES = 4 << 30
_DISK_FULL_PAUSE_S = 5.0
_SAVE_USES_S = 30.0


@dataclass(eq=False)
class Shelf:
    """Objects with the same slot size.

    Attributes:
        index: key -> place, least recently used first.
        free: empty places that are not being written; taken from the end.
        segments: by number.
        look_again: use number from which other shelves are searched again for a colder segment.
        least_bytes: size of a segment with one slot.
    """

    slot_bytes: int
    index: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    free: list[int] = field(default_factory=list)
    segments: dict[int, Segment] = field(default_factory=dict)
    look_again: int = 0
    least_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.least_bytes = segment_bytes_for(self.slot_bytes, num_slots=1)

    def at(self, place: int) -> tuple[Segment, int]:
        """The segment and slot of a place."""
        return self.segments[place >> 24], place & SLOT_MASK

    def length(self, key: bytes) -> int:
        """Bytes of an object's payload."""
        segment, slot = self.at(self.index[key])
        return segment.lengths[slot]

    def checksum(self, key: bytes) -> int:
        """Checksum of an object's payload."""
        segment, slot = self.at(self.index[key])
        return segment.checksums[slot]


class Uses:
    """Numbers uses, for LRU eviction, and saves the numbers to disk periodically.

    Args:
        counts: counts failures to save them.
    Attributes:
        next: number of the next use.
    """

    def __init__(self, counts: StorageStats) -> None:
        self._counts = counts
        self.next = 1
        self._save_at_s = time.monotonic() + _SAVE_USES_S

    def take(self, count: int = 1) -> int:
        """Take consecutive numbers; returns the first."""
        first = self.next
        self.next += count
        return first

    def save_sometimes(self, segments: Iterable[Segment]) -> None:
        """Save the use numbers of segments, if the last time was `_SAVE_USES_S` ago."""
        if time.monotonic() >= self._save_at_s:
            self.save(segments)

    def save(self, segments: Iterable[Segment]) -> None:
        """Save the use numbers of segments; failures are counted."""
        self._save_at_s = time.monotonic() + _SAVE_USES_S
        try:
            for segment in segments:
                segment.save_uses()
        except OSError:
            self._counts.io_errors += 1


class Shelves:
    """All objects in a directory, up to a size limit.

    Args:
        directory: existing segments in it are recovered.
        max_bytes: limit for all files together.
        counts: counts evictions and damaged objects.
    Attributes:
        num_bytes: current size of all files.
        is_disk_full: whether the disk was too full for the latest new segment.
        suffixes: key suffixes (base.py) present at the start or stored since, up to the last `clear`.
        changes: keys that entered or left an index.
    """

    def __init__(self, directory: Path, *, max_bytes: int, counts: StorageStats) -> None:
        self._directory, self._max_bytes, self._counts = directory, max_bytes, counts
        self._shelves: dict[int, Shelf] = {}
        self.num_bytes = 0
        self.is_disk_full = False
        self.suffixes = set[bytes]()
        self.changes = ChangeLog()
        self.uses = Uses(counts)
        self._grow_again_s = 0.0
        self._next_number = 1
        self._recover()
        self.bound(max_bytes)

    @property
    def num_objects(self) -> int:
        """Number of stored objects."""
        return sum(len(shelf.index) for shelf in self._shelves.values())

    def keys(self) -> list[bytes]:
        """Keys of all objects, in no particular order."""
        return [key for shelf in self._shelves.values() for key in shelf.index]

    def segments(self) -> Iterator[Segment]:
        """Iterate over the segments of all shelves."""
        for shelf in self._shelves.values():
            yield from shelf.segments.values()

    def find(self, key: bytes) -> Shelf | None:
        """Return the shelf that holds an object; None if it is not stored."""
        for shelf in self._shelves.values():
            if key in shelf.index:
                return shelf
        return None

    def touch(self, shelf: Shelf, key: bytes) -> None:
        """Make an object the most recently used."""
        segment, slot = shelf.at(shelf.index[key])
        shelf.index.move_to_end(key)
        segment.touch(slot, self.uses.take())

    def take(self, num_bytes: int) -> tuple[Shelf, int] | None:
        """Reserve a place for a payload, evicting if necessary.

        Returns:
            Shelf and place, to be passed to `publish` or `give_back`; None if nothing can be evicted.
        """
        slot_bytes = slot_bytes_for(num_bytes)
        shelf = self._shelves.get(slot_bytes) or self._shelves.setdefault(slot_bytes, Shelf(slot_bytes))
        if shelf.free:
            return shelf, shelf.free.pop()
        if self._make_room(shelf) and self._grow(shelf):
            return shelf, shelf.free.pop()
        if not shelf.index and self._push_out(shelf) and self._grow(shelf):
            return shelf, shelf.free.pop()
        if not shelf.index:
            return None  # nothing of this size can be evicted, and no segment of another size dropped
        key, place = shelf.index.popitem(last=False)
        self.changes.note([key])
        segment, slot = shelf.at(place)
        segment.forget(slot)
        self._counts.evicted += 1
        return shelf, place

    def publish(self, shelf: Shelf, place: int, key: bytes) -> None:
        """Index a written place under its key, or free it if the key has been stored meanwhile."""
        if key in shelf.index:
            self.give_back(shelf, place)
        else:
            shelf.index[key] = place
            self.suffixes.add(suffix_of(key))
            self.changes.note([key])

    def give_back(self, shelf: Shelf, place: int) -> None:
        """Free a place; does nothing if its segment has been dropped."""
        if place >> 24 in shelf.segments:
            segment, slot = shelf.at(place)
            segment.forget(slot)
            shelf.free.append(place)

    def erase(self, shelf: Shelf, key: bytes) -> None:
        """Delete an object, on disk too."""
        place = shelf.index.pop(key)
        self.changes.note([key])
        segment, slot = shelf.at(place)
        segment.erase(slot)
        shelf.free.append(place)

    def bound(self, max_bytes: int) -> None:
        """Change the limit; drops the least recently used segments until it holds."""
        self._max_bytes = max_bytes
        while self.num_bytes > max_bytes:
            self._drop(min(self.segments(), key=_last_used))

    def clear(self) -> None:
        """Drop all segments."""
        for segment in list(self.segments()):
            self._drop(segment, is_eviction=False)
        self.suffixes.clear()

    def _make_room(self, shelf: Shelf) -> bool:
        """Drop segments of other shelves that are colder than this one, and return whether a new segment now fits.

        This takes a pass over all segments, so a full shelf does it only every 64 uses.
        """
        needed = shelf.least_bytes
        if self.num_bytes + needed <= self._max_bytes:
            return True
        if needed > self._max_bytes or (shelf.index and self.uses.next < shelf.look_again):
            return False
        shelf.look_again = self.uses.next + 64
        limit = self.uses.next
        if shelf.index:
            segment, slot = shelf.at(next(iter(shelf.index.values())))
            limit = segment.used[slot]
        others = [s for s in self.segments() if s.slot_bytes != shelf.slot_bytes and not s.num_held]
        for segment in sorted(others, key=_last_used):
            if segment.last_used >= limit:
                return False
            self._drop(segment)
            if self.num_bytes + needed <= self._max_bytes:
                return True
        return False

    def _push_out(self, shelf: Shelf) -> bool:
        """On a full disk, drop the coldest large enough segment of another shelf for the first one of this shelf."""
        others = [segment for segment in self.segments() if segment.slot_bytes != shelf.slot_bytes]
        free = [segment for segment in others if not segment.num_held and segment.num_bytes >= shelf.least_bytes]
        if not free or not self.is_disk_full:
            return False
        self._drop(min(free, key=_last_used))
        self._grow_again_s = 0.0
        return True

    def _grow(self, shelf: Shelf) -> bool:
        """Add a segment to a shelf; False if the disk is full."""
        if self.is_disk_full and time.monotonic() < self._grow_again_s:
            return False
        size = min(max(self._max_bytes // _SEGMENTS, _MIN_SEGMENT_BYTES), _MAX_SEGMENT_BYTES)
        size = max(size, shelf.least_bytes)
        path = self._directory / f"{self._next_number:08d}{SUFFIX}"
        self._next_number += 1
        try:
            segment = Segment.create(
                path, slot_bytes=shelf.slot_bytes, max_bytes=min(size, self._max_bytes - self.num_bytes)
            )
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            self.is_disk_full, self._grow_again_s = True, time.monotonic() + _DISK_FULL_PAUSE_S
            return False
        self.is_disk_full = False
        segment.last_used = self.uses.next
        self._add(shelf, segment)
        shelf.free += [segment.number << 24 | slot for slot in reversed(range(segment.num_slots))]
        return True

    def _add(self, shelf: Shelf, segment: Segment) -> None:
        shelf.segments[segment.number] = segment
        self.num_bytes += segment.num_bytes

    def _drop(self, segment: Segment, *, is_eviction: bool = True) -> None:
        shelf, number = self._shelves[segment.slot_bytes], segment.number
        gone = [key for key, place in shelf.index.items() if place >> 24 == number]
        for key in gone:
            del shelf.index[key]
        self.changes.note(gone)
        if is_eviction:
            self._counts.evicted += len(gone)
        shelf.free = [place for place in shelf.free if place >> 24 != number]
        del shelf.segments[number]
        self.num_bytes -= segment.num_bytes
        segment.drop()

    def _recover(self) -> None:
        """Rebuild the index from the records of all segments; unreadable ones are counted and freed."""
        found: list[tuple[int, bytes, Shelf, int]] = []
        for path in self._directory.glob(f"*{UNFINISHED}"):
            path.unlink()
        for path in sorted(path for path in self._directory.glob(f"*{SUFFIX}") if path.stem.isdecimal()):
            segment = Segment.open(path)
            self._next_number = max(self._next_number, int(path.stem) + 1)
            if segment is None:
                self._counts.foreign += 1
                path.unlink()
                continue
            shelf = self._shelves.setdefault(segment.slot_bytes, Shelf(segment.slot_bytes))
            self._add(shelf, segment)
            found += self._recover_segment(shelf, segment)
        found.sort(key=lambda entry: entry[0])
        for use, key, shelf, place in found:
            if (older := shelf.index.pop(key, None)) is not None:
                self.give_back(shelf, older)
            shelf.index[key] = place
            self.suffixes.add(suffix_of(key))
            self.uses.next = max(self.uses.next, use + 1)

    def _recover_segment(self, shelf: Shelf, segment: Segment) -> list[tuple[int, bytes, Shelf, int]]:
        """Return (use, key, shelf, place) of each object in a segment; its other slots are freed."""
        found, first = [], segment.number << 24
        for slot, header in segment.recover():
            if isinstance(header, Header):
                found.append((segment.used[slot], header.key, shelf, first | slot))
            elif header is Fetch.CORRUPT:
                self._counts.corrupt += 1
            else:
                self._counts.foreign += 1
        shelf.free += [first | slot for slot in reversed(range(segment.num_slots)) if not segment.lengths[slot]]
        return found


def _last_used(segment: Segment) -> int:
    return segment.last_used
