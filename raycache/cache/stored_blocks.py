"""Asks the storage for what it has, so that KV events can tell (kv_events.py).

    start, persisted, not found, every 10 s of steps -> LIST since the last version -> StorageEvents

The storage evicts on its own, other processes may have filled it, and operators resize and clear it: only the storage
knows its content. One listing is asked for at a time; a failed one is asked for again.
"""

from __future__ import annotations

from raycache.cache.kv_events import StorageEvents
from raycache.cache.storage_commands import CommandKind, Outcome, StorageClient, StorageResult

_RETRY_S = 1.0
_EVERY_S = 10.0


class StoredBlocks:
    """Keeps the events of the storage up to date.

    Args:
        commands: sends commands to the storage.
        events: of the storage; None: nobody wants them.
    """

    def __init__(self, commands: StorageClient, events: StorageEvents | None) -> None:
        self._commands, self.events = commands, events
        self._version = ""
        self._open: int | None = None
        self._is_wanted = self._can_ask = events is not None
        self._is_resting = False
        self._at_s = 0.0

    @property
    def num_open(self) -> int:
        """Listings in progress, or to be asked for at once."""
        return int(self._open is not None or (self._is_wanted and self._can_ask))

    def want(self) -> None:
        """Note that the content may have changed."""
        self._is_wanted = self._can_ask = self.events is not None

    def forget(self, *, is_empty: bool) -> None:
        """The storage was replaced, or is detached or about to be emptied.

        Args:
            is_empty: whether it counts as empty until it is asked again, which is not at once: its owner empties it
                after the decider was told.
        """
        self._version, self._open = "", None
        self.want()
        if self.events is not None and is_empty:
            self._can_ask, self._is_resting = False, True
            self.events.remove()

    def poll(self, *, now_s: float) -> None:
        """Ask for a listing if one is wanted; only while a storage is attached."""
        if self.events is None or self._open is not None:
            return
        if self._is_resting:
            self._at_s, self._is_resting = now_s, False
        if now_s - self._at_s >= (_RETRY_S if self._is_wanted else _EVERY_S):
            self._is_wanted = self._can_ask = True
        if self._is_wanted and self._can_ask:
            self._is_wanted, self._at_s = False, now_s
            self._open = self._commands.post(CommandKind.LIST, "events", version=self._version)

    def take(self, result: StorageResult) -> None:
        """Apply a listing; one of an earlier storage is ignored."""
        if result.number != self._open or self.events is None:
            return
        self._open = None
        if result.outcome is not Outcome.DONE:
            self._is_wanted, self._can_ask = True, False
        elif result.listed.version:
            self._version = result.listed.version
            self.events.take(result.listed)
