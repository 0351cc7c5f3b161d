"""Evicts pages and restore points from a tree.

Free leaves of the trie are trimmed from their ends, restore points are dropped whole, both in the order of evict.py.
`on_leave` sees what is about to be evicted (`Leaving`); evicted pages leave a ghost.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from raycache.cache.evict import Eviction, EvictionOrder, Leaving, Value
from raycache.cache.listener import TreeListener
from raycache.cache.node import Claims, Node, RestorePoint, Root
from raycache.cache.trie import Trie
from raycache.memory.pages import PageIds

NO_PAGES: PageIds = np.empty(0, np.intp)
_USELESS: Value = (-(1 << 62), 0)  # evicted before all else, in order of insertion


class Evictor:
    """Evicts what no handle protects.

    Args:
        trie: its leaves are evicted.
        eviction: the policy.
        has_points: whether prefixes can be resumed only from restore points.
        on_drop: called with each dropped restore point.
        on_leave: called just before an eviction, or None.
        listener: told of every change.
    """

    def __init__(
        self,
        trie: Trie,
        *,
        eviction: Eviction,
        has_points: bool,
        on_drop: Callable[[RestorePoint], None],
        on_leave: Callable[[Leaving], None] | None,
        listener: TreeListener,
    ) -> None:
        self._trie, self._on_drop, self._on_leave, self._listener = trie, on_drop, on_leave, listener
        self._worth, self._counts_matches = eviction.worth, eviction is Eviction.LFU
        self._leaves: EvictionOrder[Node] = EvictionOrder(self._worth_with_points if has_points else self._worth)
        self._points: EvictionOrder[RestorePoint] = EvictionOrder(self._worth)
        self._num_touches = 0  # the clock of restore points: finer than steps

    @property
    def num_points(self) -> int:
        """Restore points in the tree."""
        return len(self._points)

    def tick(self, now_s: float) -> None:
        """Set the clock on which priorities expire, in seconds."""
        self._leaves.tick(now_s)
        self._points.tick(now_s)

    def add(self, node: Node, point: RestorePoint, claims: Claims) -> None:
        """Put a restore point at the end of a node that has none."""
        self._num_touches += 1
        point.node, point.last_used, point.claims = node, self._num_touches, claims
        node.point = point
        self._points.push(point)
        self._listener.point_added(node)

    def count(self, node: Node, claims: Claims, *, is_longer: bool) -> None:
        """Count a match that ends at a node; `is_longer`: it found more than the handle covered before."""
        is_counted = is_longer and self._counts_matches
        if is_counted:
            node.num_uses += 1
        if node.point is not None:
            self.touch(node, claims, is_counted=is_counted)

    def touch(self, node: Node, claims: Claims, *, is_counted: bool) -> None:
        """Count a use of the restore point at the end of a node, if there is one."""
        if node.point is not None and node.has_point:
            self._num_touches += 1
            node.point.use(self._num_touches, claims)
            node.point.num_uses += is_counted

    def freed(self, node: Node) -> None:
        """Reconsider a node for eviction after a lock, child or restore point of it is gone."""
        if node.children or node.locks:
            return
        if node.parent is not None:
            self._leaves.push(node)
        elif isinstance(node, Root):
            del self._trie.roots[node.seed]  # clients choose salts: there may be any number of them

    def evict(self, num_pages: int, *, is_remembered: bool = True) -> PageIds:
        """Evict the last pages of free leaves.

        Args:
            num_pages: how many; fewer are evicted if there are no more.
            is_remembered: whether to call `on_leave` and to leave ghosts.
        """
        given_up: list[PageIds] = []  # list[PageIds]() would build the type at each call
        missing, leaves, on_leave = num_pages, self._leaves, self._on_leave if is_remembered else None
        while missing > 0 and (node := leaves.first()) is not None:
            if node.children or node.locks:  # protected since it became a candidate
                leaves.void(node)
                continue
            pages = node.pages[-missing:]
            missing -= len(pages)
            given_up.append(pages[::-1])
            if on_leave is not None:
                on_leave(_leaving(node, len(pages)))
            self._drop(node, pages, leaves_ghost=is_remembered)
        return np.concatenate(given_up) if given_up else NO_PAGES

    def evict_point(self, space: str) -> bool:
        """Evict the first restore point in order, because units of `space` are needed; False if there is none."""
        point = self._points.first()
        if point is None:
            return False
        node = point.node
        assert node is not None, "a candidate is not in the tree"
        if self._on_leave is not None:
            self._on_leave(_leaving(node, 0))
        self._drop_point(point, lost=space)
        if node.entry:  # without the point it is evicted before pages that lead to one
            self._leaves.void(node)
            self._leaves.push(node)
        return True

    def discard(self, first: Node) -> PageIds:
        """Drop a node and its subtree, except for what handles protect."""
        pages = [NO_PAGES]
        for node in reversed(list(first.walk_down())):
            if node.is_free_leaf:  # its subtree was visited before it
                pages.append(node.pages)
                self._drop(node, node.pages, leaves_ghost=False)
        return np.concatenate(pages)

    def check(self) -> None:
        """Assert that the candidates are exactly what can be evicted."""
        nodes = list(self._trie.nodes())
        self._leaves.check({node for node in nodes if node.entry})
        self._points.check({node.point for node in nodes if node.point is not None and node.has_point})

    def _drop(self, node: Node, pages: PageIds, *, leaves_ghost: bool) -> None:
        """Drop the last pages of a free leaf, and the leaf when none is left."""
        had_point = False
        if node.point is not None:
            had_point = node.has_point
            if had_point:
                self._drop_point(node.point, lost="")
            node.point = None
        self._listener.dropped(pages)
        num_pages = len(pages)
        if num_pages < node.num_pages:
            self._trie.trim(node, num_pages)
            if had_point:  # it is worth less without the point
                self._leaves.void(node)
                self._leaves.push(node)
            return
        self._leaves.void(node)
        parent = self._trie.take_off(node, leaves_ghost=leaves_ghost)
        # Only the deepest node of a prefix records uses; it passes them up when it is evicted.
        parent.use(node.last_used, node.claims)
        parent.num_uses += node.num_uses
        self.freed(parent)

    def _drop_point(self, point: RestorePoint, *, lost: str) -> None:
        self._points.void(point)
        self._on_drop(point)
        point.lost = lost
        assert point.node is not None, "the restore point is not in the tree"
        self._listener.point_dropped(point.node)

    def _worth_with_points(self, node: Node, now_s: float) -> Value:
        """Value of a free leaf: the lowest if no prefix that ends in it can be resumed."""
        return self._worth(node, now_s) if node.has_point else _USELESS


def _leaving(node: Node, num_pages: int) -> Leaving:
    """Describe the eviction of a node's last pages, or of its restore point only."""
    root, *runs = node.path()
    assert isinstance(root, Root), "the way up ends at a root"
    pages = np.concatenate([run.pages for run in runs])
    tokens, point = b"".join(run.key for run in runs), node.point if node.has_point else None
    return Leaving(root.seed, tokens, pages, len(pages) - num_pages, point)
