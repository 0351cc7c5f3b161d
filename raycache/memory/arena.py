"""The arena: the host tier of one node, one file of shared memory that outlives whoever maps it.

    head | catalog | rank 0: headers and slab of each space | rank 1: ... | ...      of the ranks on the node

    head      magic, what the file was made for, the epoch of the gang that writes, and the owner's description
    catalog   what each unit is, written by the decider alone (cache/catalog.py); only on its node
    headers   [units, 2] per rank and space: tag (which page or state it is), checksum of the envelope; 0, 0: nothing
    slab      [units, envelope_bytes] per rank and space (rows.py)

The rank writes its own headers and slab when it saves, the arena's owner when it fetches from storage. A header is
cleared before its envelope changes and written last, so that what a crash leaves behind is either whole or nothing.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import struct
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raycache.errors import ConfigError
from raycache.memory.rows import EnvelopeLayout

HEAD_BYTES = 64 * 1024
"""Of the head, most of it for the description."""

_MAGIC = b"RCarena1"
_FIXED = struct.Struct("<8sQ32s32sI")
"""Magic, bytes of the file, digest of the geometry, of the description, length of the description."""
_EPOCH_AT, _DESCRIPTION_AT = 256, 512
_PAGE = 4096  # bytes to which slabs are aligned
_WORD = np.dtype(np.uint64).itemsize


class Arena:
    """A mapped arena; made by `create` or `open`.

    Args:
        path: of the file.
        layout: envelopes of the node's ranks.
        sizes: component space -> units, the same on all nodes.
        catalog_bytes: length of the catalog, 0 for none.
    Attributes:
        path, layout, sizes: as given.
        description: of the owner, any bytes.
        catalog: bytes that the decider writes; zeros in a fresh arena.
    """

    def __init__(self, path: Path, layout: EnvelopeLayout, *, sizes: Mapping[str, int], catalog_bytes: int) -> None:
        self.path, self.layout, self.sizes = path, layout, dict(sizes)
        self._places, num_bytes = _places(layout, self.sizes, catalog_bytes)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), num_bytes)
        # One array that keeps the mapping, and all views are views of it: an array made with buffer= does not, and
        # would end the process after `close`.
        self._bytes = np.frombuffer(self._map, np.uint8)
        length: int = _FIXED.unpack_from(self._map)[-1]
        self.description = self._map[_DESCRIPTION_AT : _DESCRIPTION_AT + length]
        self.catalog = memoryview(self._map)[HEAD_BYTES : HEAD_BYTES + catalog_bytes]

    @staticmethod
    def num_bytes(layout: EnvelopeLayout, *, sizes: Mapping[str, int], catalog_bytes: int) -> int:
        """Length of the file."""
        return _places(layout, sizes, catalog_bytes)[1]

    @classmethod
    def create(
        cls, path: Path, layout: EnvelopeLayout, *, sizes: Mapping[str, int], catalog_bytes: int, description: bytes
    ) -> Arena:
        """Make a new file and take all of its memory at once.

        Raises:
            ConfigError: the file is there already, its memory is not, or the description is too long for the head.
        """
        if len(description) > HEAD_BYTES - _DESCRIPTION_AT:
            raise ConfigError(
                f"the arena's description has {len(description)} bytes, its head has room for "
                f"{HEAD_BYTES - _DESCRIPTION_AT}"
            )
        num_bytes = cls.num_bytes(layout, sizes=sizes, catalog_bytes=catalog_bytes)
        _reserve(path, num_bytes)
        with path.open("r+b") as file:
            file.seek(_DESCRIPTION_AT)
            file.write(description)
            file.seek(0)
            file.write(_fixed(layout, sizes, num_bytes, catalog_bytes, description))
        return cls(path, layout, sizes=sizes, catalog_bytes=catalog_bytes)

    @classmethod
    def open(cls, path: Path, layout: EnvelopeLayout, *, sizes: Mapping[str, int], catalog_bytes: int) -> Arena:
        """Map an arena that is there.

        Raises:
            ConfigError: it is not there, no arena, damaged, or was made for another model, split or size.
        """
        num_bytes = cls.num_bytes(layout, sizes=sizes, catalog_bytes=catalog_bytes)
        try:
            length = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
        except OSError as cause:
            raise ConfigError(f"cannot open the arena {path}: {cause}; start without it to make a new one") from cause
        if len(head) < HEAD_BYTES or not head.startswith(_MAGIC):
            raise ConfigError(f"{path} is no arena, or of another version; remove it to make a new one")
        size = _FIXED.unpack_from(head)[-1]
        description = head[_DESCRIPTION_AT : _DESCRIPTION_AT + size]
        wanted = _fixed(layout, sizes, num_bytes, catalog_bytes, description)
        if length != num_bytes or head[: _FIXED.size] != wanted:
            raise ConfigError(
                f"the arena {path} with {length} bytes is damaged or was made for another model, split or size (this "
                f"one takes {num_bytes} bytes); remove it to make a new one"
            )
        return cls(path, layout, sizes=sizes, catalog_bytes=catalog_bytes)

    @property
    def epoch(self) -> int:
        """Of the gang that writes; 0 in a fresh arena."""
        return int(self._epoch_word()[0])

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch_word()[0] = value

    def slab(self, rank: int, space: str) -> NDArray[np.uint8]:
        """Envelopes [units, envelope_bytes] of a rank, shared and writable; without columns where it has none."""
        units, width, start = self.sizes[space], self.layout.envelope_bytes(rank, space), self._places[rank, space][1]
        return self._bytes[start : start + units * width].reshape(units, width)

    def headers(self, rank: int, space: str) -> NDArray[np.uint64]:
        """(tag, checksum) [units, 2] of a rank's envelopes, shared and writable; 0, 0 where nothing is valid."""
        units, start = self.sizes[space], self._places[rank, space][0]
        return self._bytes[start : start + 2 * _WORD * units].view(np.uint64).reshape(units, 2)

    def close(self) -> None:
        """Let go of the memory; who still has a view of it keeps it mapped until that is gone."""
        self._bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # what BufferError says is that such a view is there
            self.catalog.release()
            self._map.close()

    def unlink(self) -> None:
        """Remove the file; mappings stay valid, the memory is given back with the last of them."""
        self.path.unlink(missing_ok=True)

    def _epoch_word(self) -> NDArray[np.uint64]:
        return self._bytes[_EPOCH_AT : _EPOCH_AT + _WORD].view(np.uint64)


def _places(
    layout: EnvelopeLayout, sizes: Mapping[str, int], catalog_bytes: int
) -> tuple[dict[tuple[int, str], tuple[int, int]], int]:
    """(rank, space) -> where its headers and its slab begin; and where all ends, bytes."""
    places, end = dict[tuple[int, str], tuple[int, int]](), _aligned(HEAD_BYTES + catalog_bytes)
    for rank in layout.ranks:
        for space in layout.spaces:
            width = layout.envelope_bytes(rank, space)
            slab = _aligned(end + 2 * _WORD * sizes[space])
            places[rank, space] = (end, slab)
            end = _aligned(slab + sizes[space] * width)
    return places, end


def _aligned(offset: int) -> int:
    return -(-offset // _PAGE) * _PAGE


def _fixed(
    layout: EnvelopeLayout, sizes: Mapping[str, int], num_bytes: int, catalog_bytes: int, description: bytes
) -> bytes:
    """The part of the head that does not change."""
    ranks = range(layout.split.world_size)
    envelopes = [layout.pieces(rank, space) for rank in ranks for space in layout.spaces]
    geometry = repr((layout.split, sorted(sizes.items()), catalog_bytes, envelopes)).encode()
    digests = sha256(geometry).digest(), sha256(description).digest()
    return _FIXED.pack(_MAGIC, num_bytes, *digests, len(description))


def _reserve(path: Path, num_bytes: int) -> None:
    """Make a file of zeros whose memory is there: a later write into a hole would end the process by SIGBUS."""
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except FileExistsError as cause:
        raise ConfigError(f"{path} is there already; open it, or remove it to make a new one") from cause
    except OSError as cause:
        path.unlink(missing_ok=True)
        if cause.errno != errno.ENOSPC:
            raise ConfigError(f"cannot make the arena {path}: {cause}; make {path.parent} writable") from cause
        free = shutil.disk_usage(path.parent).free
        raise ConfigError(
            f"no memory for the arena {path}: {num_bytes / 2**30:.2f} GiB wanted, {free / 2**30:.2f} GiB free in "
            f"{path.parent}; use a smaller --host-memory, or a larger shared memory (mount -o remount,size=..., "
            "docker run --shm-size)"
        ) from cause
