"""Objects for tests of the storage tier, whose payloads follow from their keys."""

import hashlib

from raycache.cache.storage_commands import Fetch
from raycache.storage.base import Storage

MIB = 1 << 20


def payload_of(key: bytes, size: int) -> bytes:
    """What belongs to a key, computed from it."""
    return hashlib.shake_128(key).digest(size)


def key_of(number: int) -> bytes:
    """A key of 56 bytes; there are two suffixes."""
    return (
        hashlib.sha256(number.to_bytes(8, "little")).digest() + b"rows of full" + b"box 0 of one" + bytes(number > 999)
    )


def put(storage: Storage, numbers: list[int], size: int = 5000) -> list[bool]:
    keys = [key_of(number) for number in numbers]
    return storage.put(keys, payloads=[payload_of(key, size) for key in keys])


def get(storage: Storage, numbers: list[int], size: int = 5000) -> list[Fetch]:
    """Read, and check that every hit is what belongs to its key."""
    keys = [key_of(number) for number in numbers]
    buffers = [bytearray(size) for _ in keys]
    found = storage.get(keys, into=buffers)
    for key, buffer, fetch in zip(keys, buffers, found, strict=True):
        assert fetch is not Fetch.HIT or buffer == payload_of(key, size)
    return found


def has(storage: Storage, numbers: range) -> list[int]:
    there = storage.contains([key_of(number) for number in numbers], touch=False)
    return [number for number, is_there in zip(numbers, there, strict=True) if is_there]
