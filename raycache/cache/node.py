"""One node of the radix tree: a run of whole pages that is matched, split and trimmed as one.

The tree decides when; this is how, at the cost of the bytes that have to be compared or are new:

    key     [ t t t t | t t t t | ... . ]           packed tokens, a bytearray: grows in place
    pages   [   p     |   p     | ... . ]           one id per page; the two parts of a split share one array
    samples [   s     |   s     | ... . | s | s ]   one per page, and of those that were trimmed off its end
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from raycache.cache.ghosts import SAMPLE_BYTES, Place
from raycache.memory.pages import PageIds
from raycache.types import PackedTokens

STRIDE_BYTES = 1 << 20
"""Of one memcmp at most; what differs is looked for inside the last one."""


Parts = Mapping[str, Sequence[int]]
"""Component space -> window pages, oldest first, or the one state slot, that continuing from a position needs."""

Claims = tuple[tuple[int, float], ...]
"""(priority, until when in seconds), priorities falling and times rising: the first that still holds counts, or 0."""


class Evictable:
    """What eviction policies look at.

    Attributes:
        last_used: when a handle last came to end here; what was used below counts once that is evicted.
        num_uses: matches that ended here or in what was evicted below; 0 if the policy does not count.
        claims: priorities that it was used with; none if the policy does not look at them.
        entry: number of its entry among the candidates, 0 for none.
    """

    __slots__ = ("claims", "entry", "last_used", "num_uses")

    def __init__(self, last_used: int, claims: Claims) -> None:
        self.last_used = last_used
        self.num_uses = 0
        self.claims = claims
        self.entry = 0

    def use(self, now: int, claims: Claims) -> None:
        """Count as used at `now`, with a priority or none."""
        if now > self.last_used:
            self.last_used = now
        if claims != self.claims:
            self.claims = _merge(self.claims, claims)


class RestorePoint(Evictable):
    """What continuing from one position needs beside the pages of the sequence.

    Attributes:
        position: tokens before it.
        parts: units of every component space but that of the sequence's pages.
        node: at whose end a tree keeps it, or kept it once; None before.
        lost: the component space whose units a tree needed when it gave the point up; the others went with them.
        storage: number of the storage that has it, 0 for none.
    """

    __slots__ = ("lost", "node", "parts", "position", "storage")

    def __init__(self, position: int, parts: Parts) -> None:
        super().__init__(0, ())
        self.position = position
        self.parts = parts
        self.node: Node | None = None
        self.lost = ""
        self.storage = 0


class Node(Evictable):
    """A run of whole pages.

    Attributes:
        parent: None for a root, and once it is evicted.
        key: packed tokens of the run.
        samples: of its pages, to remember them by when they are evicted, and of evicted ones that followed.
        name: the bytes of its first page.
        children: by name.
        locks: handles that end here.
        locked_children: children that are protected.
        place: where the samples end, as a place where more evicted pages may hang; None if none ever did.
        point: restore point at its end, if there is or was one.
        num_pages: length of the run.
    """

    __slots__ = (
        "_ids",
        "children",
        "key",
        "locked_children",
        "locks",
        "name",
        "num_pages",
        "parent",
        "place",
        "point",
        "samples",
    )

    def __init__(
        self,
        parent: Node | None,
        key: bytearray,
        ids: PageIds,
        samples: bytearray,
        *,
        name: bytes = b"",
        place: Place | None = None,
        last_used: int = 0,
        claims: Claims = (),
    ) -> None:
        super().__init__(last_used, claims)
        self.parent = parent
        self.key = key
        self.name = name
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.locked_children = 0
        self.place = place
        self.point: RestorePoint | None = None
        self.num_pages = len(ids)
        self._ids = ids  # may be longer than the run, by room to grow
        self.samples = samples

    @property
    def pages(self) -> PageIds:
        """The page ids of the run, a view."""
        return self._ids if len(self._ids) == self.num_pages else self._ids[: self.num_pages]

    @property
    def tail(self) -> bytearray:
        """Samples of evicted pages that followed the run and did not come back."""
        return self.samples[self.num_pages * SAMPLE_BYTES :]

    @property
    def has_tail(self) -> bool:
        """Whether evicted pages followed the run that were part of it."""
        return len(self.samples) > self.num_pages * SAMPLE_BYTES

    @property
    def has_ghosts(self) -> bool:
        """Whether evicted pages followed the run that did not come back."""
        has_tail = len(self.samples) > self.num_pages * SAMPLE_BYTES
        return has_tail or (self.place is not None and bool(self.place.ghosts))

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
        stride = max(1, STRIDE_BYTES // page_bytes) * page_bytes
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

    def last_point(self, end: int, *, above: Node) -> tuple[Node, int, str | None]:
        """Find the last restore point that a prefix which ends here can be continued from.

        Args:
            end: bytes of the prefix.
            above: this node or one above it, where the search ends.
        Returns:
            The node at whose end it stands, or `above`, the bytes up to there, and which component space was lost
            nearest to the end: None if there was nothing to pass, "" if nothing was lost on the way.
        """
        node, lost = self, None
        while node is not above and not node.has_point:
            assert node.parent is not None, "every node is below the one that the walk began at"
            lost = lost or (node.point.lost if node.point is not None else "")
            end -= len(node.key)
            node = node.parent
        return node, end, lost

    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        nodes: list[Node] = [self]
        while (above := nodes[-1].parent) is not None:
            nodes.append(above)
        return nodes[::-1]

    def walk_down(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def check(self, *, page_bytes: int) -> None:
        """Assert what holds for every node of a tree."""
        assert len(self.key) == self.num_pages * page_bytes, "a node's tokens and pages differ in number"
        assert len(self.samples) >= self.num_pages * SAMPLE_BYTES, "a node has fewer samples than pages"
        assert not (self.has_tail and self.children), "evicted pages are forgotten where others follow"
        assert self.locks >= 0, "unlocked more often than locked"
        protected = sum(child.is_protected for child in self.children.values())
        assert self.locked_children == protected, f"{self.locked_children} locked children counted, {protected} are"
        for name, child in self.children.items():
            assert child.parent is self and child.num_pages > 0, "a child is empty or has another parent"
            assert name == child.name == child.key[:page_bytes] and len(name) == page_bytes, "a child's name is wrong"
        assert self.point is None or self.point.node is self, "a restore point stands elsewhere"
        assert self.entry or not self.is_free_leaf, "a free leaf is not among the candidates"

    def append(self, tokens: PackedTokens, ids: PageIds, samples: bytes) -> None:
        """Grow by whole pages at the end, where no evicted ones follow; amortised, costs as much as what is new."""
        end = self.num_pages + len(ids)
        if end > len(self._ids):
            grown = np.empty(end + end // 2, np.int32)
            grown[: self.num_pages] = self.pages
            self._ids = grown
        self._ids[self.num_pages : end] = ids
        self.num_pages = end
        self.key += tokens
        self.samples += samples

    def take_front(self, size: int, *, page_bytes: int) -> Node:
        """Cut the first `size` bytes off into a node of their own, which is not linked to anything yet.

        Uses stay with the end, which hands them up when it goes.
        """
        num_pages = size // page_bytes
        front_key, self.key = _cut(self.key, size)
        front_samples, self.samples = _cut(self.samples, num_pages * SAMPLE_BYTES)
        front = Node(None, front_key, self._ids[:num_pages], front_samples, name=self.name)
        self.name = bytes(self.key[:page_bytes])
        self._ids = self._ids[num_pages:]
        self.num_pages -= num_pages
        return front

    def drop_back(self, num_pages: int, *, page_bytes: int) -> None:
        """Give up the last `num_pages` pages, fewer than all; their samples stay."""
        self.num_pages -= num_pages
        del self.key[-num_pages * page_bytes :]

    def forget_tail(self) -> None:
        """Forget what was trimmed off the end of the run."""
        del self.samples[self.num_pages * SAMPLE_BYTES :]


class Root(Node):
    """The empty prefix of one tree of prefixes.

    Attributes:
        seed: tells the trees apart.
    """

    __slots__ = ("seed",)

    def __init__(self, seed: bytes, place: Place) -> None:
        super().__init__(None, bytearray(), np.empty(0, np.int32), bytearray(), place=place)
        self.seed = seed


def _merge(first: Claims, second: Claims) -> Claims:
    """The claims of something that was used with both: at any time the higher of the two, where what has expired is 0.

    Negative priorities rise when they expire, so of two the higher one holds until the first of both times.
    """
    if not (first and second):
        return first or second
    claims = sorted((*first, *second), reverse=True)
    if claims[0][0] < 0:
        return ((claims[0][0], min(until_s for _, until_s in claims)),)
    merged: list[tuple[int, float]] = []
    for priority, until_s in claims:
        if priority >= 0 and (not merged or until_s > merged[-1][1]):
            merged.append((priority, until_s))
    return tuple(merged)


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
