"""Window pages and state slots held by one running sequence, and those of its next row.

    space     a sequence holds                                  a restore point at position p holds
    full      pages of all its tokens, own or in the tree     (the tree's pages up to p)
    window    pages that the next query sees                    pages of the last window - 1 tokens before p
    state     the slot with the state after its last token      the slot with the state after p tokens

Window pages and state slots are reference counted, never copied. If a restore point shares the state slot, the next
row reads that slot and writes to a new one, in which the sequence continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from raycache.cache.node import RestorePoint
from raycache.cache.tier import Tier


@dataclass(slots=True)
class WindowPages:
    """Pages of one window space.

    Attributes:
        first: index in the sequence of the first page held.
        ids: page ids from there on; -1 for pages that leave the window during the row in flight.
    """

    first: int
    ids: deque[int]

    @property
    def held(self) -> list[int]:
        """The ids without the -1 entries."""
        return [page for page in self.ids if page >= 0]

    @property
    def end(self) -> int:
        """Index of the first page after those held."""
        return self.first + len(self.ids)


@dataclass(slots=True)
class Capacity:
    """Pages and slots for one row.

    Attributes:
        new_pages: space -> page ids to append to the sequence's tables; -1 for pages that are never read.
        read_state, write_state: state slots; -1 for none.
        draft_states: state slots, one per draft token.
    """

    new_pages: dict[str, list[int]]
    read_state: int = -1
    write_state: int = -1
    draft_states: tuple[int, ...] = ()


class HeldUnits:
    """What a sequence holds besides the pages of all its tokens.

    Args:
        device: the device tier.
        point: restore point to resume from; None for an empty prefix.
    Attributes:
        state: slot after the last computed token; -1 for none.
        next_states: slots that the row in flight writes: after its last known token, and after each draft token.
    """

    __slots__ = ("_device", "_next_len", "next_states", "state", "windows")

    def __init__(self, device: Tier, point: RestorePoint | None) -> None:
        self._device = device
        self._next_len = 0  # length of the sequence at the first of next_states
        self.windows: dict[str, WindowPages] = {}
        self.state = -1
        self.next_states: tuple[int, ...] = ()
        position, parts = (0, {}) if point is None else (point.position, point.parts)
        for space, ids in parts.items():
            device.units[space].share(ids)
        for space in device.windows:
            self.windows[space] = WindowPages(device.first_page(space, position), deque(parts.get(space, ())))
        if parts and device.state_space:
            self.state = parts[device.state_space][0]

    def missing(self, next_len: int, stop: int, *, num_drafts: int) -> dict[str, int]:
        """Count the units of each space that a row needs in addition.

        Args:
            next_len: length of the sequence after the row, without draft tokens.
            stop: length including the row's draft tokens and those drafted after it.
        """
        device, counts = self._device, {}
        for space, held in self.windows.items():
            first = max(held.end, device.first_page(space, next_len))
            counts[space] = max(0, -(-stop // device.page_size) - first)
        if device.state_space:
            is_kept = self.state < 0 or device.units[device.state_space].is_shared(self.state)
            counts[device.state_space] = num_drafts + is_kept
        return counts

    def take(self, counts: Mapping[str, int], capacity: Capacity, *, next_len: int, num_drafts: int) -> None:
        """Add the missing units to a row's capacity; they must be free."""
        device = self._device
        self._next_len = next_len
        for space, held in self.windows.items():
            # Skipped pages lie before the window of all later rows, though this row still reads them.
            num_skipped = max(0, device.first_page(space, next_len) - held.end)
            added = [-1] * num_skipped + device.units[space].allocate(counts[space])
            held.ids.extend(added)
            if added:
                capacity.new_pages[space] = added
        if device.state_space:
            capacity.read_state = self.state
            taken = device.units[device.state_space].allocate(counts[device.state_space])
            self.next_states = tuple(taken if len(taken) > num_drafts else [self.state, *taken])
            capacity.write_state, *drafts = self.next_states
            capacity.draft_states = tuple(drafts)

    def advance(self, num_computed: int) -> None:
        """Release what the sequence no longer needs once `num_computed` tokens are computed."""
        device = self._device
        if self.next_states:
            old, written = self.state, self.next_states
            self.state, self.next_states = written[num_computed - self._next_len], ()
            device.units[device.state_space].release({old, *written} - {-1, self.state})
        for space, held in self.windows.items():
            first = device.first_page(space, num_computed)
            while held.first < first and held.ids:
                page = held.ids.popleft()
                held.first += 1
                if page >= 0:
                    device.units[space].release([page])

    def point(self, num_computed: int) -> RestorePoint:
        """Make a restore point of what the next token needs, not yet held by anyone."""
        end = num_computed // self._device.page_size  # pages behind it are for draft tokens
        parts = {space: tuple(window.ids)[: end - window.first] for space, window in self.windows.items()}
        if self._device.state_space:
            parts[self._device.state_space] = (self.state,)
        return RestorePoint(num_computed, parts)

    def all(self) -> dict[str, list[int]]:
        """Space -> units held."""
        found = {space: window.held for space, window in self.windows.items()}
        if self._device.state_space:
            found[self._device.state_space] = [slot for slot in {self.state, *self.next_states} if slot >= 0]
        return found

    def release(self) -> None:
        """Release everything."""
        for space, ids in self.all().items():
            self._device.units[space].release(ids)
