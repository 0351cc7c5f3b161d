"""What the decider asks of the storage tier, and what it is told: plain data that travels between processes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import NamedTuple, Protocol

from raycache.cache.keys import tag_of


class Fetch(Enum):
    """What became of a key that was asked for."""

    HIT = "hit"
    MISSING = "missing"
    CORRUPT = "checksum"
    """It was there, and not as it was put: flipped, torn or cut off."""
    FOREIGN = "foreign"
    """It is there, of another length or format than expected."""
    UNAVAILABLE = "unavailable"
    """The storage could not be asked."""


class CommandKind(StrEnum):
    """What is to be done."""

    FIND = "find"
    """How much of a prefix is stored?"""
    FETCH = "fetch"
    """From the storage to the host."""
    PERSIST = "persist"
    """From the host to the storage."""


class Outcome(StrEnum):
    """What became of a command."""

    DONE = "done"
    CANCELLED = "cancelled"
    """Its owner did not want it any more before it began, or is not the decider any more."""
    LATE = "late"
    """Its deadline came before its turn."""
    UNAVAILABLE = "unavailable"
    """The storage, or the process that talks to it, could not be asked."""


class StoredUnit(NamedTuple):
    """A page or a state slot of the host, and what belongs into it.

    Attributes:
        space: component space.
        host: id there.
        digest: of the tokens up to its end.
    """

    space: str
    host: int
    digest: bytes

    @property
    def tag(self) -> int:
        """What the header of its slot has to say."""
        return tag_of(self.digest)


class Found(NamedTuple):
    """How much of a prefix is stored, in pages from its begin.

    Attributes:
        num_pages: whose rows of the sequence's pages all are.
        point_pages: the longest of those lengths that the model can continue from; for models without restore points
            num_pages.
        is_foreign: the page after num_pages is stored, too, but in rows of another format.
    """

    num_pages: int = 0
    point_pages: int = 0
    is_foreign: bool = False


NOTHING_FOUND = Found()


@dataclass(frozen=True, slots=True)
class StorageCommand:
    """One thing to do.

    Attributes:
        kind: which.
        number: the decider's name for it.
        owner: on whose behalf, such as a request's id; owners take turns.
        units: to fetch or to persist; parents before children.
        digests: to find: of all pages of a prefix, from its first one on.
        deadline_s: on the clock time.monotonic of the one who gives it; what has not begun by then never will.
        epoch: of the decider.
    """

    kind: CommandKind
    number: int
    owner: str
    units: tuple[StoredUnit, ...] = ()
    digests: tuple[bytes, ...] = ()
    deadline_s: float = math.inf
    epoch: int = 0

    def sent(self) -> StorageCommand:
        """For another machine, whose clock is another: deadline_s is the seconds that are left."""
        return replace(self, deadline_s=self.deadline_s - time.monotonic())

    def received(self) -> StorageCommand:
        """What `sent` gave, on this machine's clock."""
        return replace(self, deadline_s=self.deadline_s + time.monotonic())

    def not_done(self, outcome: Outcome, error: str = "") -> StorageAnswer:
        """The answer when nothing came of it."""
        return StorageAnswer(
            self.number,
            self.kind,
            self.owner,
            outcome,
            fetches=(Fetch.UNAVAILABLE,) * len(self.units) if self.kind is CommandKind.FETCH else (),
            stored=(False,) * len(self.units) if self.kind is CommandKind.PERSIST else (),
            error=error,
        )


@dataclass(frozen=True, slots=True)
class StorageAnswer:
    """What became of a command.

    Attributes:
        number, kind, owner: of the command.
        outcome: whether it was done; if not, the rest says that nothing was found, fetched or stored.
        found: of FIND.
        fetches: of FETCH, one per unit.
        stored: of PERSIST, one per unit: whether it is in the storage now.
        seconds: that the call took, without the time that it waited for its turn.
        num_bytes: of the units that were fetched, or are stored.
        error: why it was not done, for people.
    """

    number: int
    kind: CommandKind
    owner: str
    outcome: Outcome
    found: Found = NOTHING_FOUND
    fetches: tuple[Fetch, ...] = ()
    stored: tuple[bool, ...] = ()
    seconds: float = 0.0
    num_bytes: int = 0
    error: str = ""


class StorageWorkers(Protocol):
    """Who carries out commands, behind the decider's back (raycache/storage/lanes.py)."""

    def post(self, command: StorageCommand) -> None:
        """Give a command; does not wait."""

    def answers(self) -> list[StorageAnswer]:
        """What has been answered since the last call."""

    def cancel(self, owner: str) -> None:
        """Drop the commands of one owner that have not begun."""

    def cancel_kind(self, kind: CommandKind) -> None:
        """Drop the commands of one kind that have not begun."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for the next answer; whether there is one."""

    def close(self, timeout_s: float) -> bool:
        """End; whether all calls ended in time."""


class StorageClient:
    """Numbers what the decider asks of its storage, and posts it.

    Args:
        workers: carry it out.
        epoch: of the decider.
    """

    def __init__(self, workers: StorageWorkers, *, epoch: int) -> None:
        self._workers, self._epoch, self._num_posted = workers, epoch, 0

    def post(
        self,
        kind: CommandKind,
        owner: str,
        *,
        units: Sequence[StoredUnit] = (),
        digests: Sequence[bytes] = (),
        deadline_s: float = math.inf,
    ) -> int:
        """Post one; arguments as of `StorageCommand`. Its answer has the number that is returned."""
        self._num_posted += 1
        command = StorageCommand(kind, self._num_posted, owner, tuple(units), tuple(digests), deadline_s, self._epoch)
        self._workers.post(command)
        return self._num_posted

    def cancel(self, owner: str) -> None:
        """Drop what one owner has asked for and has not begun."""
        self._workers.cancel(owner)

    def cancel_kind(self, kind: CommandKind) -> None:
        """Drop what is of one kind and has not begun."""
        self._workers.cancel_kind(kind)
