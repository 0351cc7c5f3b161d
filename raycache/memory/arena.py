"""The arena: the host tier of one node, a file of shared memory that outlives the processes that map it.

    head | catalog | rank 0: headers and slab of each space | rank 1: ... | ...      for the ranks on the node

    head      magic, digests of geometry and description, epoch of the gang that writes, and the owner's description
    catalog   contents of each unit, written by the decider only (cache/catalog.py); only on its node
    headers   [units, 2] per rank and space: tag (which page or state it is), checksum of the envelope; 0, 0 if invalid
    slab      [units, envelope_bytes] per rank and space (rows.py)

A rank writes its own headers and slab when it saves, the arena's owner when it reads from storage. Headers are cleared
before their envelope changes and written last, so that after a crash an envelope is either complete or invalid.
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
"""Size of the head, most of which is for the description."""

_MAGIC = b"RCarena1"
_FIXED = struct.Struct("<8sQ32s32sI")
"""Magic, bytes of the file, digest of the geometry, of the description, length of the description."""
_EPOCH_AT, _DESCRIPTION_AT = 256, 512
_PAGE = 4096  # bytes to which slabs are aligned
_WORD = np.dtype(np.uint64).itemsize


class Arena:
    """A mapped arena; made by `create` or `open`.

    Args:
        layout: envelopes of the node's ranks.
        sizes: component space -> number of units, the same on all nodes.
        catalog_bytes: size of the catalog, 0 for none.
    Attributes:
        description: of the owner, any bytes.
        catalog: zeros in a new arena.
    """

    def __init__(self, path: Path, layout: EnvelopeLayout, *, sizes: Mapping[str, int], catalog_bytes: int) -> None:
        self.path, self.layout, self.sizes = path, layout, dict(sizes)
        self._places, num_bytes = _places(layout, self.sizes, catalog_bytes)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), num_bytes)
        # All views derive from this array, which keeps the mapping alive. Arrays made with buffer= do not, and would
        # crash the process after `close`.
        self._bytes = np.frombuffer(self._map, np.uint8)
        length: int = _FIXED.unpack_from(self._map)[-1]
        self.description = self._map[_DESCRIPTION_AT : _DESCRIPTION_AT + length]
        self.catalog = memoryview(self._map)[HEAD_BYTES : HEAD_BYTES + catalog_bytes]

    @staticmethod
    def num_bytes(layout: EnvelopeLayout, *, sizes: Mapping[str, int], catalog_bytes: int) -> int:
        """Size of the file."""
        return _places(layout, sizes, catalog_bytes)[1]

    @classmethod
    def create(
        cls, path: Path, layout: EnvelopeLayout, *, sizes: Mapping[str, int], catalog_bytes: int, description: bytes
    ) -> Arena:
        """Create a file and allocate all of its memory.

        Raises:
            ConfigError: the file exists, there is not enough memory, or the description is too long.
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
        """Map an existing arena.

        Raises:
            ConfigError: it does not exist, is not an arena, is damaged, or was made for another model, split or size.
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
        """Epoch of the gang that writes; 0 in a new arena."""
        return int(self._epoch_word()[0])

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch_word()[0] = value

    def slab(self, rank: int, space: str) -> NDArray[np.uint8]:
        """Envelopes of a rank, [units, envelope_bytes], shared and writable; envelope_bytes is 0 if it has none."""
        units, width, start = self.sizes[space], self.layout.envelope_bytes(rank, space), self._places[rank, space][1]
        return self._bytes[start : start + units * width].reshape(units, width)

    def headers(self, rank: int, space: str) -> NDArray[np.uint64]:
        """(tag, checksum) of a rank's envelopes, [units, 2], shared and writable; (0, 0) for invalid ones."""
        units, start = self.sizes[space], self._places[rank, space][0]
        return self._bytes[start : start + 2 * _WORD * units].view(np.uint64).reshape(units, 2)

    def close(self) -> None:
        """Unmap the memory; it stays mapped as long as views of it exist."""
        self._bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # raised if there are such views
            self.catalog.release()
            self._map.close()

    def unlink(self) -> None:
        """Remove the file; mappings stay valid, and memory is freed with the last of them."""
        self.path.unlink(missing_ok=True)

    def _epoch_word(self) -> NDArray[np.uint64]:
        return self._bytes[_EPOCH_AT : _EPOCH_AT + _WORD].view(np.uint64)


def _places(
    layout: EnvelopeLayout, sizes: Mapping[str, int], catalog_bytes: int
) -> tuple[dict[tuple[int, str], tuple[int, int]], int]:
    """(rank, space) -> offsets of its headers and its slab; and the size of the file, bytes."""
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
    """The immutable part of the head."""
    ranks = range(layout.split.world_size)
    envelopes = [layout.pieces(rank, space) for rank in ranks for space in layout.spaces]
    geometry = repr((layout.split, sorted(sizes.items()), catalog_bytes, envelopes)).encode()
    digests = sha256(geometry).digest(), sha256(description).digest()
    return _FIXED.pack(_MAGIC, num_bytes, *digests, len(description))


def _reserve(path: Path, num_bytes: int) -> None:
    """Create a file of zeros with all memory allocated; a later write to a hole could kill the process with SIGBUS."""
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
