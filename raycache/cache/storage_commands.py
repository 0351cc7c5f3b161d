"""Commands from the decider to the storage tier, and their results: plain data, sent between processes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from itertools import groupby, repeat
from typing import Final, NamedTuple, Protocol

from raycache.cache.keys import PackedDigests, tag_of, unpacked


class Fetch(Enum):
    """Result of fetching one key."""

    HIT = "hit"
    MISSING = "missing"
    CORRUPT = "checksum"
    """The object was found but is damaged or truncated."""
    FOREIGN = "foreign"
    """The object was found but has an unexpected length or format."""
    UNAVAILABLE = "unavailable"
    """The storage could not be reached."""


class CommandKind(StrEnum):
    """Type of a storage command."""

    FIND = "find"
    """Find how much of a prefix is stored."""
    FETCH = "fetch"
    """Copy units from storage to the host."""
    PERSIST = "persist"
    """Copy units from the host to storage."""
    LIST = "list"
    """List the stored pages, or what has changed since an earlier listing."""


class Outcome(StrEnum):
    """How a command ended."""

    DONE = "done"
    CANCELLED = "cancelled"
    """Cancelled by its owner before it started, or sent by a former decider."""
    LATE = "late"
    """Its deadline passed before it started."""
    UNAVAILABLE = "unavailable"
    """The storage, or the process that talks to it, could not be reached."""


class StoredUnit(NamedTuple):
    """A host page or state slot, and the content it is to hold.

    Attributes:
        space: component space.
        host: page or slot id on the host.
        digest: chain digest of the tokens up to its end.
    """

    space: str
    host: int
    digest: bytes

    @property
    def tag(self) -> int:
        """The tag expected in its slot's header."""
        return tag_of(self.digest)


UnitColumns = tuple[str, Sequence[int], PackedDigests]
"""Units of one space: (space, host ids, digests)."""


@dataclass(frozen=True, slots=True)
class StoredUnits:
    """Units as columns, since the decider should not make an object for each of thousands of pages.

    Attributes:
        columns: in order of the units.
    """

    columns: tuple[UnitColumns, ...] = ()

    @classmethod
    def of(cls, units: Iterable[StoredUnit]) -> StoredUnits:
        """Columns of units given one by one."""
        columns = []
        for space, group in groupby(units, lambda unit: unit.space):
            _, hosts, digests = zip(*group, strict=True)
            columns.append((space, hosts, b"".join(digests)))
        return cls(tuple(columns))

    def __len__(self) -> int:
        return sum(len(hosts) for _, hosts, _ in self.columns)

    def __iter__(self) -> Iterator[StoredUnit]:
        for space, hosts, digests in self.columns:
            yield from map(StoredUnit, repeat(space, len(hosts)), hosts, unpacked(digests))


NO_UNITS = StoredUnits()


class Found(NamedTuple):
    """How much of a prefix is stored, in pages from its start.

    Attributes:
        num_pages: pages whose "full" rows are all stored.
        point_pages: longest stored length from which the model can resume; num_pages for models without restore points.
        is_foreign: whether the page after num_pages is stored in another row format.
    """

    num_pages: int = 0
    point_pages: int = 0
    is_foreign: bool = False


NOTHING_FOUND = Found()


class Listed(NamedTuple):
    """Pages whose "full" rows are all stored, by digest.

    Attributes:
        version: for the next LIST; empty: the storage cannot tell.
        is_whole: whether `added` has all stored pages, instead of those changed since the version of the command.
        added, removed: pages that are stored now, and that are not.
    """

    version: str = ""
    is_whole: bool = False
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


NOTHING_LISTED = Listed()


@dataclass(slots=True)
class StorageCommand:
    """One command to the storage tier.

    Fields are final for the type checker only: a frozen dataclass takes five times as long to make.

    Attributes:
        number: chosen by the decider; its result carries the same one.
        owner: for example a request id; commands are scheduled round-robin over owners.
        units: units to fetch or persist; parents before children.
        digests: for FIND: digests of a prefix's pages, from the first on.
        version: for LIST: of the listing whose changes are wanted; empty: everything.
        deadline_s: latest start, on the sender's time.monotonic; later the command is dropped.
        epoch: the decider's epoch; commands of former deciders are refused.
    """

    kind: Final[CommandKind]
    number: Final[int]
    owner: Final[str]
    units: Final[StoredUnits] = NO_UNITS
    digests: Final[PackedDigests] = b""
    deadline_s: Final[float] = math.inf
    epoch: Final[int] = 0
    version: Final[str] = ""

    def sent(self) -> StorageCommand:
        """Convert for sending to another machine: deadline_s becomes the seconds remaining."""
        return replace(self, deadline_s=self.deadline_s - time.monotonic())

    def received(self) -> StorageCommand:
        """Convert back from `sent`, to this machine's clock."""
        return replace(self, deadline_s=self.deadline_s + time.monotonic())

    def not_done(self, outcome: Outcome, error: str = "") -> StorageResult:
        """The result of a command that was not done."""
        return StorageResult(
            self.number,
            self.kind,
            self.owner,
            outcome,
            fetches=(Fetch.UNAVAILABLE,) * len(self.units) if self.kind is CommandKind.FETCH else (),
            stored=bytes(len(self.units)) if self.kind is CommandKind.PERSIST else b"",
            error=error,
        )


@dataclass(slots=True)
class StorageResult:
    """Result of a command. Fields are final for the type checker only, as in `StorageCommand`.

    Attributes:
        number, kind, owner: copied from the command.
        outcome: whether it was done; if not, the other fields say that nothing was found, fetched or stored.
        found: for FIND.
        listed: for LIST.
        fetches: for FETCH, one per unit.
        stored: for PERSIST, 1 or 0 per unit: whether it is now in the storage.
        seconds: duration of the call, without queueing.
        num_bytes: bytes of the units fetched or stored.
        error: readable reason why it was not done.
    """

    number: Final[int]
    kind: Final[CommandKind]
    owner: Final[str]
    outcome: Final[Outcome]
    found: Final[Found] = NOTHING_FOUND
    listed: Final[Listed] = NOTHING_LISTED
    fetches: Final[tuple[Fetch, ...]] = ()
    stored: Final[bytes] = b""
    seconds: Final[float] = 0.0
    num_bytes: Final[int] = 0
    error: Final[str] = ""


class StorageWorkers(Protocol):
    """Executes commands in the background (raycache/storage/lanes.py)."""

    def post(self, command: StorageCommand) -> None:
        """Queue a command; does not block."""

    def results(self) -> list[StorageResult]:
        """Results since the last call."""

    def cancel(self, owner: str) -> None:
        """Drop an owner's commands that have not started."""

    def cancel_kind(self, kind: CommandKind) -> None:
        """Drop commands of one kind that have not started."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for the next result; returns whether there is one."""

    def close(self, timeout_s: float) -> bool:
        """Stop; returns whether all calls ended in time."""


class StorageClient:
    """Numbers the decider's storage commands and posts them.

    Args:
        workers: execute the commands.
        epoch: the decider's epoch; commands of former deciders are refused.
    """

    def __init__(self, workers: StorageWorkers, *, epoch: int) -> None:
        self._workers, self._epoch, self._num_posted = workers, epoch, 0

    def post(
        self,
        kind: CommandKind,
        owner: str,
        *,
        units: StoredUnits = NO_UNITS,
        digests: PackedDigests = b"",
        deadline_s: float = math.inf,
        version: str = "",
    ) -> int:
        """Post a command (arguments as in `StorageCommand`); returns its number."""
        self._num_posted += 1
        self._workers.post(
            StorageCommand(kind, self._num_posted, owner, units, digests, deadline_s, self._epoch, version)
        )
        return self._num_posted

    def cancel(self, owner: str) -> None:
        """Drop an owner's commands that have not started."""
        self._workers.cancel(owner)

    def cancel_kind(self, kind: CommandKind) -> None:
        """Drop commands of one kind that have not started."""
        self._workers.cancel_kind(kind)
