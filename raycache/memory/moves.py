"""Moves of whole units between the device and the host, as listed in plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Unit(NamedTuple):
    """A page or a state slot to move.

    Attributes:
        space: component space.
        device, host: its ids there.
        tag: first 8 bytes of the digest of the tokens up to its end, little endian; on load it shows whether the host
            still holds the unit that the decider expects.
    """

    space: str
    device: int
    host: int
    tag: int


@dataclass(slots=True, eq=False)
class Batch:
    """Units of one space as columns, since a Python loop over thousands of units would take longer than moving them.

    Attributes:
        devices, hosts: ids [U].
        tags: [U].
    """

    space: str
    devices: NDArray[np.int64]
    hosts: NDArray[np.int64]
    tags: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.tags)

    def __getitem__(self, part: slice) -> Batch:
        return Batch(self.space, self.devices[part], self.hosts[part], self.tags[part])

    def taken(self, which: NDArray[np.bool_], space: str) -> Batch:
        """Select units, all of this space."""
        return Batch(space, self.devices[which], self.hosts[which], self.tags[which])

    def first(self, which: NDArray[np.bool_]) -> Unit:
        """The first selected unit; there must be one."""
        at = int(which.argmax())
        return Unit(self.space, int(self.devices[at]), int(self.hosts[at]), int(self.tags[at]))

    def rows(self) -> Iterator[tuple[str, int, int, int]]:
        """The fields of each `Unit`."""
        return zip(repeat(self.space), self.devices.tolist(), self.hosts.tolist(), self.tags.tolist())


@dataclass(slots=True, eq=False)
class Moves:
    """Units that move together.

    Attributes:
        number: on its lane, counted from 1 without gaps within an epoch.
        batches: one per space, with a unit at least.
    """

    number: int
    batches: Sequence[Batch]

    def __post_init__(self) -> None:
        for batch in self.batches:
            assert len(batch.tags), "carriers expect units in each batch"

    @classmethod
    def of(cls, number: int, units: Iterable[Unit]) -> Moves:
        """Moves of units given one by one, in any order."""
        columns = list(zip(*units, strict=True))
        if not columns:
            return cls(number, ())
        spaces, *ids, tags = columns
        devices, hosts = (np.array(column, np.int64) for column in ids)
        whole = Batch(spaces[0], devices, hosts, np.array(tags, np.uint64))
        names = dict.fromkeys(spaces)
        if len(names) == 1:
            return cls(number, (whole,))
        of_unit = np.array(spaces)
        return cls(number, tuple(whole.taken(of_unit == name, name) for name in names))

    @property
    def units(self) -> list[Unit]:
        """All units, one by one."""
        return [Unit._make(row) for batch in self.batches for row in batch.rows()]

    def by_space(self) -> dict[str, Batch]:
        """Component space -> its units, in their order."""
        return {batch.space: batch for batch in self.batches}


class Run(NamedTuple):
    """Units with consecutive ids on both device and host; `device` and `host` are the first ids."""

    device: int
    host: int
    num_units: int


def runs(units: Batch) -> list[Run]:
    """Join units with consecutive ids; each device id occurs at most once."""
    joined: list[Run] = []
    for device, host in sorted(zip(units.devices.tolist(), units.hosts.tolist(), strict=True)):
        last = joined[-1] if joined else None
        if last is not None and (device, host) == (last.device + last.num_units, last.host + last.num_units):
            joined[-1] = last._replace(num_units=last.num_units + 1)
        else:
            joined.append(Run(device, host, 1))
    return joined
