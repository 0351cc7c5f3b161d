"""Eviction policies, and the order in which unused prefixes are evicted.

    lru        least recently used first
    lfu        fewest matches first, ties least recently used first
    priority   lowest priority first, ties least recently used first; a priority may expire, after which it is 0

Usage is recorded where a handle ends, in nodes and restore points, and passed to the parent when a node is evicted: a
prefix counts as used at least as much as its continuations. A lazy heap has one entry per candidate; a use does not
touch the heap, and an outdated entry is corrected when it reaches the top:

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
"""(item, time) -> its value; the smallest is evicted first."""

_PLAIN: Claims = ((0, math.inf),)
T = TypeVar("T", bound=Evictable)


class Eviction(StrEnum):
    """Eviction policy: what is evicted first."""

    LRU = "lru"
    LFU = "lfu"
    PRIORITY = "priority"

    def claims_of(self, priority: int, until_s: float) -> Claims:
        """The claims of a use with this priority.

        Args:
            priority: may be negative.
            until_s: when it expires, on the clock of `tick`; 0.0: never.
        """
        if self is not Eviction.PRIORITY:
            return ()
        return ((priority, until_s or math.inf),) if priority else _PLAIN

    @property
    def worth(self) -> Worth:
        """The policy's function from item and time to value; the smallest is evicted first."""
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
        root: seed of its tree of prefixes.
        tokens: packed, from the start of the prefix to the end of what is evicted.
        pages: page ids of the whole path.
        num_kept: first pages of the path that stay cached.
        point: restore point at the end, which is evicted as well, or None.
    """

    root: bytes
    tokens: bytes
    pages: PageIds
    num_kept: int
    point: RestorePoint | None

    def take(self, first: int) -> PageIds:
        """The pages of the path without the first `first` ones."""
        return self.pages[first:]

    def release(self, is_saved: bool) -> None:
        """Do nothing: saves copy the pages before they are overwritten, so none are locked."""


class EvictionOrder(Generic[T]):
    """Eviction candidates, each at most once, ordered by a value that use raises and only time lowers.

    Args:
        worth: value of an item at a time in seconds; the smallest is evicted first.
    Attributes:
        now_s: clock on which priorities expire, in seconds from an arbitrary origin.
    """

    def __init__(self, worth: Callable[[T, float], Value]) -> None:
        self._worth = worth
        self.now_s = 0.0
        self._heap: list[tuple[int, int, int, T]] = []
        self._expiries: list[tuple[float, int, T]] = []  # when the value of an entry falls
        self._num_pushes = 0  # makes entries unique; ties go in order of insertion
        self._num_valid = 0
        self._most = 64  # heap size at which void entries are removed

    def __len__(self) -> int:
        return self._num_valid

    def push(self, item: T) -> None:
        """Make an item a candidate, if it is not one yet."""
        if item.entry:
            return
        self._num_pushes += 1
        self._num_valid += 1
        item.entry = self._num_pushes
        rank, last_used = self._worth(item, self.now_s)
        heapq.heappush(self._heap, (rank, last_used, item.entry, item))
        for _, until_s in item.claims:
            if self.now_s < until_s < math.inf:
                heapq.heappush(self._expiries, (until_s, item.entry, item))
                break
        if len(self._heap) > self._most or len(self._expiries) > self._most:
            self._throw_out_void()

    def void(self, item: T) -> None:
        """Remove an item, if it is a candidate."""
        if item.entry:
            item.entry = 0
            self._num_valid -= 1

    def first(self) -> T | None:
        """The candidate to evict first, or None. It stays a candidate. O(log n) per outdated entry."""
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
        """Set the clock; items whose priority has expired move forward."""
        self.now_s = max(self.now_s, now_s)
        while self._expiries and self._expiries[0][0] <= self.now_s:
            _, entry, item = heapq.heappop(self._expiries)
            if entry == item.entry:
                self.void(item)
                self.push(item)

    def check(self, candidates: set[T]) -> None:
        """Assert that exactly these are candidates, none later in the heap than its value demands."""
        queued = [(entry[:2], entry[3]) for entry in self._heap if entry[2] == entry[3].entry]
        assert len({item for _, item in queued}) == len(queued) == self._num_valid, "an item is in the heap twice"
        assert {item for _, item in queued} == candidates, "entries and the heap disagree"
        assert all(value <= self._worth(item, self.now_s) for value, item in queued), (
            "a heap entry has a higher value than its item"
        )
        assert max(len(self._heap), len(self._expiries)) <= self._most, "the heap has too many void entries"

    def _throw_out_void(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2] == entry[3].entry]
        self._expiries = [expiry for expiry in self._expiries if expiry[1] == expiry[2].entry]
        heapq.heapify(self._heap)
        heapq.heapify(self._expiries)
        self._most = 2 * len(self._heap) + 64


def _priority(claims: Claims, now_s: float) -> int:
    return next((priority for priority, until_s in claims if until_s > now_s), 0)
