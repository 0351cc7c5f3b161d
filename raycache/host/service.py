"""The owner of a node's host tier: makes the arena, and moves rows between it and the storage.

It decides nothing and outlives engine and ranks. Its own state is kept beside the arena, so that after its death
another owner of the same directory continues with the same arena and storage.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raycache.cache.storage_commands import StorageCommand, StorageResult
from raycache.errors import ConfigError
from raycache.host import directory as host_directory
from raycache.host.attached_storage import AttachedStorage
from raycache.host.directory import ARENA, DirectoryGoneError
from raycache.host.plan import node_budget
from raycache.host.spec import HostSpec, SpecFile
from raycache.memory.arena import Arena
from raycache.storage.open import storage_name

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """An open arena.

    Attributes:
        path: the arena's file.
        spec: what it was made for.
        is_fresh: whether it was just made, and is empty.
    """

    path: Path
    spec: HostSpec
    is_fresh: bool


class HostService:
    """One node's host tier. Thread safe.

    Args:
        directory: for its files; made if necessary. State left there by a previous owner is taken over.
    Raises:
        ConfigError: the directory cannot be made, or another process owns it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory / ARENA
        self._lease = host_directory.own(directory)
        self._lock, self._file = threading.Lock(), SpecFile(directory)
        self._spec: HostSpec | None = None
        self._arena: Arena | None = None
        self._storage: AttachedStorage | None = None
        self._take_over()

    def spec(self) -> HostSpec | None:
        """Spec of the open arena, or None."""
        return self._spec

    def budget(self, host_memory: str) -> int:
        """Bytes of this node that the host tier may use (see `node_budget`)."""
        return node_budget(host_memory)

    def are_ranks_gone(self, timeout_s: float) -> bool:
        """Wait until no process can move rows in the arena (see `directory.are_ranks_gone`)."""
        return host_directory.are_ranks_gone(self._directory, timeout_s=timeout_s)

    def drop(self) -> None:
        """Release arena and storage; the next `open` makes a new arena. The storage keeps its contents."""
        with self._lock:
            self._let_go()
            self._file.remove()

    def open(self, spec: HostSpec, *, epoch: int = 0) -> Opened:
        """Make the arena and open the storage; those already open are kept if compatible.

        Args:
            spec: the requirements.
            epoch: the calling decider's epoch, above all former ones; their commands have ended when this returns.
        Returns:
            The open arena: as specified, or an existing one with its own sizes and storage.
        Raises:
            ConfigError: there is too little memory, or at the first start the storage cannot be opened. Later the
                engine continues without the storage, for the sake of running requests.
        """
        is_fresh = True
        with self._lock:
            if self._spec is None or not self._spec.suits(spec):
                self._let_go()
                self._make(spec)
                self._use_storage(spec, is_needed=not epoch)
                self._spec = self._file.keep(spec)
            elif self._storage is not None and not self._storage.fence(epoch):
                _log.warning("storage calls of the previous engine do not end; the host tier starts empty")
                self._storage.use(self._spec, self._make(self._spec))
            else:
                is_fresh = False
            assert self._arena is not None, "the arena is neither new nor open"
            self._arena.epoch = epoch
            return Opened(self.path, self._opened(), is_fresh)

    def work(self, command: StorageCommand) -> StorageResult:
        """Execute one command of a storage lane.

        Raises:
            OSError: no storage is attached, or it cannot be reached.
        """
        if (storage := self._storage) is None:
            raise OSError("the host tier has no storage")
        return storage.work(command)

    def attach(self, url: str) -> str:
        """Attach a storage, replacing the current one; returns its name.

        Raises:
            ConfigError: it cannot be opened, is already attached, or there is no arena.
        """
        with self._lock:
            spec = replace(self._opened(), storage=url, storage_bytes=0)
            name = storage_name(spec.own_storage)
            if self._storage is not None and self._storage.name == name:
                raise ConfigError(
                    f"storage {name} is already attached; change its size with resize, or detach it first"
                )
            self._use_storage(spec)
            self._spec = self._file.keep(spec)
        return name

    def detach(self) -> str:
        """Detach the storage, which keeps its contents; returns its name.

        Raises:
            ConfigError: no storage is attached.
        """
        with self._lock:
            name = self._attached().name
            spec = replace(self._opened(), storage="", storage_bytes=0)
            self._use_storage(spec)
            self._spec = self._file.keep(spec)
        return name

    def clear(self) -> None:
        """Delete everything in the storage, if one is attached."""
        if (storage := self._storage) is not None:
            storage.clear()

    def resize(self, max_bytes: int) -> None:
        """Change the size limit of the storage.

        Raises:
            ConfigError: the limit is too small, the storage's server sets it, or no storage is attached.
        """
        with self._lock:
            self._attached().resize(max_bytes)
            self._spec = self._file.keep(replace(self._opened(), storage_bytes=max_bytes))

    def scrub(self, *, timeout_s: float = math.inf) -> dict[str, Any]:
        """Read everything in the storage and delete damaged objects, for at most `timeout_s` seconds.

        Returns:
            Fields of `Scrub`.
        Raises:
            ConfigError: the storage cannot be reached, or none is attached.
        """
        return self._attached().scrub(timeout_s=timeout_s)

    def status(self) -> dict[str, Any]:
        """State of the storage: "name", "is_up" and the fields of `StorageStats`; empty without one."""
        return {} if (storage := self._storage) is None else dict(storage.status())

    def close(self) -> None:
        """Release everything in shared memory. The storage keeps its contents."""
        with self._lock:
            self._let_go()
            host_directory.remove(self._directory)
            self._lease.close()

    def _opened(self) -> HostSpec:
        if self._spec is None:
            raise ConfigError("the host tier is not open yet; try again when the engine runs")
        return self._spec

    def _attached(self) -> AttachedStorage:
        if self._storage is None:
            raise ConfigError("there is no storage tier; attach one first")
        return self._storage

    def _make(self, spec: HostSpec) -> Arena:
        if self._arena is not None:
            self._arena.close()
        # An owner that died while making an arena has left an incomplete one.
        self.path.unlink(missing_ok=True)
        self._arena = Arena.create(
            self.path, spec.layout, sizes=spec.sizes, catalog_bytes=spec.catalog_bytes, description=b""
        )
        return self._arena

    def _use_storage(self, spec: HostSpec, *, is_needed: bool = True) -> None:
        """Open a spec's storage, and only then release the current one, which a wrong URL must not cost.

        Args:
            spec: will be written to disk.
            is_needed: if False, continue without a storage that cannot be opened: an owner on a node that was cut off
                may still hold it.
        """
        assert self._arena is not None, "the arena must be made before"
        try:
            storage = AttachedStorage(spec, self._arena) if spec.storage else None
        except ConfigError as cause:
            if is_needed:
                raise
            _log.warning("the storage tier of %s cannot be reopened: %s", self._directory, cause)
            return
        before, self._storage = self._storage, storage
        if storage is not None:
            storage.restore_bound(spec.storage_bytes)
        if before is not None:
            before.close()

    def _take_over(self) -> None:
        """Continue with the state of a previous owner, if any."""
        try:
            spec = self._file.read()
            self._arena = _open_arena(self.path, spec)
        except FileNotFoundError:
            return  # there was none
        except (ValueError, TypeError, KeyError) as cause:  # a ConfigError is a ValueError
            _log.warning("the host tier in %s cannot be taken over: %s", self._directory, cause)
            return
        self._spec = spec
        self._use_storage(spec, is_needed=False)

    def _let_go(self) -> None:
        self._spec = None
        if self._storage is not None:
            self._storage.close()
            self._storage = None
        if self._arena is not None:
            self._arena.unlink()
            self._arena.close()
            self._arena = None


def open_arena(path: Path) -> Arena:
    """Map an arena made by a `HostService`, in ranks and the decider.

    Raises:
        DirectoryGoneError: the arena does not exist.
    """
    try:
        return _open_arena(path, SpecFile(path.parent).read())
    except FileNotFoundError as cause:
        raise DirectoryGoneError(f"there is no host tier in {path.parent}: {cause}") from cause


def _open_arena(path: Path, spec: HostSpec) -> Arena:
    return Arena.open(path, spec.layout, sizes=spec.sizes, catalog_bytes=spec.catalog_bytes)
