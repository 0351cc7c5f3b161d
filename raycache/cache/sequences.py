"""What running sequences hold of the cache, and what they leave behind.

The only owner of the allocators and of the tree. A sequence is matched when it is admitted, asks for room before each
row, and says after each how far it is; whole pages go to the tree at once, so that others can use them.

    space     a sequence holds                                  a restore point at position p holds
    full      pages of all its tokens: own, or the tree's       (the tree's pages up to p)
    window    pages that the next query sees                    pages of the last window - 1 tokens before p
    state     the slot with the state after its last token      the slot with the state after p tokens

Window pages and state slots are never copied: holders are counted. A row reads the state from one slot and writes it
to another as soon as somebody else holds the first, so a restore point keeps the slot and the sequence goes on in a new
one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from raycache.cache.node import Parts
from raycache.cache.tree import PrefixHandle, RadixTree
from raycache.memory.component import FULL
from raycache.memory.pages import PageAllocator, SharedAllocator
from raycache.types import PackedTokens


@dataclass(frozen=True)
class SpaceSizes:
    """Pages and slots of every component space.

    Attributes:
        num_pages: pages of the sequence.
        page_size: tokens per page.
        windows: space -> (window in tokens, pages).
        states: space -> slots; at most one.
    """

    num_pages: int
    page_size: int
    windows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    states: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.states) <= 1, "a model has one kind of recurrent state"


@dataclass(slots=True)
class WindowPages:
    """Pages of one window space.

    Attributes:
        first: number of the first page in the sequence that is held.
        ids: of the pages from there on; -1 for those that the row in flight leaves behind at once.
    """

    first: int
    ids: deque[int]

    @property
    def held(self) -> list[int]:
        """The ids without gaps."""
        return [page for page in self.ids if page >= 0]

    @property
    def end(self) -> int:
        """Number of the first page that was not written yet."""
        return self.first + len(self.ids)


@dataclass(slots=True)
class Room:
    """Where a row goes.

    Attributes:
        new_pages: space -> pages to append to the tables of the sequence; -1 for those that nobody will read.
        read_state, write_state: slots; -1 for none.
    """

    new_pages: dict[str, list[int]]
    read_state: int = -1
    write_state: int = -1


_NO_ROOM_NEEDED = Room({})


@dataclass(slots=True, eq=False)
class Holding:
    """What one running sequence holds.

    Attributes:
        handle: the locked prefix in the tree.
        pages: of the sequence, in order.
        own: those of them that the tree did not adopt.
        windows: space -> pages.
        state, next_state: slot after the last computed token, and that which the row in flight writes; -1 for none.
        checkpoint: (position, parts) of the last page boundary that it passed.
    """

    handle: PrefixHandle
    pages: list[int]
    own: set[int] = field(default_factory=set)
    windows: dict[str, WindowPages] = field(default_factory=dict)
    state: int = -1
    next_state: int = -1
    checkpoint: tuple[int, Parts] | None = None

    def tables(self) -> dict[str, list[int]]:
        """Space -> page ids from the sequence's begin on, -1 for those that are not held."""
        return {FULL: list(self.pages)} | {
            space: [-1] * window.first + list(window.ids) for space, window in self.windows.items()
        }


class SequenceCache:
    """Decides where sequences live.

    Args:
        sizes: of the pools.
        is_kept: whether what sequences compute is kept for others; if not, nothing is matched either.
    Attributes:
        num_evicted: pages of the sequence that were freed to make room.
        num_points_evicted: restore points that were given up to make room.
    """

    def __init__(self, sizes: SpaceSizes, *, is_kept: bool) -> None:
        self.page_size = sizes.page_size
        self.is_kept = is_kept
        self.num_evicted = 0
        self.num_points_evicted = 0
        self._windows = {space: window for space, (window, _) in sizes.windows.items()}
        self._state_space = next(iter(sizes.states), "")
        self._pages = PageAllocator(sizes.num_pages)
        self._shared = {space: SharedAllocator(count) for space, (_, count) in sizes.windows.items()}
        self._shared |= {space: SharedAllocator(count) for space, count in sizes.states.items()}
        self._tree = RadixTree(sizes.page_size, point_spaces=tuple(self._shared), on_drop=self._release_parts)

    @property
    def has_points(self) -> bool:
        """Whether sequences can be continued only from restore points."""
        return bool(self._shared)

    @property
    def num_pages(self) -> int:
        """Pages of the sequence, in all."""
        return self._pages.num_pages

    @property
    def num_obtainable(self) -> int:
        """Pages of the sequence that are free or can be made so."""
        return self._pages.num_free + self._tree.num_evictable

    # --- the life of a sequence ---------------------------------------------------------------------------------------

    def begin(self, tokens: PackedTokens, *, is_matched: bool, now: int) -> Holding:
        """Lock the longest prefix that can be continued.

        Args:
            tokens: of the sequence so far, packed.
            is_matched: whether it may reuse anything.
            now: step number, the LRU clock.
        """
        handle = self._tree.match(tokens if is_matched and self.is_kept else tokens[:4], now=now)
        holding = Holding(handle, handle.pages.tolist())
        parts = handle.parts
        for space, ids in parts.items():
            self._shared[space].share(ids)
        for space, window in self._windows.items():
            ids = deque(parts.get(space, ()))
            holding.windows[space] = WindowPages(self._first_page(handle.length, window), ids)
        if parts and self._state_space:
            holding.state = parts[self._state_space][0]
        return holding

    def make_room(self, holding: Holding, start: int, stop: int) -> Room | None:
        """Room for the tokens [start, stop) of a sequence; None, with nothing taken, if there is too little.

        What others could reuse is evicted for it.
        """
        missing = -(-stop // self.page_size) - len(holding.pages)
        if missing <= 0 and not self._shared:
            return _NO_ROOM_NEEDED  # nearly every decode step of a dense model
        needed = {FULL: missing}
        skipped = {}
        for space, window in self._windows.items():
            held = holding.windows[space]
            first = max(held.end, self._first_page(stop, window))
            skipped[space] = first - held.end
            needed[space] = max(0, -(-stop // self.page_size) - first)
        is_shared = holding.state >= 0 and self._shared[self._state_space].is_shared(holding.state)
        if self._state_space and (holding.state < 0 or is_shared):
            needed[self._state_space] = 1
        if not all(self._make_free(space, count) for space, count in needed.items()):
            return None
        return self._take(holding, needed, skipped)

    def advance(
        self, holding: Holding, tokens: PackedTokens, num_computed: int, *, is_kept: bool, is_point: bool, now: int
    ) -> None:
        """A sequence has computed its first `num_computed` tokens.

        Args:
            holding: of the sequence.
            tokens: of the sequence, packed, at least so many.
            num_computed: in tokens.
            is_kept: whether its whole pages go to the tree.
            is_point: whether this should become a restore point.
            now: step number.
        """
        if not self._shared and num_computed - holding.handle.length < self.page_size:
            return  # no whole page more
        if holding.next_state >= 0:
            if holding.state not in (-1, holding.next_state):
                self._shared[self._state_space].release([holding.state])
            holding.state, holding.next_state = holding.next_state, -1
        for space, window in self._windows.items():
            self._leave_window(space, holding.windows[space], self._first_page(num_computed, window))
        if not (is_kept and self.is_kept):
            return
        self._adopt(holding, tokens, num_computed, now=now)
        if holding.checkpoint is not None and holding.checkpoint[0] < holding.handle.length:
            self._replace_checkpoint(holding, None)  # the prefix ends elsewhere now: nobody could use it
        if self.has_points and num_computed == holding.handle.length:
            self._replace_checkpoint(holding, (num_computed, self._parts(holding)))
            if is_point:
                self._keep_checkpoint(holding)

    def end(self, holding: Holding) -> None:
        """Give everything back; the last page boundary becomes a restore point."""
        self._keep_checkpoint(holding)
        self._replace_checkpoint(holding, None)
        self._pages.free(np.asarray(sorted(holding.own), np.int32))
        holding.handle.release()
        for space, window in holding.windows.items():
            self._shared[space].release(window.held)
        for slot in {holding.state, holding.next_state} - {-1}:
            self._shared[self._state_space].release([slot])

    def evict(self, space: str) -> bool:
        """Give up one page of the sequence, or the restore point that comes next, of what nobody holds.

        Returns:
            Whether there was one.
        """
        if space != FULL:
            return space in self._shared and self._tree.evict_point(space)
        evicted = self._tree.evict(1)
        self._pages.free(evicted)
        return len(evicted) > 0

    def clear(self) -> None:
        """Forget everything that no running sequence holds."""
        self._pages.free(self._tree.clear())

    # --- counts and checks --------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Balances of the sequence's pages, by name of EngineStats."""
        free, cached = self._pages.num_free, self._tree.num_cached
        return {
            "pages_total": self._pages.num_pages,
            "pages_free": free,
            "pages_in_use": self._pages.num_pages - free - cached,
            "pages_cached": cached,
            "pages_locked": self._tree.num_locked,
            "evicted_pages": self.num_evicted,
            "restore_points": self._tree.num_points,
            "evicted_restore_points": self.num_points_evicted,
        }

    def shared_counts(self) -> dict[str, tuple[int, int]]:
        """(total, free) of each window and state space."""
        return {space: (allocator.num_ids, allocator.num_free) for space, allocator in self._shared.items()}

    def check(self, holdings: Sequence[Holding]) -> None:
        """Assert that every page and slot is free, or held by exactly those who know of it."""
        self._tree.check()
        own = [page for holding in holdings for page in holding.own]
        self._pages.check(in_use=np.asarray(own, np.int32), cached=self._tree.cached_pages())
        if not holdings:
            assert self._tree.num_locked == 0, "pages are locked and nothing runs"
        parts = self._tree.point_parts()
        parts += [holding.checkpoint[1] for holding in holdings if holding.checkpoint is not None]
        for space, allocator in self._shared.items():
            held = [i for part in parts for i in part.get(space, ())]
            for holding in holdings:
                if space == self._state_space:
                    held += {holding.state, holding.next_state} - {-1}
                else:
                    held += holding.windows[space].held
            allocator.check(held)

    # --- how ----------------------------------------------------------------------------------------------------------

    def _first_page(self, position: int, window: int) -> int:
        """The first page that a query at `position` sees through a window."""
        return max(0, position - window + 1) // self.page_size

    def _make_free(self, space: str, count: int) -> bool:
        if space == FULL:
            missing = count - self._pages.num_free
            if missing > 0:
                evicted = self._tree.evict(missing)
                self._pages.free(evicted)
                self.num_evicted += len(evicted)
            return self._pages.num_free >= count
        allocator = self._shared[space]
        while allocator.num_free < count and self._tree.evict_point(space):
            self.num_points_evicted += 1
        return allocator.num_free >= count

    def _take(self, holding: Holding, needed: Mapping[str, int], skipped: Mapping[str, int]) -> Room:
        new_pages = {}
        if needed[FULL] > 0:
            new_pages[FULL] = self._pages.allocate(needed[FULL]).tolist()
            holding.pages += new_pages[FULL]
            holding.own.update(new_pages[FULL])
        for space, held in holding.windows.items():
            taken = self._shared[space].allocate(needed[space])
            if skipped[space]:
                # What is held lies before the window of whatever comes after this row, but the row itself sees it.
                held.ids.extend([-1] * skipped[space])
            held.ids.extend(taken)
            if skipped[space] or taken:
                new_pages[space] = [-1] * skipped[space] + taken
        room = Room(new_pages)
        if self._state_space:
            room.read_state = holding.state
            is_new = self._state_space in needed
            holding.next_state = self._shared[self._state_space].allocate(1)[0] if is_new else holding.state
            room.write_state = holding.next_state
        return room

    def _leave_window(self, space: str, held: WindowPages, first: int) -> None:
        while held.first < first and held.ids:
            page = held.ids.popleft()
            held.first += 1
            if page >= 0:
                self._shared[space].release([page])

    def _adopt(self, holding: Holding, tokens: PackedTokens, num_computed: int, *, now: int) -> None:
        """Hand the whole pages that were computed to the tree."""
        known, whole = holding.handle.length // self.page_size, num_computed // self.page_size
        if whole > known:
            pages = np.asarray(holding.pages[known:whole], np.int32)
            adopted = self._tree.extend(holding.handle, tokens, pages, now=now)
            holding.own.difference_update(pages[adopted].tolist())

    def _parts(self, holding: Holding) -> dict[str, Sequence[int]]:
        """What the next token needs beside the pages of the sequence, with a holder added."""
        parts: dict[str, Sequence[int]] = {space: tuple(window.ids) for space, window in holding.windows.items()}
        if self._state_space:
            parts[self._state_space] = (holding.state,)
        for space, ids in parts.items():
            self._shared[space].share(ids)
        return parts

    def _replace_checkpoint(self, holding: Holding, checkpoint: tuple[int, Parts] | None) -> None:
        if holding.checkpoint is not None:
            self._release_parts(holding.checkpoint[1])
        holding.checkpoint = checkpoint

    def _keep_checkpoint(self, holding: Holding) -> None:
        """Put the checkpoint, where the sequence's prefix ends, into the tree."""
        if holding.checkpoint is None:
            return
        assert holding.checkpoint[0] == holding.handle.length, "a checkpoint that the prefix has left behind"
        if self._tree.keep(holding.handle, holding.checkpoint[1]):
            holding.checkpoint = None

    def _release_parts(self, parts: Parts) -> None:
        for space, ids in parts.items():
            self._shared[space].release(ids)
