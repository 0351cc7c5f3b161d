"""Host memory of the twin, and the mover of one gang of it.

A slot holds a copy of what a device unit held, and the tag of what it is. Saves end some looks at the board later than
they were planned, in order; each copies either at once or only when it ends, so what is overwritten in between is found
out. Loads look at the tags as a rank's mover does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from raycache.memory.moves import Moves, Unit
from raycache.parallel.board import Acks

Content = Mapping[int, tuple[int, int]] | Sequence[int]
"""Of a page: offset -> (position, token). Of a state: all tokens that went into it."""


@dataclass(frozen=True)
class Slot:
    """One unit of the host."""

    tag: int
    content: Content


class TwinHost:
    """Slots by (space, host id); those that hold nothing valid are not there. Outlives gangs and deciders."""

    def __init__(self) -> None:
        self.slots: dict[tuple[str, int], Slot] = {}

    def holds(self, space: str, host: int, tag: int) -> bool:
        slot = self.slots.get((space, host))
        return slot is not None and slot.tag == tag

    def hold(self, space: str, units: Sequence[int], tags: Sequence[int]) -> list[bool]:
        """Which slots hold what they should."""
        return [self.holds(space, unit, tag) for unit, tag in zip(units, tags, strict=True)]

    def damage(self, random: Random) -> None:
        """Flip a bit somewhere: the checksum says so to whoever looks."""
        if self.slots:
            del self.slots[random.choice(sorted(self.slots))]


@dataclass(frozen=True)
class Trouble:
    """How often moves go wrong, and how late they end.

    Attributes:
        bad_saves, bad_loads: parts of 1 that fail.
        most_late: looks at the board that a save takes at most.
    """

    bad_saves: float = 0.0
    bad_loads: float = 0.0
    most_late: int = 0


@dataclass
class _Save:
    moves: Moves
    late: int
    copies: list[Content] | None


class TwinMover:
    """Moves of one gang.

    Args:
        host: memory.
        trouble: that it has.
        random: when it has it.
    Attributes:
        num_bad_loads: loads that failed although nobody wanted them to: a slot did not hold what it should.
    """

    def __init__(self, host: TwinHost, *, trouble: Trouble = Trouble(), random: Random | None = None) -> None:
        self._host, self.trouble, self._random = host, trouble, random or Random(0)
        self._saves: deque[_Save] = deque()
        self._num_saved = self._num_loaded = self._bad_save = self._bad_load = self._num_planned = 0
        self._read: Callable[[str, int], Content] = lambda space, device: ()
        self.num_bad_loads = 0

    def bind(self, read: Callable[[str, int], Content]) -> None:
        """Say how device units are read."""
        self._read = read

    def save(self, lane: Sequence[Moves], *, is_first: bool) -> None:
        """Begin saves; all of them end first if something is about to be overwritten."""
        for moves in lane:
            self._num_planned += 1
            assert moves.number == self._num_planned, "saves are numbered without gaps"
            is_eager = self._random.random() < 0.5
            copies = [self._read(unit.space, unit.device) for unit in moves.units] if is_eager else None
            self._saves.append(_Save(moves, self._random.randint(0, self.trouble.most_late), copies))
        while is_first and self._saves:
            self._end_save()

    def load(self, lane: Sequence[Moves]) -> dict[Unit, Content | None]:
        """What comes to the device; None for what is not there."""
        found: dict[Unit, Content | None] = {}
        for moves in lane:
            assert moves.number == max(self._num_loaded, self._bad_load) + 1, "loads are numbered without gaps"
            slots = [self._host.slots.get((unit.space, unit.host)) for unit in moves.units]
            are_held = [
                slot is not None and slot.tag == unit.tag for slot, unit in zip(slots, moves.units, strict=True)
            ]
            is_good = all(are_held) and self._random.random() >= self.trouble.bad_loads
            self.num_bad_loads += not all(are_held)
            if not is_good:
                self._bad_load = moves.number
            self._num_loaded = moves.number
            for slot, unit in zip(slots, moves.units, strict=True):
                found[unit] = slot.content if is_good and slot is not None else None
        return found

    def acks(self) -> Acks:
        """What the board says; time goes on for saves."""
        while self._saves and self._saves[0].late <= 0:
            self._end_save()
        if self._saves:
            self._saves[0].late -= 1
        return Acks(self._num_saved, self._num_loaded, self._bad_save, self._bad_load)

    def die(self) -> None:
        """The gang is killed: a save that was on its way leaves slots with nothing valid in them, or has not begun."""
        for save in list(self._saves)[: self._random.randint(0, len(self._saves))]:
            for unit in save.moves.units:
                self._host.slots.pop((unit.space, unit.host), None)
        self._saves.clear()

    def _end_save(self) -> None:
        save = self._saves.popleft()
        units = save.moves.units
        copies = save.copies or [self._read(unit.space, unit.device) for unit in units]
        is_bad = self._random.random() < self.trouble.bad_saves
        for unit, content in zip(units, copies, strict=True):
            if is_bad:
                self._host.slots.pop((unit.space, unit.host), None)
            else:
                self._host.slots[unit.space, unit.host] = Slot(unit.tag, content)
        if is_bad:
            self._bad_save = save.moves.number
        self._num_saved = save.moves.number
