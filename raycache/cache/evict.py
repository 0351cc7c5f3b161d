"""In which order what nobody uses is given up.

    lru        least recently used first
    lfu        fewest matches first, ties least recently used first
    priority   lowest priority first, ties least recently used first; a priority holds for a time and is 0 after it

What a policy looks at is kept where a handle ends, in nodes and in restore points, and handed up to the parent when a
node goes: a prefix is at least as used as what hung below it. One lazy heap has an entry per candidate; use does not
touch the heap, an entry is put right when it comes first:

    heap    (value when pushed, number of the entry, item)        item.entry is 0 or the number of its valid entry
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from raycache.cache.node import Claims, Evictable, RestorePoint
from raycache.memory.pages import PageIds

Value = tuple[int, int]
"""The policy's rank, then the time of last use."""

Worth = Callable[[Evictable, float], Value]
"""What an item is worth at a time."""

_PLAIN: Claims = ((0, math.inf),)
T = TypeVar("T", bound=Evictable)


class Eviction(StrEnum):
    """What goes first."""

    LRU = "lru"
    LFU = "lfu"
    PRIORITY = "priority"

    def claims_of(self, priority: int, until_s: float) -> Claims:
        """What a use with this priority claims.

        Args:
            priority: may be negative.
            until_s: when it counts as 0 again, on the clock of `tick`; 0.0 for never.
        """
        if self is not Eviction.PRIORITY:
            return ()
        return ((priority, until_s or math.inf),) if priority else _PLAIN

    @property
    def worth(self) -> Worth:
        """The function that tells what an item is worth at a time; the smallest goes first."""
        match self:
            case Eviction.LRU:
                return lambda item, now_s: (0, item.last_used)
            case Eviction.LFU:
                return lambda item, now_s: (item.num_uses, item.last_used)
            case Eviction.PRIORITY:
                return lambda item, now_s: (_priority(item.claims, now_s), item.last_used)


@dataclass(frozen=True, slots=True)
class Leaving:
    """The end of a prefix, or a restore point, just before it is evicted.

    Attributes:
        root: of the tree that it is in.
        tokens: packed, from the first one of the root to the end of what goes.
        pages: ids of the whole path up to there.
        num_kept: pages of the path that stay, its first ones.
        point: restore point at the end, which goes, too; None if there is none.
    """

    root: bytes
    tokens: bytes
    pages: PageIds
    num_kept: int
    point: RestorePoint | None

    def pages_from(self, first: int) -> PageIds:
        """The pages of the path without the first `first` ones."""
        return self.pages[first:]

    def release(self, is_saved: bool) -> None:
        """Nothing is held: what is saved of it is copied before its pages are written again."""


class EvictionOrder(Generic[T]):
    """Candidates, each at most once, in the order of a value that use raises and only time may lower.

    Args:
        worth: of an item at the time of `now_s`.
    Attributes:
        now_s: the clock of priorities, in seconds since whenever.
    """

    def __init__(self, worth: Callable[[T, float], Value]) -> None:
        self._worth = worth
        self.now_s = 0.0
        self._heap: list[tuple[int, int, int, T]] = []
        self._expiries: list[tuple[float, int, T]] = []  # when the value that an entry was pushed with falls
        self._num_pushes = 0  # makes entries unique, and ties first come, first served
        self._num_valid = 0
        self._most = 64  # entries before the void ones are thrown out

    def __len__(self) -> int:
        return self._num_valid

    def push(self, item: T) -> None:
        """Make an item a candidate, if it is not one already."""
        if item.entry:
            return
        self._num_pushes += 1
        self._num_valid += 1
        item.entry = self._num_pushes
        heapq.heappush(self._heap, (*self._worth(item, self.now_s), item.entry, item))
        for _, until_s in item.claims:
            if self.now_s < until_s < math.inf:
                heapq.heappush(self._expiries, (until_s, item.entry, item))
                break
        if len(self._heap) > self._most or len(self._expiries) > self._most:
            self._throw_out_void()

    def void(self, item: T) -> None:
        """Take an item out, if it is a candidate."""
        if item.entry:
            item.entry = 0
            self._num_valid -= 1

    def first(self) -> T | None:
        """The item that goes first, which stays a candidate; None if there is none. Costs O(log n) per entry passed."""
        while self._heap:
            rank, last_used, entry, item = self._heap[0]
            if entry == item.entry:
                if self._worth(item, self.now_s) <= (rank, last_used):
                    return item
                self.void(item)
                self.push(item)
            else:
                heapq.heappop(self._heap)
        return None

    def tick(self, now_s: float) -> None:
        """Set the clock; those whose priority has expired move forward."""
        self.now_s = max(self.now_s, now_s)
        while self._expiries and self._expiries[0][0] <= self.now_s:
            _, entry, item = heapq.heappop(self._expiries)
            if entry == item.entry:
                self.void(item)
                self.push(item)

    def check(self, candidates: set[T]) -> None:
        """Assert that exactly these are candidates, none later in the heap than it has to be."""
        queued = [(entry[:2], entry[3]) for entry in self._heap if entry[2] == entry[3].entry]
        assert len({item for _, item in queued}) == len(queued) == self._num_valid, "an item is in the heap twice"
        assert {item for _, item in queued} == candidates, "entries and the heap disagree"
        assert all(value <= self._worth(item, self.now_s) for value, item in queued), "a heap entry is too young"
        assert max(len(self._heap), len(self._expiries)) <= self._most, "the heap keeps items that are gone"

    def _throw_out_void(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2] == entry[3].entry]
        self._expiries = [expiry for expiry in self._expiries if expiry[1] == expiry[2].entry]
        heapq.heapify(self._heap)
        heapq.heapify(self._expiries)
        self._most = 2 * len(self._heap) + 64


def _priority(claims: Claims, now_s: float) -> int:
    return next((priority for priority, until_s in claims if until_s > now_s), 0)
