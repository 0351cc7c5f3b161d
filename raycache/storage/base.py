"""What every storage backend does, and how an object says what it is.

A storage maps keys (raycache/cache/keys.py) to payloads. It is a cache: it may forget any object at any time, and an
object that is bad, torn or foreign is a miss with a counter. What it returns as a hit is what was put.

An object is described by 96 bytes, kept beside the payload, or in front of it where there is one value per key:

    magic 4 | version 2 | key length 2 | payload length 8 | checksum of payload 8 | key 64 | checksum of all before 8

Checksums are XXH3-64: they find accidents, at memory speed. That nobody can make up a key is the key's business.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from raycache.cache.storage_commands import Fetch
from raycache.memory.checksum import Buffer, checksum_of

FORMAT_VERSION = 1
HEADER_BYTES = 96
MAX_KEY_BYTES = 64
SUFFIX_BYTES = 24
"""Of a key: its row format and box, after the digest (keys.py)."""
_MAGIC = b"RCob"
_FIELDS = struct.Struct("<4sHHQQ64s")
_CHECKSUM = struct.Struct("<Q")


@dataclass
class StorageStats:
    """What a storage has and what it did since it was opened.

    Attributes:
        objects: stored now, 0 where the medium does not count them (object.py).
        bytes_used, bytes_limit: on the medium, with all that it takes to keep them; 0 where it does not say, limit 0
            for none.
        stored: objects taken in.
        known: objects that were put and were there already.
        hits, missing: objects asked for.
        corrupt, foreign: objects that were there and not usable; they are misses too, and not counted as missing.
        evicted: objects given up to make room.
        refused: objects not taken because they are larger than the bound, or everything else is being written.
        disk_full: objects not taken because the medium is full.
        io_errors: objects whose read or write failed otherwise.
        unavailable: objects asked for or put while the storage could not be reached.
    """

    objects: int = 0
    bytes_used: int = 0
    bytes_limit: int = 0
    stored: int = 0
    known: int = 0
    hits: int = 0
    missing: int = 0
    corrupt: int = 0
    foreign: int = 0
    evicted: int = 0
    refused: int = 0
    disk_full: int = 0
    io_errors: int = 0
    unavailable: int = 0

    def count(self, found: Sequence[Fetch]) -> None:
        """Add the answers of a `get`."""
        self.hits += found.count(Fetch.HIT)
        self.missing += found.count(Fetch.MISSING)
        self.corrupt += found.count(Fetch.CORRUPT)
        self.foreign += found.count(Fetch.FOREIGN)


@dataclass(frozen=True)
class Scrub:
    """What a check of all objects found.

    Attributes:
        checked: objects read.
        num_bytes: of their payloads.
        bad: those that were not what was put; they are gone now.
        seconds: that it took.
        is_whole: whether that was all.
    """

    checked: int
    num_bytes: int
    bad: int
    seconds: float
    is_whole: bool = True


class Storage(Protocol):
    """A backend. Safe to be called from several threads; what is wrong with an object is in the answer, never raised.

    A backend that is not reachable as a whole raises OSError, which `Guarded` (guard.py) turns into misses. The engine
    puts, gets and looks for objects; the last three methods are the operator's.
    """

    def put(self, keys: Sequence[bytes], *, payloads: Sequence[Buffer], checksums: Sequence[int] = ()) -> list[bool]:
        """Store objects, parents before children; the first one is the last to be evicted.

        Args:
            keys: at most 64 bytes each. One that is there already is not written again: equal keys mean equal state.
            payloads: one per key, at least a byte each; not changed until the call returns.
            checksums: of the payloads, as of when they were known to be right, 0 where there is none; empty for none
                at all. They become the objects' own, so that a payload that was damaged since then is found corrupt by
                whoever reads it. The others are taken now.
        Returns:
            Which are stored now.
        """

    def get(self, keys: Sequence[bytes], *, into: Sequence[Buffer]) -> list[Fetch]:
        """Read objects into buffers of exactly their length; counts as a use.

        Returns:
            One answer per key. Only after HIT the buffer means anything.
        """

    def contains(self, keys: Sequence[bytes], *, touch: bool) -> list[bool]:
        """Which keys are stored, without reading them.

        Args:
            keys: to look for.
            touch: count as a use, so that the prefix of something that was just stored does not leave before it. The
                first key is then the last to be evicted.
        """

    def checksums(self, keys: Sequence[bytes]) -> list[int]:
        """Checksums of objects as they were put, 0 where the medium would have to be asked for it or there is none.

        Between a `get` and this call another object may have taken the place of the one that was read.
        """

    def suffixes(self) -> set[bytes]:
        """The distinct `suffix_of` of the stored keys: which row formats and boxes there are, whoever wrote them.

        May lag behind what another process stores by some seconds, and name some whose objects have left since.
        """

    def stats(self) -> StorageStats:
        """A copy of the counters; a storage across the network may be asked for some."""

    def close(self) -> None:
        """Let go of the medium, once; nothing else may be called after."""

    def clear(self) -> None:
        """Forget everything."""

    def resize(self, max_bytes: int) -> None:
        """Change the bound; what was used least recently goes until it holds.

        Raises:
            ConfigError: it is too small, or the bound is not ours to set.
        """

    def scrub(self, *, until_s: float = math.inf) -> Scrub:
        """Read every object and drop those that are not what was put; others may use the storage meanwhile.

        Args:
            until_s: on the monotonic clock, when to stop even if there are more.
        """


class Header(NamedTuple):
    """An object's description.

    Attributes:
        key: of the object.
        num_bytes: of the payload.
        checksum: of the payload.
    """

    key: bytes
    num_bytes: int
    checksum: int

    def packed(self) -> bytes:
        """`HEADER_BYTES` bytes."""
        fields = _FIELDS.pack(_MAGIC, FORMAT_VERSION, len(self.key), self.num_bytes, self.checksum, self.key)
        return fields + _CHECKSUM.pack(checksum_of(fields))


def read_header(data: Buffer) -> Header | Fetch:
    """Unpack a header.

    Returns:
        The header, or why there is none: MISSING (nothing was ever written here), FOREIGN or CORRUPT.
    """
    if len(data) < HEADER_BYTES:
        return Fetch.CORRUPT
    magic, version, key_len, num_bytes, checksum, key = _FIELDS.unpack_from(data)
    if magic != _MAGIC:
        return Fetch.FOREIGN if any(magic) else Fetch.MISSING
    if version != FORMAT_VERSION:
        return Fetch.FOREIGN
    (found,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
    if checksum_of(memoryview(data)[: _FIELDS.size]) != found:
        return Fetch.CORRUPT
    return Header(key[:key_len], num_bytes, checksum)


def read_object(data: Buffer, *, key: bytes, num_bytes: int) -> memoryview | Fetch:
    """Take a header and its payload apart, where they lie behind each other.

    Args:
        data: what the medium has for the key.
        key: that was asked for.
        num_bytes: of the payload that is expected.
    Returns:
        The payload, a view of `data`, or why there is none.
    """
    header = read_header(data)
    if header is Fetch.MISSING:
        return Fetch.CORRUPT  # zeros
    if not isinstance(header, Header):
        return header
    if header.key != key or header.num_bytes != num_bytes:
        return Fetch.FOREIGN
    payload = memoryview(data)[HEADER_BYTES:]
    if len(payload) != num_bytes or checksum_of(payload) != header.checksum:
        return Fetch.CORRUPT
    return payload


def pack_object(key: bytes, payload: memoryview, *, into: memoryview, checksum: int = 0) -> None:
    """Write a header with its payload behind it into `HEADER_BYTES` more than the payload takes.

    Args:
        key, payload: of the object.
        into: memory for both.
        checksum: of the payload, 0 to take it now.
    """
    into[:HEADER_BYTES] = Header(key, len(payload), checksum or checksum_of(payload)).packed()
    into[HEADER_BYTES:] = payload


def suffix_of(key: bytes) -> bytes:
    """The last `SUFFIX_BYTES` of a key."""
    return key[-SUFFIX_BYTES:]


def check_objects(keys: Sequence[bytes], payloads: Sequence[memoryview]) -> None:
    """Refuse what no header can describe.

    Raises:
        ValueError: a key is empty or too long, or a payload is empty.
    """
    if not all(0 < len(key) <= MAX_KEY_BYTES for key in keys) or not all(payloads):
        raise ValueError(f"keys must have 1 to {MAX_KEY_BYTES} bytes, and payloads at least one")


def flat(buffer: Buffer) -> memoryview:
    """A view of single bytes.

    Raises:
        TypeError: it is not contiguous.
    """
    return memoryview(buffer).cast("B")
