"""Which keys of a storage have changed: a bounded log, so that a reader needs to list everything only once."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from raycache.storage.base import Changes

_MOST_KEPT = 1 << 16


class ChangeLog:
    """The last keys that were stored or dropped; nothing is noted before the first reader. Not thread safe.

    A version is "NAME:NUMBER": a random name of this log, and how many changes there had been.

    Args:
        most_kept: changes; who asks for earlier ones gets everything.
    """

    def __init__(self, *, most_kept: int = _MOST_KEPT) -> None:
        self._name = secrets.token_hex(8)
        self._kept: deque[bytes] = deque(maxlen=most_kept)
        self._num_noted = 0
        self._is_read = False

    def note(self, keys: Iterable[bytes]) -> None:
        """Note that keys were stored or dropped."""
        if self._is_read:
            for key in keys:
                self._kept.append(key)
                self._num_noted += 1

    def since(self, version: str, all_keys: Callable[[], Sequence[bytes]]) -> Changes:
        """Return the changes since a version, or all keys."""
        self._is_read = True
        now = f"{self._name}:{self._num_noted}"
        name, _, number = version.partition(":")
        num_missed = self._num_noted - int(number) if name == self._name else len(self._kept) + 1
        if num_missed > len(self._kept):
            return Changes(now, is_whole=True, keys=all_keys())
        return Changes(now, is_whole=False, keys=list(islice(self._kept, len(self._kept) - num_missed, None)))
