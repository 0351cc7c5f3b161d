"""A storage of the twin's host memory, with troubles, and lanes to it without threads: every look at the answers is a
tick of their clock, so that the same random numbers give the same story."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from raycache.cache.keys import unpacked
from raycache.cache.storage_commands import (
    CommandKind,
    Fetch,
    Found,
    Listed,
    Outcome,
    StorageCommand,
    StorageResult,
    StoredUnit,
)
from raycache.memory.component import FULL
from tests.oracle.twin_host import Content, Slot, TwinHost


@dataclass(frozen=True)
class StorageTrouble:
    """Parts of 1 of what is asked that go wrong, and how late answers are.

    Attributes:
        errors: commands that raise OSError.
        lost: objects that turn out to be gone, once FIND has promised them.
        bad: objects that come back damaged, foreign or not at all.
        refused: objects that are not taken.
        foreign: FINDs that see another model's objects behind what they find.
        late: commands that are given up because their turn never comes.
        most_ticks: that a command takes at most.
    """

    errors: float = 0.0
    lost: float = 0.0
    bad: float = 0.0
    refused: float = 0.0
    foreign: float = 0.0
    late: float = 0.0
    most_ticks: int = 0


class TwinStorage:
    """Objects by (space, digest).

    Args:
        host: whose slots are filled and read.
        page_size: tokens per page.
        windows: space -> window in tokens.
        state_space: of states, "" for none.
        most: objects; the oldest go.
    Attributes:
        trouble: that it has from now on.
        num_evicted: objects that went because there were too many.
        num_unheld: units that were to be persisted and not in their slots any more.
    """

    def __init__(
        self,
        host: TwinHost,
        *,
        page_size: int,
        windows: Mapping[str, int],
        state_space: str = "",
        most: int = 1 << 30,
        trouble: StorageTrouble = StorageTrouble(),
        random: Random | None = None,
    ) -> None:
        self.objects: dict[tuple[str, bytes], Content] = {}
        self._changes: list[tuple[str, bytes]] = []
        self.trouble, self.num_unheld, self.num_evicted = trouble, 0, 0
        self._host, self._random, self._most = host, random or Random(0), most
        self._page_size, self._windows, self._state_space = page_size, dict(windows), state_space

    def work(self, command: StorageCommand) -> StorageResult:
        if self._happens(self.trouble.errors):
            raise OSError("the twin's storage is away")
        answer = {
            CommandKind.FIND: self._find,
            CommandKind.FETCH: self._fetch,
            CommandKind.PERSIST: self._persist,
            CommandKind.LIST: self._list,
        }
        return answer[command.kind](command)

    def forget(self, space: str | None = None) -> None:
        """Lose everything, or all of one space."""
        for key in [key for key in self.objects if space is None or key[0] == space]:
            self._drop(key)

    @property
    def digests(self) -> set[bytes]:
        """Of the pages that are stored."""
        return {digest for space, digest in self.objects if space == FULL}

    def _drop(self, key: tuple[str, bytes]) -> None:
        if self.objects.pop(key, None) is not None:
            self._changes.append(key)

    def _list(self, command: StorageCommand) -> StorageResult:
        listed = self.list_pages(command)
        return StorageResult(command.number, command.kind, command.owner, Outcome.DONE, listed=listed)

    def list_pages(self, command: StorageCommand) -> Listed:
        """What has changed, or at times everything, as after too many changes."""
        is_whole = not command.version or self._random.random() < 0.2
        changed = [digest for space, digest in self._changes[int(command.version or 0) :] if space == FULL]
        digests = self.digests if is_whole else dict.fromkeys(changed)
        added = tuple(digest for digest in digests if (FULL, digest) in self.objects)
        removed = tuple(digest for digest in digests if (FULL, digest) not in self.objects)
        return Listed(str(len(self._changes)), is_whole, added, removed)

    def _find(self, command: StorageCommand) -> StorageResult:
        # A page vouches for those before it, as galloping takes it.
        digests = unpacked(command.digests)
        stored = [n for n, digest in enumerate(digests, start=1) if (FULL, digest) in self.objects]
        num_pages = max(stored, default=0)
        points = [n for n in range(1, num_pages + 1) if self._is_point(digests, n)]
        found = Found(num_pages, max(points, default=0), self._happens(self.trouble.foreign))
        return StorageResult(command.number, command.kind, command.owner, Outcome.DONE, found=found)

    def _is_point(self, digests: Sequence[bytes], length: int) -> bool:
        needed = [(self._state_space, digests[length - 1])] if self._state_space else []
        for space, window in self._windows.items():
            first = max(0, length * self._page_size - window + 1) // self._page_size
            needed += [(space, digest) for digest in digests[first:length]]
        return all(key in self.objects for key in needed)

    def _fetch(self, command: StorageCommand) -> StorageResult:
        fetches = tuple(self._fetch_one(unit) for unit in command.units)
        return StorageResult(command.number, command.kind, command.owner, Outcome.DONE, fetches=fetches)

    def _fetch_one(self, unit: StoredUnit) -> Fetch:
        self._host.slots.pop((unit.space, unit.host), None)
        key = (unit.space, unit.digest)
        if self._happens(self.trouble.lost):
            self._drop(key)
        if key not in self.objects:
            return Fetch.MISSING
        if self._happens(self.trouble.bad):
            return self._random.choice([Fetch.CORRUPT, Fetch.FOREIGN, Fetch.UNAVAILABLE])
        self._host.slots[unit.space, unit.host] = Slot(unit.tag, self.objects[key])
        return Fetch.HIT

    def _persist(self, command: StorageCommand) -> StorageResult:
        stored = bytes(self._persist_one(unit) for unit in command.units)
        while len(self.objects) > self._most:
            self._drop(next(iter(self.objects)))
            self.num_evicted += 1
        return StorageResult(command.number, command.kind, command.owner, Outcome.DONE, stored=stored)

    def _persist_one(self, unit: StoredUnit) -> bool:
        if not self._host.holds(unit.space, unit.host, unit.tag):
            self.num_unheld += 1
            return False
        if self._happens(self.trouble.refused):
            return False
        self._changes.append((unit.space, unit.digest))
        self.objects[unit.space, unit.digest] = self._host.slots[unit.space, unit.host].content
        return True

    def _happens(self, part: float) -> bool:
        return self._random.random() < part


@dataclass
class _Turn:
    command: StorageCommand
    begins_in: int
    ends_in: int


class TwinLanes:
    """`StorageLanes` without threads: commands end some ticks after they were posted, in any order.

    Args:
        storage: does them.
        random: draws how long they take.
    """

    def __init__(self, storage: TwinStorage, *, random: Random | None = None) -> None:
        self._storage, self._random = storage, random or Random(0)
        self._turns: list[_Turn] = []
        self._answers: list[StorageResult] = []

    @property
    def num_open(self) -> int:
        return len(self._turns) + len(self._answers)

    def post(self, command: StorageCommand) -> None:
        ticks = self._random.randint(0, self._storage.trouble.most_ticks)
        self._turns.append(_Turn(command, self._random.randint(0, ticks), ticks))

    def results(self) -> list[StorageResult]:
        self._random.shuffle(self._turns)
        for turn in self._turns:
            turn.begins_in -= 1
            turn.ends_in -= 1
            if turn.begins_in >= 0 and self._is_late(turn.command):
                self._give_up(turn, Outcome.LATE)
        self._end(lambda turn: turn.ends_in < 0)
        answers, self._answers = self._answers, []
        return answers

    def cancel(self, owner: str) -> None:
        for turn in list(self._turns):
            if turn.command.owner == owner and turn.begins_in >= 0:
                self._give_up(turn, Outcome.CANCELLED)

    def cancel_kind(self, kind: CommandKind) -> None:
        for turn in list(self._turns):
            if turn.command.kind is kind and turn.begins_in >= 0:
                self._give_up(turn, Outcome.CANCELLED)

    def wait(self, timeout_s: float) -> bool:
        return bool(self._answers)

    def close(self, timeout_s: float) -> bool:
        self.cancel_all()
        return True

    def cancel_all(self) -> None:
        """The decider is gone: what has begun comes to its end, as the fence makes sure; nothing else does."""
        self._end(lambda turn: turn.begins_in < 0)
        for turn in list(self._turns):
            self._give_up(turn, Outcome.CANCELLED)

    def _is_late(self, command: StorageCommand) -> bool:
        return command.deadline_s <= time.monotonic() or self._random.random() < self._storage.trouble.late

    def _give_up(self, turn: _Turn, outcome: Outcome) -> None:
        self._turns = [other for other in self._turns if other is not turn]
        self._answers.append(turn.command.not_done(outcome))

    def _end(self, is_over: Callable[[_Turn], bool]) -> None:
        over = [turn for turn in self._turns if is_over(turn)]
        self._turns = [turn for turn in self._turns if not is_over(turn)]
        for turn in over:
            try:
                self._answers.append(self._storage.work(turn.command))
            except OSError as error:
                self._answers.append(turn.command.not_done(Outcome.UNAVAILABLE, str(error)))
