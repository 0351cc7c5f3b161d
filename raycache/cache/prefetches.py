"""Fetches prefixes from storage to the host ahead of their requests.

    request queued -> find -> host pages reserved -> fetch, a few pages per command -> pages enter the host tree

Nothing here blocks. Pages that do not arrive in time are a miss.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from raycache.cache.costs import Costs
from raycache.cache.host_tier import HostTier
from raycache.cache.keys import DIGEST_BYTES, PackedDigests, chain_digests
from raycache.cache.node import RestorePoint
from raycache.cache.persists import Persists
from raycache.cache.storage_commands import (
    CommandKind,
    Fetch,
    Found,
    Outcome,
    StorageClient,
    StorageResult,
    StoredUnits,
    UnitColumns,
)
from raycache.cache.tree import PrefixHandle
from raycache.memory.component import FULL
from raycache.memory.pages import PageIds
from raycache.types import Miss, PackedTokens

_PAGES_PER_FETCH = 16
_COMPLETE_FACTOR = 10.0
"""Limit of a wait under wait_complete, as a multiple of prefetch_timeout_s."""


class Waiting(StrEnum):
    """Whether a request waits for its prefetch."""

    BEST_EFFORT = "best_effort"
    COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


@dataclass(slots=True, eq=False)
class Chunk:
    """One fetch command.

    Attributes:
        pages, digests: host pages to fill, consecutive in the sequence, and their digests.
        point: the restore point after them; only in the last fetch of a prefetch.
        results: result per unit, pages first; None until the command has completed.
    """

    pages: PageIds
    digests: PackedDigests
    point: RestorePoint | None = None
    results: Sequence[Fetch] | None = None


@dataclass(slots=True, eq=False)
class Prefetch:
    """Prefetch of one request's prefix.

    Attributes:
        owner: the request's id.
        tokens: the prompt, packed.
        handle: host prefix, at the end of what has arrived.
        digests: digests of all reusable whole pages of the prompt, packed.
        start_s: start time, on the clock of `now_s`.
        begin, end: token range fetched to the host; both 0 for none.
        num_stored: length of the stored prefix in tokens.
        is_known: whether num_stored is final; before, more may be stored.
        worst: worst result of a fetch so far.
        chunks: fetches whose pages are not in the tree yet.
        why_short: reason why less arrived than is stored.
        is_done: whether nothing more will arrive.
        is_abandoned: whether its request no longer waits for it.
    """

    owner: str
    tokens: PackedTokens
    handle: PrefixHandle
    digests: PackedDigests
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

    def digests_of(self, first: int, stop: int) -> PackedDigests:
        """Digests of the pages [first, stop)."""
        return self.digests[first * DIGEST_BYTES : stop * DIGEST_BYTES]

    @property
    def num_pages(self) -> int:
        """Reusable whole pages of the prompt."""
        return len(self.digests) // DIGEST_BYTES

    def finish(self) -> None:
        """Mark as done and release the handle."""
        self.is_done = True
        if not self.handle.is_released:
            self.handle.release()

    def wait_is_over(self, waiting: Waiting, *, timeout_s: float, now_s: float) -> bool:
        """Whether its request has waited as long as the policy allows."""
        limit_s = timeout_s * (_COMPLETE_FACTOR if waiting is Waiting.COMPLETE else 1.0)
        return now_s - self.start_s >= limit_s


class Prefetches:
    """Decides what is fetched from storage to the host.

    Args:
        host: the tier above.
        commands: to the storage.
        persists: tracks what storage is known to have.
        waiting: policy by which requests wait for their prefetch.
        timeout_s: longest wait under that policy, and deadline for a fetch to start.
        share: fraction of host pages that prefetches may reserve at a time.
        costs: measured pace of moving and computing.
    Attributes:
        num_reserved: host pages reserved for fetches in progress.
        counts: counters for status output and metrics.
        seconds: total duration of fetches.
    """

    def __init__(
        self,
        host: HostTier,
        commands: StorageClient,
        persists: Persists,
        *,
        waiting: Waiting,
        timeout_s: float,
        share: float,
        costs: Costs,
    ) -> None:
        self._host, self._commands, self._persists, self._costs = host, commands, persists, costs
        self._waiting, self._timeout_s = waiting, timeout_s
        self._most_reserved = int(share * host.tier.pages.num_pages)
        self._finds: dict[int, Prefetch] = {}
        self._fetches: dict[int, tuple[Prefetch, Chunk]] = {}
        self.num_reserved = 0
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0

    @property
    def num_open(self) -> int:
        """Number of commands in progress."""
        return len(self._finds) + len(self._fetches)

    def start(
        self, owner: str, tokens: PackedTokens, *, root: bytes, now: int, now_s: float, digests: PackedDigests = b""
    ) -> Prefetch | None:
        """Look up a request's prefix; None if the host has all of it.

        Args:
            owner: the request's id.
            tokens, root, now: as for `RadixTree.match`.
            now_s: current time, on the clock of the wait.
            digests: of the prompt's first pages, as many as are known already.
        """
        page_size = self._host.page_size
        wanted = (len(tokens) // 4 - 1) // page_size
        if not wanted:
            return None
        handle = self._host.tier.tree.match(tokens, now=now, root=root)
        if handle.length == wanted * page_size:
            handle.release()
            return None
        known = digests[: wanted * DIGEST_BYTES] or self._host.digests(handle.pages)
        first, before = len(known) // DIGEST_BYTES, (known or root)[-DIGEST_BYTES:]
        known += chain_digests(before, tokens, first=first, stop=wanted, page_size=page_size)
        prefetch = Prefetch(owner, tokens, handle, known, now_s, num_stored=handle.length)
        deadline_s = now_s + self._timeout_s
        number = self._commands.post(CommandKind.FIND, owner, digests=known, deadline_s=deadline_s)
        self._finds[number] = prefetch
        return prefetch

    def is_awaited(self, prefetch: Prefetch, *, now_s: float) -> bool:
        """Whether its request should wait for more pages."""
        if prefetch.is_done or prefetch.is_abandoned or self._waiting is Waiting.BEST_EFFORT:
            return False
        if prefetch.wait_is_over(self._waiting, timeout_s=self._timeout_s, now_s=now_s):
            prefetch.why_short = Miss.TIMEOUT
            return False
        missing = prefetch.num_pages * self._host.page_size - prefetch.handle.length
        if not self._costs.is_wait_worth(missing, waited_s=now_s - prefetch.start_s):
            prefetch.why_short = Miss.SLOWER
            return False
        return True

    def abandon(self, prefetch: Prefetch) -> None:
        """Stop, as its request runs or has ended; fetches in progress still complete."""
        if not (prefetch.is_done or prefetch.is_abandoned):
            prefetch.is_abandoned = True
            self._commands.cancel(prefetch.owner)

    def take_found(self, result: StorageResult, *, now: int) -> None:
        """Fetch what the storage has beyond the host, as far as it fits."""
        prefetch = self._finds.pop(result.number)
        if result.outcome is not Outcome.DONE:
            prefetch.worst = Fetch.UNAVAILABLE
            prefetch.finish()
            return
        prefetch.is_known = True
        size = self._host.page_size
        stop = self._reachable(result.found, prefetch)
        if result.found.is_foreign and stop * size <= prefetch.num_stored:
            prefetch.worst = Fetch.FOREIGN
        usable, prefetch.num_stored = prefetch.num_stored, max(prefetch.num_stored, stop * size)
        if stop * size <= usable or prefetch.is_abandoned:
            prefetch.finish()
            return
        # Pages that the host has beyond its last restore point, or obtained since, need not be fetched.
        self._host.tier.tree.lengthen(prefetch.handle, prefetch.tokens, limit=stop * size, now=now)
        self._fetch_all(prefetch, stop=stop)
        if not prefetch.chunks:
            prefetch.finish()

    def take_fetched(self, result: StorageResult, *, now: int) -> None:
        """Put fetched pages into the host tree, in order; pages after a missing one are dropped."""
        prefetch, chunk = self._fetches.pop(result.number)
        chunk.results = result.fetches
        self.counts["prefetched_bytes"] += result.num_bytes
        self.seconds += result.seconds
        self._costs.fetch.note(result.seconds, result.fetches.count(Fetch.HIT) * self._host.page_size)
        while prefetch.chunks and (results := prefetch.chunks[0].results) is not None:
            chunk = prefetch.chunks.popleft()
            self.num_reserved -= len(chunk.pages)
            bad = [fetch for fetch in results if fetch is not Fetch.HIT]
            if prefetch.worst is Fetch.HIT and bad:
                prefetch.worst = bad[0]
            num_good = len(chunk.pages)
            if bad:
                num_good = next((i for i, fetch in enumerate(results) if fetch is not Fetch.HIT), 0)
                num_good = min(num_good, len(chunk.pages))
            if prefetch.is_done:
                num_good = 0
            self._enter(prefetch, chunk, num_good, is_whole=not bad and not prefetch.is_done, now=now)
            if bad:
                prefetch.is_done = True  # later chunks are dropped as they arrive
        if not prefetch.chunks:
            prefetch.finish()

    def _reachable(self, found: Found, prefetch: Prefetch) -> int:
        """Number of pages worth fetching; for models with restore points, it ends at one."""
        stop = found.point_pages if self._host.tier.has_points else found.num_pages
        return min(stop, prefetch.num_pages)

    def _fetch_all(self, prefetch: Prefetch, *, stop: int) -> None:
        """Reserve host pages up to page number `stop`, and units of the restore point there, and fetch them."""
        host = self._host
        first = prefetch.handle.length // host.page_size
        missing, position = stop - first, stop * host.page_size
        pages = self._reserve(missing)
        point = host.tier.new_point(position, host.tier.part_counts(position)) if host.tier.has_points else None
        if pages is None or (host.tier.has_points and point is None):
            prefetch.why_short = Miss.NO_CAPACITY
            if pages is not None:
                self.num_reserved -= len(pages)
                host.give_back(pages)
            if point is not None:
                host.tier.let_go(point)
            return
        for start in range(0, missing, _PAGES_PER_FETCH):
            end = min(start + _PAGES_PER_FETCH, missing)
            prefetch.chunks.append(Chunk(pages[start:end], prefetch.digests_of(first + start, first + end)))
        if point is not None:
            if not prefetch.chunks:
                prefetch.chunks.append(Chunk(pages, b""))
            prefetch.chunks[-1].point = point
        for chunk in prefetch.chunks:
            self._fetch(prefetch, chunk, stop=stop)

    def _reserve(self, count: int) -> PageIds | None:
        if self.num_reserved + count > self._most_reserved:
            self.counts["refused_prefetches"] += 1
            return None
        pages = self._host.reserve(count)
        if pages is not None:
            self.num_reserved += count
        return pages

    def _fetch(self, prefetch: Prefetch, chunk: Chunk, *, stop: int) -> None:
        columns: list[UnitColumns] = [(FULL, chunk.pages.tolist(), chunk.digests)]
        for space, ids in ({} if chunk.point is None else chunk.point.parts).items():
            columns.append((space, ids, prefetch.digests_of(stop - len(ids), stop)))
        # A fetch that has started cannot be stopped; one that waits too long for its turn is useless.
        deadline_s = prefetch.start_s + self._timeout_s * _COMPLETE_FACTOR
        units = StoredUnits(tuple(columns))
        number = self._commands.post(CommandKind.FETCH, prefetch.owner, units=units, deadline_s=deadline_s)
        self._fetches[number] = prefetch, chunk

    def _enter(self, prefetch: Prefetch, chunk: Chunk, num_good: int, *, is_whole: bool, now: int) -> None:
        good, handle = chunk.pages[:num_good], prefetch.handle
        if num_good:
            if prefetch.end == 0:
                prefetch.begin = handle.length
            entered = self._host.enter(handle, prefetch.tokens, good, chunk.digests[: num_good * DIGEST_BYTES], now=now)
            prefetch.end = handle.length
            self._persists.note_stored(entered)
            self.counts["prefetched_pages"] += len(entered)
        self._host.give_back(chunk.pages[num_good:], None if is_whole else chunk.point)
        if is_whole and chunk.point is not None and self._host.keep(handle, chunk.point):
            self._persists.note_stored_point(chunk.point)
            self.counts["prefetched_points"] += 1
            if prefetch.end == 0:
                prefetch.begin = prefetch.end = handle.length
