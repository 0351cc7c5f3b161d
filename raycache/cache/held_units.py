"""Window pages and state slots of one running sequence, and where its next row goes.

    space     a sequence holds                                  a restore point at position p holds
    full      pages of all its tokens: own, or the tree's       (the tree's pages up to p)
    window    pages that the next query sees                    pages of the last window - 1 tokens before p
    state     the slot with the state after its last token      the slot with the state after p tokens

Window pages and state slots are never copied: holders are counted. A row reads the state from one slot and writes it
to another as soon as somebody else holds the first, so a restore point keeps the slot and the sequence goes on in a new
one.
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
        first: number of the first page in the sequence that is held.
        ids: of the pages from there on; -1 for those that the row in flight leaves behind at once.
    """

    first: int
    ids: deque[int]

    @property
    def held(self) -> list[int]:
        """The ids without gaps."""
        return [page for page in self.ids if page >= 0]

    @property
    def end(self) -> int:
        """Number of the first page that was not written yet."""
        return self.first + len(self.ids)


@dataclass(slots=True)
class Capacity:
    """What a row gets.

    Attributes:
        new_pages: space -> pages to append to the tables of the sequence; -1 for those that nobody will read.
        read_state, write_state: slots; -1 for none.
        draft_states: slots, one per draft.
    """

    new_pages: dict[str, list[int]]
    read_state: int = -1
    write_state: int = -1
    draft_states: tuple[int, ...] = ()


class HeldUnits:
    """What a sequence holds beside the pages of all its tokens.

    Args:
        device: tier that it runs on.
        point: restore point that it goes on from; None at its begin.
    Attributes:
        windows: space -> pages.
        state: slot after the last computed token; -1 for none.
        next_states: those that the row in flight writes: after its last token that is no draft, and after each draft.
    """

    __slots__ = ("_device", "_next_len", "next_states", "state", "windows")

    def __init__(self, device: Tier, point: RestorePoint | None) -> None:
        self._device = device
        self._next_len = 0  # tokens of the sequence after the first of next_states
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
        """Units of each space that a row lacks.

        Args:
            next_len: tokens of the sequence after the row, without its drafts.
            stop: tokens that the row, its drafts and what is guessed behind them reach to.
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
        """Add to a row's capacity the units that it lacks, which are free."""
        device = self._device
        self._next_len = next_len
        for space, held in self.windows.items():
            # What is skipped lies before the window of whatever comes after this row, but the row itself sees it.
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
        """Give up what the sequence does not need any more after its first `num_computed` tokens."""
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
        """What the next token needs, as a restore point that nobody holds yet."""
        end = num_computed // self._device.page_size  # behind it are places for guesses
        parts = {space: tuple(window.ids)[: end - window.first] for space, window in self.windows.items()}
        if self._device.state_space:
            parts[self._device.state_space] = (self.state,)
        return RestorePoint(num_computed, parts)

    def all(self) -> dict[str, list[int]]:
        """Space -> units that are held."""
        found = {space: window.held for space, window in self.windows.items()}
        if self._device.state_space:
            found[self._device.state_space] = [slot for slot in {self.state, *self.next_states} if slot >= 0]
        return found

    def release(self) -> None:
        """Give up everything."""
        for space, ids in self.all().items():
            self._device.units[space].release(ids)
