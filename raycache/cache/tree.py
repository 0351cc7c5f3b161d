"""Radix tree over token prefixes.

Maps a prefix to the pages that hold its state. Decides what to reuse and what to evict; moves no data. Not thread safe:
the scheduler owns it.

    root - [The][ cat] - [ sat]         one node = a run of whole pages; a match never ends inside a page
                       ` [ ran][ off]

Prefixes with different roots (by salt or adapter, for example) share only the eviction order and the counters. Pages
protected by handles (handle.py) stay; the rest is evicted in the order of evict.py, ends of prefixes first, and leaves
a ghost (ghosts.py), which explains later misses.

Models with windows or recurrent states can be resumed only from restore points, which stand at the ends of nodes:

    [The cat ... ]* - [ sat ... ] - [ on ... ]*      a match of all three nodes, or of the first; not of two

A restore point is evicted as a whole; pages after the last one of a prefix are useless and are evicted first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raycache.cache.evict import Eviction, Leaving
from raycache.cache.evictor import NO_PAGES, Evictor
from raycache.cache.handle import Locks, PrefixHandle
from raycache.cache.listener import NoListener, TreeListener
from raycache.cache.node import Claims, Node, RestorePoint, Root
from raycache.cache.trie import Trie
from raycache.memory.pages import PageIds
from raycache.types import PackedTokens

__all__ = ["NOTHING", "PrefixHandle", "RadixTree"]

_TOKEN_BYTES = 4

NOTHING: PackedTokens = b""
"""Tokens that match nothing, for sequences that may not reuse cached pages."""


_Found = tuple[Node, int, int, str, bool]
"""Result of a search: the last node, then length, known_length, cut_by and was_evicted as in `PrefixHandle`."""


class RadixTree:
    """Prefixes in whole pages, locked by handles, evicted in the order of a policy.

    Args:
        page_size: tokens per page.
        point_spaces: component spaces with parts in a restore point; empty if pages suffice to resume.
        eviction: eviction policy.
        on_drop: called with each dropped restore point.
        on_leave: called just before an eviction; must not change the tree.
        listener: told of every change.
    Attributes:
        trie: the runs of pages.
        locks: which of them are protected.
    """

    def __init__(
        self,
        page_size: int,
        *,
        point_spaces: Sequence[str] = (),
        eviction: Eviction = Eviction.LRU,
        on_drop: Callable[[RestorePoint], None] = lambda point: None,
        on_leave: Callable[[Leaving], None] | None = None,
        listener: TreeListener | None = None,
    ) -> None:
        assert page_size >= 1, f"a page cannot have {page_size} tokens"
        self.page_size = page_size
        self._spaces = tuple(point_spaces)
        # Not for every match: `claims_of` reads a member of an enum, which is slow in Python 3.11.
        self._claims = eviction.claims_of if eviction is Eviction.PRIORITY else _no_claims
        self._page_bytes = page_size * _TOKEN_BYTES
        self.trie = Trie(self._page_bytes)
        self._listener = listener or NoListener()
        self._evictor = Evictor(
            self.trie,
            eviction=eviction,
            has_points=bool(self._spaces),
            on_drop=on_drop,
            on_leave=on_leave,
            listener=self._listener,
        )
        self.locks = Locks(self._evictor.freed)

    @property
    def num_cached(self) -> int:
        """Pages that the tree owns."""
        return self.trie.num_pages

    @property
    def num_locked(self) -> int:
        """Cached pages that handles protect."""
        return self.locks.num_pages

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now."""
        return self.trie.num_pages - self.locks.num_pages

    @property
    def num_points(self) -> int:
        """Restore points."""
        return self._evictor.num_points

    # --- find and lock ------------------------------------------------------------------------------------------------

    def match(
        self, tokens: PackedTokens, *, now: int, root: bytes = b"", priority: int = 0, until_s: float = 0.0
    ) -> PrefixHandle:
        """Find and lock the longest resumable cached prefix.

        Args:
            tokens: the whole prompt, or `NOTHING`; the last token is never matched, so that at least one is computed.
            now: step number, the LRU clock (a count, not seconds).
            root: seed of the tree of prefixes to search.
            priority: priority of the prefix, for eviction by priority.
            until_s: expiry of the priority, on the clock of `tick`, after which it counts as 0; 0.0: never.
        Returns:
            Handle of whole pages, possibly none. Release it exactly once.
        """
        node, length, known_length, cut_by, was_evicted = self._find(tokens, self.trie.root(root), 0)
        claims = self._claims(priority, until_s)
        self.locks.add(node)
        handle = PrefixHandle(node, length, root, self.locks, self.page_size, claims)
        handle.known_length, handle.cut_by, handle.was_evicted = known_length, cut_by, was_evicted
        node.use(now, claims)
        self._evictor.count(node, claims, is_longer=length > 0)
        return handle

    def match_lengths(
        self, tokens: PackedTokens, *, now: int, root: bytes = b"", priority: int = 0, until_s: float = 0.0
    ) -> tuple[int, int]:
        """Count a use of the longest resumable cached prefix like `match`, but lock nothing.

        Returns:
            `length` and `known_length` as in `PrefixHandle`.
        """
        above = self.trie.roots.get(root)
        if above is None:
            return 0, 0
        node, end, _ = self.trie.walk(above, tokens, 0, _limit(tokens, self._page_bytes))
        known_length = end // _TOKEN_BYTES
        if self._spaces:
            node, end, _ = node.last_point(end, above=above)
        claims = self._claims(priority, until_s)
        node.use(now, claims)
        self._evictor.count(node, claims, is_longer=end > 0)
        return end // _TOKEN_BYTES, known_length

    def rematch(
        self, handle: PrefixHandle, tokens: PackedTokens, *, now: int, priority: int = 0, until_s: float = 0.0
    ) -> None:
        """Lengthen a handle over pages cached since; costs O(tokens gained).

        Args:
            handle: covers a prefix of `tokens`.
            tokens, now, priority, until_s: as for `match`.
        """
        length, claims = handle.length, self._claims(priority, until_s)
        node, handle.length, handle.known_length, handle.cut_by, handle.was_evicted = self._find(
            tokens, handle.node, length
        )
        handle.move(node, now=now, claims=claims)
        self._evictor.count(node, claims, is_longer=handle.length > length)

    def lengthen(self, handle: PrefixHandle, tokens: PackedTokens, *, limit: int, now: int) -> None:
        """Lengthen a handle over cached pages, regardless of restore points.

        Args:
            handle: covers a prefix of `tokens`.
            tokens: at least `limit`.
            limit: maximum length in tokens, a multiple of the page size.
            now: as for `match`.
        """
        assert limit % self.page_size == 0, f"{limit} tokens are not whole pages of {self.page_size}"
        assert len(tokens) >= limit * _TOKEN_BYTES, f"{limit} tokens requested, got {len(tokens) // _TOKEN_BYTES}"
        start = handle.length * _TOKEN_BYTES
        node, end, _ = self.trie.walk(handle.node, tokens, start, limit * _TOKEN_BYTES)
        handle.length = end // _TOKEN_BYTES
        if handle.length > handle.known_length:
            handle.known_length = handle.length
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
    ) -> int:
        """Adopt computed pages, and lengthen the handle over them.

        Args:
            handle: covers the tokens before those pages.
            tokens: all tokens of the request; those after the new pages are ignored.
            pages: one per whole page after handle.length.
            now, priority, until_s: as for `match`. A node grows in place only while they stay the same.
        Returns:
            How many of the pages it did not adopt, the first ones: the tree already had these, the handle now covers
            the tree's copies, and the caller must free its own.
        """
        start = handle.length * _TOKEN_BYTES
        limit = start + len(pages) * self._page_bytes
        assert len(tokens) >= limit, f"{len(pages)} pages after {handle.length} tokens, but {len(tokens) // 4} tokens"
        node, end, page = self.trie.walk(handle.node, tokens, start, limit)
        claims = self._claims(priority, until_s)
        if node is not handle.node or end == limit:
            handle.move(node, now=now, claims=claims)
        num_known = (end - start) // self._page_bytes
        if end < limit:
            # Extend the node in place if usage is the same, so that a long output stays one node; not where that would
            # move the end of another handle or of a restore point, nor at a root.
            is_own = not node.children and node.locks == 1 and node.point is None and node.parent is not None
            grows = is_own and node.num_uses == 0 and node.claims == claims
            num_before, new = node.num_pages, memoryview(tokens)[end:limit]
            ids = pages[num_known:] if num_known else pages
            last = self.trie.append(node, page, new, ids, grows=grows, now=now, claims=claims)
            self.locks.num_pages += node.num_pages - num_before
            handle.move(last, now=now, claims=claims)
            self._listener.added(last, len(pages) - num_known)
        handle.length = limit // _TOKEN_BYTES
        return num_known

    def keep(self, handle: PrefixHandle, point: RestorePoint) -> bool:
        """Put a restore point at the end of a handle, with the priority that the handle was last used with.

        Args:
            handle: not empty.
            point: one part per point space; owned by the tree if it takes it.
        Returns:
            Whether the tree took it; False if one is already there.
        """
        node, parts = handle.node, point.parts
        assert set(parts) == set(self._spaces), f"a restore point has parts of {self._spaces}, got {set(parts)}"
        assert node.parent is not None, "a root cannot have a restore point"
        if node.has_point:
            self._evictor.touch(node, handle.claims, is_counted=False)
            return False
        self._evictor.add(node, point, handle.claims)
        return True

    # --- give up ------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Set the clock on which priorities expire, in seconds; only eviction by priority uses it."""
        self._evictor.tick(now_s)

    def evict(self, num_pages: int) -> PageIds:
        """Evict unprotected pages, in the order of the policy.

        Args:
            num_pages: how many; the last node is trimmed rather than dropped.
        Returns:
            Freed pages in order of eviction: `num_pages`, or all evictable ones.
        """
        return self._evictor.evict(num_pages)

    def evict_point(self, space: str) -> bool:
        """Evict the first restore point in order, because units of `space` are needed; False if there is none."""
        return self._evictor.evict_point(space)

    def clear(self) -> PageIds:
        """Drop and return all unprotected pages; forgets ghosts."""
        pages = self._evictor.evict(self.num_evictable, is_remembered=False)
        self.trie.forget_ghosts()
        return pages

    def discard(self, tokens: PackedTokens, *, root: bytes = b"", first_page: int = 0) -> PageIds:
        """Drop a prefix from one of its pages on, with all continuations, except for what handles protect.

        Args:
            tokens: whole pages, at least to the end of that page.
            root: as for `match`.
            first_page: index of the page in the prefix.
        Returns:
            Freed pages; none if that page is not cached.
        """
        start = first_page * self._page_bytes
        if root not in self.trie.roots or len(tokens) < start + self._page_bytes:
            return NO_PAGES
        node, end, page = self.trie.walk(self.trie.roots[root], tokens, 0, start)
        first = node.children.get(page) if end == start else None
        return NO_PAGES if first is None else self._evictor.discard(first)

    # --- visit --------------------------------------------------------------------------------------------------------

    def ends(self) -> list[Node]:
        """Ends of all resumable prefixes; one is above another only if both are restore points."""
        return [node for node in self.trie.nodes() if (node.has_point if self._spaces else not node.children)]

    def lock(self, node: Node) -> PrefixHandle | None:
        """Lock the prefix of one of the `ends`; None if it was evicted. Does not count as a use."""
        if node.parent is None or (self._spaces and not node.has_point):
            return None
        root, *runs = node.path()
        assert isinstance(root, Root), "the way up ends at a root"
        length = sum(run.num_pages for run in runs) * self.page_size
        self.locks.add(node)
        return PrefixHandle(node, length, root.seed, self.locks, self.page_size, node.claims)

    def check(self) -> None:
        """Assert every invariant. Walks the whole tree: for tests and idle times."""
        self.trie.check()
        locked = sum(node.num_pages for node in self.trie.nodes() if node.is_protected)
        assert self.num_locked == locked, f"{self.num_locked} locked pages counted, there are {locked}"
        self._evictor.check()

    # --- how ----------------------------------------------------------------------------------------------------------

    def _find(self, tokens: PackedTokens, above: Node, length: int) -> _Found:
        """Find the longest match below `above`, the end of a prefix of `length` tokens."""
        node, end, page = self.trie.walk(above, tokens, length * _TOKEN_BYTES, _limit(tokens, self._page_bytes))
        known_length, cut_by = end // _TOKEN_BYTES, ""
        was_evicted = self.trie.was_evicted(node, page)
        if self._spaces:
            # Blame the space lost nearest to the end of the match; if no restore point was ever kept, all of them.
            node, end, lost = node.last_point(end, above=above)
            cut_by = "" if lost is None else lost or "+".join(self._spaces)
        return node, end // _TOKEN_BYTES, known_length, cut_by, was_evicted


def _no_claims(priority: int, until_s: float) -> Claims:
    """`claims_of` of policies without priorities."""
    return ()


def _limit(tokens: PackedTokens, page_bytes: int) -> int:
    """Bytes of a prompt that can be matched: whole pages, without the last token."""
    assert len(tokens) % _TOKEN_BYTES == 0, f"{len(tokens)} bytes are not packed tokens"
    return (len(tokens) - _TOKEN_BYTES) // page_bytes * page_bytes
