"""Keys of stored state: content coordinates, so that who wrote an object, and under which split, is not in its name.

    seed      = H(version, page size, weights, adapter, salt)         one per tenant of a model
    digest[i] = H(digest[i - 1] + tokens of page i), digest[-1] = seed
    key       = digest of the last token's page (32 B) + row format (12 B) + box (12 B)

A digest stands for its page and all before it. H is SHA-256: collision resistant, so no prompt can be made up that hits
another prompt's pages, and keyed by the seed, so a tenant's keys cannot be computed without the salt. All messages of a
chain have one length, which leaves nothing to extend.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from hashlib import sha256

import numpy as np

from raycache.memory.box import BOX_BYTES, Box
from raycache.memory.component import Component
from raycache.types import PackedTokens

KEY_VERSION = 1
"""Goes into every digest and row format; a change of what keys or payloads mean makes all that is stored unseen."""

DIGEST_BYTES = 32
FORMAT_BYTES = 12
KEY_BYTES = DIGEST_BYTES + FORMAT_BYTES + BOX_BYTES


@dataclass(frozen=True)
class Identity:
    """What state depends on beside the tokens.

    Attributes:
        weights: fingerprint of the checkpoint, and of whatever else changes the numbers (cache dtype is in the row).
        page_size: tokens per page.
        adapter: fingerprint of the adapter, empty for none.
        salt: the tenant's `cache_salt`, empty for what all tenants share.
    """

    weights: str
    page_size: int
    adapter: str = ""
    salt: str = ""

    def seed(self) -> bytes:
        """What the chain starts from, 32 bytes; no two identities share one, since each part carries its length."""
        return _digest_of(b"raycache chain", KEY_VERSION, self.page_size, self.weights, self.adapter, self.salt)


class PageChain:
    """Digests of the whole pages of one sequence, computed as it grows.

    Args:
        identity: of the model and tenant.
        known: digests of the first pages, where a cached prefix has them already.
    """

    def __init__(self, identity: Identity, *, known: Iterable[bytes] = ()) -> None:
        self._page_size = identity.page_size
        self._seed = identity.seed()
        self._digests = list(known)

    def digests(self, tokens: PackedTokens) -> list[bytes]:
        """Digest of each whole page; hashes only the pages that are new since the last call.

        Args:
            tokens: the sequence from its start: what earlier calls were given, and more. An incomplete last page is
                ignored.
        Returns:
            The chain's own list, which later calls extend: length T // S, 32 bytes each. Do not change it.
        """
        digests = self._digests
        first, stop = len(digests), len(tokens) // (4 * self._page_size)
        before = digests[-1] if digests else self._seed
        digests += chain_digests(before, tokens, first=first, stop=stop, page_size=self._page_size)
        return digests


def chain_digests(before: bytes, tokens: PackedTokens, *, first: int, stop: int, page_size: int) -> list[bytes]:
    """Digests of the pages [first, stop) of a sequence.

    Args:
        before: digest of the page before the first one, or the seed.
        tokens: of the sequence, from its start.
    """
    size, digests = 4 * page_size, []
    blank = sha256()  # copies of it cost less than new ones
    for start in range(first * size, stop * size, size):
        message = blank.copy()
        message.update(before + tokens[start : start + size])
        before = message.digest()
        digests.append(before)
    return digests


def row_format(component: Component) -> bytes:
    """Which rows an object is made of, 12 bytes: the component's name, fields and reuse rule, not its layers."""
    fields = ((field.name, field.dtype, field.head_axis, *field.shape) for field in component.fields)
    rule = (component.name, component.reuse.value, component.window, len(component.layers))
    return _digest_of(b"raycache rows", KEY_VERSION, *rule, *fields)[:FORMAT_BYTES]


def tag_of(digest: bytes) -> int:
    """The first 8 bytes of a digest, little endian: what headers of host slots and plans say of it."""
    return int.from_bytes(digest[:8], "little")


def tags_of(digests: Sequence[bytes]) -> list[int]:
    """`tag_of` of many digests."""
    words: list[int] = np.frombuffer(b"".join(digests), "<u8")[:: DIGEST_BYTES // 8].tolist()
    return words


def object_keys(digests: Iterable[bytes], *, rows: bytes, box: Box) -> list[bytes]:
    """Keys of one box of many pages, `KEY_BYTES` bytes each.

    Args:
        digests: of the pages.
        rows: `row_format` of the component.
        box: part of each page.
    """
    coordinates = rows + box.packed()
    return [digest + coordinates for digest in digests]


def stored_boxes(suffixes: Iterable[bytes], *, rows: bytes, whole: Box) -> list[Box]:
    """Into which boxes the rows of a component are cut by those who wrote objects.

    Args:
        suffixes: last 24 bytes of their keys; what is no suffix of ours is ignored.
        rows: `row_format` of the component.
        whole: of the component; boxes that reach beyond it are none of ours either.
    Returns:
        The boxes, the largest first.
    """
    boxes = set[Box]()
    for suffix in suffixes:
        if suffix.startswith(rows) and len(suffix) == FORMAT_BYTES + BOX_BYTES:
            with suppress(ValueError):
                boxes.add(Box.unpack(suffix[FORMAT_BYTES:]))
    return sorted((box for box in boxes if box.common(whole) == box), key=lambda box: (-box.volume, astuple(box)))


def longest_stored(num_pages: int, has: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """How many first pages are stored, by galloping: pages are stored parents first, so a stored page vouches for those
    before it. One that has been evicted since is found out when it is loaded.

    Args:
        num_pages: of the sequence.
        has: which of these page numbers (from 0) are stored, in all components and boxes that are needed; asked with a
            few at a time, so that a remote storage answers in few round trips.
    Returns:
        A length in pages, 0 for none.
    """
    steps = [1 << power for power in range(num_pages.bit_length())]  # lengths to try, doubling
    low, high = 0, num_pages + 1  # the length is in [low, high)
    while steps:
        for length, is_there in zip(steps, has([length - 1 for length in steps]), strict=True):
            if not is_there:
                high = length
                break
            low = length
        width = high - low
        steps = sorted({low + width * part // _FAN_OUT for part in range(1, _FAN_OUT)} - {low})
    return low


_FAN_OUT = 8  # parts of the rest that one question tells apart


def _digest_of(*parts: object) -> bytes:
    """SHA-256 of parts of any kind; each with its length, so that no two lists of parts read the same."""
    message = sha256()
    for part in parts:
        text = part if isinstance(part, bytes) else repr(part).encode()
        message.update(struct.pack("<Q", len(text)) + text)
    return message.digest()
