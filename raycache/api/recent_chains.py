"""Digests of the prompts seen last, so that of a long prompt only the pages that are new are hashed.

    known    [ p0 | p1 | p2 | p3 ]   d0 d1 d2 d3
    prompt   [ p0 | p1 | p2 | q3 | q4 ]               d0 d1 d2 are copied, two pages are hashed

Prompts are kept by seed and first page, so nothing is shared between tenants.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from raycache.cache.keys import DIGEST_BYTES, Identity, PackedDigests, chain_digests, page_chain
from raycache.types import PackedTokens

_LEAST_PAGES = 64  # of a prompt that is kept: fewer are hashed in less time than it takes to look
_MOST_ALIKE = 4  # prompts that are kept of those with one first page

_Known = tuple[PackedTokens, PackedDigests]
"""The whole pages of a prompt and their digests, the seed before them."""


class RecentChains:
    """Makes `GenerateRequest.page_chain`. Safe to use from several threads.

    Args:
        max_bytes: of what is kept.
    Attributes:
        num_bytes: of what is kept now.
    """

    def __init__(self, max_bytes: int = 32 * 2**20) -> None:
        self._max_bytes = max_bytes
        self._known: OrderedDict[bytes, tuple[_Known, ...]] = OrderedDict()  # each the last used one first
        self._lock = Lock()
        self.num_bytes = 0

    def page_chain(self, identity: Identity, tokens: PackedTokens) -> PackedDigests:
        """The seed and the digests of the whole pages of a prompt, as `keys.page_chain` makes them."""
        page_size, page_bytes = identity.page_size, 4 * identity.page_size
        num_pages = len(tokens) // page_bytes
        if num_pages < _LEAST_PAGES:
            return page_chain(identity, tokens)
        tokens = tokens[: num_pages * page_bytes]
        seed = identity.seed()
        name = seed + tokens[:page_bytes]
        with self._lock:
            known = self._known.get(name, ())
        shared, nearest = 0, None
        for each in known:
            count = _shared_pages(each[0], tokens, page_bytes=page_bytes)
            if count > shared:
                shared, nearest = count, each
        begin = seed if nearest is None else nearest[1][: (1 + shared) * DIGEST_BYTES]
        chain = begin + chain_digests(begin[-DIGEST_BYTES:], tokens, first=shared, stop=num_pages, page_size=page_size)
        is_most = nearest is not None and 2 * shared * page_bytes >= len(nearest[0])
        self._keep(name, (tokens, chain), instead_of=nearest if is_most else None)
        return chain

    def _keep(self, name: bytes, new: _Known, *, instead_of: _Known | None) -> None:
        """Keep a prompt, in place of the one that it shares most of."""
        with self._lock:
            before = self._known.pop(name, ())
            kept = (new, *(each for each in before if each is not instead_of))[:_MOST_ALIKE]
            self._known[name] = kept
            self.num_bytes += _size(kept) - _size(before)
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _size(self._known.popitem(last=False)[1])


def _size(known: tuple[_Known, ...]) -> int:
    return sum(len(tokens) + len(chain) for tokens, chain in known)


def _shared_pages(known: PackedTokens, tokens: PackedTokens, *, page_bytes: int) -> int:
    """Whole pages at the beginning that two prompts share; compares each byte at most twice."""
    view = memoryview(tokens)
    same, differs = 0, min(len(known), len(tokens)) // page_bytes + 1  # lengths in pages
    middle = differs - 1  # often all of it is the same
    while same < middle:
        if known.startswith(view[same * page_bytes : middle * page_bytes], same * page_bytes):
            same = middle
        else:
            differs = middle
        middle = (same + differs) // 2
    return same
