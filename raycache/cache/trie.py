"""The structure of the radix tree: finding, splitting, adding and removing runs of pages.

Knows no handles, clocks, policies or restore points (tree.py). Evicted pages leave a ghost (ghosts.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from raycache.cache.ghosts import SAMPLE_BYTES, Ghosts, Place
from raycache.cache.node import STRIDE_BYTES, Claims, Node, Root
from raycache.memory.pages import PageIds
from raycache.types import PackedTokens

_GHOST_SHARE = 16  # ghosts use at most 1 / 16 of the memory of cached tokens


class Trie:
    """Runs of whole pages below roots.

    Args:
        page_bytes: bytes of packed tokens per page.
    Attributes:
        roots: by seed; only those with children or handles.
        num_pages: total pages of all nodes.
        num_nodes: number of nodes, without roots.
        ghosts: memory of evicted pages.
    """

    def __init__(self, page_bytes: int) -> None:
        self.roots: dict[bytes, Root] = {}
        self.num_pages = 0
        self.num_nodes = 0
        self.ghosts = Ghosts(page_bytes)
        self._page_bytes = page_bytes

    def root(self, seed: bytes) -> Root:
        """Return the root of a seed, creating it if necessary."""
        root = self.roots.get(seed)
        if root is None:
            root = self.roots[seed] = Root(seed, self.ghosts.root(seed))
        return root

    def walk(self, node: Node, tokens: PackedTokens, offset: int, limit: int) -> tuple[Node, int, bytes]:
        """Follow tokens[offset:limit] (in bytes, whole pages) down from `node`.

        Returns:
            The last matching node, split so that it ends where the match does; that offset in bytes; and the page that
            follows there, possibly of too few tokens.
        """
        page_bytes = self._page_bytes
        while True:
            page = tokens[offset : offset + page_bytes]
            if not isinstance(page, bytes):  # to convert bytes into bytes would take longer
                page = bytes(page)
            child = node.children.get(page) if offset < limit else None
            if child is None:
                return node, offset, page
            node, size = child, len(child.key)
            if size > STRIDE_BYTES or offset + size > limit or not tokens.startswith(child.key, offset):
                size = child.matching_bytes(tokens, offset, limit, page_bytes=page_bytes)
                if size < len(child.key):
                    node = self._split(child, size)
            offset += size

    def was_evicted(self, node: Node, page: bytes) -> bool:
        """Whether an uncached page with these tokens (possibly too few) followed a node and was evicted."""
        if len(page) < self._page_bytes:
            return False
        if node.num_trimmed:
            return node.tail.startswith(self.ghosts.samples(page))
        return node.place is not None and self.ghosts.has(node.place, page)

    def append(
        self, node: Node, page: bytes, tokens: memoryview, ids: PageIds, *, grows: bool, now: int, claims: Claims
    ) -> Node:
        """Add pages after a node; no child of it may start with their first page.

        Args:
            page: packed tokens of the first page.
            tokens: packed tokens of the pages.
            ids: page ids.
            grows: whether to extend the node itself, unless ghosts are attached to its end.
            now, claims: usage data of new nodes.
        Returns:
            The node that ends with the last page.
        """
        self.num_pages += len(ids)
        key, start = bytearray(tokens), 0
        samples = self.ghosts.samples(key)
        ends: Sequence[tuple[int, Place | None]] = ((len(ids), None),)
        if node.num_trimmed or self.was_evicted(node, page):
            ends = self._ends(node, key, samples)
        grows = grows and not node.has_ghosts
        for end, place in ends:
            run, run_ids, run_samples = key, ids, samples
            if len(ends) > 1:
                run, run_ids = key[start * self._page_bytes : end * self._page_bytes], ids[start:end]
                run_samples = samples[start * SAMPLE_BYTES : end * SAMPLE_BYTES]
                page = bytes(run[: self._page_bytes])
            if grows and start == 0:
                node.append(run, run_ids, run_samples)
            else:  # the array belongs to the caller
                leaf = Node(node, run, run_ids.copy(), bytearray(run_samples), page, now, claims)
                node.children[page] = leaf
                self.num_nodes += 1
                node = leaf
            node.place, start = place, end
        return node

    def trim(self, node: Node, num_pages: int) -> None:
        """Trim the last pages off a leaf, fewer than all; it keeps their samples."""
        self.num_pages -= num_pages
        node.num_pages -= num_pages
        node.num_trimmed += num_pages
        node.pages = node.pages[: node.num_pages]
        del node.key[-num_pages * self._page_bytes :]

    def take_off(self, node: Node, *, leaves_ghost: bool) -> Node:
        """Remove a leaf; returns its parent.

        Args:
            leaves_ghost: whether to remember its pages, and those trimmed off its end, as evicted.
        """
        parent = node.parent
        assert parent is not None and not node.children, "only leaves can be removed"
        if leaves_ghost:  # takes over the samples without a copy
            place, max_bytes = parent.place, self.num_pages * self._page_bytes // _GHOST_SHARE
            if place is None:  # a node with children has nothing trimmed off its end
                place = parent.place = Place()
            self.ghosts.add(place, node.name, node.samples, end=node.place, max_bytes=max_bytes)
        self.num_pages -= node.num_pages
        self.num_nodes -= 1
        del parent.children[node.name]
        node.parent = None  # breaks the reference cycle
        return parent

    def forget_ghosts(self) -> None:
        """Forget all evicted pages."""
        self.ghosts.clear()
        for node in self.nodes():
            node.forget_tail()

    def nodes(self) -> Iterator[Node]:
        """All nodes including roots, parents first."""
        for root in self.roots.values():
            yield from root.walk_down()

    def pages(self) -> PageIds:
        """All pages, in no particular order."""
        return np.concatenate([np.empty(0, np.intp), *(node.pages for node in self.nodes())])

    def check(self) -> None:
        """Assert that nodes and counts are consistent."""
        nodes = list(self.nodes())
        for node in nodes:
            node.check(page_bytes=self._page_bytes)
        num_runs, pages = len(nodes) - len(self.roots), self.pages()
        assert self.num_nodes == num_runs, f"{self.num_nodes} nodes counted, there are {num_runs}"
        assert self.num_pages == len(pages), f"{self.num_pages} pages counted, there are {len(pages)}"
        assert len(np.unique(pages)) == len(pages), "a page is in the tree twice"
        for seed, root in self.roots.items():
            assert root.seed == seed and (root.children or root.is_protected), "an unused root is kept"
        self.ghosts.check()

    def _split(self, node: Node, size: int) -> Node:
        """Split a node after `size` bytes. The upper part is new, so that handles of the lower end stay valid."""
        parent = node.parent
        assert parent is not None
        upper = node.take_front(size, page_bytes=self._page_bytes)
        upper.parent, upper.locked_children = parent, int(node.is_protected)
        upper.children[node.name] = node
        parent.children[upper.name] = upper
        node.parent = upper
        self.num_nodes += 1
        return upper

    def _ends(self, node: Node, key: bytearray, samples: bytes) -> Sequence[tuple[int, Place | None]]:
        """Where to split new pages after a node because ghosts branch off: (number of pages, place), ascending."""
        ends: list[tuple[int, Place | None]] = [*self.ghosts.give_up(self._place_after(node), key, samples)]
        num_pages = len(samples) // SAMPLE_BYTES
        return ends if ends and ends[-1][0] == num_pages else [*ends, (num_pages, None)]

    def _place_after(self, node: Node) -> Place:
        """The place at a node's end, with all ghosts attached to it."""
        if node.num_trimmed:
            place = Place()
            self.ghosts.add_rest(place, node.tail, end=node.place)
            node.forget_tail()
            node.place = place
        elif node.place is None:
            node.place = Place()
        return node.place
