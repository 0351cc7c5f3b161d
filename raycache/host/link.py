"""What an engine and its ranks must know of the host tier that they use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from raycache.cache.storage_commands import StorageAnswer, StorageCommand


@dataclass(frozen=True)
class HostLink:
    """The host tier of a gang.

    Attributes:
        path: of the arena's file on the decider's node.
        sizes: component space -> units that it has.
        work: carries out a storage command in its owner; raises OSError when there is no storage, or no owner.
        has_storage: whether one is attached.
        epoch: of the decider that uses it.
        nodes: node of each rank, by number; empty when all are on one.
    """

    path: Path
    sizes: Mapping[str, int]
    work: Callable[[StorageCommand], StorageAnswer]
    has_storage: bool
    epoch: int = 0
    nodes: tuple[int, ...] = ()
