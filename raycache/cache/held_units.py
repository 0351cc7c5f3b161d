"""Window pages and state slots held by one running sequence, and those of its next row.

    space     a sequence holds                                  a restore point at position p holds
    full      pages of all its tokens, own or in the tree     (the tree's pages up to p)
    window    pages that the next query sees                    pages of the last window - 1 tokens before p
    state     the slot with the state after its last token      the slot with the state after p tokens

Window pages and state slots are reference counted, never copied. If a restore point shares the state slot, or may do so
once the row in flight completes, the next row reads that slot and writes to a new one, in which the sequence continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class WrittenStates:
    """State slots that a row writes.

    Attributes:
        first_len: length of the sequence at the first one; the least, if the row before may accept draft tokens.
        slots: after the row's last known token, and after each draft token.
    """

    first_len: int
    slots: tuple[int, ...]


@dataclass(slots=True)
class Capacity:
    """Pages and slots for one row.

    Attributes:
        new_pages: space -> page ids to append to the sequence's tables; -1 for pages that are never read.
        read_state, write_state: state slots; -1 for none.
        draft_states: state slots, one per draft token.
    """

    new_pages: dict[str, Sequence[int]]
    read_state: int = -1
    write_state: int = -1
    draft_states: tuple[int, ...] = ()


class HeldUnits:
    """What a sequence holds besides the pages of all its tokens.

    Args:
        device: the device tier.
        point: restore point to resume from; None for an empty prefix.
        leaves_points: whether a row that ends on a page boundary may leave a restore point.
    Attributes:
        state: slot after the last computed token; -1 for none.
        in_flight: states that rows in flight write.
    """

    __slots__ = ("_device", "_leaves_points", "in_flight", "state", "windows")

    def __init__(self, device: Tier, point: RestorePoint | None, leaves_points: bool) -> None:
        self._device, self._leaves_points = device, leaves_points
        self.windows: dict[str, WindowPages] = {}
        self.state = -1
        self.in_flight: deque[WrittenStates] = deque()
        if not device.units:
            return
        position, parts = (0, {}) if point is None else (point.position, point.parts)
        for space, ids in parts.items():
            device.units[space].share(ids)
        for space in device.windows:
            self.windows[space] = WindowPages(device.first_page(space, position), deque(parts.get(space, ())))
        if parts and device.state_space:
            self.state = parts[device.state_space][0]

    def have_room(self, stop: int) -> bool:
        """Whether a row needs nothing in addition that reaches up to `stop`, as `missing` has it."""
        device = self._device
        return not device.state_space and all(held.end * device.page_size >= stop for held in self.windows.values())

    def missing(self, next_len: int, stop: int, *, num_drafts: int) -> dict[str, int]:
        """Count the units of each space that a row needs in addition.

        Args:
            next_len: length of the sequence after the row, without draft tokens; the least that it can have.
            stop: the most that it can have with the row's draft tokens and those drafted after it.
        """
        device, counts = self._device, {}
        for space, held in self.windows.items():
            first = max(held.end, device.first_page(space, next_len))
            counts[space] = max(0, -(-stop // device.page_size) - first)
        if device.state_space:
            counts[device.state_space] = num_drafts + (self._is_open or self._is_kept(self._last_state))
        return counts

    def take(self, counts: Mapping[str, int], capacity: Capacity, *, next_len: int, num_drafts: int) -> None:
        """Add the missing units to a row's capacity; they must be free."""
        device = self._device
        for space, held in self.windows.items():
            # Skipped pages lie before the window of all later rows, though this row still reads them.
            num_skipped = max(0, device.first_page(space, next_len) - held.end)
            added = [-1] * num_skipped + device.units[space].allocate(counts[space])
            held.ids.extend(added)
            if added:
                capacity.new_pages[space] = added
        if device.state_space:
            capacity.read_state = last = self._last_state
            taken = device.units[device.state_space].allocate(counts[device.state_space])
            capacity.write_state, *drafts = slots = tuple(taken if len(taken) > num_drafts else [last, *taken])
            capacity.draft_states = tuple(drafts)
            self.in_flight.append(WrittenStates(next_len, slots))

    @property
    def _is_open(self) -> bool:
        """Whether it is still open which of several states the next row reads, so that it must not write to any."""
        return bool(self.in_flight) and len(self.in_flight[-1].slots) > 1

    @property
    def _last_state(self) -> int:
        """Slot after the last planned token, if no draft token in flight is accepted."""
        return self.in_flight[-1].slots[0] if self.in_flight else self.state

    def _is_kept(self, slot: int) -> bool:
        """Whether the next row must not write to the last slot."""
        may_be_point = bool(self.in_flight) and self.in_flight[-1].first_len % self._device.page_size == 0
        is_shared = slot >= 0 and self._device.units[self._device.state_space].is_shared(slot)
        return slot < 0 or is_shared or (may_be_point and self._leaves_points)

    def advance(self, num_computed: int) -> None:
        """Release what the sequence no longer needs once the oldest row in flight is done; `num_computed` tokens are
        computed then."""
        device = self._device
        if self.in_flight:
            old, written = self.state, self.in_flight.popleft()
            num_accepted = num_computed - written.first_len
            self.state = written.slots[num_accepted]
            if num_accepted and self.in_flight:
                self.in_flight[0] = replace(self.in_flight[0], first_len=self.in_flight[0].first_len + num_accepted)
            device.units[device.state_space].release({old, *written.slots} - {-1, self.state})
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
            written = (slot for row in self.in_flight for slot in row.slots)
            found[self._device.state_space] = [slot for slot in {self.state, *written} if slot >= 0]
        return found

    def release(self) -> None:
        """Release everything."""
        for space, ids in self.all().items():
            self._device.units[space].release(ids)
