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

from raycache.cache.evict import Eviction, Leaving
from raycache.cache.evictor import NO_PAGES, Evictor
from raycache.cache.handle import Locks, PrefixHandle
from raycache.cache.node import Claims, Node, RestorePoint, Root
from raycache.cache.trie import Trie
from raycache.memory.pages import PageIds
from raycache.types import PackedTokens

__all__ = ["NOTHING", "PrefixHandle", "RadixTree"]

_TOKEN_BYTES = 4

NOTHING: PackedTokens = b""
"""Tokens that match nothing: of sequences that may not reuse what is cached."""


_Found = tuple[Node, int, int, str, bool]
"""Node where a match ends, and what `PrefixHandle` calls length, known_length, cut_by and was_evicted."""


class RadixTree:
    """Prefixes in whole pages, locked through handles, evicted in the order of a policy.

    Args:
        page_size: tokens per page.
        point_spaces: component spaces that a restore point has parts of; none if the sequence's pages are enough.
        eviction: the policy.
        on_drop: takes restore points that are given up.
        on_leave: sees what is evicted just before it is; it may not change the tree.
    Attributes:
        page_size: as given.
        trie: the runs of pages.
    """

    def __init__(
        self,
        page_size: int,
        *,
        point_spaces: Sequence[str] = (),
        eviction: Eviction = Eviction.LRU,
        on_drop: Callable[[RestorePoint], None] = lambda point: None,
        on_leave: Callable[[Leaving], None] | None = None,
    ) -> None:
        assert page_size >= 1, f"a page cannot have {page_size} tokens"
        self.page_size = page_size
        self._spaces = tuple(point_spaces)
        self._eviction = eviction
        self._page_bytes = page_size * _TOKEN_BYTES
        self.trie = Trie(self._page_bytes)
        self._evictor = Evictor(
            self.trie, eviction=eviction, has_points=bool(self._spaces), on_drop=on_drop, on_leave=on_leave
        )
        self._locks = Locks(self._evictor.freed)

    @property
    def num_cached(self) -> int:
        """Pages that the tree owns."""
        return self.trie.num_pages

    @property
    def num_locked(self) -> int:
        """Cached pages that handles protect."""
        return self._locks.num_pages

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now."""
        return self.trie.num_pages - self._locks.num_pages

    @property
    def num_points(self) -> int:
        """Restore points."""
        return self._evictor.num_points

    # --- find and lock ------------------------------------------------------------------------------------------------

    def match(
        self, tokens: PackedTokens, *, now: int, root: bytes = b"", priority: int = 0, until_s: float = 0.0
    ) -> PrefixHandle:
        """Find the longest cached prefix that can be continued, and lock exactly it.

        Args:
            tokens: the whole prompt, or `NOTHING`; the last token is never part of the match, so that there is
                something to compute.
            now: step number, the LRU clock (a count, not seconds).
            root: which prefixes to look among.
            priority: with eviction by priority, what the prefix counts for.
            until_s: how long, on the clock of `tick`; 0.0 for ever. After it, the priority counts as 0.
        Returns:
            Handle with a length of whole pages, perhaps 0. Release it exactly once.
        """
        found = self._find(tokens, self.trie.root(root), 0)
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
        node, end = self.trie.walk(handle.node, tokens, start, limit * _TOKEN_BYTES)
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
        node, end = self.trie.walk(handle.node, tokens, start, limit)
        claims = self._eviction.claims_of(priority, until_s)
        if node is not handle.node or end == limit:
            handle.move(node, now=now, claims=claims)
        num_known = (end - start) // self._page_bytes
        if end < limit:
            node = handle.node
            # Pages become part of the node where they were used alike, so that a long output stays one node. That would
            # move the end of other handles, of a restore point, and of a root.
            is_own = node.locks == 1 and not node.children and node.point is None and node.parent is not None
            grows = is_own and node.num_uses == 0 and node.claims == claims
            num_before, new = node.num_pages, memoryview(tokens)[end:limit]
            last = self.trie.append(node, new, pages[num_known:], grows=grows, now=now, claims=claims)
            self._locks.num_pages += node.num_pages - num_before
            handle.move(last, now=now, claims=claims)
        handle.length = limit // _TOKEN_BYTES
        is_adopted = np.empty(len(pages), np.bool_)
        is_adopted.fill(True)
        if num_known:
            is_adopted[:num_known] = False
        return is_adopted

    def keep(self, handle: PrefixHandle, point: RestorePoint) -> bool:
        """Put a restore point at the end of a handle, with the priority that the handle was last used with.

        Args:
            handle: not empty.
            point: with one part per point space; the tree's from now on if it takes it.
        Returns:
            Whether it took it; not if there is one already.
        """
        node, parts = handle.node, point.parts
        assert set(parts) == set(self._spaces), f"a restore point has parts of {self._spaces}, got {set(parts)}"
        assert node.parent is not None, "there is nothing to restore before the first page"
        if node.has_point:
            self._evictor.touch(node, handle.claims, is_counted=False)
            return False
        self._evictor.add(node, point, handle.claims)
        return True

    # --- give up ------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Set the clock that priorities expire by, in seconds; only eviction by priority looks at it."""
        self._evictor.tick(now_s)

    def evict(self, num_pages: int) -> PageIds:
        """Give up pages that no handle protects, those that go first by the policy.

        Args:
            num_pages: how many; a run is trimmed rather than dropped beyond that.
        Returns:
            Pages that are the caller's now, in the order in which they were given up: `num_pages`, or all evictable.
        """
        return self._evictor.evict(num_pages)

    def evict_point(self, space: str) -> bool:
        """Give up the restore point that goes first, because units of `space` are needed; False if there is none."""
        return self._evictor.evict_point(space)

    def clear(self) -> PageIds:
        """Give up every page that no handle protects, and return them; what was evicted is forgotten."""
        pages = self._evictor.clear(self.num_evictable)
        self.trie.forget_ghosts()
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
        if root not in self.trie.roots or len(tokens) < start + self._page_bytes:
            return NO_PAGES
        node, end = self.trie.walk(self.trie.roots[root], tokens, 0, start)
        first = node.children.get(bytes(tokens[start : start + self._page_bytes])) if end == start else None
        return NO_PAGES if first is None else self._evictor.discard(first)

    # --- visit --------------------------------------------------------------------------------------------------------

    def ends(self) -> list[Node]:
        """Where all prefixes that can be continued end; no end is above another unless both are restore points."""
        return [node for node in self.trie.nodes() if (node.has_point if self._spaces else not node.children)]

    def lock(self, node: Node) -> PrefixHandle | None:
        """A handle of what ends at one of the `ends`, or None if that was given up; does not count as a use."""
        if node.parent is None or (self._spaces and not node.has_point):
            return None
        root, *runs = node.path()
        assert isinstance(root, Root), "the way up ends at a root"
        handle = PrefixHandle(node, root=root.seed, locks=self._locks, page_size=self.page_size)
        handle.length = handle.known_length = sum(run.num_pages for run in runs) * self.page_size
        handle.claims = node.claims
        return handle

    def check(self) -> None:
        """Assert every invariant of the tree. Walks all of it: for tests and idle times."""
        self.trie.check()
        locked = sum(node.num_pages for node in self.trie.nodes() if node.is_protected)
        assert self.num_locked == locked, f"{self.num_locked} locked pages counted, there are {locked}"
        self._evictor.check()

    # --- how ----------------------------------------------------------------------------------------------------------

    def _find(self, tokens: PackedTokens, above: Node, length: int) -> _Found:
        """The longest match below `above`, which ends after `length` tokens."""
        assert len(tokens) % _TOKEN_BYTES == 0, f"{len(tokens)} bytes are not packed tokens"
        limit = (len(tokens) - _TOKEN_BYTES) // self._page_bytes * self._page_bytes
        node, end = self.trie.walk(above, tokens, length * _TOKEN_BYTES, limit)
        known_length, was_evicted = end // _TOKEN_BYTES, False
        if node.has_ghosts:
            was_evicted = self.trie.was_evicted(node, bytes(tokens[end : end + self._page_bytes]))
        cut_by = ""
        if self._spaces:
            # What was lost nearest to the end of the match; where nothing was ever kept, all parts lack alike.
            node, end, lost = node.last_point(end, above=above)
            cut_by = "" if lost is None else lost or "+".join(self._spaces)
        return node, end // _TOKEN_BYTES, known_length, cut_by, was_evicted

    def _settle(self, handle: PrefixHandle, found: _Found, *, now: int, claims: Claims) -> None:
        """Move a handle to what was found for it, and count that as used."""
        is_counted = self._eviction is Eviction.LFU and found[1] > handle.length
        node, handle.length, handle.known_length, handle.cut_by, handle.was_evicted = found
        handle.move(node, now=now, claims=claims)
        node.num_uses += is_counted
        self._evictor.touch(node, claims, is_counted=is_counted)
