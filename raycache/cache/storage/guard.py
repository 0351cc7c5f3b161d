"""A storage that may be away: at the start, now, or from now on. What cannot be reached is a miss.

    up --OSError--> down: everything misses at once --pause over--> opened again by whoever comes next

While it is down nobody waits for it. The operator reads of it once a minute and sees it in the counters.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from raycache.cache.storage.base import Buffer, Fetch, Storage, StorageStats

_LOG = logging.getLogger(__name__)
_WARN_EVERY_S = 60.0
T = TypeVar("T")


class Guarded:
    """A backend that never raises for being away.

    Args:
        open_storage: connects; raises OSError when there is nothing to connect to. ConfigError passes through.
        name: for warnings, such as "file:/var/cache/raycache".
        retry_s: pause after a failure.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        open_storage: Callable[[], Storage],
        *,
        name: str,
        retry_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open, self._name, self._retry_s, self._clock = open_storage, name, retry_s, clock
        self._lock = threading.Lock()
        self._storage: Storage | None = None
        self._last = StorageStats()
        self._retry_at_s = self._warn_at_s = clock()
        self._num_unavailable = 0
        self._is_closed = False
        self._reach()

    @property
    def is_up(self) -> bool:
        """Whether the last call reached it."""
        return self._storage is not None

    def put(self, keys: Sequence[bytes], *, payloads: Sequence[Buffer]) -> list[bool]:
        """See `Storage.put`."""
        stored = self._ask(lambda storage: storage.put(keys, payloads=payloads), None)
        return [False] * self._away(len(keys)) if stored is None else stored

    def get(self, keys: Sequence[bytes], *, into: Sequence[Buffer]) -> list[Fetch]:
        """See `Storage.get`."""
        found = self._ask(lambda storage: storage.get(keys, into=into), None)
        return [Fetch.UNAVAILABLE] * self._away(len(keys)) if found is None else found

    def contains(self, keys: Sequence[bytes], *, touch: bool) -> list[bool]:
        """See `Storage.contains`."""
        stored = self._ask(lambda storage: storage.contains(keys, touch=touch), None)
        return [False] * self._away(len(keys)) if stored is None else stored

    def clear(self) -> None:
        """See `Storage.clear`; what is away keeps what it has."""
        self._ask(lambda storage: storage.clear(), None)

    def stats(self) -> StorageStats:
        """See `Storage.stats`; the last that were seen, while it is away."""
        self._last = self._ask(lambda storage: storage.stats(), self._last)
        return replace(self._last, unavailable=self._last.unavailable + self._num_unavailable)

    def close(self) -> None:
        """See `Storage.close`."""
        self._ask(lambda storage: storage.close(), None)
        with self._lock:
            self._is_closed, self._storage = True, None

    def _away(self, num_keys: int) -> int:
        with self._lock:
            self._num_unavailable += num_keys
        return num_keys

    def _ask(self, question: Callable[[Storage], T], miss: T) -> T:
        storage = self._reach()
        if storage is None:
            return miss
        try:
            return question(storage)
        except OSError as error:
            self._lose(storage, error)
            return miss

    def _reach(self) -> Storage | None:
        """The backend, opened again if it is time to; whoever comes while another opens it does not wait."""
        if self._storage is not None or self._is_closed or self._clock() < self._retry_at_s:
            return self._storage
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._storage is None and not self._is_closed:
                self._storage = self._open()
        except OSError as error:
            self._retry_at_s = self._clock() + self._retry_s
            self._warn(error)
        finally:
            self._lock.release()
        return self._storage

    def _lose(self, storage: Storage, error: OSError) -> None:
        with self._lock:
            if self._storage is not storage:
                return  # another thread saw it first
            self._storage = None
            self._retry_at_s = self._clock() + self._retry_s
            self._warn(error)
        # What was asked last is unknown, and so is whether closing can work.
        with contextlib.suppress(OSError):
            storage.close()

    def _warn(self, error: OSError) -> None:
        if self._clock() >= self._warn_at_s:
            self._warn_at_s = self._clock() + _WARN_EVERY_S
            _LOG.warning(
                "storage %s cannot be reached (%s): prefixes that only it has are computed again; next try in %.0f s",
                self._name,
                error,
                self._retry_s,
            )
