"""The storage tier as the decider sees it: prefixes fetched to the host ahead of their requests, and persisted.

    request queued -> prefetch (prefetches.py) -> host
    host page entered -> persist (persists.py)

All calls are made by lanes (storage/lanes.py); nothing here waits. What does not come in time is a miss.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from raycache.cache.costs import Costs
from raycache.cache.host_tier import HostTier
from raycache.cache.keys import chain_digests
from raycache.cache.persists import Persists
from raycache.cache.prefetches import Prefetch, Prefetches, Waiting
from raycache.cache.storage_commands import CommandKind, Outcome, StorageClient, StorageWorkers
from raycache.cache.tree import PrefixHandle
from raycache.types import PackedTokens


class StorageTier:
    """Decides what moves between host and storage.

    Args:
        host: the tier above.
        lanes: make the calls.
        waiting, timeout_s, share, costs: of `Prefetches`.
        epoch: of the decider; commands of others are refused.
    Attributes:
        persists: what goes to the storage.
        is_attached: whether there is a storage now.
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
    ) -> None:
        self._host, self._timeout_s, self._lanes = host, timeout_s, lanes
        self._commands = StorageClient(lanes, epoch=epoch)
        self.persists = Persists(host, self._commands)
        self._prefetches = Prefetches(
            host, self._commands, self.persists, waiting=waiting, timeout_s=timeout_s, share=share, costs=costs
        )
        self._asked: dict[int, Callable[[int | None], None]] = {}
        self._attended: list[Callable[[float], bool]] = []
        self._num_unavailable = 0
        self.is_attached = True
        host.on_enter = lambda entered: self.persists.enter(entered, is_attached=self.is_attached)

    # --- requests -----------------------------------------------------------------------------------------------------

    def start(self, owner: str, tokens: PackedTokens, *, root: bytes, now: int, now_s: float) -> Prefetch | None:
        """Look for a request's prefix; None if the host has all of it, or there is no storage now."""
        if not self.is_attached:
            return None
        return self._prefetches.start(owner, tokens, root=root, now=now, now_s=now_s)

    def is_awaited(self, prefetch: Prefetch, *, now_s: float) -> bool:
        """Whether a request should wait for more of its prefetch."""
        return self._prefetches.is_awaited(prefetch, now_s=now_s)

    def abandon(self, prefetch: Prefetch) -> None:
        """A request runs, or has ended: what has begun still comes to the host."""
        self._prefetches.abandon(prefetch)

    def find(self, tokens: PackedTokens, *, root: bytes, then: Callable[[int | None], None]) -> None:
        """Ask how many first tokens the storage could continue; `then` is told when it is known, None for no answer."""
        wanted = (len(tokens) // 4 - 1) // self._host.page_size
        digests = chain_digests(root, tokens, first=0, stop=wanted, page_size=self._host.page_size)
        deadline_s = time.monotonic() + self._timeout_s
        self._asked[self._commands.post(CommandKind.FIND, "operator", digests=digests, deadline_s=deadline_s)] = then

    def attach(self, *, is_attached: bool) -> None:
        """There is another storage, or an empty one, or none: nothing is stored as far as is known."""
        self.is_attached = is_attached
        self.persists.forget()

    def prefixes(self) -> Iterator[PrefixHandle]:
        """As `HostTier.prefixes`."""
        return self._host.prefixes()

    def persist(self, handle: PrefixHandle) -> int:
        """As `Persists.store`, with the restore point at the handle's end; 0 without a storage."""
        return self.persists.store(handle, handle.point) if self.is_attached else 0

    def attend(self, work: Callable[[float], bool]) -> None:
        """Do more work with each look at the answers, until it says that it is over; it is told the monotonic clock,
        seconds, and infinity at the end of all."""
        self._attended.append(work)

    # --- answers ------------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Commands whose answers have not come, and work that is attended to."""
        return self._prefetches.num_open + len(self.persists.open) + len(self._asked) + len(self._attended)

    def wait(self, timeout_s: float) -> None:
        """Wait for the next answer."""
        self._lanes.wait(timeout_s)

    def poll(self, *, now: int, now_s: float) -> None:
        """Take in what the lanes have done."""
        for answer in self._lanes.answers():
            self._num_unavailable += answer.outcome is Outcome.UNAVAILABLE
            if answer.number in self._asked:
                is_known = answer.outcome is Outcome.DONE
                self._asked.pop(answer.number)(answer.found.point_pages * self._host.page_size if is_known else None)
            elif answer.kind is CommandKind.FIND:
                self._prefetches.take_found(answer, now=now)
            elif answer.kind is CommandKind.FETCH:
                self._prefetches.take_fetched(answer, now=now)
            else:
                self.persists.take(answer)
        self._attended = [work for work in self._attended if not work(now_s)]

    def close(self, timeout_s: float) -> None:
        """End the lanes; what is on its way is given up."""
        self._lanes.close(timeout_s)
        for work in self._attended:
            work(math.inf)
        self._attended = []

    def counts(self) -> dict[str, float]:
        """Figures for people and metrics."""
        counts = self._prefetches.counts + self.persists.counts + Counter(unavailable_orders=self._num_unavailable)
        return {name: float(counts[name]) for name in _COUNTERS} | {
            "prefetching_pages": self._prefetches.num_reserved,
            "open_orders": self.num_open,
            "prefetch_s": self._prefetches.seconds,
            "persist_s": self.persists.seconds,
        }


class NoStorage:
    """There is no storage tier: nothing is asked for, and nothing comes."""

    is_present = is_attached = False
    num_open = 0

    def start(self, owner: str, tokens: PackedTokens, *, root: bytes, now: int, now_s: float) -> None:
        """Nothing is found."""

    def is_awaited(self, prefetch: Prefetch, *, now_s: float) -> bool:
        """Nothing comes."""
        return False

    def abandon(self, prefetch: Prefetch) -> None:
        """Nothing was begun."""

    def attach(self, *, is_attached: bool) -> None:
        """There is nothing that a storage could be attached to."""

    def wait(self, timeout_s: float) -> None:
        """Nothing to wait for."""

    def poll(self, *, now: int, now_s: float) -> None:
        """Nothing was asked."""

    def close(self, timeout_s: float) -> None:
        """Nothing to end."""

    def counts(self) -> dict[str, float]:
        """No figures."""
        return {}


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
