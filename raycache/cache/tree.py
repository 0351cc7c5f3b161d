"""Radix tree over token prefixes.

Maps a prefix to the device pages that hold its state. Decides what to reuse and what to evict; moves nothing. Not
thread safe: the scheduler owns it.

    root - [The][ cat] - [ sat]         one node = a run of whole pages; a match never ends inside a page
                       ` [ ran][ off]

A node is protected while a handle locks it or a node below it is protected. Protected nodes reach up to the root, so a
walk that locks or unlocks stops at the first ancestor that is protected anyway:

    locked by handles, + children that are protected      0 + 1 - 1 + 0
                                                                ` 0 + 0   <- free leaf: the only kind that is evicted

Models with windows or recurrent states can be continued only from restore points, which stand at the ends of nodes:

    [The cat ... ]* - [ sat ... ] - [ on ... ]*      a match of all three nodes, or of the first; not of two

A restore point goes as a whole, least recently used first; pages behind the last one of a prefix are of no use and are
evicted before all others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from raycache.cache.node import Node, Parts, RestorePoint
from raycache.memory.pages import PageIds
from raycache.types import PackedTokens

_TOKEN_BYTES = 4
_NO_PAGES: PageIds = np.empty(0, np.int32)


class RadixTree:
    """Prefixes in whole pages, locked through handles, evicted least recently used first.

    Args:
        page_size: tokens per page.
        point_spaces: component spaces that a restore point has parts of; none if the sequence's pages are enough.
        on_drop: takes the parts of restore points that are given up.
    Attributes:
        num_cached: pages that the tree owns.
        num_locked: those of them that handles protect.
        num_nodes: runs of pages, for a look at the tree's shape.
    """

    def __init__(
        self, page_size: int, *, point_spaces: Sequence[str] = (), on_drop: Callable[[Parts], None] = lambda parts: None
    ) -> None:
        assert page_size >= 1, f"a page cannot have {page_size} tokens"
        self.page_size = page_size
        self._spaces = tuple(point_spaces)
        self._on_drop = on_drop
        self.num_cached = 0
        self.num_locked = 0
        self.num_nodes = 0
        self._page_bytes = page_size * _TOKEN_BYTES
        self._root = Node(None, bytearray(), _NO_PAGES, 0)
        # Free leaves by time of last use, one entry each. Out-of-date entries are put right when they are popped.
        self._heap: list[tuple[int, int, Node]] = []
        self._num_pushes = 0  # makes heap entries unique, and ties first come, first served
        # Nodes with a restore point, least recently used first: a dict keeps its order.
        self._points: dict[Node, None] = {}

    @property
    def num_points(self) -> int:
        """Restore points."""
        return len(self._points)

    @property
    def _most_entries(self) -> int:
        """Entries of the heap beyond which the void ones are thrown out."""
        return 2 * self.num_nodes + 64

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now."""
        return self.num_cached - self.num_locked

    def match(self, tokens: PackedTokens, *, now: int) -> PrefixHandle:
        """Find the longest cached prefix that can be continued, and lock exactly it.

        Args:
            tokens: the whole prompt, at least one token; the last token is never part of the match, so that there is
                something to compute.
            now: step number, the LRU clock (a count, not seconds).
        Returns:
            Handle with a length of whole pages, perhaps 0. Release it exactly once.
        """
        handle = PrefixHandle(self, self._root)
        self._lock(self._root)
        self.rematch(handle, tokens, now=now)
        return handle

    def rematch(self, handle: PrefixHandle, tokens: PackedTokens, *, now: int) -> None:
        """Lengthen a handle by what was cached after it was made; costs as much as the tokens gained.

        Args:
            handle: covers a prefix of `tokens`.
            tokens, now: as for `match`.
        """
        assert tokens and len(tokens) % _TOKEN_BYTES == 0, f"{len(tokens)} bytes are not one or more packed tokens"
        start = handle.length * _TOKEN_BYTES
        limit = (len(tokens) - _TOKEN_BYTES) // self._page_bytes * self._page_bytes
        node, end = self._walk(handle.node, tokens, start, limit)
        handle.known_length = end // _TOKEN_BYTES
        if self._spaces:
            node, end, handle.cut_by = self._last_point(node, end, above=handle.node)
        handle.length = end // _TOKEN_BYTES
        self._move_lock(handle, node, now)
        self._touch_point(node)

    def keep(self, handle: PrefixHandle, parts: Parts) -> bool:
        """Make the end of a handle a restore point.

        Args:
            handle: not empty.
            parts: one entry per point space; the tree's from now on if it takes them.
        Returns:
            Whether it took them; not if there is a restore point already.
        """
        node = handle.node
        assert set(parts) == set(self._spaces), f"a restore point has parts of {self._spaces}, got {set(parts)}"
        assert node.parent is not None, "there is nothing to restore before the first page"
        if not node.has_point:
            node.point = RestorePoint(parts)
            self._points[node] = None
            return True
        self._touch_point(node)
        return False

    def evict_point(self, space: str) -> bool:
        """Give up the least recently used restore point, because `space` needs room; False if there is none."""
        if not self._points:
            return False
        node = next(iter(self._points))
        self._drop_point(node, lost=space)
        if node.entry:
            node.entry = 0  # its entry in the heap is void, the new one comes before the pages of restore points
            self._push_free_leaf(node)
            if len(self._heap) > self._most_entries:
                self._heap = [entry for entry in self._heap if entry[1] == entry[2].entry]
                heapq.heapify(self._heap)
        return True

    def point_parts(self) -> list[Parts]:
        """Parts of all restore points: for checks."""
        return [node.point.parts for node in self._points if node.point is not None]

    def extend(self, handle: PrefixHandle, tokens: PackedTokens, pages: PageIds, *, now: int) -> npt.NDArray[np.bool_]:
        """Adopt pages that the request has computed, and lengthen its handle over them.

        Args:
            handle: covers the tokens before those pages.
            tokens: all tokens of the request from its first on; those after the new pages are ignored.
            pages: one per whole page after handle.length.
            now: as for `match`.
        Returns:
            Per page, whether the tree owns it now. Where it does not, the tree had that page already, the handle now
            covers the tree's, and the given one is the caller's to free.
        """
        start = handle.length * _TOKEN_BYTES
        limit = start + len(pages) * self._page_bytes
        assert len(tokens) >= limit, f"{len(pages)} pages after {handle.length} tokens, but {len(tokens) // 4} tokens"
        node, end = self._walk(handle.node, tokens, start, limit)
        self._move_lock(handle, node, now)
        num_known = (end - start) // self._page_bytes
        if end < limit:
            self._append(handle, memoryview(tokens)[end:limit], pages[num_known:], now)
        handle.length = limit // _TOKEN_BYTES
        return np.arange(len(pages)) >= num_known

    def evict(self, num_pages: int) -> PageIds:
        """Give up the least recently used pages that no handle protects, ends of prefixes first.

        Args:
            num_pages: how many; a run is trimmed rather than dropped beyond that.
        Returns:
            Pages that are the caller's now, in the order in which they were given up: `num_pages`, or all evictable.
        """
        evicted: list[PageIds] = []
        missing = num_pages
        while missing > 0 and self._heap:
            pushed_value, entry, node = heapq.heappop(self._heap)
            if entry != node.entry:
                continue
            node.entry = 0
            if self._value(node) > pushed_value or not node.is_free_leaf:
                self._push_free_leaf(node)
                continue
            count = min(missing, node.num_pages)
            missing -= count
            evicted.append(node.pages[: -count - 1 : -1])
            self._drop(node, count)
        return np.concatenate([_NO_PAGES, *evicted])

    def clear(self) -> PageIds:
        """Give up every page that no handle protects, and return them."""
        return self.evict(self.num_evictable)

    def cached_pages(self) -> PageIds:
        """All pages that the tree owns, in no particular order. Walks the tree: for checks."""
        return np.concatenate([node.pages for node in self._nodes()])

    def check(self) -> None:
        """Assert every invariant of the tree. Walks all of it: for tests and idle times."""
        nodes = list(self._nodes())
        for node in nodes:
            self._check_node(node)
        pages = self.cached_pages()
        assert self.num_nodes == len(nodes) - 1, f"{self.num_nodes} nodes counted, there are {len(nodes) - 1}"
        assert self.num_cached == len(pages), f"{self.num_cached} cached pages counted, there are {len(pages)}"
        assert len(np.unique(pages)) == len(pages), "a page is in the tree twice"
        locked = sum(node.num_pages for node in nodes if node.is_protected)
        assert self.num_locked == locked, f"{self.num_locked} locked pages counted, there are {locked}"
        queued = [(value, node) for value, entry, node in self._heap if entry == node.entry]
        assert len({node for _, node in queued}) == len(queued), "a node is in the heap twice"
        assert {node for _, node in queued} == {node for node in nodes if node.entry}, "entries and the heap disagree"
        assert all(value <= self._value(node) for value, node in queued), "a heap entry is too young"
        assert len(self._heap) <= self._most_entries + len(nodes), "the heap keeps nodes that are gone"
        assert set(self._points) == {node for node in nodes if node.has_point}, "restore points are lost"

    def _check_node(self, node: Node) -> None:
        assert len(node.key) == node.num_pages * self._page_bytes, "a node's tokens and pages differ in number"
        assert node.locks >= 0, "unlocked more often than locked"
        protected = sum(child.is_protected for child in node.children.values())
        assert node.locked_children == protected, f"{node.locked_children} locked children counted, {protected} are"
        for first_page, child in node.children.items():
            assert child.parent is node and child.num_pages > 0, "a child is empty or has another parent"
            assert child.key.startswith(first_page) and len(first_page) == self._page_bytes, "a child's name is wrong"
        assert node.entry or not node.is_free_leaf, "a free leaf is not in the heap"

    def _walk(self, node: Node, tokens: PackedTokens, offset: int, limit: int) -> tuple[Node, int]:
        """Follow tokens[offset:limit] (in bytes, whole pages) down from `node`.

        Returns:
            The last node that matches, cut so that it ends where the match does, and the byte where that is.
        """
        while offset < limit:
            child = node.children.get(bytes(tokens[offset : offset + self._page_bytes]))
            if child is None:
                break
            matched = child.matching_bytes(tokens, offset, limit, page_bytes=self._page_bytes)
            node = child if matched == len(child.key) else self._split(child, matched)
            offset += matched
        return node, offset

    def _last_point(self, node: Node, end: int, *, above: Node) -> tuple[Node, int, str]:
        """The last restore point at or before `end` (in bytes), the end of `node`, and not before `above`.

        Returns:
            Its node, the byte where that ends, and the component space that kept the match from going further.
        """
        reasons = []
        while node is not above and not node.has_point:
            assert node.parent is not None, "every node is below the one that the walk began at"
            reasons.append(node.point.lost if node.point is not None else "")
            end -= len(node.key)
            node = node.parent
        # What was lost nearest to the end of the match; where nothing was ever kept, all parts lack alike.
        lost = next(filter(None, reasons), "+".join(self._spaces))
        return node, end, lost if reasons else ""

    def _drop_point(self, node: Node, *, lost: str) -> None:
        assert node.point is not None, "only restore points are dropped"
        del self._points[node]
        self._on_drop(node.point.parts)
        node.point.parts, node.point.lost = {}, lost

    def _touch_point(self, node: Node) -> None:
        if node in self._points:
            self._points[node] = self._points.pop(node)

    def _value(self, node: Node) -> int:
        """What a free leaf is worth, the smallest goes first: nothing if no prefix can be continued behind it."""
        return node.last_used if node.has_point or not self._spaces else -1

    def _split(self, node: Node, size: int) -> Node:
        """Cut a node after `size` bytes. The upper part is new, so that handles of the lower end stay as they are."""
        parent = node.parent
        assert parent is not None
        upper = node.take_front(size, page_bytes=self._page_bytes)
        upper.parent, upper.locked_children = parent, int(node.is_protected)
        upper.children[bytes(node.key[: self._page_bytes])] = node
        parent.children[bytes(upper.key[: self._page_bytes])] = upper
        node.parent = upper
        self.num_nodes += 1
        return upper

    def _append(self, handle: PrefixHandle, tokens: memoryview, pages: PageIds, now: int) -> None:
        """Put new pages after the handle's node, which no cached prefix continues with their first page."""
        node = handle.node
        self.num_cached += len(pages)
        # Growing in place keeps a long output one node. It would move the end of other handles, and of the root.
        if node.parent is not None and not node.children and node.locks == 1 and node.point is None:
            node.append(tokens, pages)
            self.num_locked += len(pages)
            return
        leaf = Node(node, bytearray(tokens), pages.astype(np.int32), now)  # astype copies: the array is the caller's
        node.children[bytes(tokens[: self._page_bytes])] = leaf
        self.num_nodes += 1
        self._move_lock(handle, leaf, now)

    def _drop(self, node: Node, count: int) -> None:
        """Forget the last `count` pages of a free leaf, and the leaf when none is left."""
        parent = node.parent
        assert parent is not None
        self.num_cached -= count
        if node.has_point:
            self._drop_point(node, lost="")
        node.point = None
        if count < node.num_pages:
            node.drop_back(count, page_bytes=self._page_bytes)
            self._push_free_leaf(node)
            return
        del parent.children[bytes(node.key[: self._page_bytes])]
        self.num_nodes -= 1
        node.parent = None  # breaks the reference cycle
        # Only the deepest node of a prefix is marked as used; it hands that up when it goes.
        parent.last_used = max(parent.last_used, node.last_used)
        self._push_free_leaf(parent)

    def _move_lock(self, handle: PrefixHandle, node: Node, now: int) -> None:
        """Let a handle lock `node`, at or below the one that it locks now."""
        assert not handle.is_released, "the handle is released"
        node.last_used = max(node.last_used, now)
        if node is not handle.node:
            self._lock(node)  # before unlocking, so that the walk ends at the handle's old node
            self._unlock(handle.node)
            handle.node = node

    def _lock(self, node: Node) -> None:
        was_protected = node.is_protected
        node.locks += 1
        while not was_protected:
            self.num_locked += node.num_pages
            if node.parent is None:
                return
            node = node.parent
            was_protected = node.is_protected
            node.locked_children += 1

    def _unlock(self, node: Node) -> None:
        node.locks -= 1
        while not node.is_protected:
            self.num_locked -= node.num_pages
            self._push_free_leaf(node)
            if node.parent is None:
                return
            node = node.parent
            node.locked_children -= 1

    def _push_free_leaf(self, node: Node) -> None:
        if node.is_free_leaf and not node.entry:
            self._num_pushes += 1
            node.entry = self._num_pushes
            heapq.heappush(self._heap, (self._value(node), node.entry, node))

    def _nodes(self) -> Iterator[Node]:
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


class PrefixHandle:
    """A locked prefix. Made by `RadixTree.match`; `release` is the only way to unlock it.

    Attributes:
        length: tokens that it covers, a multiple of the page size.
        known_length: tokens whose pages were found; more than `length` where no restore point follows.
        cut_by: the component space that made the difference, or several joined by "+"; "" for none.
        node: where it ends; the tree's own.
        is_released: whether it is of no use any more.
    """

    __slots__ = ("_tree", "cut_by", "is_released", "known_length", "length", "node")

    def __init__(self, tree: RadixTree, node: Node) -> None:
        self.length = 0
        self.known_length = 0
        self.cut_by = ""
        self.node = node
        self._tree = tree
        self.is_released = False

    @property
    def parts(self) -> Parts:
        """Parts of the restore point at its end; none before the first page."""
        return self.node.point.parts if self.node.point is not None else {}

    @property
    def key(self) -> Hashable:
        """Names the position: equal for two handles that end at the same place, until this one is lengthened."""
        return (self.node, self.length)

    @property
    def pages(self) -> PageIds:
        """The device page of each page of the prefix, a copy."""
        return self.pages_from(0)

    def pages_from(self, first: int) -> PageIds:
        """The device pages of the prefix without its first `first` ones; costs as much as what is returned."""
        runs = [_NO_PAGES]
        node, missing = self.node, self.length // self._tree.page_size - first
        while missing > 0:
            assert node.parent is not None, "the handle is longer than the way to the root"
            runs.append(node.pages[-missing:])
            missing -= node.num_pages
            node = node.parent
        return np.concatenate(runs[::-1])

    def release(self) -> None:
        """Unlock the prefix; the handle is of no use after that."""
        assert not self.is_released, "a handle is released exactly once"
        self.is_released = True
        self._tree._unlock(self.node)
