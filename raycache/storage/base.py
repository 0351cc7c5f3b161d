"""The interface of storage backends, and the header of stored objects.

A storage maps keys (raycache/cache/keys.py) to payloads. It is a cache: it may drop any object at any time, and a
damaged, torn or foreign object is a counted miss. A hit always returns what was put.

Each object has a header of 96 bytes, kept beside the payload, or before it if there is one value per key:

    magic 4 | version 2 | key length 2 | payload length 8 | checksum of payload 8 | key 64 | checksum of all before 8

Checksums are XXH3-64: they detect accidental damage, at memory speed. Protection from forgery is up to the keys.
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
"""Bytes of a key after its digest: row format and box (keys.py)."""
_MAGIC = b"RCob"
_FIELDS = struct.Struct("<4sHHQQ64s")
_CHECKSUM = struct.Struct("<Q")


@dataclass
class StorageStats:
    """Contents of a storage, and counters since it was opened.

    Attributes:
        objects: stored objects; 0 if the medium does not count them (object.py).
        bytes_used, bytes_limit: on the medium, including overhead; 0 if unknown; limit 0: none.
        stored: objects written.
        known: objects put that were already stored.
        hits, missing: objects requested and found, or not found.
        corrupt, foreign: objects found but unusable; misses as well, but not counted as missing.
        evicted: objects dropped for others.
        refused: objects rejected because they exceed the limit, or everything else is being written.
        disk_full: objects rejected because the medium is full.
        io_errors: objects whose read or write failed otherwise.
        unavailable: objects requested or put while the storage could not be reached.
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
        """Count the results of a `get`."""
        self.hits += found.count(Fetch.HIT)
        self.missing += found.count(Fetch.MISSING)
        self.corrupt += found.count(Fetch.CORRUPT)
        self.foreign += found.count(Fetch.FOREIGN)


@dataclass(frozen=True)
class Scrub:
    """Result of checking all objects.

    Attributes:
        checked: objects read.
        num_bytes: total bytes of their payloads.
        bad: damaged objects, now deleted.
        seconds: duration.
        is_whole: whether all objects were checked.
    """

    checked: int
    num_bytes: int
    bad: int
    seconds: float
    is_whole: bool = True


class Changes(NamedTuple):
    """Keys that were stored or dropped.

    Attributes:
        version: to ask for the changes from here on.
        is_whole: whether `keys` are all stored ones, instead of those changed.
    """

    version: str
    is_whole: bool
    keys: Sequence[bytes]


class Storage(Protocol):
    """A backend. Thread safe; problems with single objects are returned, never raised.

    An unreachable backend raises OSError, which `Guarded` (guard.py) turns into misses. The engine puts, gets and looks
    up objects; the last three methods serve operators.
    """

    def put(self, keys: Sequence[bytes], *, payloads: Sequence[Buffer], checksums: Sequence[int] = ()) -> list[bool]:
        """Store objects, parents before children; the first one is the last to be evicted.

        Args:
            keys: at most 64 bytes each. Existing keys are not written again: equal keys mean equal state.
            payloads: one per key, not empty; must not change until the call returns.
            checksums: of the payloads, from when they were known to be right, so that later damage is found by readers;
                0 or an empty sequence: computed now.
        Returns:
            For each key, whether it is now stored.
        """

    def get(self, keys: Sequence[bytes], *, into: Sequence[Buffer]) -> list[Fetch]:
        """Read objects into buffers of exactly their length; counts as a use.

        Returns:
            One result per key. The buffer is valid only after HIT.
        """

    def contains(self, keys: Sequence[bytes], *, touch: bool) -> list[bool]:
        """Which keys are stored, without reading them.

        Args:
            touch: count as a use, so that the prefix of a new object is not evicted before it. The first key is then
                the last to be evicted.
        """

    def checksums(self, keys: Sequence[bytes]) -> list[int]:
        """Checksums of objects as put; 0 if there is none or it would take a request to the medium.

        Between a `get` and this call another object may have replaced the one read.
        """

    def suffixes(self) -> set[bytes]:
        """The distinct `suffix_of` of stored keys: all row formats and boxes, from any writer.

        May lag some seconds behind other processes, and may include suffixes whose objects have been evicted.
        """

    def changes(self, since: str) -> Changes | None:
        """Keys that were stored or dropped since a version, each once or more; None if the medium does not tell.

        Args:
            since: version of earlier changes; those of another storage, or of too long ago, give all keys. Empty: all.
        """

    def stats(self) -> StorageStats:
        """A copy of the counters; may take a request across the network."""

    def close(self) -> None:
        """Release the medium. Call once; nothing else may be called afterwards."""

    def clear(self) -> None:
        """Delete everything."""

    def resize(self, max_bytes: int) -> None:
        """Change the size limit; evicts the least recently used objects until it holds.

        Raises:
            ConfigError: the limit is too small, or the storage's server sets it.
        """

    def scrub(self, *, until_s: float = math.inf) -> Scrub:
        """Read every object and delete damaged ones; the storage stays usable meanwhile.

        Args:
            until_s: when to stop at the latest, on the monotonic clock.
        """


class Header(NamedTuple):
    """The header of an object.

    Attributes:
        num_bytes: size of the payload.
        checksum: XXH3-64 of the payload.
    """

    key: bytes
    num_bytes: int
    checksum: int

    def packed(self) -> bytes:
        """Encode into `HEADER_BYTES` bytes."""
        fields = _FIELDS.pack(_MAGIC, FORMAT_VERSION, len(self.key), self.num_bytes, self.checksum, self.key)
        return fields + _CHECKSUM.pack(checksum_of(fields))


def read_header(data: Buffer) -> Header | Fetch:
    """Unpack a header.

    Returns:
        The header, or why it is invalid: MISSING (nothing was written here), FOREIGN or CORRUPT.
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
    """Split a header and the payload after it.

    Args:
        data: the medium's value for the key.
        key: the requested key.
        num_bytes: expected size of the payload.
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
    """Write a header followed by the payload.

    Args:
        key, payload: of the object.
        into: memory of `HEADER_BYTES` plus the payload's size.
        checksum: of the payload; 0: computed now.
    """
    into[:HEADER_BYTES] = Header(key, len(payload), checksum or checksum_of(payload)).packed()
    into[HEADER_BYTES:] = payload


def suffix_of(key: bytes) -> bytes:
    """The last `SUFFIX_BYTES` of a key."""
    return key[-SUFFIX_BYTES:]


def check_objects(keys: Sequence[bytes], payloads: Sequence[memoryview]) -> None:
    """Reject keys and payloads that a header cannot describe.

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
