"""The owner of the host tier of one node, as an actor."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

from raycache.cache.storage_commands import StorageCommand, StorageResult
from raycache.config import Config
from raycache.errors import ConfigError
from raycache.host.commands import carry_out
from raycache.host.service import HostService
from raycache.observe import logs
from raycache.types import CacheCommand


class ArenaActor(HostService):
    """A `HostService` as an actor. Calls that must not queue behind others use a concurrency group (arena.py)."""

    def __init__(self, directory: Path, config: Config, replica: str) -> None:
        logs.set_up_actor(config.log_format, replica=replica)
        self._name = f"host tier of {config.model_name}, replica {replica}"
        self._scrubbing = threading.Lock()
        super().__init__(directory)

    def __repr__(self) -> str:
        """What the Ray dashboard and logs call it."""
        return self._name

    def work(self, command: StorageCommand) -> StorageResult:
        return super().work(command.received())

    def carry_out(self, command: CacheCommand) -> dict[str, Any]:
        return carry_out(command, self)

    def scrub(self, *, timeout_s: float = math.inf) -> dict[str, Any]:
        if not self._scrubbing.acquire(blocking=False):
            raise ConfigError("a scrub of the storage is already running; try again when it is done")
        try:
            return super().scrub(timeout_s=timeout_s)
        finally:
            self._scrubbing.release()
