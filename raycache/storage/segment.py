"""A file of equally sized slots, the unit in which the file backend allocates disk space.

    [ head 4096 | uses 8 x n | records 128 x n | pad | slot 0 | slot 1 | ... | slot n-1 ]

A slot's record holds the object's header (base.py) and the use number of the write; later uses are saved periodically.
A payload is written before its record and both have checksums, so a torn write is detected after a crash. The whole
file is allocated on creation, so a full disk fails then. All records are contiguous: one short read rebuilds the index.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from raycache.cache.storage_commands import Fetch
from raycache.memory.checksum import checksum_of
from raycache.storage.base import HEADER_BYTES, Header, read_header

ALIGN = 4096
SUFFIX = ".segment"
UNFINISHED = ".new"
_RECORD_BYTES = 128
_HEAD = struct.Struct("<8sQQQ")  # magic, bytes per slot, number of slots, checksum of the preceding fields
_MAGIC = b"RCseg\x00\x00\x01"
_UNIT_BYTES = 512 << 10  # per write or read: still in the CPU cache when the checksum is computed
_NO_RECORD = bytes(_RECORD_BYTES)
_USE = struct.Struct("<Q")
_ZEROS = memoryview(bytes(ALIGN))


def slot_bytes_for(num_bytes: int) -> int:
    """Slot size for a payload: whole blocks, so that writes never have to read a block first."""
    return -(-num_bytes // ALIGN) * ALIGN


def segment_bytes_for(slot_bytes: int, *, num_slots: int) -> int:
    """File size for a number of slots."""
    return _data_start(num_slots) + num_slots * slot_bytes


class Segment:
    """An open segment. Not thread safe, except for `write` and `read` of distinct slots.

    Attributes:
        number: the file's name.
        num_bytes: size of the file.
        used: number of the last use, per slot.
        lengths: payload size in bytes per slot; 0: empty.
        checksums: of the payload, per slot.
        num_held: slots being written or read.
        last_used: maximum of `used`.
        is_dropped: the file is deleted; it is closed once no slot is held.
    """

    def __init__(self, path: Path, fd: int, *, slot_bytes: int, num_slots: int) -> None:
        self.path, self._fd = path, fd
        self.number = int(path.stem)
        self.slot_bytes, self.num_slots = slot_bytes, num_slots
        self._records_start, self._data_start = ALIGN + _USE.size * num_slots, _data_start(num_slots)
        self.num_bytes = segment_bytes_for(slot_bytes, num_slots=num_slots)
        self.used, self.lengths, self.checksums = (array("Q", bytes(8 * num_slots)) for _ in range(3))
        self.num_held = 0
        self.last_used = 0
        self.is_dropped = False
        self._are_uses_stale = False

    @classmethod
    def create(cls, path: Path, *, slot_bytes: int, max_bytes: int) -> Segment:
        """Create a file with as many slots as fit into `max_bytes`, at least one.

        Raises:
            OSError: the disk is full.
        """
        num_slots = max(1, (max_bytes - 2 * ALIGN) // (slot_bytes + _RECORD_BYTES + _USE.size))
        unfinished = path.with_suffix(UNFINISHED)
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            segment = cls(path, fd, slot_bytes=slot_bytes, num_slots=num_slots)
            os.posix_fallocate(fd, 0, segment.num_bytes)
            head = _HEAD.pack(_MAGIC, slot_bytes, num_slots, 0)[:-8]
            os.pwrite(fd, head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)), 0)
            os.rename(unfinished, path)
        except OSError:
            os.close(fd)
            unfinished.unlink(missing_ok=True)
            raise
        return segment

    @classmethod
    def open(cls, path: Path) -> Segment | None:
        """Open an existing file; None if it is not a segment in this version's format.

        A truncated file is extended with zeros, which fail the checksums.

        Raises:
            OSError: the file cannot be read.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) == _HEAD.size:
            magic, slot_bytes, num_slots, checksum = _HEAD.unpack(head)
            if magic == _MAGIC and xxhash.xxh3_64_intdigest(head[:-8]) == checksum:
                segment = cls(path, fd, slot_bytes=slot_bytes, num_slots=num_slots)
                if os.fstat(fd).st_size < segment.num_bytes:
                    os.ftruncate(fd, segment.num_bytes)
                return segment
        os.close(fd)
        return None

    def recover(self) -> Iterator[tuple[int, Header | Fetch]]:
        """Read the records into `used`, `lengths` and `checksums`; yields the slots that were ever written."""
        self.used = array("Q", os.pread(self._fd, self._records_start - ALIGN, ALIGN))
        table = os.pread(self._fd, self.num_slots * _RECORD_BYTES, self._records_start)
        for slot in range(self.num_slots):
            record = table[slot * _RECORD_BYTES : (slot + 1) * _RECORD_BYTES]
            header = read_header(record)
            if isinstance(header, Header):
                if not 0 < header.num_bytes <= self.slot_bytes:
                    yield slot, Fetch.CORRUPT
                    continue
                (use,) = _USE.unpack_from(record, HEADER_BYTES)
                self._describe(slot, header, max(use, self.used[slot]))
            if header is not Fetch.MISSING:
                yield slot, header

    def touch(self, slot: int, use: int) -> None:
        """Count a use; lost in a crash before the next `save_uses`."""
        self.used[slot] = self.last_used = use
        self._are_uses_stale = True

    def forget(self, slot: int) -> None:
        """Free a slot; its record on disk stays until the slot is reused."""
        self.lengths[slot] = 0

    def erase(self, slot: int) -> None:
        """Free a slot on disk too, so that a damaged object does not reappear after a restart."""
        self.forget(slot)
        os.pwrite(self._fd, _NO_RECORD, self._records_start + slot * _RECORD_BYTES)

    def write(self, slots: Sequence[int], payloads: Sequence[memoryview], *, known: Sequence[int]) -> list[int]:
        """Write payloads, without their records.

        Args:
            slots: ascending.
            payloads: one per slot, at most `slot_bytes` each.
            known: their checksums; 0: computed here.
        Returns:
            The payloads' checksums.
        Raises:
            OSError: the write failed; any of these slots may be damaged.
        """
        if self.slot_bytes > _UNIT_BYTES:
            jobs = zip(slots, payloads, known, strict=True)
            return [self._write_large(slot, payload, total) for slot, payload, total in jobs]
        checksums = list[int]()
        for start, run in self._runs(slots, payloads):
            totals = known[len(checksums) : len(checksums) + len(run)]
            checksums += [total or checksum_of(payload) for total, payload in zip(totals, run, strict=True)]
            _write_all(self._fd, self._whole_slots(run, _ZEROS), start)
        return checksums

    def record(self, slots: Sequence[int], headers: Sequence[Header], *, uses: Sequence[int]) -> None:
        """Record what `write` put into the slots, on disk and in memory, with the numbers of these uses.

        Raises:
            OSError: the write failed.
        """
        run, run_start = list[bytes](), 0  # consecutive slots
        for slot, header, use in zip(slots, headers, uses, strict=True):
            if not run or slot != run_start + len(run):
                _write_all(self._fd, run, self._records_start + run_start * _RECORD_BYTES)
                run, run_start = [], slot
            run.append((header.packed() + _USE.pack(use)).ljust(_RECORD_BYTES, b"\x00"))
            self._describe(slot, header, use)
        _write_all(self._fd, run, self._records_start + run_start * _RECORD_BYTES)

    def read(self, slots: Sequence[int], into: Sequence[memoryview]) -> list[int]:
        """Read payloads.

        Args:
            slots: ascending.
            into: one buffer of the payload's size per slot.
        Returns:
            Checksums of the buffers; where the file ends too early, they keep their former content.
        Raises:
            OSError: the read failed.
        """
        if self.slot_bytes > _UNIT_BYTES:
            return [self._read_large(slot, buffer) for slot, buffer in zip(slots, into, strict=True)]
        checksums, rest = list[int](), memoryview(bytearray(ALIGN))
        for start, run in self._runs(slots, into):
            os.preadv(self._fd, self._whole_slots(run, rest), start)
            checksums += [checksum_of(buffer) for buffer in run]
        return checksums

    def save_uses(self) -> None:
        """Write the use numbers to disk if they have changed.

        Raises:
            OSError: the write failed.
        """
        if self._are_uses_stale:
            self._are_uses_stale = False
            _write_all(self._fd, [memoryview(self.used).cast("B")], ALIGN)

    def drop(self) -> None:
        """Delete the file; it is closed once no slot is held."""
        self.path.unlink(missing_ok=True)
        self.is_dropped = True
        if not self.num_held:
            self.close()

    def release(self) -> None:
        """End the read or write of a slot."""
        self.num_held -= 1
        if self.is_dropped and not self.num_held:
            self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _describe(self, slot: int, header: Header, use: int) -> None:
        self.used[slot] = use
        self.lengths[slot] = header.num_bytes
        self.checksums[slot] = header.checksum
        self.last_used = max(self.last_used, use)

    def _runs(self, slots: Sequence[int], views: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
        """Group consecutive slots, up to `_UNIT_BYTES`: (offset in the file, views)."""
        run, run_bytes, next_slot = list[memoryview](), 0, -1
        for slot, view in zip(slots, views, strict=True):
            if run and (slot != next_slot or run_bytes >= _UNIT_BYTES):
                yield self._data_start + (next_slot - len(run)) * self.slot_bytes, run
                run, run_bytes = [], 0
            run.append(view)
            run_bytes += self.slot_bytes
            next_slot = slot + 1
        if run:
            yield self._data_start + (next_slot - len(run)) * self.slot_bytes, run

    def _whole_slots(self, run: list[memoryview], rest: memoryview) -> list[memoryview]:
        """Pad each payload to its slot with a part of `rest`, one block."""
        if all(len(payload) == self.slot_bytes for payload in run):
            return run
        return [part for payload in run for part in (payload, rest[: self.slot_bytes - len(payload)])]

    def _write_large(self, slot: int, payload: memoryview, known: int) -> int:
        start, checksum = self._data_start + slot * self.slot_bytes, xxhash.xxh3_64()
        if known:
            _write_all(self._fd, [payload, _ZEROS[: -len(payload) % ALIGN]], start)
            return known
        for offset in range(0, len(payload), _UNIT_BYTES):
            part = payload[offset : offset + _UNIT_BYTES]
            checksum.update(part)
            _write_all(self._fd, [part, _ZEROS[: -len(part) % ALIGN]], start + offset)
        return checksum.intdigest()

    def _read_large(self, slot: int, buffer: memoryview) -> int:
        start, checksum = self._data_start + slot * self.slot_bytes, xxhash.xxh3_64()
        for offset in range(0, len(buffer), _UNIT_BYTES):
            part = buffer[offset : offset + _UNIT_BYTES]
            os.preadv(self._fd, [part], start + offset)
            checksum.update(part)
        return checksum.intdigest()


def _data_start(num_slots: int) -> int:
    return slot_bytes_for(ALIGN + num_slots * (_USE.size + _RECORD_BYTES))


def _write_all(fd: int, parts: Sequence[bytes | bytearray | memoryview], start: int) -> None:
    """Write consecutive parts; a short write is continued, so that its cause is raised."""
    wanted = sum(map(len, parts))
    if wanted and (written := os.pwritev(fd, parts, start)) < wanted:
        rest = b"".join(parts)[written:]
        while rest:
            start += written
            written = os.pwrite(fd, rest, start)
            rest = rest[written:]
