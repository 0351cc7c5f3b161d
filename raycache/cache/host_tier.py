"""The host tier: a second prefix tree over pages of host memory, and a catalog that outlives the decider.

    page    free | reserved for an incoming transfer | in the tree and in the catalog

Pages from the device (transfers.py) or from storage (prefetches.py) enter the tree once they are complete, so no
incomplete page is ever used, and after a crash the catalog lists only acknowledged pages. Parents enter first, so
prefixes in the tree have no holes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

import numpy as np

from raycache.cache.catalog import Catalog, Holds
from raycache.cache.evict import Eviction
from raycache.cache.keys import DIGEST_BYTES, PackedDigests
from raycache.cache.listener import TreeListener
from raycache.cache.node import Parts, RestorePoint
from raycache.cache.spaces import SpaceSizes
from raycache.cache.tier import Tier
from raycache.cache.tree import NOTHING, PrefixHandle
from raycache.memory.component import window_pages
from raycache.memory.pages import PageIds
from raycache.types import PackedTokens


class WritePolicy(StrEnum):
    """When the device's pages are copied to the host."""

    THROUGH = "write_through"  # once they are computed
    SELECTIVE = "write_through_selective"  # when a second request uses them
    BACK = "write_back"  # when they are evicted


OnEnter = Callable[[PrefixHandle, PageIds, RestorePoint | None], None]
"""Called with pages that have entered the tree and the restore point after them, if new, and a handle at their end,
which the receiver clones to keep it locked."""


class NoHost:
    """Stands in where there is no host tier."""

    is_present = False

    def clear(self) -> None:
        """Do nothing."""

    def tick(self, now_s: float) -> None:
        """Do nothing."""

    def counts(self) -> dict[str, float]:
        """Return no counters."""
        return {}

    def check(self) -> None:
        """Do nothing."""


class HostTier:
    """Decides what the host tier holds.

    Args:
        sizes: pages and slots of the pools.
        catalog: shared-memory record that outlives the decider.
        policy: when device pages are saved.
        eviction: eviction policy.
        unit_bytes: component space -> bytes of a unit, over all ranks.
        listener: told of every change of the tree.
    Attributes:
        tier: its pages, units and prefix tree.
        num_last: digests of last pages that a restore point needs, at least one.
        num_discarded: prefixes dropped because their data was damaged.
        on_enter: called for the storage to persist what has entered the tree.
    """

    is_present = True

    def __init__(
        self,
        sizes: SpaceSizes,
        *,
        catalog: Catalog,
        policy: WritePolicy = WritePolicy.THROUGH,
        eviction: Eviction,
        unit_bytes: Mapping[str, int] | None = None,
        listener: TreeListener | None = None,
    ) -> None:
        self.policy = policy
        self.unit_bytes = unit_bytes or {}
        self.on_enter: OnEnter = lambda handle, pages, point: None
        self.page_size = sizes.page_size
        self.tier = Tier(
            sizes, eviction=eviction, on_evict=catalog.drop_pages, on_drop=self._drop_record, listener=listener
        )
        self.num_last = max([1, *(window_pages(window, self.page_size) for window in self.tier.windows.values())])
        self._catalog = catalog
        self._num_reserved = self.num_discarded = 0

    # --- what comes ---------------------------------------------------------------------------------------------------

    def reserve(self, num_pages: int) -> PageIds | None:
        """Reserve pages to be filled; None if too few can be freed."""
        pages = self.tier.take_pages(num_pages)
        if pages is not None:
            self._num_reserved += num_pages
        return pages

    def give_back(self, pages: PageIds, point: RestorePoint | None = None) -> None:
        """Free reserved pages and units that did not enter the tree."""
        self._num_reserved -= len(pages)
        self.tier.pages.free(pages)
        if point is not None:
            self.tier.let_go(point)

    def enter(
        self, handle: PrefixHandle, tokens: PackedTokens, pages: PageIds, digests: PackedDigests, *, now: int
    ) -> PageIds:
        """Put filled pages into the tree after a handle, which is lengthened over them.

        Returns:
            Pages that the tree took; the others are freed.
        """
        first, size = handle.length // self.page_size, 4 * self.page_size
        stop, parent = first + len(pages), int(handle.node.pages[-1]) if first else -1
        num_known = self.tier.tree.extend(handle, tokens, pages, now=now)
        self._num_reserved -= len(pages)
        entered = pages
        if num_known:
            self.tier.pages.free(pages[:num_known])
            entered, digests = pages[num_known:], digests[num_known * DIGEST_BYTES :]
            first += num_known
            parent = handle.page(first - 1)
        if len(entered):
            new = memoryview(tokens)[first * size : stop * size]
            self._catalog.add_pages(entered, digests=digests, tokens=new, parent=parent, seed=handle.root)
        return entered

    def keep(self, handle: PrefixHandle, point: RestorePoint) -> bool:
        """Put a filled restore point at the end of a handle; its units are freed if the tree does not take it."""
        if not self.tier.keep(handle, point):
            self.tier.let_go(point)
            return False
        self._catalog.add_point(int(handle.node.pages[-1]), point.parts)
        return True

    def can_take(self, num_pages: int, parts: Parts) -> bool:
        """Whether a prefix fits now; if not, it may fit once transfers in progress are done."""
        if num_pages > self.tier.num_obtainable:
            return False
        is_free = all(self.tier.units[space].num_free >= len(ids) for space, ids in parts.items())
        return is_free or 2 * len(self.tier.held) < self.tier.tree.num_points

    # --- what is there ------------------------------------------------------------------------------------------------

    def digests(self, pages: PageIds) -> PackedDigests:
        """Chain digests of pages in the tree."""
        return self._catalog.digests(pages)

    def last_digests(self, handle: PrefixHandle) -> PackedDigests:
        """Chain digests of a handle's last `num_last` pages, or of all if fewer."""
        return self._catalog.digests(handle.pages_from(max(0, handle.length // self.page_size - self.num_last)))

    def prefixes(self) -> Iterator[PrefixHandle]:
        """Iterate over handles of all prefixes; release each before the next."""
        tree = self.tier.tree
        return (handle for node in tree.ends() if (handle := tree.lock(node)) is not None)

    def discard(self, tokens: PackedTokens, *, root: bytes, first_page: int) -> None:
        """Drop a damaged page and everything that continues it."""
        self.num_discarded += 1
        pages = self.tier.tree.discard(tokens, root=root, first_page=first_page)
        self._catalog.drop_pages(pages)
        self.tier.pages.free(pages)

    def clear(self) -> None:
        """Drop everything that is not in use."""
        self._catalog.drop_pages(self.tier.clear())

    def recover(self, holds: Holds = lambda space, units, tags: [True] * len(units)) -> int:
        """Rebuild the tree from an earlier decider's catalog.

        Args:
            holds: check of the slots' headers.
        Returns:
            Number of pages recovered.
        """
        branches, pages, tree = self._catalog.recover(holds), self.tier.pages, self.tier.tree
        found = np.unique(np.concatenate([np.empty(0, np.intp), *(branch.pages for branch in branches)]))
        pages.free(np.setdiff1d(pages.allocate(pages.num_free), found))
        for branch in branches:
            handle = tree.match(NOTHING, now=0, root=branch.seed)
            points = dict(branch.points)
            for stop in sorted({*points, len(branch.pages)}):
                tree.extend(handle, branch.tokens, branch.pages[handle.length // self.page_size : stop], now=0)
                if stop in points and not handle.node.has_point:
                    point = RestorePoint(handle.length, points[stop])
                    for space, ids in point.parts.items():
                        self.tier.units[space].take(ids)
                    tree.keep(handle, point)
            handle.release()
        return tree.num_cached

    def tick(self, now_s: float) -> None:
        """Set the clock on which priorities expire, in seconds."""
        self.tier.tree.tick(now_s)

    def counts(self) -> dict[str, float]:
        """Current counters, for status output and metrics."""
        total, free, cached = self.tier.pages.num_pages, self.tier.pages.num_free, self.tier.tree.num_cached
        return {
            "pages_total": total,
            "pages_free": free,
            "pages_cached": cached,
            "pages_moving": total - free - cached,
            "restore_points": self.tier.tree.num_points,
        }

    def check(self) -> None:
        """Assert that every page is free, reserved or cached, and that unit reference counts match."""
        reserved = np.setdiff1d(self.tier.pages.taken, self.tier.tree.trie.pages())
        assert len(reserved) == self._num_reserved, f"{self._num_reserved} reserved pages counted, not {len(reserved)}"
        self.tier.check(taken=reserved, units={})

    def _drop_record(self, point: RestorePoint) -> None:
        assert point.node is not None, "the restore point is not in the tree"
        self._catalog.drop_point(int(point.node.pages[-1]))
