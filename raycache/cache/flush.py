"""Copies everything that the device and the host hold to storage, before a node or replica goes away.

    host prefixes that the storage lacks  -> persisted
    device prefixes that the host lacks   -> saved to the host, which persists them as usual
    host prefixes again                   -> persisted, as some may have been skipped while the queue was full

Runs a few commands at a time between steps, so that requests continue. Prefixes evicted before their turn are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from raycache.cache.persists import MOST_PERSISTS
from raycache.cache.sequences import SequenceCache
from raycache.cache.storage_tier import StorageTier

_MOST_OPEN = 16
"""Saves and persist commands that a flush keeps in progress at a time."""


class Flush:
    """One flush; advances with each poll of the storage's results.

    Args:
        storage: the storage tier of `cache`.
        deadline_s: on the clock of `go_on`; commands issued by then still complete.
    Attributes:
        answer: completed with {"is_in_time": whether everything was tried before the deadline, "persisted_pages": pages
            stored since the start, "missing_pages": host pages that the storage still lacks}.
    """

    def __init__(self, cache: SequenceCache, storage: StorageTier, *, deadline_s: float) -> None:
        self.answer: Future[Mapping[str, Any]] = Future()
        self._cache, self._storage, self._deadline_s = cache, storage, deadline_s
        self._num_before = storage.persists.num_persisted
        self._num_saving = 0
        self._open_persists: set[int] = set()
        self._steps = self._ask_for_all()

    def go_on(self, now_s: float) -> bool:
        """Issue as many commands as may be in progress.

        Args:
            now_s: monotonic clock, seconds.
        Returns:
            Whether the flush is done.
        """
        if now_s >= self._deadline_s:
            return self._end(is_in_time=False)
        self._open_persists &= self._storage.persists.open
        while len(self._open_persists) + self._num_saving < _MOST_OPEN:
            may_go_on = next(self._steps, None)
            if may_go_on is None:
                return self._end(is_in_time=True)
            if not may_go_on:
                break
        return False

    def _ask_for_all(self) -> Iterator[bool]:
        """Issue one command per iteration; yields False when one in progress has to end first."""
        yield from self._persist_all()
        for is_saving in self._cache.transfers.save_all(self._saved):
            self._num_saving += is_saving
            yield True
            if not is_saving:
                yield from self._settle()
        yield from self._settle()
        yield from self._persist_all()
        yield from self._settle()

    def _settle(self) -> Iterator[bool]:
        """Wait for all saves and commands in progress."""
        while self._num_saving:
            yield False
        last = set(self._storage.persists.open)
        while not last.isdisjoint(self._storage.persists.open):
            yield False

    def _persist_all(self) -> Iterator[bool]:
        for handle in self._storage.prefixes():
            if number := self._storage.persist(handle):
                self._open_persists.add(number)
            handle.release()
            yield len(self._storage.persists.open) < MOST_PERSISTS

    def _saved(self) -> None:
        self._num_saving -= 1

    def _end(self, *, is_in_time: bool) -> bool:
        self.answer.set_result(
            {
                "is_in_time": is_in_time,
                "persisted_pages": self._storage.persists.num_persisted - self._num_before,
                "missing_pages": self._storage.persists.num_missing,
            }
        )
        return True
