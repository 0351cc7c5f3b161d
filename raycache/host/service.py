"""The owner of a node's host tier: it makes the arena, and moves rows between it and the storage.

It decides nothing and outlives engine and ranks. What it needs to go on after its own death lies beside the arena, so
another owner on the same directory has the same arena and the same storage.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from raycache.cache.storage_orders import OrderKind, StorageAnswer, StorageOrder
from raycache.errors import ConfigError
from raycache.host import directory as host_directory
from raycache.host.directory import ARENA, SPEC, DirectoryGoneError
from raycache.host.plan import node_budget
from raycache.host.spec import HostSpec
from raycache.memory.arena import Arena
from raycache.memory.component import Reuse
from raycache.storage.guard import Guarded
from raycache.storage.librarian import Librarian
from raycache.storage.open import open_storage, storage_name

_log = logging.getLogger(__name__)
_FENCE_TIMEOUT_S = 20.0
"""For storage calls that a decider gave before it died; those across a network give up sooner."""


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
        self._lock = threading.Lock()
        self._spec: HostSpec | None = None
        self._arena: Arena | None = None
        self._storage: Guarded | None = None
        self._librarian: Librarian | None = None
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
            (self._directory / SPEC).unlink(missing_ok=True)

    def open(self, spec: HostSpec, *, epoch: int = 0) -> Opened:
        """Make the arena and open the storage. What is open already and suits stays as it is.

        Args:
            spec: what is needed.
            epoch: of the decider that asks, above those before; what they ordered is over when this returns.
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
                if epoch:
                    self._reopen_storage(spec)
                else:
                    self._open_storage(spec)
                    self._restore_bound(spec)
                self._keep(spec)
            elif self._librarian is not None and not self._librarian.fence(epoch, timeout_s=_FENCE_TIMEOUT_S):
                _log.warning("storage calls of the engine before do not end; the host tier begins anew, without them")
                self._make(self._spec)
                self._librarian = self._new_librarian(self._spec)
            else:
                is_fresh = False
            assert self._arena is not None, "it is made or was open"
            self._arena.epoch = epoch
            return Opened(self.path, self._opened(), is_fresh)

    def work(self, order: StorageOrder) -> StorageAnswer:
        """Carry out one order of a storage lane.

        Raises:
            OSError: there is no storage.
        """
        librarian, storage = self._librarian, self._storage
        if librarian is None or storage is None:
            raise OSError("the host tier has no storage")
        answer = librarian.work(order)
        if order.kind is OrderKind.FIND and not storage.is_up:
            raise OSError(f"storage {storage.name} cannot be reached")  # not the same as having nothing
        return answer

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
            self._open_storage(spec)
            self._keep(spec)
        return name

    def detach(self) -> str:
        """Use no storage any more; it keeps what it has. Returns its name.

        Raises:
            ConfigError: there is none.
        """
        with self._lock:
            name = self._attached().name
            spec = replace(self._opened(), storage="", storage_bytes=0)
            self._open_storage(spec)
            self._keep(spec)
        return name

    def clear(self) -> None:
        """Forget all that the storage holds; nothing to do without one."""
        librarian, storage = self._librarian, self._storage
        if librarian is not None and storage is not None:
            librarian.settle(timeout_s=_FENCE_TIMEOUT_S)  # or what is being stored would be there afterwards
            storage.clear()

    def resize(self, max_bytes: int) -> None:
        """Change the bound of the storage.

        Raises:
            ConfigError: it is too small or not ours to set, or there is no storage.
        """
        with self._lock:
            self._attached().resize(max_bytes)
            self._keep(replace(self._opened(), storage_bytes=max_bytes))

    def scrub(self, *, timeout_s: float = math.inf) -> dict[str, Any]:
        """Read everything that the storage holds and drop what is damaged, for so long at most.

        Returns:
            Fields of `Scrub`.
        Raises:
            ConfigError: the storage is away, or there is none.
        """
        return asdict(self._attached().scrub(until_s=time.monotonic() + timeout_s))

    def status(self) -> dict[str, Any]:
        """Of the storage: its "name", whether it "is_up", and the fields of `StorageStats`; empty without one."""
        if (storage := self._storage) is None:
            return {}
        figures = asdict(storage.stats())
        return {"name": storage.name, "is_up": storage.is_up, **figures}

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

    def _attached(self) -> Guarded:
        if self._storage is None:
            raise ConfigError("there is no storage tier; attach one first")
        return self._storage

    def _make(self, spec: HostSpec) -> None:
        if self._arena is not None:
            self._arena.close()
        # An owner that died while it made one has left half of it.
        self.path.unlink(missing_ok=True)
        self._arena = Arena.create(
            self.path, spec.layout, sizes=spec.sizes, catalog_bytes=spec.catalog_bytes, description=b""
        )

    def _open_storage(self, spec: HostSpec) -> None:
        """Open the storage of a spec, and only then give up the one in use: a wrong URL must not cost it."""
        storage = open_storage(spec.own_storage, timeout_s=spec.storage_timeout_s) if spec.storage else None
        before, self._storage = self._storage, storage
        self._librarian = self._new_librarian(spec)
        if before is not None:
            before.close()  # with the last call that is in it

    def _reopen_storage(self, spec: HostSpec) -> None:
        """Go on with the storage, or without: an owner on a node that was cut off may still have it."""
        try:
            self._open_storage(spec)
            self._restore_bound(spec)
        except ConfigError as cause:
            _log.warning("the storage tier of %s is not what it was: %s", self._directory, cause)

    def _restore_bound(self, spec: HostSpec) -> None:
        """Give the storage the bound that an operator has set."""
        if spec.storage_bytes:
            try:
                self._attached().resize(spec.storage_bytes)
            except ConfigError as cause:
                _log.warning("the storage tier of %s has not the bound that was set: %s", self._directory, cause)

    def _new_librarian(self, spec: HostSpec) -> Librarian | None:
        if self._storage is None:
            return None
        assert self._arena is not None, "the arena is made before"
        states = [part.space for part in spec.components if part.reuse is Reuse.STATE_HERE]
        return Librarian(
            self._arena,
            spec.layout,
            self._storage,
            page_size=spec.page_size,
            windows={part.space: part.window for part in spec.components if part.window},
            state_space=states[0] if states else "",
            epoch=self._arena.epoch,
        )

    def _keep(self, spec: HostSpec) -> None:
        """Remember it for this owner and the next; whole or not at all."""
        self._spec = spec
        fresh = self._directory / "spec.new"
        # Nobody else may read it: a URL can hold a password.
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(spec.packed())
        fresh.replace(self._directory / SPEC)

    def _take_over(self) -> None:
        """Go on with what an owner before has left."""
        try:
            spec = _read_spec(self._directory)
            self._arena = _open_arena(self.path, spec)
        except FileNotFoundError:
            return  # there was none
        except (ValueError, TypeError, KeyError) as cause:  # a ConfigError is a ValueError
            _log.warning("the host tier in %s cannot be taken over: %s", self._directory, cause)
            return
        self._spec = spec
        self._reopen_storage(spec)

    def _let_go(self) -> None:
        self._spec = self._librarian = None
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
        return _open_arena(path, _read_spec(path.parent))
    except FileNotFoundError as cause:
        raise DirectoryGoneError(f"there is no host tier in {path.parent}: {cause}") from cause


def _open_arena(path: Path, spec: HostSpec) -> Arena:
    return Arena.open(path, spec.layout, sizes=spec.sizes, catalog_bytes=spec.catalog_bytes)


def _read_spec(directory: Path) -> HostSpec:
    return HostSpec.read((directory / SPEC).read_bytes())
