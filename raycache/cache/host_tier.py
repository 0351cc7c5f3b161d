"""The host tier: a second tree of prefixes, over pages of host memory, and the catalog that outlives its decider.

    page    free | reserved for what is on its way | in the tree and in the catalog

What comes from the device (transfers.py) or from a storage (prefetches.py) enters the tree when it is whole, so nobody
is given what is not, and after a crash the catalog names only what was acknowledged. Pages enter parents first, so what
is in the tree has no holes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from raycache.cache.catalog import Catalog, Holds
from raycache.cache.evict import Eviction
from raycache.cache.node import Parts, RestorePoint
from raycache.cache.spaces import SpaceSizes
from raycache.cache.tier import Tier
from raycache.cache.tree import NOTHING, PrefixHandle
from raycache.memory.component import FULL, window_pages
from raycache.memory.pages import PageIds
from raycache.types import PackedTokens


class WritePolicy(StrEnum):
    """When the device's pages are copied to the host."""

    THROUGH = "write_through"  # once they are computed
    SELECTIVE = "write_through_selective"  # when a second request uses them
    BACK = "write_back"  # when they are evicted


@dataclass(frozen=True, slots=True)
class Entered:
    """What has just come into the tree: what a storage may want to have.

    Attributes:
        pages: of the sequence.
        point: the restore point behind them, if that is new.
        handle: at the end of it; a lock for whoever takes it.
    """

    pages: PageIds
    point: RestorePoint | None
    handle: PrefixHandle


class NoHost:
    """There is no host tier."""

    is_present = False

    def clear(self) -> None:
        """Nothing to forget."""

    def tick(self, now_s: float) -> None:
        """Nothing that a priority could be of."""

    def counts(self) -> dict[str, float]:
        """No figures."""
        return {}

    def check(self) -> None:
        """Nothing to assert."""


class HostTier:
    """Decides what the host holds.

    Args:
        sizes: of the pools.
        catalog: the record of it, which outlives the decider.
        policy: when pages of the device are saved.
        eviction: what goes first.
        unit_bytes: component space -> bytes of a unit, over all ranks.
    Attributes:
        tier: pages, units and prefixes.
        policy, unit_bytes: as given.
        num_last: pages at the end of a prefix whose digests a restore point needs, at least one.
        num_discarded: prefixes that turned out to be bad.
        on_enter: told what was saved, once it is in the tree.
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
    ) -> None:
        self.policy = policy
        self.unit_bytes = unit_bytes or {}
        self.on_enter: Callable[[Entered], None] = lambda entered: None
        self.page_size = sizes.page_size
        self.tier = Tier(sizes, eviction=eviction, on_evict=catalog.drop_pages, on_drop=self._drop_record)
        self.num_last = max([1, *(window_pages(window, self.page_size) for window in self.tier.windows.values())])
        self._catalog = catalog
        self._reserved: set[int] = set()
        self.num_discarded = 0

    # --- what comes ---------------------------------------------------------------------------------------------------

    def reserve(self, num_pages: int) -> PageIds | None:
        """Pages to be filled; None if too few can be made free."""
        if num_pages > self.tier.num_obtainable:
            return None
        self.tier.make_free(FULL, num_pages)
        pages = self.tier.pages.allocate(num_pages)
        self._reserved.update(pages.tolist())
        return pages

    def give_back(self, pages: PageIds, point: RestorePoint | None = None) -> None:
        """Free what was reserved and did not enter."""
        self._reserved.difference_update(pages.tolist())
        self.tier.pages.free(pages)
        if point is not None:
            self.tier.let_go(point)

    def enter(
        self, handle: PrefixHandle, tokens: PackedTokens, pages: PageIds, digests: Sequence[bytes], *, now: int
    ) -> PageIds:
        """Put filled pages into the tree behind a handle, which is lengthened over them.

        Returns:
            Those that the tree took; the others are free again.
        """
        first = handle.length // self.page_size
        adopted = self.tier.tree.extend(handle, tokens, pages, now=now)
        self._reserved.difference_update(pages.tolist())
        self.tier.pages.free(pages[~adopted])
        entered = pages[adopted]
        if len(entered):
            start = first + len(pages) - len(entered)
            before = int(handle.pages_from(start - 1)[0]) if start else -1
            size = 4 * self.page_size
            self._catalog.add_pages(
                entered,
                digests=list(digests[len(pages) - len(entered) :]),
                tokens=bytes(tokens[start * size : (first + len(pages)) * size]),
                parent=before,
                seed=handle.root,
            )
        return entered

    def keep(self, handle: PrefixHandle, point: RestorePoint) -> bool:
        """Put a filled restore point at the end of a handle; the units of one that is not wanted are free again."""
        if not self.tier.keep(handle, point):
            self.tier.let_go(point)
            return False
        self._catalog.add_point(int(handle.node.pages[-1]), point.parts)
        return True

    def can_take(self, num_pages: int, parts: Parts) -> bool:
        """Whether a prefix would fit now; if not, it may once what is on its way has come."""
        if num_pages > self.tier.num_obtainable:
            return False
        is_free = all(self.tier.units[space].num_free >= len(ids) for space, ids in parts.items())
        return is_free or 2 * len(self.tier.held) < self.tier.tree.num_points

    # --- what is there ------------------------------------------------------------------------------------------------

    def digests(self, handle: PrefixHandle) -> list[bytes]:
        """Chain digests of the pages that a handle covers."""
        return self._catalog.digests(handle.pages)

    def last_digests(self, handle: PrefixHandle) -> list[bytes]:
        """Chain digests of the last pages that a handle covers, `num_last` or all."""
        return self._catalog.digests(handle.pages_from(max(0, handle.length // self.page_size - self.num_last)))

    def prefixes(self) -> Iterator[PrefixHandle]:
        """Handles of all that it holds; the caller releases each before it asks for the next."""
        tree = self.tier.tree
        return (handle for node in tree.ends() if (handle := tree.lock(node)) is not None)

    def discard(self, tokens: PackedTokens, *, root: bytes, first_page: int) -> None:
        """Forget what turned out to be bad, and all that continues it."""
        self.num_discarded += 1
        pages = self.tier.tree.discard(tokens, root=root, first_page=first_page)
        self._catalog.drop_pages(pages)
        self.tier.pages.free(pages)

    def clear(self) -> None:
        """Forget everything that nobody uses."""
        self._catalog.drop_pages(self.tier.clear())

    def recover(self, holds: Holds = lambda space, units, tags: [True] * len(units)) -> int:
        """Build the tree from the catalog that an earlier decider left.

        Args:
            holds: looks at the slots themselves.
        Returns:
            Pages found.
        """
        branches, pages, tree = self._catalog.recover(holds), self.tier.pages, self.tier.tree
        found = np.unique(np.concatenate([np.empty(0, np.int32), *(branch.pages for branch in branches)]))
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
        """Set the clock that priorities expire by, in seconds."""
        self.tier.tree.tick(now_s)

    def counts(self) -> dict[str, float]:
        """Balances, for people and metrics."""
        return {
            "pages_total": self.tier.pages.num_pages,
            "pages_free": self.tier.pages.num_free,
            "pages_cached": self.tier.tree.num_cached,
            "pages_moving": len(self._reserved),
            "restore_points": self.tier.tree.num_points,
        }

    def check(self) -> None:
        """Assert that every page is free, reserved or cached, and every unit held by who knows of it."""
        self.tier.check(taken=np.asarray(sorted(self._reserved), np.int32), units={})

    def _drop_record(self, point: RestorePoint) -> None:
        assert point.node is not None, "it stands in the tree"
        self._catalog.drop_point(int(point.node.pages[-1]))
