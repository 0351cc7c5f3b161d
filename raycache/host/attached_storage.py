"""A storage in use by a node's host tier."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from raycache.cache.storage_commands import CommandKind, StorageCommand, StorageResult
from raycache.errors import ConfigError
from raycache.host.spec import HostSpec
from raycache.memory.arena import Arena
from raycache.memory.component import Reuse
from raycache.storage.guard import Guarded
from raycache.storage.open import open_storage
from raycache.storage.storage_worker import StorageWorker

_log = logging.getLogger(__name__)
FENCE_TIMEOUT_S = 20.0
"""How long to wait for storage calls of a dead decider; calls across a network time out sooner."""


class AttachedStorage:
    """A storage, and the worker that moves units between it and an arena. Thread safe.

    Args:
        spec: must name a storage.
    Raises:
        ConfigError: the storage cannot be opened.
    """

    def __init__(self, spec: HostSpec, arena: Arena) -> None:
        self._storage: Guarded = open_storage(spec.own_storage, timeout_s=spec.storage_timeout_s)
        self._worker = _worker(spec, arena, self._storage)

    @property
    def name(self) -> str:
        """URL of the storage, without passwords."""
        return self._storage.name

    def work(self, command: StorageCommand) -> StorageResult:
        """Execute one command of a storage lane.

        Raises:
            OSError: the storage cannot be reached.
        """
        result = self._worker.work(command)
        if command.kind in (CommandKind.FIND, CommandKind.LIST) and not self._storage.is_up:
            raise OSError(f"storage {self.name} cannot be reached")  # not to be confused with finding nothing
        return result

    def fence(self, epoch: int) -> bool:
        return self._worker.fence(epoch, timeout_s=FENCE_TIMEOUT_S)

    def use(self, spec: HostSpec, arena: Arena) -> None:
        """Switch to another arena; calls in progress keep the old one."""
        self._worker = _worker(spec, arena, self._storage)

    def restore_bound(self, max_bytes: int) -> None:
        """Apply the size limit that an operator has set, in bytes; 0: none was set."""
        if max_bytes:
            try:
                self.resize(max_bytes)
            except ConfigError as cause:
                _log.warning("the size limit of storage %s could not be applied: %s", self.name, cause)

    def resize(self, max_bytes: int) -> None:
        """Change the size limit of the storage.

        Raises:
            ConfigError: the limit is too small, or the storage's server sets it.
        """
        self._storage.resize(max_bytes)

    def clear(self) -> None:
        """Delete everything in the storage."""
        self._worker.settle(timeout_s=FENCE_TIMEOUT_S)  # else writes in progress would survive
        self._storage.clear()

    def scrub(self, *, timeout_s: float = math.inf) -> dict[str, Any]:
        return asdict(self._storage.scrub(until_s=time.monotonic() + timeout_s))

    def status(self) -> Mapping[str, Any]:
        return {"name": self.name, "is_up": self._storage.is_up, **asdict(self._storage.stats())}

    def close(self) -> None:
        """Close the storage after its last call; its contents stay."""
        self._storage.close()


def _worker(spec: HostSpec, arena: Arena, storage: Guarded) -> StorageWorker:
    states = [part.space for part in spec.components if part.reuse is Reuse.STATE_HERE]
    return StorageWorker(
        arena,
        spec.layout,
        storage,
        page_size=spec.page_size,
        windows={part.space: part.window for part in spec.components if part.window},
        state_space=states[0] if states else "",
        epoch=arena.epoch,
    )
