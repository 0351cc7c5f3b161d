"""Executes storage commands for all ranks of a node.

    persist    slots of units -> objects, one per piece
    find       chain of digests -> length of the stored prefix, under any split
    fetch      objects -> slots of units

Runs in the process that owns the host memory (the arena). The sender of a command must leave the slots of its units
alone until the result has arrived.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from raycache.cache.keys import KEY_BYTES, longest_stored, object_keys, split_key, unpacked
from raycache.cache.storage_commands import (
    NOTHING_LISTED,
    CommandKind,
    Fetch,
    Found,
    Listed,
    Outcome,
    StorageCommand,
    StorageResult,
    StoredUnit,
)
from raycache.memory.arena import Arena
from raycache.memory.checksum import checksum_of
from raycache.memory.component import FULL, first_window_page
from raycache.memory.rows import EnvelopeLayout
from raycache.storage.base import Storage, suffix_of
from raycache.storage.coverage import Coverage, Lookup, formats_of, groups_of
from raycache.storage.reader import UnitReader, ranks_of

_FIRST_POSITIONS = 16
_FOREIGN_SUFFIXES = 64


class StorageWorker:
    """Moves units between the host memory of a node and a storage. Thread safe for distinct units.

    Args:
        layout: of the arena's envelopes.
        page_size: tokens per page.
        windows: space -> window in tokens.
        state_space: space of recurrent states; empty: none.
        epoch: of the current decider; commands of earlier ones are refused.
    """

    def __init__(
        self,
        arena: Arena,
        layout: EnvelopeLayout,
        storage: Storage,
        *,
        page_size: int,
        windows: Mapping[str, int],
        state_space: str = "",
        epoch: int = 0,
    ) -> None:
        self._arena, self._layout, self._storage = arena, layout, storage
        self._page_size, self._windows, self._state_space = page_size, dict(windows), state_space
        self._groups = {space: groups_of(layout, space) for space in layout.spaces}
        self._formats = formats_of(layout)
        known = {FULL, *windows, state_space}
        assert set(layout.spaces) <= known, f"spaces {layout.spaces}, but only {known} have a known reuse rule"
        self._coverage = Coverage(storage)
        self._reader = UnitReader(arena, storage, coverage=self._coverage, groups=self._groups)
        self._epoch, self._num_begun = epoch, 0
        self._working: set[int] = set()
        self._changed = threading.Condition()

    def work(self, command: StorageCommand) -> StorageResult:
        """Execute one command; failures are reported in the result."""
        if command.deadline_s <= time.monotonic():
            return command.not_done(Outcome.LATE)
        turn = self._enter(command.epoch)
        if not turn:
            return command.not_done(Outcome.CANCELLED, f"epoch {command.epoch} has been replaced by {self._epoch}")
        start_s = time.monotonic()
        try:
            result = self._do(command)
        except OSError as error:
            result = command.not_done(Outcome.UNAVAILABLE, str(error) or type(error).__name__)
        finally:
            self._leave(turn)
        return replace(result, seconds=time.monotonic() - start_s)

    def fence(self, epoch: int, *, timeout_s: float) -> bool:
        """Refuse commands of earlier epochs from now on, and wait for running ones.

        The successor of a lost decider calls this before it uses any slot.

        Returns:
            Whether they ended in time.
        """
        with self._changed:
            self._epoch = max(self._epoch, epoch)
            return self._changed.wait_for(lambda: not self._working, timeout_s)

    def settle(self, *, timeout_s: float) -> bool:
        """Wait for the commands now running; returns whether they ended in time."""
        with self._changed:
            begun = set(self._working)
            return self._changed.wait_for(lambda: begun.isdisjoint(self._working), timeout_s)

    def persist(self, units: Sequence[StoredUnit]) -> list[bool]:
        """Store units; pieces already stored are not written again.

        An object that is a whole envelope keeps the slot's checksum, so readers detect damage from before the write.

        Args:
            units: parents before children; the first ones are the last to be evicted.
        Returns:
            For each unit, whether it is now stored whole; False if its slot's header is of another unit.
        Raises:
            OSError: the storage cannot be reached.
        """
        keys, payloads, checksums, items = list[bytes](), list[memoryview](), list[int](), list[int]()
        stored = [self._is_held(unit) for unit in units]
        for item, unit in enumerate(units):
            for group in self._groups.get(unit.space, ()) if stored[item] else ():
                for place in group.places:
                    envelope = self._arena.slab(place.rank, unit.space)[unit.host]
                    keys.append(unit.digest + place.suffix)
                    payload = envelope[place.span].data
                    header = self._arena.headers(place.rank, unit.space)[unit.host]
                    payloads.append(payload)
                    # Computed now, while the slot holds the unit. If a slow storage reads the slot only after its
                    # reuse, the checksum does not match what it stores.
                    checksums.append(int(header[1]) if place.is_whole else checksum_of(payload))
                    items.append(item)
        done = self._storage.put(keys, payloads=payloads, checksums=checksums) if keys else []
        for item, is_stored in zip(items, done, strict=True):
            stored[item] &= is_stored
        self._coverage.learn({suffix_of(key) for key, is_stored in zip(keys, done, strict=True) if is_stored})
        return stored

    def find(self, digests: Sequence[bytes]) -> Found:
        """Find how much of a prefix is stored, under any split; counts as a use.

        Args:
            digests: of all pages of the prefix, from the first on.
        Raises:
            OSError: the storage cannot be reached.
        """
        lookup = Lookup(self._coverage, self._groups)
        num_pages = longest_stored(
            len(digests), lambda pages: lookup.are_stored((FULL, digests[page]) for page in pages)
        )
        point_pages = self._longest_point(digests, num_pages, lookup)
        is_foreign = num_pages < len(digests) and self._is_foreign(digests[num_pages])
        if self._coverage.is_bounded:
            self._touch(digests, num_pages, point_pages, lookup)
        return Found(num_pages, point_pages, is_foreign)

    def fetch(self, units: Sequence[StoredUnit]) -> list[Fetch]:
        """Read units into their slots, from objects of any boxes; returns the worst result for each unit."""
        return self._reader.read(units)

    def listed(self, version: str) -> Listed:
        """List the stored pages, or those that have changed since a version.

        Raises:
            OSError: the storage cannot be reached.
        """
        changes = self._storage.changes(version)
        if changes is None:
            return NOTHING_LISTED
        self._coverage.learn({suffix_of(key) for key in changes.keys})
        rows = {group.rows for group in self._groups[FULL]}
        names = {split_key(key) for key in changes.keys if len(key) == KEY_BYTES}
        digests = sorted({digest for digest, row_format in names if row_format in rows})
        lookup = Lookup(self._coverage, self._groups)
        are_stored = lookup.are_stored((FULL, digest) for digest in digests)
        added = tuple(digest for digest, is_stored in zip(digests, are_stored, strict=True) if is_stored)
        gone = (digest for digest, is_stored in zip(digests, are_stored, strict=True) if not is_stored)
        return Listed(changes.version, changes.is_whole, added, () if changes.is_whole else tuple(gone))

    # --- commands -----------------------------------------------------------------------------------------------------

    def _do(self, command: StorageCommand) -> StorageResult:
        result = StorageResult(command.number, command.kind, command.owner, Outcome.DONE)
        match command.kind:
            case CommandKind.FIND:
                return replace(result, found=self.find(unpacked(command.digests)))
            case CommandKind.FETCH:
                units = list(command.units)
                fetches = self.fetch(units)
                are_hits = [fetch is Fetch.HIT for fetch in fetches]
                return replace(result, fetches=tuple(fetches), num_bytes=self._num_bytes(units, are_hits))
            case CommandKind.LIST:
                return replace(result, listed=self.listed(command.version))
            case CommandKind.PERSIST:
                units = list(command.units)
                stored = self.persist(units)
                return replace(result, stored=bytes(stored), num_bytes=self._num_bytes(units, stored))

    def _num_bytes(self, units: Sequence[StoredUnit], counted: Sequence[bool]) -> int:
        spaces = [unit.space for unit, is_counted in zip(units, counted, strict=True) if is_counted]
        return sum(self._layout.unit_bytes(space) for space in spaces if space in self._groups)

    def _enter(self, epoch: int) -> int:
        """Start a command; returns a number for `_leave`, or 0 if its epoch is refused."""
        with self._changed:
            if epoch < self._epoch:
                return 0
            self._num_begun += 1
            self._working.add(self._num_begun)
            return self._num_begun

    def _leave(self, turn: int) -> None:
        with self._changed:
            self._working.remove(turn)
            self._changed.notify_all()

    # --- steps --------------------------------------------------------------------------------------------------------

    def _is_held(self, unit: StoredUnit) -> bool:
        """Whether the slots of all ranks hold a unit, undamaged where readers could not detect damage later."""
        groups = self._groups.get(unit.space, ())
        whole = {place.rank for group in groups for place in group.places if place.is_whole}
        for rank in ranks_of(groups):
            tag, checksum = self._arena.headers(rank, unit.space)[unit.host].tolist()
            if tag != unit.tag:
                return False
            if rank not in whole and checksum != checksum_of(self._arena.slab(rank, unit.space)[unit.host].data):
                return False
        return True

    def _longest_point(self, digests: Sequence[bytes], num_pages: int, lookup: Lookup) -> int:
        """The longest length up to `num_pages` from which the model can resume."""
        if not self._windows and not self._state_space:
            return num_pages
        end, count = num_pages, _FIRST_POSITIONS
        while end > 0:
            lengths = range(end, max(0, end - count), -1)
            # Restore points are sparse: checking only their last parts rules out most lengths.
            last = [[(space, digests[page]) for space, page in self._parts(n) if page == n - 1] for n in lengths]
            lookup.are_stored(part for parts in last for part in parts)
            left = [n for n, parts in zip(lengths, last, strict=True) if all(lookup.are_stored(parts))]
            whole = {n: [(space, digests[page]) for space, page in self._parts(n)] for n in left}
            lookup.are_stored(part for parts in whole.values() for part in parts)
            for length, parts in whole.items():
                if all(lookup.are_stored(parts)):
                    return length
            end, count = lengths[-1] - 1, 2 * count
        return 0

    def _parts(self, length: int) -> Iterator[tuple[str, int]]:
        """(space, page number) of all units besides "full" pages that resuming after `length` pages needs."""
        for space, window in self._windows.items():
            first = first_window_page(length * self._page_size, window=window, page_size=self._page_size)
            yield from ((space, page) for page in range(first, length))
        if self._state_space:
            yield self._state_space, length - 1

    def _is_foreign(self, digest: bytes) -> bool:
        """Whether a page is stored in a row format that this model does not read."""
        others = sorted(suffix for suffix in self._coverage.suffixes if not suffix.startswith(self._formats))
        return bool(others) and any(
            self._storage.contains([digest + suffix for suffix in others[:_FOREIGN_SUFFIXES]], touch=False)
        )

    def _touch(self, digests: Sequence[bytes], num_pages: int, point_pages: int, lookup: Lookup) -> None:
        """Count a use of the objects found, so that a prefix is not evicted before its continuations."""
        keys = list(self._keys(FULL, digests[:num_pages], lookup))
        if point_pages:
            for space, page in self._parts(point_pages):
                keys += self._keys(space, [digests[page]], lookup)
        if keys:
            self._storage.contains(keys, touch=True)

    def _keys(self, space: str, digests: Sequence[bytes], lookup: Lookup) -> Iterable[bytes]:
        """Keys of the objects that units would be read from, assuming the boxes of the last one for all."""
        chains = [
            object_keys(digests, rows=group.rows, box=box)
            for group in self._groups.get(space, ())
            for box in (lookup.boxes(group, digests[-1]) if digests else ())
        ]
        return (key for keys in zip(*chains, strict=True) for key in keys)
