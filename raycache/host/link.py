"""How an engine and its ranks reach their host tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from raycache.cache.storage_commands import StorageCommand, StorageResult


@dataclass(frozen=True)
class HostLink:
    """The host tier of a gang.

    Attributes:
        path: the arena's file on the decider's node.
        sizes: component space -> number of host units.
        work: executes a storage command in the owner's process; raises OSError if there is no storage or no owner.
        has_storage: whether a storage is attached.
        epoch: epoch of the decider that uses it.
        nodes: index of each rank's node; empty if all ranks are on one node.
    """

    path: Path
    sizes: Mapping[str, int]
    work: Callable[[StorageCommand], StorageResult]
    has_storage: bool
    epoch: int = 0
    nodes: tuple[int, ...] = ()
