"""Pages, units and prefix tree of one tier; shared by device and host.

    page    free | taken by a sequence or transfer | in the tree
    unit    free | reference counted: by running sequences, restore points in the tree, other restore points

A unit is a window page or a state slot. A new restore point is held by its creator and may then move into the tree.
A transfer of a restore point in the tree holds it meanwhile, so that eviction does not free its units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from raycache.cache.evict import Eviction, Leaving
from raycache.cache.handle import PrefixHandle
from raycache.cache.listener import TreeListener
from raycache.cache.node import RestorePoint
from raycache.cache.spaces import SpaceSizes
from raycache.cache.tree import RadixTree
from raycache.memory.component import FULL, first_window_page
from raycache.memory.pages import PageAllocator, PageIds, SharedAllocator


class Tier:
    """Decides what one tier keeps.

    Args:
        sizes: pages and slots of the pools.
        eviction: eviction policy.
        on_evict: called with page ids evicted for others, before they are free.
        on_drop: called with each restore point that the tree drops, before its units are free.
        on_leave: called just before an eviction (see `RadixTree`).
        listener: told of every change of the tree.
    Attributes:
        page_size: tokens per page.
        windows: space -> window, in tokens.
        state_space: name of the space of recurrent states, "" if there is none.
        has_points: whether prefixes can be resumed only from restore points.
        pages: allocator of the "full" space.
        units: space -> allocator of window pages or state slots.
        tree: cached prefixes.
        held: restore points held outside of the tree, once per holder.
        num_evicted: pages evicted for others.
        num_points_evicted: restore points evicted for others.
    """

    def __init__(
        self,
        sizes: SpaceSizes,
        *,
        eviction: Eviction,
        on_evict: Callable[[PageIds], None] = lambda pages: None,
        on_drop: Callable[[RestorePoint], None] = lambda point: None,
        on_leave: Callable[[Leaving], None] | None = None,
        listener: TreeListener | None = None,
    ) -> None:
        self.page_size = sizes.page_size
        self.windows = {space: window for space, (window, _) in sizes.windows.items()}
        self.state_space = next(iter(sizes.states), "")
        self.pages = PageAllocator(sizes.num_pages)
        self.units = {space: SharedAllocator(count) for space, (_, count) in sizes.windows.items()}
        self.units |= {space: SharedAllocator(count) for space, count in sizes.states.items()}
        self.has_points = bool(self.units)
        self.held: list[RestorePoint] = []
        self.num_evicted = self.num_points_evicted = 0
        self._on_evict, self._on_drop = on_evict, on_drop
        self.tree = RadixTree(
            sizes.page_size,
            point_spaces=tuple(self.units),
            eviction=eviction,
            on_drop=self._dropped,
            on_leave=on_leave,
            listener=listener,
        )

    @property
    def num_obtainable(self) -> int:
        """Pages that are free or evictable."""
        return self.pages.num_free + self.tree.num_evictable

    def first_page(self, space: str, position: int) -> int:
        """Index of the first page of a window space that resuming at a position needs."""
        return first_window_page(position, window=self.windows[space], page_size=self.page_size)

    def part_counts(self, position: int) -> dict[str, int]:
        """Units of each space that a restore point at a position has."""
        stop = position // self.page_size
        return {space: stop - self.first_page(space, position) if space in self.windows else 1 for space in self.units}

    def evict_pages(self, count: int) -> PageIds:
        """Evict pages for others, `count` or all evictable ones; the caller owns them."""
        evicted = self.tree.evict(count)
        self.num_evicted += len(evicted)
        self._on_evict(evicted)
        return evicted

    def take_pages(self, count: int) -> PageIds | None:
        """Take pages, evicted ones if too few are free; None if that is impossible."""
        num_free = self.pages.num_free
        if count <= num_free:
            return self.pages.allocate(count)
        if count > num_free + self.tree.num_evictable:
            return None
        evicted = self.evict_pages(count - num_free)
        return np.concatenate((evicted, self.pages.allocate(num_free))) if num_free else evicted

    def make_free(self, space: str, count: int) -> bool:
        """Evict until `count` units are free; False if that is impossible."""
        units = self.units[space]
        while units.num_free < count and self.tree.evict_point(space):
            self.num_points_evicted += 1
        return units.num_free >= count

    def new_point(self, position: int, counts: Mapping[str, int]) -> RestorePoint | None:
        """Make a restore point of exclusive units, held by the caller; None if there are too few."""
        if not all(self.make_free(space, count) for space, count in counts.items()):
            return None
        point = RestorePoint(position, {s: tuple(self.units[s].allocate(n)) for s, n in counts.items()})
        self.held.append(point)
        return point

    def hold(self, point: RestorePoint) -> RestorePoint:
        """Keep the units of a restore point until `let_go`, even if the tree drops it."""
        for space, ids in point.parts.items():
            self.units[space].share(ids)
        self.held.append(point)
        return point

    def let_go(self, point: RestorePoint) -> None:
        """Undo `hold` or `new_point`."""
        self.held.remove(point)
        for space, ids in point.parts.items():
            self.units[space].release(ids)

    def keep(self, handle: PrefixHandle, point: RestorePoint) -> bool:
        """Put a restore point at the end of a handle; the caller no longer holds it if the tree takes it."""
        if not self.tree.keep(handle, point):
            return False
        self.held.remove(point)
        return True

    def clear(self) -> PageIds:
        """Drop all unused prefixes; returns the freed pages."""
        pages = self.tree.clear()
        self.pages.free(pages)
        return pages

    def components(self) -> dict[str, tuple[int, int]]:
        """Component space -> (total, free) pages or units."""
        units = {space: (units.num_ids, units.num_free) for space, units in self.units.items()}
        return {FULL: (self.pages.num_pages, self.pages.num_free), **units}

    def check(self, *, taken: PageIds, units: Mapping[str, Iterable[int]]) -> None:
        """Assert that pages and units balance, with matching reference counts.

        Args:
            taken: pages that are neither free nor in the tree.
            units: space -> units held besides restore points, once per holder.
        """
        self.tree.check()
        self.pages.check(in_use=taken, cached=self.tree.trie.pages())
        points = [node.point for node in self.tree.trie.nodes() if node.point is not None and node.has_point]
        for space, allocator in self.units.items():
            parts = [i for point in points + self.held for i in point.parts.get(space, ())]
            allocator.check([*parts, *units.get(space, ())])

    def _dropped(self, point: RestorePoint) -> None:
        self._on_drop(point)
        for space, ids in point.parts.items():
            self.units[space].release(ids)
