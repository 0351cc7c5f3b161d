"""Storage in files of one directory: bounded in bytes, evicts least recently used first, survives crashes.

    directory/  raycache-storage (a marker, locked by the process that uses it)  00000001.segment  00000002.segment ...

The index is in memory (shelves.py) and rebuilt from the files at start. Payloads are moved outside the lock, those of
neighbouring slots in one call: a slot that is being written is in no index, and one that was overwritten while it was
read shows by its checksum.

Nothing is synced: a killed process loses no recorded object; after a power cut, objects with valid checksums remain.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from raycache.cache.storage_commands import Fetch
from raycache.errors import ConfigError
from raycache.memory.checksum import Buffer
from raycache.storage.base import Changes, Header, Scrub, StorageStats, check_objects, flat
from raycache.storage.segment import Segment
from raycache.storage.shelves import DISK_FULL, SLOT_MASK, Shelf, Shelves

_MARKER = "raycache-storage"
_MARKER_TEXT = b"RayCache storage, format 1\n"
_MIN_BYTES = 1 << 20
_REFUSALS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
"""Errors that waiting does not fix, unlike an unreachable file system."""


class _Job(NamedTuple):
    """A read or write of one object.

    Attributes:
        item: index of the object in the call.
        view: its payload, or the buffer to read it into.
        use: number of this use.
        checksum: of the payload; 0: unknown.
    """

    item: int
    key: bytes
    shelf: Shelf
    segment: Segment
    place: int
    view: memoryview
    use: int = 0
    checksum: int = 0


class FileStorage:
    """A bounded directory of objects, for one process.

    Args:
        directory: created if missing; must be empty or contain a RayCache storage.
        max_bytes: limit of all segments together, at least 1 MiB; never exceeded. If it is lower than last time, the
            least recently used segments are deleted.
    Raises:
        ConfigError: the limit is too small, the directory contains other files, or another process uses it.
        OSError: the directory cannot be created or read.
    """

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        _check_bound(max_bytes)
        self._max_bytes = max_bytes
        self._counts = StorageStats()
        self._lock = threading.Lock()
        self._marker_fd = _claim(directory)
        try:
            self._shelves = Shelves(directory, max_bytes=max_bytes, counts=self._counts)
        except OSError:
            os.close(self._marker_fd)
            raise

    def put(self, keys: Sequence[bytes], *, payloads: Sequence[Buffer], checksums: Sequence[int] = ()) -> list[bool]:
        """Store objects.

        Raises:
            ValueError: a key is empty or too long, or a payload is empty.
        """
        views = [flat(payload) for payload in payloads]
        check_objects(keys, views)
        stored = [False] * len(keys)
        with self._lock:
            jobs = self._reserve(keys, views, checksums or [0] * len(keys), stored)
        errors = {segment: self._write(segment, batch) for segment, batch in _by_segment(jobs)}
        with self._lock:
            self._publish(jobs, errors, stored)
            self._shelves.uses.save_sometimes(self._shelves.segments())
        return stored

    def get(self, keys: Sequence[bytes], *, into: Sequence[Buffer]) -> list[Fetch]:
        found = [Fetch.MISSING] * len(keys)
        with self._lock:
            jobs = self._look_up(keys, [flat(buffer) for buffer in into], found)
        for segment, batch in _by_segment(jobs):
            self._read(segment, batch, found)
        with self._lock:
            self._counts.count(found)
            self._shelves.uses.save_sometimes(self._shelves.segments())
        return found

    def contains(self, keys: Sequence[bytes], *, touch: bool) -> list[bool]:
        with self._lock:
            shelves = [self._shelves.find(key) for key in keys]
            if touch:
                for key, shelf in zip(reversed(keys), reversed(shelves), strict=True):
                    if shelf is not None:
                        self._shelves.touch(shelf, key)
        return [shelf is not None for shelf in shelves]

    def checksums(self, keys: Sequence[bytes]) -> list[int]:
        with self._lock:
            shelves = [self._shelves.find(key) for key in keys]
            return [0 if shelf is None else shelf.checksum(key) for shelf, key in zip(shelves, keys, strict=True)]

    def suffixes(self) -> set[bytes]:
        """Suffixes of all keys found at opening, or stored since it was opened or cleared."""
        with self._lock:
            return set(self._shelves.suffixes)

    def changes(self, since: str) -> Changes:
        """Keys stored or dropped since a version. The first call begins to note them."""
        with self._lock:
            return self._shelves.changes.since(since, self._shelves.keys)

    def stats(self) -> StorageStats:
        with self._lock:
            return replace(
                self._counts,
                objects=self._shelves.num_objects,
                bytes_used=self._shelves.num_bytes,
                bytes_limit=self._max_bytes,
            )

    def close(self) -> None:
        with self._lock:
            self._shelves.uses.save(self._shelves.segments())
            for segment in self._shelves.segments():
                segment.close()
            os.close(self._marker_fd)

    def clear(self) -> None:
        with self._lock:
            self._shelves.clear()

    def keys(self) -> list[bytes]:
        """All keys, in no particular order."""
        with self._lock:
            return self._shelves.keys()

    def resize(self, max_bytes: int) -> None:
        """Change the size limit; evicts whole segments.

        Raises:
            ConfigError: the limit is too small.
        """
        _check_bound(max_bytes)
        with self._lock:
            self._max_bytes = max_bytes
            self._shelves.bound(max_bytes)

    def scrub(self, *, until_s: float = math.inf) -> Scrub:
        start_s, checked, num_bytes, bad = time.monotonic(), 0, 0, 0
        is_whole = True
        for key in self.keys():
            if time.monotonic() >= until_s:
                is_whole = False
                break
            found = [Fetch.MISSING]
            with self._lock:
                shelf = self._shelves.find(key)
                if shelf is None:
                    continue
                segment, slot = shelf.at(shelf.index[key])
                buffer = memoryview(bytearray(segment.lengths[slot]))
                job = _hold(0, key, shelf, buffer)
            self._read(segment, [job], found)
            checked, num_bytes, bad = checked + 1, num_bytes + len(buffer), bad + (found[0] is Fetch.CORRUPT)
        with self._lock:
            self._counts.corrupt += bad
        return Scrub(checked, num_bytes, bad, time.monotonic() - start_s, is_whole)

    def _reserve(
        self, keys: Sequence[bytes], views: Sequence[memoryview], checksums: Sequence[int], stored: list[bool]
    ) -> list[_Job]:
        """Reserve places for new objects; existing ones are touched first, so that their children do not evict them."""
        for i in reversed(range(len(keys))):
            if (shelf := self._shelves.find(keys[i])) is None:
                continue
            if shelf.length(keys[i]) == len(views[i]):
                self._shelves.touch(shelf, keys[i])
                self._counts.known += 1
                stored[i] = True
            else:
                self._erase(shelf, keys[i])
        jobs, last_use = [], self._shelves.uses.take(len(keys)) + len(keys)
        for i, view in enumerate(views):
            if stored[i]:
                continue
            taken = self._take(len(view))
            if taken is not None:
                shelf, place = taken
                segment, _ = shelf.at(place)
                segment.num_held += 1
                jobs.append(_Job(i, keys[i], shelf, segment, place, view, last_use - i, checksums[i]))
        return jobs

    def _take(self, num_bytes: int) -> tuple[Shelf, int] | None:
        try:
            taken = self._shelves.take(num_bytes)
        except OSError:
            self._counts.io_errors += 1
            return None
        if taken is None and self._shelves.is_disk_full:
            self._counts.disk_full += 1
        elif taken is None:
            self._counts.refused += 1
        return taken

    def _write(self, segment: Segment, batch: Sequence[_Job]) -> int:
        """Write the objects of one segment, then their records; returns 0 or an errno."""
        slots = [job.place & SLOT_MASK for job in batch]
        try:
            checksums = segment.write(slots, [job.view for job in batch], known=[job.checksum for job in batch])
            headers = [Header(job.key, len(job.view), total) for job, total in zip(batch, checksums, strict=True)]
            segment.record(slots, headers, uses=[job.use for job in batch])
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def _publish(self, jobs: Sequence[_Job], errors: Mapping[Segment, int], stored: list[bool]) -> None:
        """Index the written objects, the first one last."""
        for job in reversed(jobs):
            error = errors[job.segment]
            if error or job.segment.is_dropped:
                self._shelves.give_back(job.shelf, job.place)
            else:
                self._shelves.publish(job.shelf, job.place, job.key)
                stored[job.item] = True
                self._counts.stored += 1
            self._counts.disk_full += error in DISK_FULL
            self._counts.io_errors += bool(error) and error not in DISK_FULL
            job.segment.release()

    def _look_up(self, keys: Sequence[bytes], views: Sequence[memoryview], found: list[Fetch]) -> list[_Job]:
        jobs = []
        for i in reversed(range(len(keys))):
            shelf = self._shelves.find(keys[i])
            if shelf is None:
                continue
            if shelf.length(keys[i]) != len(views[i]):
                found[i] = Fetch.FOREIGN
                continue
            self._shelves.touch(shelf, keys[i])
            jobs.append(_hold(i, keys[i], shelf, views[i]))
        return jobs

    def _read(self, segment: Segment, batch: Sequence[_Job], found: list[Fetch]) -> None:
        """Read objects of one segment and verify them; damaged ones are deleted."""
        try:
            checksums = segment.read([job.place & SLOT_MASK for job in batch], [job.view for job in batch])
        except OSError:
            checksums = []
        with self._lock:
            if not checksums:
                self._counts.io_errors += len(batch)
                for job in batch:
                    found[job.item] = Fetch.UNAVAILABLE
            for job, total in zip(batch, checksums, strict=False):
                if total == job.checksum:
                    found[job.item] = Fetch.HIT
                elif (
                    job.shelf.index.get(job.key) == job.place
                    and segment.checksums[job.place & SLOT_MASK] == job.checksum
                ):
                    found[job.item] = Fetch.CORRUPT  # otherwise it was evicted while it was read
                    self._erase(job.shelf, job.key)
            for job in batch:
                job.segment.release()

    def _erase(self, shelf: Shelf, key: bytes) -> None:
        try:
            self._shelves.erase(shelf, key)
        except OSError:
            self._counts.io_errors += 1


def _check_bound(max_bytes: int) -> None:
    if max_bytes < _MIN_BYTES:
        raise ConfigError(f"max_bytes={max_bytes} is too small for a storage; use at least {_MIN_BYTES}")


def _claim(directory: Path) -> int:
    """Lock the directory for this process, until the process ends at the latest."""
    marker = directory / _MARKER
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # In this order, as another process may be creating the marker.
        if any(directory.iterdir()) and not marker.exists():
            raise ConfigError(f"{directory} is not empty and not a RayCache storage; name an empty or new directory")
        fd = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"{directory} cannot be used ({reason}); name a directory that this user can write to"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise ConfigError(
            f"{directory} is in use by another process; give each its own directory; on a mount shared by nodes, "
            "write {node} into the path"
        ) from error
    text = os.pread(fd, 4096, 0)
    if text not in (b"", _MARKER_TEXT):
        os.close(fd)
        raise ConfigError(f"{directory} holds a storage of another format, {text!r}; name another directory")
    os.pwrite(fd, _MARKER_TEXT, 0)
    return fd


def _hold(item: int, key: bytes, shelf: Shelf, view: memoryview) -> _Job:
    """Prepare the read of an object; its file stays open until then."""
    place = shelf.index[key]
    segment, slot = shelf.at(place)
    segment.num_held += 1
    return _Job(item, key, shelf, segment, place, view, checksum=segment.checksums[slot])


def _by_segment(jobs: Sequence[_Job]) -> Iterator[tuple[Segment, list[_Job]]]:
    """Group jobs by segment, in the order of their slots."""
    batch: list[_Job] = []
    for job in sorted(jobs, key=attrgetter("place")):
        if batch and job.segment is not batch[0].segment:
            yield batch[0].segment, batch
            batch = []
        batch.append(job)
    if batch:
        yield batch[0].segment, batch
