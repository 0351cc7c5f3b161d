"""Radix tree over token prefixes.

Maps a prefix to the pages that hold its state. Decides what to reuse and what to evict; moves nothing. Not thread safe:
the scheduler owns it.

    root - [The][ cat] - [ sat]         one node = a run of whole pages; a match never ends inside a page
                       ` [ ran][ off]

Prefixes of different roots (another salt or adapter, say) share nothing but the order of eviction and the counts. What
handles protect (handle.py) stays; the rest goes in the order of evict.py, ends of prefixes first, and leaves a ghost
(ghosts.py), so that a match can tell why it ended.

Models with windows or recurrent states can be continued only from restore points, which stand at the ends of nodes:

    [The cat ... ]* - [ sat ... ] - [ on ... ]*      a match of all three nodes, or of the first; not of two

A restore point goes as a whole; pages behind the last one of a prefix are of no use and are evicted before all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from raycache.cache.evict import Eviction, EvictionOrder, Leaving, Value
from raycache.cache.handle import Locks, PrefixHandle
from raycache.cache.node import Claims, Node, Parts, RestorePoint, Root
from raycache.cache.trie import Trie
from raycache.memory.pages import PageIds
from raycache.types import PackedTokens

__all__ = ["PrefixHandle", "RadixTree"]

_TOKEN_BYTES = 4
_NO_PAGES: PageIds = np.empty(0, np.int32)
_USELESS: Value = (-(1 << 62), 0)  # goes before all else, first come, first served


class RadixTree:
    """Prefixes in whole pages, locked through handles, evicted in the order of a policy.

    Args:
        page_size: tokens per page.
        point_spaces: component spaces that a restore point has parts of; none if the sequence's pages are enough.
        eviction: the policy.
        on_drop: takes the parts of restore points that are given up.
        on_leave: sees what is evicted just before it is; it may not change the tree.
    """

    def __init__(
        self,
        page_size: int,
        *,
        point_spaces: Sequence[str] = (),
        eviction: Eviction = Eviction.LRU,
        on_drop: Callable[[Parts], None] = lambda parts: None,
        on_leave: Callable[[Leaving], None] | None = None,
    ) -> None:
        assert page_size >= 1, f"a page cannot have {page_size} tokens"
        self.page_size = page_size
        self._spaces = tuple(point_spaces)
        self._eviction = eviction
        self._on_drop = on_drop
        self._on_leave = on_leave
        self._page_bytes = page_size * _TOKEN_BYTES
        self._trie = Trie(self._page_bytes)
        self._locks = Locks(self._freed)
        self._worth = eviction.worth
        self._leaves: EvictionOrder[Node] = EvictionOrder(self._worth_with_points if self._spaces else self._worth)
        self._points: EvictionOrder[RestorePoint] = EvictionOrder(self._worth)
        self._num_touches = 0  # the clock of restore points: finer than steps

    @property
    def num_cached(self) -> int:
        """Pages that the tree owns."""
        return self._trie.num_pages

    @property
    def num_locked(self) -> int:
        """Cached pages that handles protect."""
        return self._locks.num_pages

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now."""
        return self.num_cached - self.num_locked

    @property
    def num_points(self) -> int:
        """Restore points."""
        return len(self._points)

    @property
    def num_nodes(self) -> int:
        """Runs of pages: for a look at the tree's shape."""
        return self._trie.num_nodes

    @property
    def num_roots(self) -> int:
        """Roots that something hangs at, or a handle."""
        return len(self._trie.roots)

    @property
    def num_ghosts(self) -> int:
        """Runs of pages that were evicted and are remembered."""
        return len(self._trie.ghosts)

    # --- find and lock ------------------------------------------------------------------------------------------------

    def match(
        self, tokens: PackedTokens, *, now: int, root: bytes = b"", priority: int = 0, until_s: float = 0.0
    ) -> PrefixHandle:
        """Find the longest cached prefix that can be continued, and lock exactly it.

        Args:
            tokens: the whole prompt, at least one token; the last token is never part of the match, so that there is
                something to compute.
            now: step number, the LRU clock (a count, not seconds).
            root: which prefixes to look among.
            priority: with eviction by priority, what the prefix counts for.
            until_s: how long, on the clock of `tick`; 0.0 for ever. After it, the priority counts as 0.
        Returns:
            Handle with a length of whole pages, perhaps 0. Release it exactly once.
        """
        found = self._find(tokens, self._trie.root(root), 0)
        handle = PrefixHandle(found[0], root=root, locks=self._locks, page_size=self.page_size)
        self._settle(handle, found, now=now, claims=self._eviction.claims_of(priority, until_s))
        return handle

    def rematch(
        self, handle: PrefixHandle, tokens: PackedTokens, *, now: int, priority: int = 0, until_s: float = 0.0
    ) -> None:
        """Lengthen a handle by what was cached after it was made; costs as much as the tokens gained.

        Args:
            handle: covers a prefix of `tokens`.
            tokens, now, priority, until_s: as for `match`.
        """
        found = self._find(tokens, handle.node, handle.length)
        self._settle(handle, found, now=now, claims=self._eviction.claims_of(priority, until_s))

    def lengthen(self, handle: PrefixHandle, tokens: PackedTokens, *, limit: int, now: int) -> None:
        """Lengthen a handle over the pages that are cached, whether or not there is a restore point.

        Args:
            handle: covers a prefix of `tokens`.
            tokens: at least `limit`.
            limit: in tokens, a multiple of the page size.
            now: as for `match`.
        """
        assert limit % self.page_size == 0, f"{limit} tokens are not whole pages of {self.page_size}"
        assert len(tokens) >= limit * _TOKEN_BYTES, f"{limit} tokens wanted of {len(tokens) // _TOKEN_BYTES}"
        start = handle.length * _TOKEN_BYTES
        node, end = self._trie.walk(handle.node, tokens, start, limit * _TOKEN_BYTES)
        handle.length = end // _TOKEN_BYTES
        handle.known_length = max(handle.known_length, handle.length)
        handle.move(node, now=now, claims=handle.claims)

    # --- keep ---------------------------------------------------------------------------------------------------------

    def extend(
        self,
        handle: PrefixHandle,
        tokens: PackedTokens,
        pages: PageIds,
        *,
        now: int,
        priority: int = 0,
        until_s: float = 0.0,
    ) -> npt.NDArray[np.bool_]:
        """Adopt pages that the request has computed, and lengthen its handle over them.

        Args:
            handle: covers the tokens before those pages.
            tokens: all tokens of the request from its first on; those after the new pages are ignored.
            pages: one per whole page after handle.length.
            now, priority, until_s: as for `match`. A run grows in place only while they are given alike.
        Returns:
            Per page, whether the tree owns it now. Where it does not, the tree had that page already, the handle now
            covers the tree's, and the given one is the caller's to free.
        """
        start = handle.length * _TOKEN_BYTES
        limit = start + len(pages) * self._page_bytes
        assert len(tokens) >= limit, f"{len(pages)} pages after {handle.length} tokens, but {len(tokens) // 4} tokens"
        node, end = self._trie.walk(handle.node, tokens, start, limit)
        claims = self._eviction.claims_of(priority, until_s)
        if node is not handle.node or end == limit:
            handle.move(node, now=now, claims=claims)
        num_known = (end - start) // self._page_bytes
        if end < limit:
            self._append(handle, memoryview(tokens)[end:limit], pages[num_known:], now=now, claims=claims)
        handle.length = limit // _TOKEN_BYTES
        is_adopted = np.empty(len(pages), np.bool_)
        is_adopted.fill(True)
        if num_known:
            is_adopted[:num_known] = False
        return is_adopted

    def keep(self, handle: PrefixHandle, parts: Parts) -> bool:
        """Make the end of a handle a restore point, with the priority that the handle was last used with.

        Args:
            handle: not empty.
            parts: one entry per point space; the tree's from now on if it takes them.
        Returns:
            Whether it took them; not if there is a restore point already.
        """
        node = handle.node
        assert set(parts) == set(self._spaces), f"a restore point has parts of {self._spaces}, got {set(parts)}"
        assert node.parent is not None, "there is nothing to restore before the first page"
        if node.has_point:
            self._touch_point(node, handle.claims, is_counted=False)
            return False
        self._num_touches += 1
        node.point = RestorePoint(node, parts, last_used=self._num_touches, claims=handle.claims)
        self._points.push(node.point)
        return True

    # --- give up ------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Set the clock that priorities expire by, in seconds; only eviction by priority looks at it."""
        self._leaves.tick(now_s)
        self._points.tick(now_s)

    def evict(self, num_pages: int) -> PageIds:
        """Give up pages that no handle protects, those that go first by the policy.

        Args:
            num_pages: how many; a run is trimmed rather than dropped beyond that.
        Returns:
            Pages that are the caller's now, in the order in which they were given up: `num_pages`, or all evictable.
        """
        return self._give_up(num_pages, is_evicted=True)

    def evict_point(self, space: str) -> bool:
        """Give up the restore point that goes first, because `space` needs room; False if there is none."""
        point = self._points.first()
        if point is None:
            return False
        if self._on_leave is not None:
            self._on_leave(self._leaving(point.node, 0))
        self._drop_point(point, lost=space)
        if point.node.entry:  # it comes before the pages of restore points now
            self._leaves.void(point.node)
            self._leaves.push(point.node)
        return True

    def clear(self) -> PageIds:
        """Give up every page that no handle protects, and return them; what was evicted is forgotten."""
        pages = self._give_up(self.num_evictable, is_evicted=False)
        self._trie.forget_ghosts()
        return pages

    def discard(self, tokens: PackedTokens, *, root: bytes = b"", first_page: int = 0) -> PageIds:
        """Give up the pages of one prefix from one of its pages on, and all below, except for what handles protect.

        Args:
            tokens: whole pages of them, at least up to the end of that page.
            root: as for `match`.
            first_page: number of the page in the prefix.
        Returns:
            Pages that are the caller's now; none if that page is not cached.
        """
        start = first_page * self._page_bytes
        if root not in self._trie.roots or len(tokens) < start + self._page_bytes:
            return _NO_PAGES
        node, end = self._trie.walk(self._trie.roots[root], tokens, 0, start)
        first = node.children.get(bytes(tokens[start : start + self._page_bytes])) if end == start else None
        pages = [_NO_PAGES]
        for below in reversed(list(first.walk_down())) if first is not None else ():
            if below.is_free_leaf:  # what is below it came before it
                pages.append(below.pages)
                self._drop(below, below.num_pages)
        return np.concatenate(pages)

    # --- visit --------------------------------------------------------------------------------------------------------

    def ends(self) -> list[Node]:
        """Where all prefixes that can be continued end; no end is above another unless both are restore points."""
        return [node for node in self._trie.nodes() if (node.has_point if self._spaces else not node.children)]

    def lock(self, node: Node) -> PrefixHandle | None:
        """A handle of what ends at one of the `ends`, or None if that was given up; does not count as a use."""
        if node.parent is None or (self._spaces and not node.has_point):
            return None
        above, num_pages = node, 0
        while above.parent is not None:
            num_pages += above.num_pages
            above = above.parent
        assert isinstance(above, Root), "the way up ends at a root"
        handle = PrefixHandle(node, root=above.seed, locks=self._locks, page_size=self.page_size)
        handle.length = handle.known_length = num_pages * self.page_size
        handle.claims = node.claims
        return handle

    def tokens(self, handle: PrefixHandle) -> bytes:
        """Packed tokens that a handle covers."""
        keys, above = [], handle.node
        while above.parent is not None:
            keys.append(above.key)
            above = above.parent
        return b"".join(keys[::-1])

    # --- looks at it --------------------------------------------------------------------------------------------------

    def cached_pages(self) -> PageIds:
        """All pages that the tree owns, in no particular order. Walks the tree: for checks."""
        return np.concatenate([_NO_PAGES, *(node.pages for node in self._trie.nodes())])

    def point_parts(self) -> list[Parts]:
        """Parts of all restore points: for checks."""
        return [node.point.parts for node in self._trie.nodes() if node.point is not None and node.has_point]

    def check(self) -> None:
        """Assert every invariant of the tree. Walks all of it: for tests and idle times."""
        self._trie.check()
        nodes = list(self._trie.nodes())
        locked = sum(node.num_pages for node in nodes if node.is_protected)
        assert self.num_locked == locked, f"{self.num_locked} locked pages counted, there are {locked}"
        self._leaves.check({node for node in nodes if node.entry})
        self._points.check({node.point for node in nodes if node.point is not None and node.has_point})

    # --- how ----------------------------------------------------------------------------------------------------------

    def _find(self, tokens: PackedTokens, above: Node, length: int) -> tuple[Node, int, int, str, bool]:
        """The longest match below `above`, which ends after `length` tokens.

        Returns:
            The node where it ends, and what `PrefixHandle` calls length, known_length, cut_by and was_evicted.
        """
        assert tokens and len(tokens) % _TOKEN_BYTES == 0, f"{len(tokens)} bytes are not one or more packed tokens"
        limit = (len(tokens) - _TOKEN_BYTES) // self._page_bytes * self._page_bytes
        node, end = self._trie.walk(above, tokens, length * _TOKEN_BYTES, limit)
        known_length, was_evicted = end // _TOKEN_BYTES, False
        if node.has_ghosts:
            was_evicted = self._trie.was_evicted(node, bytes(tokens[end : end + self._page_bytes]))
        cut_by = ""
        if self._spaces:
            node, end, cut_by = self._last_point(node, end, above=above)
        return node, end // _TOKEN_BYTES, known_length, cut_by, was_evicted

    def _settle(
        self, handle: PrefixHandle, found: tuple[Node, int, int, str, bool], *, now: int, claims: Claims
    ) -> None:
        """Move a handle to what was found for it, and count that as used."""
        is_counted = self._eviction is Eviction.LFU and found[1] > handle.length
        node, handle.length, handle.known_length, handle.cut_by, handle.was_evicted = found
        handle.move(node, now=now, claims=claims)
        node.num_uses += is_counted
        self._touch_point(node, claims, is_counted=is_counted)

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

    def _touch_point(self, node: Node, claims: Claims, *, is_counted: bool) -> None:
        if node.point is not None and node.has_point:
            self._num_touches += 1
            node.point.use(self._num_touches, claims)
            node.point.num_uses += is_counted

    def _append(self, handle: PrefixHandle, tokens: memoryview, pages: PageIds, *, now: int, claims: Claims) -> None:
        """Put new pages after the handle's node, which no cached prefix continues with their first page."""
        node = handle.node
        # Pages become part of the node where they were used alike, so that a long output stays one node. That would
        # move the end of other handles, of a restore point, and of a root.
        is_own = node.locks == 1 and not node.children and node.point is None and node.parent is not None
        grows = is_own and node.num_uses == 0 and node.claims == claims
        num_before = node.num_pages
        last = self._trie.append(node, tokens, pages, grows=grows, now=now, claims=claims)
        self._locks.num_pages += node.num_pages - num_before
        handle.move(last, now=now, claims=claims)

    def _give_up(self, num_pages: int, *, is_evicted: bool) -> PageIds:
        evicted = [_NO_PAGES]
        missing = num_pages
        while missing > 0 and (node := self._leaves.first()) is not None:
            if not node.is_free_leaf:
                self._leaves.void(node)
                continue
            count = min(missing, node.num_pages)
            missing -= count
            evicted.append(node.pages[: -count - 1 : -1])
            if is_evicted and self._on_leave is not None:
                self._on_leave(self._leaving(node, count))
            if is_evicted and count == node.num_pages:
                self._trie.evicted(node)
            self._drop(node, count)
        return np.concatenate(evicted)

    def _leaving(self, node: Node, num_pages: int) -> Leaving:
        """What `on_leave` is told of the last pages of a node, or of its restore point only."""
        keys, pages, above = [node.key], [node.pages], node
        while above.parent is not None:
            above = above.parent
            keys.append(above.key)
            pages.append(above.pages)
        assert isinstance(above, Root), "the way up ends at a root"
        path, parts = np.concatenate(pages[::-1]), node.point.parts if node.point is not None else {}
        return Leaving(above.seed, b"".join(keys[::-1]), path, len(path) - num_pages, parts, len(path) * self.page_size)

    def _drop(self, node: Node, count: int) -> None:
        """Forget the last `count` pages of a free leaf, and the leaf when none is left."""
        had_point, num_pages = node.has_point, node.num_pages
        if node.point is not None and had_point:
            self._drop_point(node.point, lost="")
        node.point = None
        if count == num_pages or had_point:  # it is worth less without the point
            self._leaves.void(node)
        if count < num_pages:
            self._trie.trim(node, count)
            self._freed(node)
            return
        parent = self._trie.take_off(node)
        # Only the deepest node of a prefix is marked as used; it hands that up when it goes.
        parent.use(node.last_used, node.claims)
        parent.num_uses += node.num_uses
        self._freed(parent)

    def _drop_point(self, point: RestorePoint, *, lost: str) -> None:
        self._points.void(point)
        self._on_drop(point.parts)
        point.parts, point.lost = {}, lost

    def _freed(self, node: Node) -> None:
        """Something that kept a node from being evicted is gone."""
        if node.is_free_leaf:
            self._leaves.push(node)
        elif isinstance(node, Root) and not (node.children or node.is_protected):
            del self._trie.roots[node.seed]  # clients choose salts: there may be any number of them

    def _worth_with_points(self, node: Node, now_s: float) -> Value:
        """What a free leaf is worth: nothing if no prefix can be continued behind it."""
        return self._worth(node, now_s) if node.has_point else _USELESS
