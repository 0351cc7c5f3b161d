"""One node of the radix tree: a run of whole pages that is matched, split and trimmed as one.

The tree decides when; this is how, at the cost of the bytes that have to be compared or are new:

    key     [ t t t t | t t t t | ... . ]     packed tokens, a bytearray: grows in place
    pages   [   p     |   p     | ... . ]     one id per page; the two parts of a split share one array
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raycache.memory.pages import PageIds
from raycache.types import PackedTokens

_STRIDE_BYTES = 1 << 20  # of one memcmp; what differs is looked for inside the last one


Parts = Mapping[str, Sequence[int]]
"""Component space -> window pages, oldest first, or the one state slot, that continuing from a position needs."""


@dataclass(slots=True, eq=False)
class RestorePoint:
    """What is needed beside the pages of the sequence to continue from the end of a node.

    Attributes:
        parts: held by the tree; empty once they are lost.
        lost: the component space whose rows were taken to make room; the others went with them.
    """

    parts: Parts
    lost: str = ""


class Node:
    """A run of whole pages.

    Attributes:
        parent: None for the root, and once it is evicted.
        key: packed tokens of the run.
        children: by the bytes of their first page.
        locks: handles that end here.
        locked_children: children that are protected.
        last_used: when a handle last came to end here; what was used below counts once that is evicted.
        entry: number of its entry in the heap of free leaves, 0 for none.
        point: restore point at its end, if there is or was one.
        num_pages: length of the run.
    """

    __slots__ = (
        "_ids",
        "children",
        "entry",
        "key",
        "last_used",
        "locked_children",
        "locks",
        "num_pages",
        "parent",
        "point",
    )

    def __init__(self, parent: Node | None, key: bytearray, ids: PageIds, last_used: int) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.locked_children = 0
        self.last_used = last_used
        self.entry = 0
        self.point: RestorePoint | None = None
        self.num_pages = len(ids)
        self._ids = ids  # may be longer than the run, by room to grow

    @property
    def pages(self) -> PageIds:
        """The page ids of the run, a view."""
        return self._ids[: self.num_pages]

    @property
    def is_protected(self) -> bool:
        """Whether a handle ends here or below."""
        return self.locks + self.locked_children > 0

    @property
    def has_point(self) -> bool:
        """Whether a sequence can be continued from its end, in models that need more than the sequence's pages."""
        return self.point is not None and not self.point.lost

    @property
    def is_free_leaf(self) -> bool:
        """Whether it can be evicted now."""
        return not (self.children or self.locks or self.parent is None)

    def matching_bytes(self, tokens: PackedTokens, offset: int, limit: int, *, page_bytes: int) -> int:
        """How many bytes of the key equal tokens[offset:limit], in whole pages; the first page is known to.

        One pass of memcmp in strides, then halving inside the stride that differs. Slices are views: no copies.
        """
        size = min(len(self.key), limit - offset)
        stride = max(1, _STRIDE_BYTES // page_bytes) * page_bytes
        key, matched = memoryview(self.key), 0
        while matched < size and tokens.startswith(key[matched : min(matched + stride, size)], offset + matched):
            matched += stride
        if matched >= size:
            return size
        differs = min(matched + stride, size)
        while differs - matched > page_bytes:
            middle = matched + (differs - matched) // (2 * page_bytes) * page_bytes
            if tokens.startswith(key[matched:middle], offset + matched):
                matched = middle
            else:
                differs = middle
        return matched

    def append(self, tokens: memoryview, ids: PageIds) -> None:
        """Grow by whole pages at the end; amortised, costs as much as what is new."""
        end = self.num_pages + len(ids)
        if end > len(self._ids):
            grown = np.empty(end + end // 2, np.int32)
            grown[: self.num_pages] = self.pages
            self._ids = grown
        self._ids[self.num_pages : end] = ids
        self.num_pages = end
        self.key += tokens

    def take_front(self, size: int, *, page_bytes: int) -> Node:
        """Cut the first `size` bytes off into a node of their own, which is not linked to anything yet."""
        num_pages = size // page_bytes
        front_key, self.key = _cut(self.key, size)
        front = Node(None, front_key, self._ids[:num_pages], self.last_used)
        self._ids = self._ids[num_pages:]
        self.num_pages -= num_pages
        return front

    def drop_back(self, num_pages: int, *, page_bytes: int) -> None:
        """Forget the last `num_pages` pages, fewer than all."""
        self.num_pages -= num_pages
        del self.key[-num_pages * page_bytes :]


def _cut(key: bytearray, size: int) -> tuple[bytearray, bytearray]:
    """Cut a key in two after `size` bytes.

    A small part is copied out of the large one, which keeps its memory: copying a long key costs more in first touches
    of fresh memory than in bytes moved. Otherwise both are copied, so that neither keeps more memory than it fills.
    """
    rest = len(key) - size
    if 8 * size < rest:
        front = key[:size]
        del key[:size]
        return front, key
    if 8 * rest < size:
        back = key[size:]
        del key[size:]
        return key, back
    return key[:size], key[size:]
