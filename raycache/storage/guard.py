"""A storage that may be unreachable at any time; then every access is a miss.

    up --OSError--> down: everything misses at once --pause over--> reopened by the next caller

Nothing waits for an unreachable storage. Operators see a warning per minute, and a counter. An abandoned backend is
closed when its last call has returned, since a file descriptor closed earlier might be reused for another file.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from raycache.cache.storage_commands import Fetch
from raycache.errors import ConfigError
from raycache.memory.checksum import Buffer
from raycache.storage.base import Changes, Scrub, Storage, StorageStats

_LOG = logging.getLogger(__name__)
_WARN_EVERY_S = 60.0


@dataclass(eq=False)
class _Opened:
    """A backend in use.

    Attributes:
        storage: the backend.
        num_calls: calls in progress.
        is_over: whether it is abandoned; its last call closes it.
    """

    storage: Storage
    num_calls: int = 0
    is_over: bool = False


class Guarded:
    """Wraps a backend so that its being unreachable raises only for operator commands.

    Args:
        open_storage: connects; raises OSError if the backend is unreachable. A ConfigError is raised only by the first
            attempt, in this constructor.
        name: for warnings, such as "file:/var/cache/raycache".
        retry_s: pause after a failure.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        open_storage: Callable[[], Storage],
        *,
        name: str,
        retry_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._open, self._retry_s, self._clock = open_storage, retry_s, clock
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._opened: _Opened | None = None
        self._max_bytes = 0  # as resized
        self._last = StorageStats()
        self._retry_at_s = self._warn_at_s = clock()
        self._num_unavailable = 0
        self._is_closed = False
        try:
            self._opened = _Opened(open_storage())
        except OSError as error:
            self._pause(error)

    @property
    def is_up(self) -> bool:
        """Whether the last call reached the backend."""
        return self._opened is not None

    def put(self, keys: Sequence[bytes], *, payloads: Sequence[Buffer], checksums: Sequence[int] = ()) -> list[bool]:
        with self._ask() as storage:
            if storage is not None:
                return storage.put(keys, payloads=payloads, checksums=checksums)
        return [False] * self._away(len(keys))

    def get(self, keys: Sequence[bytes], *, into: Sequence[Buffer]) -> list[Fetch]:
        with self._ask() as storage:
            if storage is not None:
                return storage.get(keys, into=into)
        return [Fetch.UNAVAILABLE] * self._away(len(keys))

    def contains(self, keys: Sequence[bytes], *, touch: bool) -> list[bool]:
        with self._ask() as storage:
            if storage is not None:
                return storage.contains(keys, touch=touch)
        return [False] * self._away(len(keys))

    def checksums(self, keys: Sequence[bytes]) -> list[int]:
        """Known checksums; none while the storage is unreachable."""
        with self._ask() as storage:
            if storage is not None:
                return storage.checksums(keys)
        return [0] * len(keys)

    def suffixes(self) -> set[bytes]:
        """Key suffixes; none while the storage is unreachable."""
        with self._ask() as storage:
            if storage is not None:
                return storage.suffixes()
        return set()

    def changes(self, since: str) -> Changes | None:
        """Changes.

        Raises:
            OSError: the storage is unreachable.
        """
        with self._ask() as storage:
            if storage is not None:
                return storage.changes(since)
        raise OSError(f"storage {self.name} cannot be reached")

    def stats(self) -> StorageStats:
        """Statistics; the last known ones while the storage is unreachable."""
        with self._ask() as storage:
            if storage is not None:
                self._last = storage.stats()
        return replace(self._last, unavailable=self._last.unavailable + self._num_unavailable)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            opened, self._opened = self._opened, None
            if opened is None:
                return
            opened.is_over = True
            is_empty = not opened.num_calls
        if is_empty:
            _close(opened.storage)

    def clear(self) -> None:
        """Delete everything.

        Raises:
            ConfigError: the storage is unreachable, and keeps its contents.
        """
        with self._ask() as storage:
            if storage is not None:
                storage.clear()
                return
        raise ConfigError(f"storage {self.name} is unreachable and keeps its contents; try again later")

    def resize(self, max_bytes: int) -> None:
        """Change the size limit, also for when the storage is reopened.

        Raises:
            ConfigError: the limit is too small or set by the server, or the storage is unreachable.
        """
        with self._ask() as storage:
            if storage is not None:
                storage.resize(max_bytes)
                self._max_bytes = max_bytes
                return
        raise ConfigError(f"storage {self.name} is unreachable and keeps its size limit; try again later")

    def scrub(self, *, until_s: float = math.inf) -> Scrub:
        """Read every object and delete damaged ones.

        Raises:
            ConfigError: the storage is unreachable.
        """
        with self._ask() as storage:
            if storage is not None:
                return storage.scrub(until_s=until_s)
        raise ConfigError(f"storage {self.name} is unreachable; try again later")

    @contextlib.contextmanager
    def _ask(self) -> Iterator[Storage | None]:
        """Lend the backend for one call, None if unreachable; on OSError, suppresses it and abandons the backend."""
        opened = self._enter()
        if opened is None:
            yield None
            return
        try:
            yield opened.storage
        except OSError as error:
            self._lose(opened, error)
        finally:
            self._leave(opened)

    def _away(self, num_keys: int) -> int:
        with self._lock:
            self._num_unavailable += num_keys
        return num_keys

    def _enter(self) -> _Opened | None:
        if self._opened is None and not self._is_closed and self._clock() >= self._retry_at_s:
            self._open_again()
        with self._lock:
            opened = self._opened
            if opened is not None:
                opened.num_calls += 1
        return opened

    def _open_again(self) -> None:
        """Reopen the backend; does nothing while another thread is reopening it."""
        if not self._opening.acquire(blocking=False):
            return
        try:
            if self._opened is not None:
                return
            storage = _open_resized(self._open, self._max_bytes)
            with self._lock:
                if not self._is_closed:
                    self._opened = _Opened(storage)
                    return
            _close(storage)
        except (OSError, ConfigError) as error:
            self._pause(error)
        finally:
            self._opening.release()

    def _lose(self, opened: _Opened, error: OSError) -> None:
        with self._lock:
            if self._opened is not opened:
                return  # another thread saw it first
            self._opened = None
            opened.is_over = True
        self._pause(error)

    def _leave(self, opened: _Opened) -> None:
        with self._lock:
            opened.num_calls -= 1
            is_last = opened.is_over and not opened.num_calls
        if is_last:
            _close(opened.storage)

    def _pause(self, error: OSError | ConfigError) -> None:
        self._retry_at_s = self._clock() + self._retry_s
        if self._clock() >= self._warn_at_s:
            self._warn_at_s = self._clock() + _WARN_EVERY_S
            _LOG.warning(
                "storage %s cannot be reached (%s): prefixes stored only there are recomputed; retrying in %.0f s",
                self.name,
                error,
                self._retry_s,
            )


def _open_resized(open_storage: Callable[[], Storage], max_bytes: int) -> Storage:
    storage = open_storage()
    try:
        if max_bytes:
            storage.resize(max_bytes)
    except OSError:
        _close(storage)
        raise
    return storage


def _close(storage: Storage) -> None:
    # The backend may be unreachable, so closing can fail.
    with contextlib.suppress(OSError):
        storage.close()
