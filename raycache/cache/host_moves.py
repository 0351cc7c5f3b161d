"""What is on its way between the device, the host tier and storage, and on whose behalf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import repeat

from raycache.cache.keys import tags_of
from raycache.cache.node import Parts
from raycache.cache.tree import PrefixHandle
from raycache.memory.moves import Unit
from raycache.memory.pages import PageIds
from raycache.types import PackedTokens

HOST_COUNTERS = (
    "saved_pages",
    "loaded_pages",
    "evicted_pages",
    "evicted_points",
    "unsaved_pages",
    "failed_saves",
    "failed_loads",
)
"""Names of what a host tier counts."""


class WritePolicy(StrEnum):
    """When the device's pages are copied to the host."""

    THROUGH = "write_through"  # once they are computed
    SELECTIVE = "write_through_selective"  # when a second request uses them
    BACK = "write_back"  # when they are evicted


class HostParts(dict[str, Sequence[int]]):
    """Host units of a restore point.

    Attributes:
        page: host page that it stands behind, -1 as long as it is in no tree.
        storage: number of the storage that has it, 0 for none.
    """

    page = -1
    storage = 0


@dataclass(slots=True, eq=False)
class Cursor:
    """A sequence's place in the host tier.

    Attributes:
        found: the longest prefix here that can be continued.
        saved: the end of what the host knows or has saved of it.
        num_planned: pages that the host has or is getting.
        tail: digests of the last of those, as many as a restore point may need, at least one if there are any.
        num_open: moves of it that are on their way.
        is_closed: the sequence has ended.
        is_broken: moves of it failed, those after them are of no use.
    """

    found: PrefixHandle
    saved: PrefixHandle
    num_planned: int = 0
    tail: list[bytes] = field(default_factory=list)
    num_open: int = 0
    is_closed: bool = False
    is_broken: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Pages of one sequence on their way to the host.

    Attributes:
        number: of the moves.
        cursor: of the sequence.
        tokens: of the sequence, packed; it may grow.
        pages, digests: of the host.
        parts: of the restore point at the end, or None.
        release: lets go of the device's units; told whether they are saved.
    """

    number: int
    cursor: Cursor
    tokens: PackedTokens
    pages: PageIds
    digests: list[bytes]
    parts: HostParts | None
    release: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class Entered:
    """What has just come into the tree: what a storage may want to have.

    Attributes:
        pages: of the sequence.
        parts: of the restore point behind them, or empty.
        handle: at the end of it; a lock for whoever takes it.
    """

    pages: PageIds
    parts: Parts
    handle: PrefixHandle


def units_of(space: str, device: Sequence[int], host: Sequence[int], digests: Sequence[bytes]) -> list[Unit]:
    """Units to move, each between the device's id and the host's, with the tag of its digest."""
    assert len(device) == len(host) == len(digests), f"{len(device)} units of {space} to {len(host)}"
    return list(map(Unit._make, zip(repeat(space), device, host, tags_of(digests), strict=False)))
