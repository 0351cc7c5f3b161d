"""Keys of stored state, derived from content: independent of the writer and of how the model is split.

    seed      = H(version, page size, weights, adapter, salt)         one per tenant of a model
    digest[i] = H(digest[i - 1] + tokens of page i), digest[-1] = seed
    key       = digest of the last token's page (32 B) + row format (12 B) + box (12 B)

Digests are passed on packed: those of consecutive pages as one bytes object, 32 bytes each (`PackedDigests`).

A digest identifies its page and all pages before it. H is SHA-256: collision resistant, so no prompt can be crafted to
hit another prompt's pages, and keyed by the seed, so a tenant's keys cannot be computed without the salt. All messages
of a chain have the same length, which rules out length extension.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from raycache.memory.box import BOX_BYTES, Box
from raycache.memory.component import Component
from raycache.types import PackedTokens

KEY_VERSION = 1
"""Part of every digest and row format; bump it when the meaning of keys or payloads changes, to hide stored objects."""

DIGEST_BYTES = 32
FORMAT_BYTES = 12
KEY_BYTES = DIGEST_BYTES + FORMAT_BYTES + BOX_BYTES

PackedDigests = bytes
"""Digests of consecutive pages, `DIGEST_BYTES` each."""


@dataclass(frozen=True)
class Identity:
    """What cached state depends on besides the tokens.

    Attributes:
        weights: fingerprint of the checkpoint and whatever else changes the numbers (cache dtype: see `row_format`).
        page_size: tokens per page.
        adapter: fingerprint of the adapter, empty for none.
        salt: the tenant's `cache_salt`, empty if all tenants share the cache.
    """

    weights: str
    page_size: int
    adapter: str = ""
    salt: str = ""

    def seed(self) -> bytes:
        """Start of the digest chain, 32 bytes; unique per identity, since each part is hashed with its length."""
        return _digest_of(b"raycache chain", KEY_VERSION, self.page_size, self.weights, self.adapter, self.salt)


class PageChain:
    """Digests of the whole pages of one sequence, computed as it grows.

    Args:
        identity: gives the seed of the chain.
        known: digests of the first pages, if a cached prefix has them.
    """

    def __init__(self, identity: Identity, *, known: Iterable[bytes] = ()) -> None:
        self._page_size = identity.page_size
        self._seed = identity.seed()
        self._digests = list(known)

    def digests(self, tokens: PackedTokens) -> list[bytes]:
        """Digest of each whole page; hashes only the pages that are new since the last call.

        Args:
            tokens: the sequence from its start, extending earlier calls' tokens. An incomplete last page is ignored.
        Returns:
            The chain's internal list, which later calls extend: T // S digests of 32 bytes. Do not modify it.
        """
        digests = self._digests
        first, stop = len(digests), len(tokens) // (4 * self._page_size)
        before = digests[-1] if digests else self._seed
        digests += unpacked(chain_digests(before, tokens, first=first, stop=stop, page_size=self._page_size))
        return digests


def chain_digests(before: bytes, tokens: PackedTokens, *, first: int, stop: int, page_size: int) -> PackedDigests:
    """Digests of the pages [first, stop) of a sequence.

    Args:
        before: digest of the page before the first one, or the seed.
        tokens: the sequence from its start, packed.
    """
    if first >= stop:
        return b""
    size, digests = 4 * page_size, []
    blank = sha256()  # copying is cheaper than creating
    for (page,) in struct.iter_unpack(f"{size}s", memoryview(tokens)[first * size : stop * size]):
        message = blank.copy()
        message.update(before + page)
        before = message.digest()
        digests.append(before)
    return b"".join(digests)


def unpacked(digests: PackedDigests) -> list[bytes]:
    """The digests one by one."""
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]


def page_chain(identity: Identity, tokens: PackedTokens) -> PackedDigests:
    """The seed and the digests of the whole pages of a prompt: `GenerateRequest.page_chain`."""
    seed, page_size = identity.seed(), identity.page_size
    return seed + chain_digests(seed, tokens, first=0, stop=len(tokens) // (4 * page_size), page_size=page_size)


def digests_in(chain: PackedDigests, tokens: PackedTokens, *, seed: bytes, page_size: int) -> PackedDigests:
    """Digests of the whole pages of a prompt from its `page_chain`; none if it is not of this seed and prompt.

    Whoever made it is trusted, as pages are stored under these digests: of the tokens only the last page is checked.
    """
    stop = len(tokens) // (4 * page_size)
    if not stop or len(chain) != (stop + 1) * DIGEST_BYTES or not chain.startswith(seed):
        return b""
    before, last = chain[-2 * DIGEST_BYTES : -DIGEST_BYTES], chain[-DIGEST_BYTES:]
    is_of_tokens = last == chain_digests(before, tokens, first=stop - 1, stop=stop, page_size=page_size)
    return chain[DIGEST_BYTES:] if is_of_tokens else b""


def row_format(component: Component) -> bytes:
    """Format of an object's rows, 12 bytes: a hash of the component's name, fields and reuse rule, not its layers."""
    fields = ((field.name, field.dtype, field.head_axis, *field.shape) for field in component.fields)
    rule = (component.name, component.reuse.value, component.window, len(component.layers))
    return _digest_of(b"raycache rows", KEY_VERSION, *rule, *fields)[:FORMAT_BYTES]


def tag_of(digest: bytes) -> int:
    """The first 8 bytes of a digest, little endian: identifies it in headers of host slots and in plans."""
    return int.from_bytes(digest[:8], "little")


def tags_of(digests: PackedDigests) -> NDArray[np.uint64]:
    """`tag_of` of each digest."""
    return np.frombuffer(digests, np.uint64)[:: DIGEST_BYTES // 8]


def object_keys(digests: Iterable[bytes], *, rows: bytes, box: Box) -> list[bytes]:
    """Keys of the same box of many pages, `KEY_BYTES` each.

    Args:
        digests: page digests.
        rows: `row_format` of the component.
        box: the part of each page.
    """
    coordinates = rows + box.packed()
    return [digest + coordinates for digest in digests]


def split_key(key: bytes) -> tuple[bytes, bytes]:
    """Digest and row format of a key of `object_keys`."""
    return key[:DIGEST_BYTES], key[DIGEST_BYTES : DIGEST_BYTES + FORMAT_BYTES]


def stored_boxes(suffixes: Iterable[bytes], *, rows: bytes, whole: Box) -> list[Box]:
    """Find the boxes into which writers have split a component's rows.

    Args:
        suffixes: last 24 bytes of stored keys; unknown ones are ignored.
        rows: `row_format` of the component.
        whole: the component's full box; boxes that exceed it are ignored.
    Returns:
        Boxes, largest first.
    """
    boxes = set[Box]()
    for suffix in suffixes:
        if suffix.startswith(rows) and len(suffix) == FORMAT_BYTES + BOX_BYTES:
            with suppress(ValueError):
                boxes.add(Box.unpack(suffix[FORMAT_BYTES:]))
    return sorted((box for box in boxes if box.common(whole) == box), key=lambda box: (-box.volume, astuple(box)))


def longest_stored(num_pages: int, has: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """Find how many first pages are stored, by galloping search.

    Pages are stored parents first, so a stored page implies those before it. Loading fails if one was evicted since.

    Args:
        num_pages: pages of the sequence.
        has: given some page indices, returns which are stored in all needed components and boxes. Called with several
            at a time, to save round trips to a remote storage.
    Returns:
        Length in pages, 0 for none.
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


_FAN_OUT = 8  # parts into which one call divides the remaining range


def _digest_of(*parts: object) -> bytes:
    """SHA-256 of parts, each hashed with its length, so that different lists never hash the same bytes."""
    message = sha256()
    for part in parts:
        text = part if isinstance(part, bytes) else repr(part).encode()
        message.update(struct.pack("<Q", len(text)) + text)
    return message.digest()
