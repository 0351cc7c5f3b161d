"""The storage tier as the decider sees it: fetches prefixes to the host ahead of requests, and persists them.

    request queued -> prefetch (prefetches.py) -> host
    host page entered -> persist (persists.py)

Lanes (storage/lanes.py) make all calls; nothing here blocks. Pages that do not arrive in time are a miss.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from raycache.cache.costs import Costs
from raycache.cache.host_tier import HostTier
from raycache.cache.keys import PackedDigests, chain_digests
from raycache.cache.kv_events import StorageEvents
from raycache.cache.persists import Persists
from raycache.cache.prefetches import Prefetch, Prefetches, Waiting
from raycache.cache.storage_commands import CommandKind, Fetch, Outcome, StorageClient, StorageWorkers
from raycache.cache.stored_blocks import StoredBlocks
from raycache.cache.tree import PrefixHandle
from raycache.types import PackedTokens


class StorageTier:
    """Decides what moves between host and storage.

    Args:
        host: the tier above.
        lanes: execute the storage calls.
        waiting, timeout_s, share, costs: of `Prefetches`.
        epoch: the decider's epoch; commands of other epochs are refused.
        events: told of the storage's content; None: nobody wants to know.
    Attributes:
        persists: writes to the storage.
        blocks: what the storage has, for the events.
        is_attached: whether a storage is attached.
    """

    is_present = True

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
        events: StorageEvents | None = None,
    ) -> None:
        self._host, self._timeout_s, self._lanes = host, timeout_s, lanes
        self._commands = StorageClient(lanes, epoch=epoch)
        self.blocks = StoredBlocks(self._commands, events)
        self.persists = Persists(host, self._commands, events=events)
        self._prefetches = Prefetches(
            host, self._commands, self.persists, waiting=waiting, timeout_s=timeout_s, share=share, costs=costs
        )
        self._asked: dict[int, Callable[[int | None], None]] = {}
        self._attended: list[Callable[[float], bool]] = []
        self._num_unavailable = 0
        self.is_attached = True
        host.on_enter = lambda handle, pages, point: self.persists.enter(
            handle, pages, point, is_attached=self.is_attached
        )

    # --- requests -----------------------------------------------------------------------------------------------------

    def start(
        self, owner: str, tokens: PackedTokens, *, root: bytes, now: int, now_s: float, digests: PackedDigests = b""
    ) -> Prefetch | None:
        """Look up a request's prefix; None if the host has all of it, or no storage is attached."""
        if not self.is_attached:
            return None
        return self._prefetches.start(owner, tokens, root=root, now=now, now_s=now_s, digests=digests)

    def is_awaited(self, prefetch: Prefetch, *, now_s: float) -> bool:
        """Whether a request should wait for more of its prefetch."""
        return self._prefetches.is_awaited(prefetch, now_s=now_s)

    def abandon(self, prefetch: Prefetch) -> None:
        """Stop a prefetch, as its request runs or has ended; fetches in progress still complete."""
        self._prefetches.abandon(prefetch)

    def find(self, tokens: PackedTokens, *, root: bytes, then: Callable[[int | None], None]) -> None:
        """Find the stored, resumable length of a prompt; calls `then` with tokens, or None without a reply."""
        wanted = (len(tokens) // 4 - 1) // self._host.page_size
        digests = chain_digests(root, tokens, first=0, stop=wanted, page_size=self._host.page_size)
        deadline_s = time.monotonic() + self._timeout_s
        self._asked[self._commands.post(CommandKind.FIND, "operator", digests=digests, deadline_s=deadline_s)] = then

    def attach(self, *, is_attached: bool, is_emptied: bool = False) -> None:
        """Note that the storage was attached, replaced, detached, or will be emptied; forgets what is stored."""
        self.is_attached = is_attached
        self.persists.forget()
        self.blocks.forget(is_empty=is_emptied or not is_attached)

    def prefixes(self) -> Iterator[PrefixHandle]:
        """Iterate over handles of all host prefixes; release each before the next."""
        return self._host.prefixes()

    def persist(self, handle: PrefixHandle) -> int:
        """Persist a host prefix with the restore point at its end; returns the command's number, 0 for none."""
        return self.persists.store(handle, handle.point) if self.is_attached else 0

    def attend(self, work: Callable[[float], bool]) -> None:
        """Call `work` with each poll until it returns True; its argument is the monotonic time in seconds, infinity at
        shutdown."""
        self._attended.append(work)

    # --- results ------------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Number of commands and attended work in progress."""
        num_asked = len(self._asked) + len(self._attended) + (self.blocks.num_open if self.is_attached else 0)
        return self._prefetches.num_open + len(self.persists.open) + num_asked

    def wait(self, timeout_s: float) -> None:
        """Wait for the next result."""
        self._lanes.wait(timeout_s)

    def poll(self, *, now: int, now_s: float) -> None:
        """Apply completed commands, and go on with what waits for them."""
        self.take_results(now=now)
        if self.is_attached:
            self.blocks.poll(now_s=now_s)
        if self._attended:
            self._attended = [work for work in self._attended if not work(now_s)]

    def take_results(self, *, now: int) -> None:
        """Apply completed commands."""
        for result in self._lanes.results():
            self._num_unavailable += result.outcome is Outcome.UNAVAILABLE
            if result.number in self._asked:
                is_known = result.outcome is Outcome.DONE
                self._asked.pop(result.number)(result.found.point_pages * self._host.page_size if is_known else None)
            elif result.kind is CommandKind.FIND:
                self._prefetches.take_found(result, now=now)
            elif result.kind is CommandKind.FETCH:
                self._prefetches.take_fetched(result, now=now)
                if any(fetch is not Fetch.HIT for fetch in result.fetches):
                    self.blocks.want()
            elif result.kind is CommandKind.LIST:
                self.blocks.take(result)
            else:
                self.persists.take(result)
                self.blocks.want()

    def close(self, timeout_s: float) -> None:
        """Stop the lanes; commands in progress are abandoned."""
        self._lanes.close(timeout_s)
        for work in self._attended:
            work(math.inf)
        self._attended = []

    def counts(self) -> dict[str, float]:
        """Current counters, for status output and metrics."""
        counts = self._prefetches.counts + self.persists.counts + Counter(unavailable_requests=self._num_unavailable)
        return {name: float(counts[name]) for name in _COUNTERS} | {
            "prefetching_pages": self._prefetches.num_reserved,
            "open_requests": self.num_open,
            "prefetch_s": self._prefetches.seconds,
            "persist_s": self.persists.seconds,
        }


class NoStorage:
    """Stands in where there is no storage tier."""

    is_present = is_attached = False
    num_open = 0

    def start(
        self, owner: str, tokens: PackedTokens, *, root: bytes, now: int, now_s: float, digests: PackedDigests = b""
    ) -> None:
        """Return None."""

    def is_awaited(self, prefetch: Prefetch, *, now_s: float) -> bool:
        """Return False."""
        return False

    def abandon(self, prefetch: Prefetch) -> None:
        """Do nothing."""

    def attach(self, *, is_attached: bool, is_emptied: bool = False) -> None:
        """Do nothing."""

    def wait(self, timeout_s: float) -> None:
        """Do nothing."""

    def poll(self, *, now: int, now_s: float) -> None:
        """Do nothing."""

    def take_results(self, *, now: int) -> None:
        """Do nothing."""

    def close(self, timeout_s: float) -> None:
        """Do nothing."""

    def counts(self) -> dict[str, float]:
        """Return no counters."""
        return {}


_COUNTERS = (
    "prefetched_pages",
    "prefetched_bytes",
    "prefetched_points",
    "persisted_pages",
    "persisted_bytes",
    "unpersisted_pages",
    "refused_prefetches",
    "unavailable_requests",
)
