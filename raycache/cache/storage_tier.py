"""The storage tier as the decider sees it: prefixes fetched to the host ahead of their requests, and persisted.

    request queued -> find -> host pages reserved -> fetch, some pages an order -> pages enter the host's tree in order
    host page entered -> persist

All calls are made by lanes (storage/lanes.py); nothing here waits. What does not come in time is a miss.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from raycache.cache.costs import Costs
from raycache.cache.host_moves import Entered, HostParts
from raycache.cache.host_tier import HostTier
from raycache.cache.node import Parts
from raycache.cache.storage_orders import (
    Fetch,
    Found,
    OrderKind,
    Outcome,
    StorageAnswer,
    StorageOrder,
    StorageWorkers,
    StoredUnit,
)
from raycache.cache.tree import PrefixHandle
from raycache.memory.component import FULL
from raycache.memory.pages import PageIds
from raycache.types import Miss, PackedTokens

_PAGES_PER_ORDER = 16
MOST_PERSISTS = 256
"""Orders to persist that may wait; with more of them the storage is too slow, and pages are not persisted."""
_PERSIST_TIMEOUT_S = 120.0
"""For an order to persist to begin: until it ends, the host cannot evict its pages."""
_COMPLETE_FACTOR = 10.0
"""Under wait_complete a request waits so many times prefetch_timeout_s at most: no wait is without end."""


class Waiting(StrEnum):
    """Whether a request waits for its prefetch."""

    BEST_EFFORT = "best_effort"
    COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


@dataclass(slots=True, eq=False)
class Chunk:
    """Units of one fetch.

    Attributes:
        pages, digests: of the sequence, which follow each other.
        parts: of the restore point; only in the last one.
        answers: one per unit, pages first; None until they are there.
    """

    pages: PageIds
    digests: list[bytes]
    parts: HostParts | None = None
    answers: Sequence[Fetch] | None = None


@dataclass(slots=True, eq=False)
class Prefetch:
    """What storage brings for one request.

    Attributes:
        owner: the request's id.
        tokens: of the prompt, packed.
        handle: of the host, at the end of what has come.
        digests: of all whole pages that can be reused.
        start_s: when it began.
        begin, end: what it has brought to the host, in tokens; both 0 for nothing.
        num_stored: tokens that the storage has, from the prompt's begin on.
        is_known: whether the storage has said so; until then there may be more.
        worst: the worst answer to a fetch so far.
        chunks: fetches that were not taken in yet.
        why_short: why less came than is stored.
        is_done: nothing more will come.
        is_abandoned: its request does not wait for it any more.
    """

    owner: str
    tokens: PackedTokens
    handle: PrefixHandle
    digests: list[bytes]
    start_s: float
    begin: int = 0
    end: int = 0
    num_stored: int = 0
    is_known: bool = False
    worst: Fetch = Fetch.HIT
    chunks: deque[Chunk] = field(default_factory=deque)
    why_short: Miss = Miss.TIMEOUT
    is_done: bool = False
    is_abandoned: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Persist:
    handle: PrefixHandle
    pages: PageIds
    parts: Parts
    storage: int


class StorageTier:
    """Decides what moves between host and storage.

    Args:
        host: the tier above.
        lanes: make the calls.
        waiting: whether requests wait for their prefetch.
        timeout_s: how long, under that policy; and when a fetch that has not begun is given up.
        share: of the host's pages, how much prefetches may hold at a time.
        costs: what moving and computing take.
        epoch: of the decider; orders of others are refused.
    """

    def __init__(
        self,
        host: HostTier,
        lanes: StorageWorkers,
        *,
        waiting: Waiting,
        timeout_s: float,
        share: float,
        costs: Costs,
        epoch: int = 0,
    ) -> None:
        self._host, self._lanes, self._costs, self._epoch = host, lanes, costs, epoch
        self._waiting, self._timeout_s = waiting, timeout_s
        self._most_reserved = int(share * host.counts()["pages_total"])
        self._num_reserved = 0
        self._num_orders = 0
        self._finds: dict[int, Prefetch] = {}
        self._fetches: dict[int, tuple[Prefetch, Chunk]] = {}
        self._persists: dict[int, _Persist] = {}
        self._asked: dict[int, Callable[[int | None], None]] = {}
        self._attended: list[Callable[[float], bool]] = []
        self._counts: Counter[str] = Counter()
        self._seconds = {"prefetch_s": 0.0, "persist_s": 0.0}
        self._number = 1  # of the storage
        self.is_attached = True
        self._is_stored = np.zeros(int(host.counts()["pages_total"]), np.bool_)  # by host page
        host.on_enter = self._persist

    # --- requests -----------------------------------------------------------------------------------------------------

    def start(self, owner: str, tokens: PackedTokens, *, root: bytes, now: int, now_s: float) -> Prefetch | None:
        """Look for a request's prefix; None if the host has all of it."""
        page_size = self._host.page_size
        wanted = (len(tokens) // 4 - 1) // page_size
        if not self.is_attached or not wanted:
            return None
        handle = self._host.match(tokens, root=root, now=now)
        if handle.length == wanted * page_size:
            handle.release()
            return None
        known = self._host.page_digests(handle)
        digests = known + self._host.digests(known[-1] if known else root, tokens, len(known), wanted)
        prefetch = Prefetch(owner, tokens, handle, digests, now_s, num_stored=handle.length)
        self._finds[self._order(OrderKind.FIND, owner, digests=digests, deadline_s=now_s + self._timeout_s)] = prefetch
        return prefetch

    def find(self, tokens: PackedTokens, *, root: bytes, then: Callable[[int | None], None]) -> None:
        """Ask how many first tokens the storage could continue; `then` is told when it is known, None for no answer."""
        wanted = (len(tokens) // 4 - 1) // self._host.page_size
        digests = self._host.digests(root, tokens, 0, wanted)
        number = self._order(OrderKind.FIND, "operator", digests=digests, deadline_s=time.monotonic() + self._timeout_s)
        self._asked[number] = then

    def is_awaited(self, prefetch: Prefetch, *, now_s: float) -> bool:
        """Whether its request should wait for more of it."""
        if prefetch.is_done or prefetch.is_abandoned or self._waiting is Waiting.BEST_EFFORT:
            return False
        waited_s = now_s - prefetch.start_s
        limit_s = self._timeout_s * (_COMPLETE_FACTOR if self._waiting is Waiting.COMPLETE else 1.0)
        if waited_s >= limit_s:
            prefetch.why_short = Miss.TIMEOUT
            return False
        missing = len(prefetch.digests) * self._host.page_size - prefetch.handle.length
        if not self._costs.is_wait_worth(missing, waited_s=waited_s):
            prefetch.why_short = Miss.SLOWER
            return False
        return True

    def abandon(self, prefetch: Prefetch) -> None:
        """Its request runs, or has ended: what has begun still comes to the host."""
        if not (prefetch.is_done or prefetch.is_abandoned):
            prefetch.is_abandoned = True
            self._lanes.cancel(prefetch.owner)

    def attach(self, *, is_attached: bool) -> None:
        """There is another storage, or an empty one, or none: nothing is stored as far as is known."""
        self._lanes.cancel_kind(OrderKind.PERSIST)
        self.is_attached = is_attached
        self._number += 1
        self._is_stored[:] = False

    # --- all of it ----------------------------------------------------------------------------------------------------

    def attend(self, work: Callable[[float], bool]) -> None:
        """Do more work with each look at the answers, until it says that it is over; it is told the monotonic clock,
        seconds, and infinity at the end of all."""
        self._attended.append(work)

    def prefixes(self) -> Iterator[PrefixHandle]:
        """As `HostTier.prefixes`."""
        return self._host.prefixes()

    def persist(self, handle: PrefixHandle) -> int:
        """Store what the storage lacks of a host's prefix, as far as is known, and of its restore point.

        Returns:
            Number of the order, 0 if there is nothing to do.
        """
        return self._store(handle, handle.parts) if self.is_attached else 0

    @property
    def open_persists(self) -> Set[int]:
        """Numbers of the orders to persist whose answers have not come."""
        return self._persists.keys()

    @property
    def num_persisted(self) -> int:
        """Pages that the storage has taken, or had already."""
        return self._counts["persisted_pages"]

    @property
    def num_missing(self) -> int:
        """Pages of the host that the storage lacks, as far as is known."""
        is_stored = self._is_stored.copy()
        for persist in self._persists.values():
            is_stored[persist.pages] = False
        return int(np.count_nonzero(~is_stored[self._host.cached_pages()]))

    # --- answers ------------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Orders whose answers have not come."""
        return len(self._finds) + len(self._fetches) + len(self._persists) + len(self._asked) + len(self._attended)

    def wait(self, timeout_s: float) -> None:
        """Wait for the next answer."""
        self._lanes.wait(timeout_s)

    def poll(self, *, now: int, now_s: float) -> None:
        """Take in what the lanes have done."""
        for answer in self._lanes.answers():
            if answer.outcome is Outcome.UNAVAILABLE:
                self._counts["unavailable_orders"] += 1
            if answer.number in self._asked:
                is_known = answer.outcome is Outcome.DONE
                self._asked.pop(answer.number)(answer.found.point_pages * self._host.page_size if is_known else None)
            elif answer.kind is OrderKind.FIND:
                self._take_found(self._finds.pop(answer.number), answer, now=now)
            elif answer.kind is OrderKind.FETCH:
                prefetch, chunk = self._fetches.pop(answer.number)
                chunk.answers = answer.fetches
                self._note_moved("prefetch", answer)
                self._costs.fetch.note(answer.seconds, answer.fetches.count(Fetch.HIT) * self._host.page_size)
                self._take_chunks(prefetch, now=now)
            else:
                persist = self._persists.pop(answer.number)
                self._note_moved("persist", answer)
                self._take_stored(persist, answer)
        self._attended = [work for work in self._attended if not work(now_s)]

    def close(self, timeout_s: float) -> None:
        """End the lanes; what is on its way is given up."""
        self._lanes.close(timeout_s)
        for work in self._attended:
            work(math.inf)
        self._attended = []

    def counts(self) -> dict[str, float]:
        """Figures for people and metrics."""
        return {name: float(self._counts[name]) for name in _COUNTERS} | {
            "prefetching_pages": self._num_reserved,
            "open_orders": self.num_open,
            **self._seconds,
        }

    # --- how ----------------------------------------------------------------------------------------------------------

    def _note_moved(self, lane: str, answer: StorageAnswer) -> None:
        self._counts[f"{lane}ed_bytes"] += answer.num_bytes
        self._seconds[f"{lane}_s"] += answer.seconds

    def _order(
        self,
        kind: OrderKind,
        owner: str,
        *,
        units: Sequence[StoredUnit] = (),
        digests: Sequence[bytes] = (),
        deadline_s: float = math.inf,
    ) -> int:
        self._num_orders += 1
        self._lanes.post(
            StorageOrder(kind, self._num_orders, owner, tuple(units), tuple(digests), deadline_s, self._epoch)
        )
        return self._num_orders

    def _take_found(self, prefetch: Prefetch, answer: StorageAnswer, *, now: int) -> None:
        """Fetch what the storage has beyond the host, as much as there is room for."""
        if answer.outcome is not Outcome.DONE:
            prefetch.worst = Fetch.UNAVAILABLE
            self._finish(prefetch)
            return
        prefetch.is_known = True
        size = self._host.page_size
        stop, has_point = self._reachable(answer.found, prefetch)
        if answer.found.is_foreign and stop * size <= prefetch.num_stored:
            prefetch.worst = Fetch.FOREIGN
        usable, prefetch.num_stored = prefetch.num_stored, max(prefetch.num_stored, stop * size)
        if stop * size <= usable or prefetch.is_abandoned:
            self._finish(prefetch)
            return
        # Pages that the host has beyond its last restore point, or has got since, need not be fetched.
        self._host.lengthen(prefetch.handle, prefetch.tokens, limit=stop * size, now=now)
        first = prefetch.handle.length // size
        missing = stop - first
        pages = self._reserve(missing)
        parts = self._host.reserve_parts(self._host.part_counts(stop * size)) if has_point else None
        if pages is None or (has_point and parts is None):
            prefetch.why_short = Miss.NO_ROOM
            self._give_back(pages, parts)
            self._finish(prefetch)
            return
        for start in range(0, missing, _PAGES_PER_ORDER):
            end = min(start + _PAGES_PER_ORDER, missing)
            prefetch.chunks.append(Chunk(pages[start:end], prefetch.digests[first + start : first + end]))
        if has_point and not prefetch.chunks:
            prefetch.chunks.append(Chunk(pages, []))
        if parts is not None:
            prefetch.chunks[-1].parts = parts
        for chunk in prefetch.chunks:
            self._fetch(prefetch, chunk, stop=stop)
        if not prefetch.chunks:
            self._finish(prefetch)

    def _reachable(self, found: Found, prefetch: Prefetch) -> tuple[int, bool]:
        """Up to which page the prefetch goes, and whether a restore point is to be fetched there."""
        if not self._host.point_spaces:
            return min(found.num_pages, len(prefetch.digests)), False
        return min(found.point_pages, len(prefetch.digests)), True

    def _reserve(self, count: int) -> PageIds | None:
        if self._num_reserved + count > self._most_reserved:
            self._counts["refused_prefetches"] += 1
            return None
        pages = self._host.reserve(count)
        if pages is not None:
            self._num_reserved += count
        return pages

    def _give_back(self, pages: PageIds | None, parts: HostParts | None) -> None:
        """What was reserved for a prefetch that has no room for all of it."""
        taken = np.empty(0, np.int32) if pages is None else pages
        self._num_reserved -= len(taken)
        self._host.give_back(taken, parts)

    def _fetch(self, prefetch: Prefetch, chunk: Chunk, *, stop: int) -> None:
        units = [StoredUnit(FULL, *unit) for unit in zip(chunk.pages.tolist(), chunk.digests, strict=True)]
        for space, ids in (chunk.parts or {}).items():
            digests = prefetch.digests[stop - len(ids) : stop]
            units += [StoredUnit(space, *unit) for unit in zip(ids, digests, strict=True)]
        # A fetch that has begun cannot be stopped; one that waits for its turn for too long is of no use.
        deadline_s = prefetch.start_s + self._timeout_s * _COMPLETE_FACTOR
        self._fetches[self._order(OrderKind.FETCH, prefetch.owner, units=units, deadline_s=deadline_s)] = (
            prefetch,
            chunk,
        )

    def _take_chunks(self, prefetch: Prefetch, *, now: int) -> None:
        """Let what has come enter the host's tree, in order; behind a page that did not come, nothing is of use."""
        while prefetch.chunks and prefetch.chunks[0].answers is not None:
            chunk = prefetch.chunks.popleft()
            assert chunk.answers is not None, "just asked"
            self._num_reserved -= len(chunk.pages)
            bad = [answer for answer in chunk.answers if answer is not Fetch.HIT]
            if prefetch.worst is Fetch.HIT and bad:
                prefetch.worst = bad[0]
            num_good = len(chunk.pages)
            if bad:
                num_good = next((i for i, answer in enumerate(chunk.answers) if answer is not Fetch.HIT), 0)
                num_good = min(num_good, len(chunk.pages))
            if prefetch.is_done:
                num_good = 0
            self._enter(prefetch, chunk, num_good, is_whole=not bad and not prefetch.is_done, now=now)
            if bad:
                prefetch.is_done = True  # later chunks are given back as they come
        if not prefetch.chunks:
            self._finish(prefetch)

    def _enter(self, prefetch: Prefetch, chunk: Chunk, num_good: int, *, is_whole: bool, now: int) -> None:
        good, handle = chunk.pages[:num_good], prefetch.handle
        if num_good:
            if prefetch.end == 0:
                prefetch.begin = handle.length
            entered = self._host.enter(handle, prefetch.tokens, good, chunk.digests[:num_good], now=now)
            prefetch.end = handle.length
            self._is_stored[entered] = True
            self._counts["prefetched_pages"] += len(entered)
        self._host.give_back(chunk.pages[num_good:], None if is_whole else chunk.parts)
        if is_whole and chunk.parts is not None and self._host.keep(handle, chunk.parts):
            chunk.parts.storage = self._number
            self._counts["prefetched_points"] += 1
            if prefetch.end == 0:
                prefetch.begin = prefetch.end = handle.length

    def _finish(self, prefetch: Prefetch) -> None:
        prefetch.is_done = True
        if not prefetch.handle.is_released:
            prefetch.handle.release()

    def _persist(self, entered: Entered) -> None:
        """Store what has entered the host, after those pages before it that the storage lacks: a prefix without its
        begin is never found."""
        self._is_stored[entered.pages] = False
        if not self.is_attached:
            return
        if len(self._persists) >= MOST_PERSISTS:
            self._counts["unpersisted_pages"] += len(entered.pages)
            return
        self._store(entered.handle, entered.parts)

    def _store(self, handle: PrefixHandle, parts: Parts) -> int:
        """Order what the storage lacks of a prefix, and of a restore point at its end; 0 for nothing."""
        if isinstance(parts, HostParts) and parts.storage == self._number:
            parts = {}
        path = handle.pages
        missing = np.flatnonzero(~self._is_stored[path])
        if not len(missing) and not parts:
            return 0
        pages = path[missing]
        digests = self._host.page_digests(handle)
        units = [StoredUnit(FULL, page, digests[i]) for page, i in zip(pages.tolist(), missing.tolist(), strict=True)]
        self._is_stored[pages] = True  # or will be: what follows it need not be sent with it again
        for space, ids in parts.items():
            units += [StoredUnit(space, *unit) for unit in zip(ids, digests[len(digests) - len(ids) :], strict=True)]
        owner, deadline_s = f"persist {handle.root.hex()[:8]}", time.monotonic() + _PERSIST_TIMEOUT_S
        number = self._order(OrderKind.PERSIST, owner, units=units, deadline_s=deadline_s)
        self._host.hold(parts)
        if isinstance(parts, HostParts):
            parts.storage = self._number
        self._persists[number] = _Persist(handle.clone(), pages, parts, self._number)
        return number

    def _take_stored(self, persist: _Persist, answer: StorageAnswer) -> None:
        stored = np.asarray(answer.stored[: len(persist.pages)], np.bool_)
        self._counts["persisted_pages"] += int(np.count_nonzero(stored))
        is_same = persist.storage == self._number  # and was not emptied meanwhile
        self._is_stored[persist.pages] &= stored & is_same
        if isinstance(persist.parts, HostParts) and not (is_same and all(answer.stored[len(persist.pages) :])):
            persist.parts.storage = 0
        persist.handle.release()
        self._host.let_go(persist.parts)


_COUNTERS = (
    "prefetched_pages",
    "prefetched_bytes",
    "prefetched_points",
    "persisted_pages",
    "persisted_bytes",
    "unpersisted_pages",
    "refused_prefetches",
    "unavailable_orders",
)
