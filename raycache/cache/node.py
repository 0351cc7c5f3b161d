"""A node of the radix tree: a run of whole pages.

Operations cost as much as the bytes compared or added:

    key     [ t t t t | t t t t | ... . ]           packed tokens, a bytearray: grows in place
    pages   [   p     |   p     | ... . ]           one id per page; the two parts of a split share one array
    samples [   s     |   s     | ... . | s | s ]   one per page, and per page trimmed off its end
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from raycache.cache.ghosts import SAMPLE_BYTES, Place
from raycache.memory.pages import PageIds
from raycache.types import PackedTokens

STRIDE_BYTES = 1 << 20
"""Bytes per memcmp; a difference is then located inside the last stride."""


Parts = Mapping[str, Sequence[int]]
"""Component space -> what resuming from a position needs: window pages, oldest first, or one state slot."""

Claims = tuple[tuple[int, float], ...]
"""(priority, expiry in seconds), by falling priority and rising expiry: the first not expired counts, else 0."""


class Evictable:
    """Usage data for eviction policies.

    Attributes:
        last_used: when a handle last ended here, or in a continuation that has been evicted.
        num_uses: matches that ended here or in an evicted continuation; 0 if the policy does not count.
        claims: priorities that it was used with; empty if the policy ignores them.
        entry: number of its entry among the eviction candidates, 0 for none.
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
    """What resuming from one position needs besides the pages of the sequence.

    Attributes:
        position: length of the prefix in tokens.
        parts: units of every component space except "full".
        node: the tree node at whose end it is or was kept; None before.
        lost: component space that ran out of units when the point was evicted.
        storage: number of the storage that has it; 0: none.
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
        samples: samples (ghosts.py) of its pages and of evicted pages that followed.
        name: packed tokens of its first page.
        children: by name.
        locks: number of handles that end here.
        locked_children: number of protected children.
        num_pages, pages: the page ids of the run, and how many.
        num_trimmed: pages trimmed off its end, whose samples it keeps.
        place: the place after the samples, to which more ghosts may be attached; None if none ever was.
        point: current or former restore point at its end, or None.
    """

    __slots__ = (
        "_ids",
        "children",
        "key",
        "locked_children",
        "locks",
        "name",
        "num_pages",
        "num_trimmed",
        "pages",
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
        name: bytes = b"",
        last_used: int = 0,
        claims: Claims = (),
    ) -> None:
        # `Evictable.__init__`, written out, and no argument by keyword: those of a class cost more than all of this.
        self.last_used = last_used
        self.num_uses = 0
        self.claims = claims
        self.entry = 0
        self.parent = parent
        self.key = key
        self.name = name
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.locked_children = 0
        self.place: Place | None = None
        self.point: RestorePoint | None = None
        self.num_pages = len(ids)
        self.num_trimmed = 0
        self.pages = self._ids = ids  # the latter may be longer, as spare capacity
        self.samples = samples

    @property
    def tail(self) -> bytearray:
        """Samples of evicted pages that followed the run and are not cached again."""
        return self.samples[self.num_pages * SAMPLE_BYTES :]

    @property
    def has_ghosts(self) -> bool:
        """Whether any evicted pages are remembered after the run."""
        return self.num_trimmed > 0 or (self.place is not None and bool(self.place.ghosts))

    @property
    def is_protected(self) -> bool:
        """Whether a handle ends here or in a descendant."""
        return self.locks + self.locked_children > 0

    @property
    def has_point(self) -> bool:
        """Whether a restore point stands at its end."""
        return self.point is not None and not self.point.lost

    @property
    def is_free_leaf(self) -> bool:
        """Whether it can be evicted now."""
        return not (self.children or self.locks or self.parent is None)

    def matching_bytes(self, tokens: PackedTokens, offset: int, limit: int, *, page_bytes: int) -> int:
        """Length in bytes, in whole pages, of the key's match with tokens[offset:limit]; the first page must match.

        Compares in strides, then bisects inside the stride that differs. Slices are views, not copies.
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
        """Find the last restore point from which a prefix that ends here can be resumed.

        Args:
            end: length of the prefix in bytes.
            above: this node or an ancestor, where the search ends.
        Returns:
            The node at whose end it stands, or `above`; the length in bytes up to there; and the component space lost
            nearest to the end: None if no node was passed, "" if nothing was lost on the way.
        """
        node, lost = self, None
        while node is not above and not node.has_point:
            assert node.parent is not None, "the walk started outside of the subtree of `above`"
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
        """This node and its descendants, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def check(self, *, page_bytes: int) -> None:
        """Assert the invariants of a node."""
        assert len(self.key) == self.num_pages * page_bytes, "a node's tokens and pages differ in number"
        assert len(self.pages) == self.num_pages, f"{len(self.pages)} page ids, {self.num_pages} counted"
        num_samples = self.num_pages + self.num_trimmed
        assert len(self.samples) == num_samples * SAMPLE_BYTES, f"a node does not have {num_samples} samples"
        assert not (self.num_trimmed and self.children), "a node with children remembers trimmed pages"
        assert self.locks >= 0, "unlocked more often than locked"
        protected = sum(child.is_protected for child in self.children.values())
        assert self.locked_children == protected, f"{self.locked_children} locked children counted, {protected} are"
        for name, child in self.children.items():
            assert child.parent is self and child.num_pages > 0, "a child is empty or has another parent"
            assert name == child.name == child.key[:page_bytes] and len(name) == page_bytes, "a child's name is wrong"
        assert self.point is None or self.point.node is self, "a restore point belongs to another node"
        assert self.entry or not self.is_free_leaf, "a free leaf is not among the candidates"

    def append(self, tokens: PackedTokens, ids: PageIds, samples: bytes) -> None:
        """Append whole pages; no evicted ones may follow. Amortised cost: the size of what is new."""
        end = self.num_pages + len(ids)
        if end > len(self._ids):
            grown = np.empty(end + end // 2, np.intp)
            grown[: self.num_pages] = self.pages
            self._ids = grown
        self._ids[self.num_pages : end] = ids
        self.num_pages, self.pages = end, self._ids[:end]
        self.key += tokens
        self.samples += samples

    def take_front(self, size: int, *, page_bytes: int) -> Node:
        """Split the first `size` bytes off into a new, unlinked node.

        Usage data stays with this node, which passes it up when it is evicted.
        """
        num_pages = size // page_bytes
        front_key, self.key = _cut(self.key, size)
        front_samples, self.samples = _cut(self.samples, num_pages * SAMPLE_BYTES)
        front = Node(None, front_key, self.pages[:num_pages], front_samples, self.name)
        self.name = bytes(self.key[:page_bytes])
        self._ids, self.pages = self._ids[num_pages:], self.pages[num_pages:]
        self.num_pages -= num_pages
        return front

    def forget_tail(self) -> None:
        """Forget pages that were trimmed off the end."""
        del self.samples[self.num_pages * SAMPLE_BYTES :]
        self.num_trimmed = 0


class Root(Node):
    """The empty prefix of one tree.

    Attributes:
        seed: start of the digest chain; identifies the tree.
    """

    __slots__ = ("seed",)

    def __init__(self, seed: bytes, place: Place) -> None:
        super().__init__(None, bytearray(), np.empty(0, np.intp), bytearray())
        self.seed, self.place = seed, place


def _merge(first: Claims, second: Claims) -> Claims:
    """Combine claims: at any time the higher of the two, where an expired one counts as 0.

    Negative priorities rise when they expire, so the higher of two holds until the earlier expiry.
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
    """Split a key after `size` bytes.

    A small part is copied out and the large one keeps its memory: touching fresh memory costs more than copying.
    Otherwise both are copied, so that neither wastes memory.
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
