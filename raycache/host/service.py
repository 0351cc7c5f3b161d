"""The owner of a node's host tier: it makes the arena, and moves rows between it and the storage.

It decides nothing and outlives engine and ranks. What it needs to go on after its own death lies beside the arena, so
another owner on the same directory has the same arena and the same storage.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raycache.cache.storage_commands import StorageAnswer, StorageCommand
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
    """An arena that is open.

    Attributes:
        path: of its file.
        spec: what it is.
        is_fresh: it was made anew, and holds nothing.
    """

    path: Path
    spec: HostSpec
    is_fresh: bool


class HostService:
    """One node's host tier. Its methods may be called from several threads.

    Args:
        directory: for its files, made if it is not there; what an owner before has left there is taken over.
    Raises:
        ConfigError: the directory cannot be made, or another process owns it.

    Attributes:
        path: of the arena's file.
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
        """What is open; None for nothing."""
        return self._spec

    def budget(self, host_memory: str) -> int:
        """Bytes that this node can give; see `node_budget`."""
        return node_budget(host_memory)

    def are_ranks_gone(self, timeout_s: float) -> bool:
        """Wait until no process can move rows in the arena any more; see `host_directory.are_ranks_gone`."""
        return host_directory.are_ranks_gone(self._directory, timeout_s=timeout_s)

    def drop(self) -> None:
        """Let go of the arena and of the storage, which keeps what it has; the next `open` makes both anew."""
        with self._lock:
            self._let_go()
            self._file.remove()

    def open(self, spec: HostSpec, *, epoch: int = 0) -> Opened:
        """Make the arena and open the storage. What is open already and suits stays as it is.

        Args:
            spec: what is needed.
            epoch: of the decider that asks, above those before; what they asked for is over when this returns.
        Returns:
            What is open now: as asked for, or with the sizes and the storage that it had before.
        Raises:
            ConfigError: there is no memory for it, or the storage refuses us at the first start. Later there are
                requests to go on with, which need no storage.
        """
        is_fresh = True
        with self._lock:
            if self._spec is None or not self._spec.suits(spec):
                self._let_go()
                self._make(spec)
                self._use_storage(spec, is_needed=not epoch)
                self._spec = self._file.keep(spec)
            elif self._storage is not None and not self._storage.fence(epoch):
                _log.warning("storage calls of the engine before do not end; the host tier begins anew, without them")
                self._storage.use(self._spec, self._make(self._spec))
            else:
                is_fresh = False
            assert self._arena is not None, "it is made or was open"
            self._arena.epoch = epoch
            return Opened(self.path, self._opened(), is_fresh)

    def work(self, command: StorageCommand) -> StorageAnswer:
        """Carry out one command of a storage lane.

        Raises:
            OSError: there is no storage.
        """
        if (storage := self._storage) is None:
            raise OSError("the host tier has no storage")
        return storage.work(command)

    def attach(self, url: str) -> str:
        """Use a storage, instead of the one in use; returns its name.

        Raises:
            ConfigError: it cannot work, is in use already, or there is no arena.
        """
        with self._lock:
            spec = replace(self._opened(), storage=url, storage_bytes=0)
            name = storage_name(spec.own_storage)
            if self._storage is not None and self._storage.name == name:
                raise ConfigError(f"storage {name} is attached already; change its bound by resize, or detach it first")
            self._use_storage(spec)
            self._spec = self._file.keep(spec)
        return name

    def detach(self) -> str:
        """Use no storage any more; it keeps what it has. Returns its name.

        Raises:
            ConfigError: there is none.
        """
        with self._lock:
            name = self._attached().name
            spec = replace(self._opened(), storage="", storage_bytes=0)
            self._use_storage(spec)
            self._spec = self._file.keep(spec)
        return name

    def clear(self) -> None:
        """Forget all that the storage holds; nothing to do without one."""
        if (storage := self._storage) is not None:
            storage.clear()

    def resize(self, max_bytes: int) -> None:
        """Change the bound of the storage.

        Raises:
            ConfigError: it is too small or not ours to set, or there is no storage.
        """
        with self._lock:
            self._attached().resize(max_bytes)
            self._spec = self._file.keep(replace(self._opened(), storage_bytes=max_bytes))

    def scrub(self, *, timeout_s: float = math.inf) -> dict[str, Any]:
        """Read everything that the storage holds and drop what is damaged, for so long at most.

        Returns:
            Fields of `Scrub`.
        Raises:
            ConfigError: the storage is away, or there is none.
        """
        return self._attached().scrub(timeout_s=timeout_s)

    def status(self) -> dict[str, Any]:
        """Of the storage: its "name", whether it "is_up", and the fields of `StorageStats`; empty without one."""
        return {} if (storage := self._storage) is None else dict(storage.status())

    def close(self) -> None:
        """End it: nothing of it stays in shared memory. The storage keeps what it has."""
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
        # An owner that died while it made one has left half of it.
        self.path.unlink(missing_ok=True)
        self._arena = Arena.create(
            self.path, spec.layout, sizes=spec.sizes, catalog_bytes=spec.catalog_bytes, description=b""
        )
        return self._arena

    def _use_storage(self, spec: HostSpec, *, is_needed: bool = True) -> None:
        """Open the storage of a spec, and only then give up the one in use: a wrong URL must not cost it.

        Args:
            spec: as it will be kept.
            is_needed: or else go on without it if it cannot be opened: an owner on a node that was cut off may have it.
        """
        assert self._arena is not None, "the arena is made before"
        try:
            storage = AttachedStorage(spec, self._arena) if spec.storage else None
        except ConfigError as cause:
            if is_needed:
                raise
            _log.warning("the storage tier of %s is not what it was: %s", self._directory, cause)
            return
        before, self._storage = self._storage, storage
        if storage is not None:
            storage.restore_bound(spec.storage_bytes)
        if before is not None:
            before.close()

    def _take_over(self) -> None:
        """Go on with what an owner before has left."""
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
    """Map the arena that a `HostService` has opened, for ranks and the decider.

    Raises:
        DirectoryGoneError: there is none.
    """
    try:
        return _open_arena(path, SpecFile(path.parent).read())
    except FileNotFoundError as cause:
        raise DirectoryGoneError(f"there is no host tier in {path.parent}: {cause}") from cause


def _open_arena(path: Path, spec: HostSpec) -> Arena:
    return Arena.open(path, spec.layout, sizes=spec.sizes, catalog_bytes=spec.catalog_bytes)
