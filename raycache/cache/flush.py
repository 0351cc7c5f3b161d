"""All that the device and the host hold, brought to the storage: before a node or a replica goes away.

    host's prefixes that the storage lacks -> persisted
    device's prefixes that the host lacks  -> saved; what enters the host is persisted, as always
    host's prefixes again                  -> persisted, in case there were too many commands for some

Some commands at a time, between steps, so that requests go on meanwhile. What is evicted before its turn is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from raycache.cache.persists import MOST_PERSISTS
from raycache.cache.sequences import SequenceCache
from raycache.cache.storage_tier import StorageTier

_MOST_OPEN = 16
"""Saves, and commands to persist, that one flush has under way at a time."""


class Flush:
    """One flush; goes on with each look at the storage's answers.

    Args:
        cache: to bring to its storage.
        storage: that the cache has.
        deadline_s: on the clock of `go_on`; what has been asked for by then still comes to its end.
    Attributes:
        answer: gets {"is_in_time": whether all of it was tried before the deadline, "persisted_pages": pages that the
            storage took since it began, "missing_pages": those of the host that the storage lacks at the end}.
    """

    def __init__(self, cache: SequenceCache, storage: StorageTier, *, deadline_s: float) -> None:
        self.answer: Future[Mapping[str, Any]] = Future()
        self._cache, self._storage, self._deadline_s = cache, storage, deadline_s
        self._num_before = storage.persists.num_persisted
        self._num_saving = 0
        self._open_persists: set[int] = set()
        self._steps = self._ask_for_all()

    def go_on(self, now_s: float) -> bool:
        """Ask for as much as may be under way.

        Args:
            now_s: monotonic clock, seconds.
        Returns:
            Whether it is over.
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
        """Ask for one thing at each turn, or say with False that something has to end first."""
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
        """Wait for all that is on its way now."""
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
