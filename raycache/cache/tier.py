"""The pages, units and prefixes of one tier: what the device and the host have in common.

    page    free | taken by somebody | in the tree
    unit    free | held, by any number: running sequences, restore points in the tree, restore points in other hands

A unit is a window page or a state slot. Restore points are made here, are in somebody's hands at first, and may end up
in the tree; whoever moves the units of one that is in the tree holds it meanwhile, so that eviction does not free them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from raycache.cache.evict import Eviction, Leaving
from raycache.cache.handle import PrefixHandle
from raycache.cache.node import RestorePoint
from raycache.cache.spaces import SpaceSizes
from raycache.cache.tree import RadixTree
from raycache.memory.component import FULL, first_window_page
from raycache.memory.pages import PageAllocator, PageIds, SharedAllocator


class Tier:
    """Decides what one tier keeps.

    Args:
        sizes: of the pools.
        eviction: what goes first.
        on_evict: told of pages that are evicted because others are needed, before they are free.
        on_drop: told of restore points that the tree gives up, before their units are free.
        on_leave: as for `RadixTree`.
    Attributes:
        page_size: tokens per page.
        windows: space -> window, in tokens.
        state_space: name of the space of recurrent states, "" if there is none.
        pages: of the sequence.
        units: space -> units of restore points.
        tree: prefixes.
        held: restore points that are in somebody's hands, as often as that.
        num_evicted: pages that went because others were needed.
        num_points_evicted: restore points that did.
    """

    def __init__(
        self,
        sizes: SpaceSizes,
        *,
        eviction: Eviction,
        on_evict: Callable[[PageIds], None] = lambda pages: None,
        on_drop: Callable[[RestorePoint], None] = lambda point: None,
        on_leave: Callable[[Leaving], None] | None = None,
    ) -> None:
        self.page_size = sizes.page_size
        self.windows = {space: window for space, (window, _) in sizes.windows.items()}
        self.state_space = next(iter(sizes.states), "")
        self.pages = PageAllocator(sizes.num_pages)
        self.units = {space: SharedAllocator(count) for space, (_, count) in sizes.windows.items()}
        self.units |= {space: SharedAllocator(count) for space, count in sizes.states.items()}
        self.held: list[RestorePoint] = []
        self.num_evicted = self.num_points_evicted = 0
        self._on_evict, self._on_drop = on_evict, on_drop
        self.tree = RadixTree(
            sizes.page_size,
            point_spaces=tuple(self.units),
            eviction=eviction,
            on_drop=self._dropped,
            on_leave=on_leave,
        )

    @property
    def has_points(self) -> bool:
        """Whether prefixes can be continued only from restore points."""
        return bool(self.units)

    @property
    def num_obtainable(self) -> int:
        """Pages that are free or can be made so."""
        return self.pages.num_free + self.tree.num_evictable

    def first_page(self, space: str, position: int) -> int:
        """The first page of a window space that continuing at a position needs."""
        return first_window_page(position, window=self.windows[space], page_size=self.page_size)

    def part_counts(self, position: int) -> dict[str, int]:
        """Units of each space that a restore point has."""
        stop = position // self.page_size
        return {space: stop - self.first_page(space, position) if space in self.windows else 1 for space in self.units}

    def make_free(self, space: str, count: int) -> bool:
        """Evict until so many pages, or units, are free; False if there are fewer."""
        if space == FULL:
            missing = count - self.pages.num_free
            if missing > 0:
                evicted = self.tree.evict(missing)
                self.num_evicted += len(evicted)
                self._on_evict(evicted)
                self.pages.free(evicted)
            return self.pages.num_free >= count
        units = self.units[space]
        while units.num_free < count and self.tree.evict_point(space):
            self.num_points_evicted += 1
        return units.num_free >= count

    def new_point(self, position: int, counts: Mapping[str, int]) -> RestorePoint | None:
        """A restore point of units that nobody else holds, in the caller's hands; None if there are too few."""
        if not all(self.make_free(space, count) for space, count in counts.items()):
            return None
        point = RestorePoint(position, {s: tuple(self.units[s].allocate(n)) for s, n in counts.items()})
        self.held.append(point)
        return point

    def hold(self, point: RestorePoint) -> RestorePoint:
        """Keep the units of a restore point as they are until `let_go`, whether or not a tree gives it up."""
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
        """Put a restore point at the end of a handle: it is out of the caller's hands if the tree takes it."""
        if not self.tree.keep(handle, point):
            return False
        self.held.remove(point)
        return True

    def clear(self) -> PageIds:
        """Forget all prefixes that nobody uses; the pages that are free now."""
        pages = self.tree.clear()
        self.pages.free(pages)
        return pages

    def components(self) -> dict[str, tuple[int, int]]:
        """Component space -> (total, free) pages or units."""
        units = {space: (units.num_ids, units.num_free) for space, units in self.units.items()}
        return {FULL: (self.pages.num_pages, self.pages.num_free), **units}

    def check(self, *, taken: PageIds, units: Mapping[str, Iterable[int]]) -> None:
        """Assert that every page and unit is in exactly the places that know of it.

        Args:
            taken: pages that are neither free nor in the tree.
            units: space -> those that are held beside restore points, as often as they are.
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
