"""A storage in use by a node's host tier."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from raycache.cache.storage_commands import CommandKind, StorageAnswer, StorageCommand
from raycache.errors import ConfigError
from raycache.host.spec import HostSpec
from raycache.memory.arena import Arena
from raycache.memory.component import Reuse
from raycache.storage.guard import Guarded
from raycache.storage.open import open_storage
from raycache.storage.storage_worker import StorageWorker

_log = logging.getLogger(__name__)
FENCE_TIMEOUT_S = 20.0
"""For storage calls that a decider gave before it died; those across a network give up sooner."""


class AttachedStorage:
    """A storage, and the worker that moves units between it and an arena. Safe to be called from several threads.

    Args:
        spec: of the host tier, with a storage.
        arena: of the node.
    Raises:
        ConfigError: the storage refuses us.
    """

    def __init__(self, spec: HostSpec, arena: Arena) -> None:
        self._storage: Guarded = open_storage(spec.own_storage, timeout_s=spec.storage_timeout_s)
        self._worker = _worker(spec, arena, self._storage)

    @property
    def name(self) -> str:
        """Of the storage, without passwords."""
        return self._storage.name

    def work(self, command: StorageCommand) -> StorageAnswer:
        """Carry out one command of a storage lane.

        Raises:
            OSError: nothing can be found, as the storage is away.
        """
        answer = self._worker.work(command)
        if command.kind is CommandKind.FIND and not self._storage.is_up:
            raise OSError(f"storage {self.name} cannot be reached")  # not the same as having nothing
        return answer

    def fence(self, epoch: int) -> bool:
        """See `StorageWorker.fence`."""
        return self._worker.fence(epoch, timeout_s=FENCE_TIMEOUT_S)

    def use(self, spec: HostSpec, arena: Arena) -> None:
        """Go on with another arena; what still runs keeps the one before."""
        self._worker = _worker(spec, arena, self._storage)

    def restore_bound(self, max_bytes: int) -> None:
        """Give the storage the bound that an operator has set; 0 for none."""
        if max_bytes:
            try:
                self.resize(max_bytes)
            except ConfigError as cause:
                _log.warning("storage %s has not the bound that was set: %s", self.name, cause)

    def resize(self, max_bytes: int) -> None:
        """Change the bound of the storage.

        Raises:
            ConfigError: it is too small or not ours to set.
        """
        self._storage.resize(max_bytes)

    def clear(self) -> None:
        """Forget all that the storage holds."""
        self._worker.settle(timeout_s=FENCE_TIMEOUT_S)  # or what is being stored would be there afterwards
        self._storage.clear()

    def scrub(self, *, timeout_s: float = math.inf) -> dict[str, Any]:
        """See `HostService.scrub`."""
        return asdict(self._storage.scrub(until_s=time.monotonic() + timeout_s))

    def status(self) -> Mapping[str, Any]:
        """See `HostService.status`."""
        return {"name": self.name, "is_up": self._storage.is_up, **asdict(self._storage.stats())}

    def close(self) -> None:
        """Let go of the storage, with the last call that is in it; it keeps what it has."""
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
