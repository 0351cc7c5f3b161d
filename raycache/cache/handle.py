"""Locked prefixes.

A node is protected while a handle locks it or a descendant is protected. Protected nodes form paths to the root, so
locking and unlocking stop at the first ancestor that stays protected anyway:

    locked by handles, + children that are protected      0 + 1 - 1 + 0
                                                                ` 0 + 0   <- free leaf: the only kind that is evicted
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from raycache.cache.node import Claims, Node, Parts, RestorePoint
from raycache.memory.pages import PageIds


class Locks:
    """Which nodes are protected.

    Args:
        on_free: called for each node without children that is no longer protected.
    Attributes:
        num_pages: total pages of protected nodes.
    """

    def __init__(self, on_free: Callable[[Node], None]) -> None:
        self._on_free = on_free
        self.num_pages = 0

    def add(self, node: Node) -> None:
        """Protect a node and its ancestors."""
        was_protected = node.locks or node.locked_children
        node.locks += 1
        while not was_protected:
            self.num_pages += node.num_pages
            if node.parent is None:
                return
            node = node.parent
            was_protected = node.locks or node.locked_children
            node.locked_children += 1

    def remove(self, node: Node) -> None:
        """Undo one `add`."""
        node.locks -= 1
        while not (node.locks or node.locked_children):
            parent = node.parent
            self.num_pages -= node.num_pages
            if not node.children:
                self._on_free(node)
            if parent is None:
                return
            node = parent
            node.locked_children -= 1


class PrefixHandle:
    """A locked prefix. Made by `RadixTree.match`, which locks it; `release` is the only way to unlock it.

    Attributes:
        root: seed of its tree of prefixes.
        length: tokens covered, a multiple of the page size.
        known_length: tokens whose pages are cached; more than `length` if the model cannot resume from the last one.
        cut_by: component space whose missing state shortened the match, several joined by "+"; "" for none.
        was_evicted: whether the page after known_length had been cached and evicted, as of the match.
        node: node where it ends; internal to the tree.
        claims: eviction claims of its last use; internal to the tree.
        is_released: whether `release` was called; nothing else may be called then.
    """

    __slots__ = (
        "_locks",
        "_page_size",
        "claims",
        "cut_by",
        "is_released",
        "known_length",
        "length",
        "node",
        "root",
        "was_evicted",
    )

    def __init__(self, node: Node, length: int, root: bytes, locks: Locks, page_size: int, claims: Claims = ()) -> None:
        self.root = root
        self.length = self.known_length = length
        self.cut_by = ""
        self.was_evicted = False
        self.node = node
        self.claims = claims
        self.is_released = False
        self._locks = locks
        self._page_size = page_size

    @property
    def point(self) -> RestorePoint | None:
        """The restore point at its end, or None."""
        point = self.node.point
        return None if point is None or point.lost else point

    @property
    def parts(self) -> Parts:
        """Parts of the restore point at its end; empty if there is none."""
        point = self.point
        return {} if point is None else point.parts

    @property
    def tokens(self) -> bytes:
        """The packed tokens covered."""
        return b"".join(node.key for node in self.node.path())

    @property
    def key(self) -> Hashable:
        """Identifies the position: equal for two handles that end at the same place; changes when one is lengthened."""
        return (self.node, self.length)

    @property
    def pages(self) -> PageIds:
        """A copy of the prefix's page ids."""
        return self.pages_from(0)

    def pages_from(self, first: int) -> PageIds:
        """Page ids of the prefix from index `first` on; costs O(pages returned)."""
        node, missing = self.node, self.length // self._page_size - first
        if 0 < missing <= node.num_pages:
            return node.pages[-missing:].copy()
        runs = []
        while missing > 0:
            assert node.parent is not None, "the handle is longer than its path to the root"
            runs.append(node.pages[-missing:])
            missing -= node.num_pages
            node = node.parent
        return np.concatenate(runs[::-1]) if runs else np.empty(0, np.intp)

    def page(self, index: int) -> int:
        """Page id at an index of the prefix."""
        node, stop = self.node, self.length // self._page_size
        while index < stop - node.num_pages:
            assert node.parent is not None, "the handle is longer than its path to the root"
            stop -= node.num_pages
            node = node.parent
        return int(node.pages[index - stop])

    def clone(self) -> PrefixHandle:
        """Return an independent lock on the same prefix."""
        assert not self.is_released, "the handle is released"
        node = self.node
        node.locks += 1  # it is protected already
        clone = PrefixHandle(node, self.length, self.root, self._locks, self._page_size, self.claims)
        clone.known_length, clone.cut_by, clone.was_evicted = self.known_length, self.cut_by, self.was_evicted
        return clone

    def move(self, node: Node, *, now: int, claims: Claims) -> None:
        """Lock `node`, at or below the current one, instead of it, and count a use. Called by the tree only."""
        assert not self.is_released, "the handle is released"
        if node is not self.node:
            self._locks.add(node)
            assert self.node.locked_children, "a handle only moves down"
            self.node.locks -= 1  # it stays protected, as its descendant is
            self.node = node
        self.claims = claims
        node.use(now, claims)

    def release(self) -> None:
        """Unlock the prefix; the handle cannot be used afterwards."""
        assert not self.is_released, "a handle is released exactly once"
        self.is_released = True
        self._locks.remove(self.node)
