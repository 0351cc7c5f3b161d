"""Checksums of data outside the device."""

from __future__ import annotations

import xxhash

Buffer = bytes | bytearray | memoryview
"""C-contiguous bytes; writable where they are read into."""


def checksum_of(payload: Buffer) -> int:
    """XXH3-64."""
    return xxhash.xxh3_64_intdigest(payload)
