"""The host tier: a second tree of prefixes, over pages of host memory.

Decides what is copied to the host and back; the ranks' movers copy. Knows the device tier only by the handles and ids
that it is given, so a sequence's prefix is matched here as it is there, and a restore point is again a unit.

    save    host pages are taken -> moves in a plan -> all ranks acknowledge -> pages go into the tree and the catalog
    load    the host prefix stays locked -> moves in the plan of the row that needs them -> acknowledged with that plan

Until it is acknowledged a page is in no tree, so nobody can be given it; after a crash the catalog names only what was
acknowledged. Pages are saved parents first, so what is in the tree has no holes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256

import numpy as np

from raycache.cache.catalog import Catalog, Holds
from raycache.cache.evict import Eviction, Leaving
from raycache.cache.host_moves import HOST_COUNTERS, Cursor, Entered, HostParts, Job, WritePolicy, units_of
from raycache.cache.moved import Moved
from raycache.cache.node import Parts
from raycache.cache.spaces import SpaceSizes
from raycache.cache.tree import PrefixHandle, RadixTree
from raycache.memory.component import FULL, window_pages
from raycache.memory.moves import Moves
from raycache.memory.pages import PageAllocator, PageIds, SharedAllocator
from raycache.parallel.board import Acks
from raycache.types import PackedTokens

_NO_PAGES: PageIds = np.empty(0, np.int32)
_NEW_RANKS = Acks()


class HostTier:
    """Decides what the host holds.

    Args:
        sizes: of the pools.
        catalog: the record of it, which outlives the decider.
        policy: when to save.
        eviction: what goes first.
        unit_bytes: component space -> bytes of a unit, over all ranks; what is moved is told in them.
    Attributes:
        policy: as given.
        on_enter: told what has come into the tree.
    """

    def __init__(
        self,
        sizes: SpaceSizes,
        *,
        catalog: Catalog,
        policy: WritePolicy = WritePolicy.THROUGH,
        eviction: Eviction,
        unit_bytes: Mapping[str, int] | None = None,
    ) -> None:
        self.page_size = sizes.page_size
        self.policy = policy
        self.on_enter: Callable[[Entered], None] = lambda entered: None
        self._catalog = catalog
        self._moved = Moved(unit_bytes or {})
        self._windows = {space: window for space, (window, _) in sizes.windows.items()}
        self._tail = max([1, *(window_pages(window, sizes.page_size) for window in self._windows.values())])
        self._pages = PageAllocator(sizes.num_pages)
        self._shared = {space: SharedAllocator(count) for space, (_, count) in sizes.windows.items()}
        self._shared |= {space: SharedAllocator(count) for space, count in sizes.states.items()}
        self._tree = RadixTree(
            sizes.page_size, point_spaces=tuple(self._shared), eviction=eviction, on_drop=self._release_parts
        )
        self._jobs: deque[Job] = deque()
        self._saves: list[Moves] = []
        self._loads: list[Moves] = []
        self._num_saves = self._num_loads = 0
        self._is_urgent = False
        self._is_lost = False
        self._moving: set[int] = set()  # pages that are in no tree yet
        self._moving_parts: list[Parts] = []  # the same of restore points
        self._held_parts: list[Parts] = []
        self._counts: Counter[str] = Counter()

    # --- the life of a sequence ---------------------------------------------------------------------------------------

    def open(self, tokens: PackedTokens, *, root: bytes, now: int) -> Cursor:
        """Lock the longest prefix that the host could continue.

        Args:
            tokens: of the sequence so far, packed.
            root: seed of its chain.
            now: step number.
        """
        found = self._tree.match(tokens, now=now, root=root)
        return Cursor(found, found.clone())

    def close(self, cursor: Cursor) -> None:
        """Unlock it; moves on their way go on."""
        cursor.found.release()
        cursor.is_closed = True
        if cursor.num_open == 0:
            cursor.saved.release()

    def save(
        self,
        cursor: Cursor,
        tokens: PackedTokens,
        pages: Callable[[int], PageIds],
        *,
        stop: int,
        parts: Parts,
        release: Callable[[bool], None],
        now: int,
    ) -> bool:
        """Copy a sequence's first pages to the host, as far as they are not there, and the restore point behind them.

        Args:
            cursor: of the sequence.
            tokens: of the sequence, packed; may grow until the moves are done.
            pages: device pages from a page number on, up to `stop`.
            stop: number of pages.
            parts: device units of the restore point there; empty for none.
            release: called when the device's units are not needed any more, with whether they are saved.
            now: step number.
        Returns:
            Whether moves were planned; if not, nothing is held.
        """
        if self._is_lost or cursor.is_broken:
            return False
        self._catch_up(cursor, tokens, stop=stop, now=now)
        missing = max(0, stop - cursor.num_planned)
        if not missing and not (parts and self._lacks_point(cursor, stop)):
            return False
        if missing > self._pages.num_free + self._tree.num_evictable:
            self._counts["unsaved_pages"] += missing
            return False
        first = cursor.num_planned
        taken = self._take_pages(missing)
        digests = self.digests(cursor.tail[-1] if cursor.tail else cursor.found.root, tokens, first, stop)
        cursor.tail = [*cursor.tail, *digests][-self._tail :]
        host_parts = self._take_parts(parts)
        units = units_of(FULL, pages(first).tolist(), taken.tolist(), digests)
        if host_parts is not None:
            for space, ids in parts.items():
                units += units_of(space, ids, host_parts[space], cursor.tail[len(cursor.tail) - len(ids) :])
        cursor.num_planned = max(cursor.num_planned, stop)
        cursor.num_open += 1
        self._num_saves += 1
        self._saves.append(Moves(self._num_saves, units))
        self._jobs.append(Job(self._num_saves, cursor, tokens, taken, digests, host_parts, release))
        return True

    def save_leaving(self, leaving: Leaving) -> bool:
        """Copy what the device is about to evict; the plan that overwrites it saves it first.

        Returns:
            Whether the host has all of its pages, or will.
        """
        if self._shared and not leaving.parts:
            return False  # pages without their restore point are of no use
        cursor = self.open(leaving.tokens, root=leaving.root, now=0)
        is_planned = self.save(
            cursor,
            leaving.tokens,
            lambda first: leaving.pages[first:],
            stop=len(leaving.pages),
            parts=leaving.parts,
            release=lambda is_done: None,
            now=0,
        )
        self._is_urgent |= is_planned
        self.close(cursor)
        return cursor.num_planned == len(leaving.pages)

    def hold(self, parts: Parts) -> None:
        """Keep the units of a restore point as they are until `let_go`, whether or not the tree gives it up."""
        for space, ids in parts.items():
            self._shared[space].share(ids)
        self._held_parts.append(parts)

    def let_go(self, parts: Parts) -> None:
        """Undo `hold`."""
        self._held_parts.remove(parts)
        for space, ids in parts.items():
            self._shared[space].release(ids)

    def load(self, handle: PrefixHandle, *, first: int, pages: Sequence[int], parts: Parts, host_parts: Parts) -> int:
        """Plan the moves of a prefix to the device.

        Args:
            handle: of the host's prefix, locked until they are done.
            first: number of the first page to load.
            pages: device pages for those from there to the handle's end.
            parts: device units for the restore point at the handle's end.
            host_parts: its units here, held until they are done.
        Returns:
            Number of the moves.
        """
        host = handle.pages
        digests = self._catalog.digests(host)
        units = units_of(FULL, pages, host[first:].tolist(), digests[first:])
        for space, ids in host_parts.items():
            units += units_of(space, parts[space], ids, digests[len(host) - len(ids) :])
        self._num_loads += 1
        self._loads.append(Moves(self._num_loads, units))
        self._counts["loaded_pages"] += len(pages)
        self._moved.count("loaded", len(pages), host_parts)
        return self._num_loads

    def discard(self, tokens: PackedTokens, *, root: bytes, first_page: int) -> None:
        """Forget what turned out to be bad, and all that continues it."""
        self._counts["failed_loads"] += 1
        self._forget(self._tree.discard(tokens, root=root, first_page=first_page))

    # --- plans and acknowledgements -----------------------------------------------------------------------------------

    @property
    def has_moves(self) -> bool:
        """Whether a plan should go out, or its acknowledgement is awaited."""
        return bool(self._saves or self._loads or self._jobs)

    def take_moves(self) -> tuple[list[Moves], list[Moves], bool]:
        """Saves and loads for the next plan, and whether its saves have to end before anything is written."""
        moves = self._saves, self._loads, self._is_urgent
        self._saves, self._loads, self._is_urgent = [], [], False
        return moves

    def acknowledge(self, acks: Acks, *, now: int) -> None:
        """Take in which saves are done. Failures between two calls are not told apart: all of them count as failed."""
        self._moved.take_times(acks)
        while self._jobs and self._jobs[0].number <= acks.saves:
            job = self._jobs.popleft()
            self._finish(job, is_done=job.number > acks.bad_save, now=now)

    def lose(self) -> None:
        """The ranks are gone: nothing that is on its way will be acknowledged, and nothing can be saved."""
        self._is_lost = True
        while self._jobs:
            self._finish(self._jobs.popleft(), is_done=False, now=0)
        self._saves, self._loads, self._is_urgent = [], [], False

    def resume(self, acks: Acks = _NEW_RANKS) -> None:
        """There are ranks again, which have acknowledged so many moves."""
        self._num_saves, self._num_loads = acks.saves, acks.loads
        self._moved.begin_anew(acks)
        self._is_lost = False

    # --- units for a storage ------------------------------------------------------------------------------------------

    def reserve(self, num_pages: int) -> PageIds | None:
        """Pages to be filled from elsewhere; None if there is too little that can go."""
        if num_pages > self._pages.num_free + self._tree.num_evictable:
            return None
        return self._take_pages(num_pages)

    def reserve_parts(self, counts: Mapping[str, int]) -> HostParts | None:
        """Units of a restore point to be filled from elsewhere; None if there is too little."""
        return self._take_parts({space: range(count) for space, count in counts.items()})

    def give_back(self, pages: PageIds, parts: HostParts | None = None) -> None:
        """What was reserved and not entered."""
        self._settle(pages)
        self._pages.free(pages)
        if parts is not None:
            self._release_parts(parts)

    def enter(
        self, handle: PrefixHandle, tokens: PackedTokens, pages: PageIds, digests: Sequence[bytes], *, now: int
    ) -> PageIds:
        """Put filled pages into the tree behind a handle, which is lengthened over them.

        Returns:
            Those that the tree took; the others are free again.
        """
        first = handle.length // self.page_size
        adopted = self._tree.extend(handle, tokens, pages, now=now)
        self._settle(pages)
        self._pages.free(pages[~adopted])
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

    def keep(self, handle: PrefixHandle, parts: HostParts) -> bool:
        """Make the end of a handle a restore point; the units of one that is not wanted are free again."""
        if not self._tree.keep(handle, parts):
            self._release_parts(parts)
            return False
        self._moving_parts.remove(parts)
        parts.page = int(handle.pages_from(handle.length // self.page_size - 1)[0])
        self._catalog.add_point(parts.page, parts)
        return True

    def digests(self, before: bytes, tokens: PackedTokens, first: int, stop: int) -> list[bytes]:
        """Chain digests of the pages [first, stop) of a sequence, after that of the page before, or the seed."""
        size, found = 4 * self.page_size, []
        for start in range(first * size, stop * size, size):
            before = sha256(before + tokens[start : start + size]).digest()
            found.append(before)
        return found

    def page_digests(self, handle: PrefixHandle) -> list[bytes]:
        """Chain digests of the pages that a handle covers."""
        return self._catalog.digests(handle.pages)

    def match(self, tokens: PackedTokens, *, root: bytes, now: int) -> PrefixHandle:
        """As `RadixTree.match`."""
        return self._tree.match(tokens, now=now, root=root)

    def rematch(self, handle: PrefixHandle, tokens: PackedTokens, *, now: int) -> None:
        """As `RadixTree.rematch`."""
        self._tree.rematch(handle, tokens, now=now)

    def lengthen(self, handle: PrefixHandle, tokens: PackedTokens, *, limit: int, now: int) -> None:
        """As `RadixTree.lengthen`."""
        self._tree.lengthen(handle, tokens, limit=limit, now=now)

    def first_window_page(self, space: str, position: int) -> int:
        """The first page of a window space that continuing at `position` needs."""
        return max(0, position - self._windows[space] + 1) // self.page_size

    def prefixes(self) -> Iterator[PrefixHandle]:
        """Handles of all that it holds; the caller releases each before it asks for the next."""
        return (handle for node in self._tree.ends() if (handle := self._tree.lock(node)) is not None)

    def can_take(self, num_pages: int, parts: Parts) -> bool:
        """Whether there is room for a prefix now; if not, there may be when what is on its way has come."""
        if num_pages > self._pages.num_free + self._tree.num_evictable:
            return False
        num_held = len(self._held_parts) + len(self._moving_parts)
        is_free = all(self._shared[space].num_free >= len(ids) for space, ids in parts.items())
        return is_free or 2 * num_held < self._tree.num_points

    def cached_pages(self) -> PageIds:
        """As `RadixTree.cached_pages`."""
        return self._tree.cached_pages()

    @property
    def point_spaces(self) -> tuple[str, ...]:
        """Spaces that restore points have parts of."""
        return tuple(self._shared)

    def part_counts(self, position: int) -> dict[str, int]:
        """Units of each point space that a restore point at `position` has."""
        last = position // self.page_size
        return {
            space: last - self.first_window_page(space, position) if space in self._windows else 1
            for space in self._shared
        }

    # --- all of it ----------------------------------------------------------------------------------------------------

    def recover(self, holds: Holds = lambda space, units, tags: [True] * len(units)) -> int:
        """Build the tree from the catalog that an earlier decider left.

        Args:
            holds: looks at the slots themselves.
        Returns:
            Pages found.
        """
        branches = self._catalog.recover(holds)
        found = np.unique(np.concatenate([_NO_PAGES, *(branch.pages for branch in branches)]))
        self._pages.free(np.setdiff1d(self._pages.allocate(self._pages.num_free), found))
        for branch in branches:
            handle = self._tree.match(branch.tokens[:4], now=0, root=branch.seed)
            self._insert(handle, branch.tokens, branch.pages, dict(branch.points))
            handle.release()
        return self._tree.num_cached

    def clear(self) -> None:
        """Forget everything that nobody uses."""
        self._forget(self._tree.clear())

    def tick(self, now_s: float) -> None:
        """Set the clock of priorities."""
        self._tree.tick(now_s)

    def counts(self) -> dict[str, float]:
        """Figures for people and metrics."""
        return {
            "pages_total": self._pages.num_pages,
            "pages_free": self._pages.num_free,
            "pages_cached": self._tree.num_cached,
            "pages_moving": len(self._moving),
            "restore_points": self._tree.num_points,
            **{name: self._counts[name] for name in HOST_COUNTERS},
            **self._moved.figures(),
        }

    def components(self) -> dict[str, tuple[int, int]]:
        """Component space -> (total, free) units."""
        shared = {space: (allocator.num_ids, allocator.num_free) for space, allocator in self._shared.items()}
        return {FULL: (self._pages.num_pages, self._pages.num_free), **shared}

    def check(self) -> None:
        """Assert that every unit is free, cached or on its way."""
        self._tree.check()
        self._pages.check(in_use=np.asarray(sorted(self._moving), np.int32), cached=self._tree.cached_pages())
        parts = self._tree.point_parts() + self._moving_parts + self._held_parts
        for space, allocator in self._shared.items():
            allocator.check(i for part in parts for i in part.get(space, ()))

    # --- how ----------------------------------------------------------------------------------------------------------

    def _catch_up(self, cursor: Cursor, tokens: PackedTokens, *, stop: int, now: int) -> None:
        """Learn what the host has got since the cursor last looked, from others too."""
        if cursor.num_open == 0:
            limit = min(stop, len(tokens) // (4 * self.page_size)) * self.page_size
            if limit > cursor.saved.length:
                self._tree.lengthen(cursor.saved, tokens, limit=limit, now=now)
            known = cursor.saved.length // self.page_size
            if known != cursor.num_planned:
                cursor.num_planned = known
                cursor.tail = self._catalog.digests(cursor.saved.pages_from(max(0, known - self._tail)))

    def _lacks_point(self, cursor: Cursor, stop: int) -> bool:
        return stop == cursor.num_planned and (cursor.num_open > 0 or not cursor.saved.node.has_point)

    def _take_pages(self, count: int) -> PageIds:
        if count > self._pages.num_free:
            evicted = self._tree.evict(count - self._pages.num_free)
            self._counts["evicted_pages"] += len(evicted)
            self._forget(evicted)
        taken = self._pages.allocate(count)
        self._moving.update(taken.tolist())
        return taken

    def _take_parts(self, parts: Mapping[str, Sequence[int]]) -> HostParts | None:
        """Host units for a restore point; None if there is none, or no room."""
        if not parts:
            return None
        for space, ids in parts.items():
            while self._shared[space].num_free < len(ids):
                if not self._tree.evict_point(space):
                    return None
                self._counts["evicted_points"] += 1
        taken = HostParts({space: self._shared[space].allocate(len(ids)) for space, ids in parts.items()})
        self._moving_parts.append(taken)
        return taken

    def _finish(self, job: Job, *, is_done: bool, now: int) -> None:
        cursor = job.cursor
        cursor.num_open -= 1
        if is_done and not cursor.is_broken:
            entered = self.enter(cursor.saved, job.tokens, job.pages, job.digests, now=now)
            self._counts["saved_pages"] += len(entered)
            self._moved.count("saved", len(job.pages), job.parts or {})
            is_kept = job.parts is not None and self.keep(cursor.saved, job.parts)
            if is_kept or len(entered):
                self.on_enter(Entered(entered, job.parts if is_kept and job.parts else {}, cursor.saved))
        else:
            is_done = False
            cursor.is_broken = True
            self._counts["failed_saves"] += 1
            self.give_back(job.pages, job.parts)
        job.release(is_done)
        if cursor.is_closed and cursor.num_open == 0:
            cursor.saved.release()

    def _settle(self, pages: PageIds) -> None:
        """They are not on their way any more."""
        self._moving.difference_update(pages.tolist())

    def _forget(self, pages: PageIds) -> None:
        self._catalog.drop_pages(pages)
        self._pages.free(pages)

    def _release_parts(self, parts: Parts) -> None:
        if isinstance(parts, HostParts) and parts.page >= 0:
            self._catalog.drop_point(parts.page)
        else:
            self._moving_parts.remove(parts)
        for space, ids in parts.items():
            self._shared[space].release(ids)

    def _insert(
        self, handle: PrefixHandle, tokens: bytes, pages: PageIds, points: Mapping[int, Mapping[str, Sequence[int]]]
    ) -> None:
        """Put a branch of the catalog into the tree, cut where its restore points are."""
        for stop in sorted({*points, len(pages)}):
            known = handle.length // self.page_size
            self._tree.extend(handle, tokens, pages[known:stop], now=0)
            if stop in points and not handle.node.has_point:
                parts = HostParts(points[stop])
                for space, ids in parts.items():
                    self._shared[space].take(ids)
                if self._tree.keep(handle, parts):
                    parts.page = int(pages[stop - 1])
