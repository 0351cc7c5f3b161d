"""Decides what the host writes to storage, and tracks what storage is known to have."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from raycache.cache.host_tier import HostTier
from raycache.cache.keys import DIGEST_BYTES, unpacked
from raycache.cache.kv_events import StorageEvents
from raycache.cache.node import RestorePoint
from raycache.cache.storage_commands import CommandKind, StorageClient, StorageResult, StoredUnits, UnitColumns
from raycache.cache.tree import PrefixHandle
from raycache.memory.component import FULL
from raycache.memory.pages import PageIds

MOST_PERSISTS = 256
"""Limit of waiting persist commands; beyond it the storage is too slow, and pages are not persisted."""
_PERSIST_TIMEOUT_S = 120.0
"""Deadline for a persist command to start: until it ends, the host cannot evict its pages."""


@dataclass(slots=True, eq=False)
class _Persist:
    handle: PrefixHandle
    pages: PageIds
    point: RestorePoint | None
    storage: int


class Persists:
    """Decides what is written from the host to storage.

    Args:
        host: the tier above.
        commands: sends commands to the storage.
        events: told what the pages that are written consist of.
    Attributes:
        counts: counters, for status output and metrics.
        seconds: time that storage calls took.
    """

    def __init__(self, host: HostTier, commands: StorageClient, *, events: StorageEvents | None = None) -> None:
        self._host, self._commands, self._events = host, commands, events
        self._open: dict[int, _Persist] = {}
        self._storage = 1  # number of the storage
        self._is_stored = np.zeros(host.tier.pages.num_pages, np.bool_)  # by host page
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0

    @property
    def open(self) -> Set[int]:
        """Numbers of commands in progress."""
        return self._open.keys()

    @property
    def num_persisted(self) -> int:
        """Pages that were written to the storage or already there."""
        return self.counts["persisted_pages"]

    @property
    def num_missing(self) -> int:
        """Host pages not known to be in the storage."""
        is_stored = self._is_stored.copy()
        for persist in self._open.values():
            is_stored[persist.pages] = False
        return int(np.count_nonzero(~is_stored[self._host.tier.tree.trie.pages()]))

    def forget(self) -> None:
        """Forget what is stored, after the storage was replaced or emptied."""
        self._commands.cancel_kind(CommandKind.PERSIST)
        self._storage += 1
        self._is_stored[:] = False

    def note_stored(self, pages: PageIds) -> None:
        """Note that host pages were fetched from the storage."""
        self._is_stored[pages] = True

    def note_stored_point(self, point: RestorePoint) -> None:
        """Note that a restore point was fetched from the storage."""
        point.storage = self._storage

    def enter(self, handle: PrefixHandle, pages: PageIds, point: RestorePoint | None, *, is_attached: bool) -> None:
        """Persist what entered the host, preceded by earlier pages that the storage lacks: a prefix without its
        beginning is never found."""
        self._is_stored[pages] = False
        if not is_attached:
            return
        if len(self._open) >= MOST_PERSISTS:
            self.counts["unpersisted_pages"] += len(pages)
            return
        self.store(handle, point)

    def store(self, handle: PrefixHandle, point: RestorePoint | None) -> int:
        """Persist what the storage is not known to have of a host prefix and of a restore point at its end.

        Returns:
            Number of the command, 0 if there is nothing to do.
        """
        if point is not None and point.storage == self._storage:
            point = None
        path = handle.pages
        is_missing = ~self._is_stored[path]
        pages = path[is_missing]
        if not len(pages) and point is None:
            return 0
        columns: list[UnitColumns] = [(FULL, pages.tolist(), self._host.digests(pages))]
        if self._events is not None:
            self._events.note(handle.node, unpacked(self._host.digests(path)), np.flatnonzero(is_missing).tolist())
        self._is_stored[pages] = True  # or will be: later commands need not include it
        if point is not None:
            last = self._host.last_digests(handle)
            columns += [(space, ids, last[len(last) - len(ids) * DIGEST_BYTES :]) for space, ids in point.parts.items()]
            self._host.tier.hold(point)
            point.storage = self._storage
        owner, deadline_s = f"persist {handle.root.hex()[:8]}", time.monotonic() + _PERSIST_TIMEOUT_S
        units = StoredUnits(tuple(columns))
        number = self._commands.post(CommandKind.PERSIST, owner, units=units, deadline_s=deadline_s)
        self._open[number] = _Persist(handle.clone(), pages, point, self._storage)
        return number

    def take(self, result: StorageResult) -> None:
        """Apply the result of a persist command."""
        persist = self._open.pop(result.number)
        self.counts["persisted_bytes"] += result.num_bytes
        self.seconds += result.seconds
        num_pages = len(persist.pages)
        num_stored = result.stored.count(1, 0, num_pages)
        self.counts["persisted_pages"] += num_stored
        is_same = persist.storage == self._storage  # not replaced or emptied meanwhile
        if num_stored < num_pages or not is_same:
            self._is_stored[persist.pages] &= np.frombuffer(result.stored, np.bool_, num_pages) & is_same
        persist.handle.release()
        if persist.point is not None:
            if not (is_same and all(result.stored[num_pages:])):
                persist.point.storage = 0
            self._host.tier.let_go(persist.point)
