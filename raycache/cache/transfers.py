"""Moves between the device and host tiers: saves and loads, and their progress.

    save    host pages are reserved -> moves in a plan -> all ranks acknowledge -> pages enter the host tree
    load    a host prefix is held -> moves in the plan of the row that needs them -> acknowledged with that plan

The ranks' movers copy the data. A `Load` holds what it needs in both tiers; planning it returns a `PlannedLoad`, the
only object that can be finished.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from raycache.cache.evict import Leaving
from raycache.cache.host_tier import HostTier, WritePolicy
from raycache.cache.keys import DIGEST_BYTES, PackedDigests, tags_of
from raycache.cache.moved import Moved
from raycache.cache.node import RestorePoint
from raycache.cache.saving import Cursor, Save, SavedPrefix, Source
from raycache.cache.tier import Tier
from raycache.cache.tree import NOTHING, PrefixHandle, RadixTree
from raycache.memory.component import FULL
from raycache.memory.moves import Batch, Moves
from raycache.memory.pages import PageIds
from raycache.parallel.board import Acks
from raycache.types import PackedTokens

_NEW_RANKS = Acks()


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """A prefix to load from the host; holds what it needs in both tiers until it ends.

    Attributes:
        handle: the host prefix.
        first: index of the first page to load.
        num_device: tokens already on the device.
        point: device units for the restore point at the handle's end; no row writes to them.
        host_point: the same restore point on the host.
    """

    transfers: Transfers
    handle: PrefixHandle
    first: int
    num_device: int
    point: RestorePoint | None = None
    host_point: RestorePoint | None = None

    @property
    def position(self) -> int:
        """Length in tokens once it is loaded."""
        return self.handle.length

    def plan(self, pages: PageIds) -> PlannedLoad:
        """Plan its moves to these device pages, from index `first` on."""
        return self.transfers.plan_load(self, pages)

    def drop(self, *, has_point: bool = True) -> None:
        """Release what it holds, after it ended or instead of making it.

        Args:
            has_point: whether it still holds the device units.
        """
        self.handle.release()
        if self.host_point is not None:
            self.transfers.host.tier.let_go(self.host_point)
        if self.point is not None and has_point:
            self.transfers.device.let_go(self.point)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedLoad(Load):
    """A load whose moves are in a plan.

    Attributes:
        number: sequence number of its moves.
    """

    number: int = 0

    def finish(self, prefix: PrefixHandle, pages: PageIds) -> None:
        """Record that these device pages, and the restore point at the end of a device prefix, are loaded."""
        self.transfers.finish_load(self, prefix, pages)

    def forget(self, tokens: PackedTokens, *, root: bytes) -> None:
        """Drop its damaged source on the host, and everything that continues it."""
        last = self.position // self.transfers.host.page_size - 1  # the damage may be in its restore point
        self.transfers.host.discard(tokens, root=root, first_page=min(self.first, last))


class Transfers:
    """Decides what moves between the device and the host.

    Args:
        device, host: the tiers.
    Attributes:
        saves_used, saves_computed: whether the write policy saves pages on reuse, and when they are computed.
        num_evicted_unsaved: device pages evicted before the host had them.
    """

    def __init__(self, device: Tier, host: HostTier) -> None:
        self.device, self.host = device, host
        self.saves_used = host.policy is not WritePolicy.BACK
        self.saves_computed = host.policy is WritePolicy.THROUGH
        self.num_evicted_unsaved = 0
        self._is_saved = np.zeros(device.pages.num_pages, np.bool_)
        self._moved = Moved(host.unit_bytes)
        self._open: deque[Save] = deque()
        self._saves: list[Moves] = []
        self._loads: list[Moves] = []
        self._num_saves = self._num_loads = 0
        self._is_urgent = False
        self._is_lost = False
        self._counts: Counter[str] = Counter()

    def open(self, tokens: PackedTokens, *, root: bytes, now: int, digests: PackedDigests = b"") -> Cursor:
        """Lock the longest resumable prefix of a sequence on the host.

        Args:
            tokens, root, now: as for `RadixTree.match`.
            digests: of the sequence's first pages, as many as are known already.
        """
        return Cursor(self.host.tier.tree.match(tokens, now=now, root=root), digests)

    # --- loads --------------------------------------------------------------------------------------------------------

    def prepare(self, handle: PrefixHandle, cursor: Cursor, tokens: PackedTokens, *, now: int) -> Load | None:
        """Reserve what loading the rest of a prefix needs; None if there is nothing to load or too little space.

        Args:
            handle: device prefix, which is lengthened over pages that need not be loaded.
            cursor: of the same sequence.
            tokens: of the sequence.
            now: step number.
        """
        found, device = cursor.found, self.device
        point = found.point
        if device.has_points and point is None:
            return None  # the restore point was evicted since it was matched
        if point is None:
            device.tree.lengthen(handle, tokens, limit=found.length, now=now)
            return Load(self, found.clone(), handle.length // device.page_size, handle.length)
        self.host.tier.hold(point)  # evictions from the device may need space on the host
        units = device.new_point(found.length, {space: len(ids) for space, ids in point.parts.items()})
        if units is None:
            self.host.tier.let_go(point)
            return None
        device.tree.lengthen(handle, tokens, limit=found.length, now=now)
        return Load(self, found.clone(), handle.length // device.page_size, handle.length, units, point)

    def prepare_more(
        self, handle: PrefixHandle, cursor: Cursor, tokens: PackedTokens, *, num_computed: int, now: int
    ) -> Load | None:
        """Like `prepare`, for a running sequence, if the host has more now. Only for models without restore points."""
        if self.device.has_points or cursor.is_closed:
            return None
        self.host.tier.tree.rematch(cursor.found, tokens, now=now)
        if cursor.found.length <= num_computed:
            return None
        return Load(self, cursor.found.clone(), handle.length // self.device.page_size, handle.length)

    def plan_load(self, load: Load, pages: PageIds) -> PlannedLoad:
        """Plan a load's moves; called by `Load.plan`."""
        loaded = load.handle.pages_from(load.first)
        batches = [_batch(FULL, pages, loaded, self.host.digests(loaded))] if len(pages) else []
        if load.point is not None and load.host_point is not None:
            batches += _part_batches(load.point, load.host_point, self.host.last_digests(load.handle))
        self._num_loads += 1
        self._loads.append(Moves(self._num_loads, batches))
        self._counts["loaded_pages"] += len(pages)
        self._moved.count("loaded", len(pages), {} if load.host_point is None else load.host_point.parts)
        held = (load.handle, load.first, load.num_device, load.point, load.host_point)
        return PlannedLoad(self, *held, self._num_loads)

    def finish_load(self, load: PlannedLoad, prefix: PrefixHandle, pages: PageIds) -> None:
        """Record that a load is done; called by `PlannedLoad.finish`."""
        self._is_saved[pages] = True
        is_kept = load.point is not None and self.device.keep(prefix, load.point)
        load.drop(has_point=not is_kept)

    # --- saves --------------------------------------------------------------------------------------------------------

    def save(
        self,
        cursor: Cursor,
        prefix: PrefixHandle,
        tokens: PackedTokens,
        *,
        now: int,
        then: Callable[[], None] = lambda: None,
    ) -> bool:
        """Save what the host lacks of a device prefix, with the restore point at its end.

        Args:
            cursor: of the sequence.
            prefix: the device prefix.
            tokens: the sequence, packed; may grow until the moves are done.
            now: step number.
            then: called when the moves are done or have failed.
        Returns:
            Whether a save was planned.
        """
        source = SavedPrefix(self.device, prefix, self._is_saved, then)
        return self.plan_save(cursor, source, tokens, stop=prefix.length // self.device.page_size, now=now)

    def plan_save(self, cursor: Cursor, source: Source, tokens: PackedTokens, *, stop: int, now: int) -> bool:
        """Plan to copy what the host lacks of a sequence's first `stop` pages and the restore point after them.

        Returns:
            Whether moves were planned; the source is released when they are done.
        """
        host, point = self.host, source.point
        if self._is_lost or cursor.is_broken or cursor.is_closed:
            return False
        cursor.catch_up(host, tokens, stop=stop, now=now)
        first = cursor.num_planned
        missing = max(0, stop - first)
        if not missing and not (point is not None and cursor.lacks_point(stop)):
            return False
        taken = host.reserve(missing)
        if taken is None:
            self._counts["unsaved_pages"] += missing
            return False
        digests = cursor.plan(host, tokens, stop=stop)
        pages, host_point = source.take(first), None
        batches = [_batch(FULL, pages, taken, digests)] if missing else []
        if point is not None:
            host_point = host.tier.new_point(point.position, {space: len(ids) for space, ids in point.parts.items()})
        if point is not None and host_point is not None:
            batches += _part_batches(point, host_point, cursor.last_digests(host))
        self._num_saves += 1
        self._saves.append(Moves(self._num_saves, batches))
        self._open.append(Save(self._num_saves, cursor, source, tokens, taken, digests, host_point))
        return True

    def save_leaving(self, leaving: Leaving) -> None:
        """Save what the device is about to evict; the plan that overwrites the pages copies them first."""
        if self.device.has_points and leaving.point is None:
            return  # pages without their restore point are useless
        cursor = self.open(leaving.tokens, root=leaving.root, now=0)
        self._is_urgent |= self.plan_save(cursor, leaving, leaving.tokens, stop=len(leaving.pages), now=0)
        cursor.close()
        self._is_saved[leaving.pages] |= cursor.num_planned == len(leaving.pages)

    def save_all(self, then: Callable[[], None]) -> Iterator[bool]:
        """Save everything on the device that the host lacks, one prefix per iteration.

        Args:
            then: called once per saved prefix, when it has completed or failed.
        Returns:
            True for each save planned; False when moves should end before the next one.
        """
        tree = self.device.tree
        for node in tree.ends():
            handle = tree.lock(node)
            if handle is not None and not self.host.can_take(handle.length // tree.page_size, handle.parts):
                handle.release()
                yield False
                handle = tree.lock(node)
            if handle is None:
                continue
            cursor = self.open(handle.tokens, root=handle.root, now=0)
            is_planned = self.save(cursor, handle, handle.tokens, now=0, then=then)
            cursor.close()
            handle.release()
            if is_planned:
                yield True

    def note_new(self, pages: PageIds) -> None:
        """Note that device pages will be overwritten."""
        self._is_saved[pages] = False

    def note_evicted(self, pages: PageIds) -> None:
        """Count evicted device pages that the host does not have."""
        self.num_evicted_unsaved += self._is_saved[pages].tobytes().count(0)

    # --- plans and acknowledgements -----------------------------------------------------------------------------------

    @property
    def has_moves(self) -> bool:
        """Whether moves are waiting for a plan or for acknowledgement."""
        return bool(self._saves or self._loads or self._open)

    @property
    def held_points(self) -> list[RestorePoint]:
        """Device restore points that are being saved."""
        sources = [save.source for save in self._open if isinstance(save.source, SavedPrefix)]
        return [source.point for source in sources if source.point is not None]

    def take_moves(self) -> tuple[list[Moves], list[Moves], bool]:
        """Saves and loads for the next plan, and whether the saves must end before any page is written."""
        moves = self._saves, self._loads, self._is_urgent
        self._saves, self._loads, self._is_urgent = [], [], False
        return moves

    def acknowledge(self, acks: Acks, *, now: int) -> None:
        """Complete acknowledged saves. If any failed since the last call, all of them count as failed."""
        self._moved.take_times(acks)
        while self._open and self._open[0].number <= acks.saves:
            save = self._open.popleft()
            self._finish(save, is_done=save.number > acks.bad_save, now=now)

    def lose(self) -> None:
        """Fail all moves in progress: the ranks are gone."""
        self._is_lost = True
        while self._open:
            self._finish(self._open.popleft(), is_done=False, now=0)
        self._saves, self._loads, self._is_urgent = [], [], False

    def resume(self, acks: Acks = _NEW_RANKS) -> None:
        """Continue with new ranks, numbering moves from their acknowledgements."""
        self._num_saves, self._num_loads = acks.saves, acks.loads
        self._moved.begin_anew(acks)
        self._is_lost = False

    def counts(self) -> dict[str, float]:
        """Counters of the host tier, for status output and metrics."""
        tier, counts = self.host.tier, self._counts
        return {
            **self.host.counts(),
            "saved_pages": counts["saved_pages"],
            "loaded_pages": counts["loaded_pages"],
            "evicted_pages": tier.num_evicted,
            "evicted_points": tier.num_points_evicted,
            "unsaved_pages": counts["unsaved_pages"],
            "failed_saves": counts["failed_saves"],
            "failed_loads": self.host.num_discarded,
            **self._moved.figures(),
        }

    def _finish(self, save: Save, *, is_done: bool, now: int) -> None:
        cursor, host, point = save.cursor, self.host, save.point
        is_done &= not cursor.is_broken
        if is_done:
            entered = host.enter(cursor.saved, save.tokens, save.pages, save.digests, now=now)
            self._counts["saved_pages"] += len(entered)
            self._moved.count("saved", len(save.pages), {} if point is None else point.parts)
            is_kept = point is not None and host.keep(cursor.saved, point)
            if is_kept or len(entered):
                host.on_enter(cursor.saved, entered, point if is_kept else None)
        else:
            self._counts["failed_saves"] += 1
            host.give_back(save.pages, point)
        save.source.release(is_done)
        cursor.finish(is_done=is_done)


class NoTransfers:
    """Stands in where there is no host tier."""

    saves_used = saves_computed = has_moves = False
    num_evicted_unsaved = 0
    held_points: Sequence[RestorePoint] = ()

    def __init__(self) -> None:
        self._cursor = Cursor(RadixTree(1).match(NOTHING, now=0), is_closed=True)

    def open(self, tokens: PackedTokens, *, root: bytes, now: int, digests: PackedDigests = b"") -> Cursor:
        """Return a closed cursor."""
        return self._cursor

    def prepare(self, handle: PrefixHandle, cursor: Cursor, tokens: PackedTokens, *, now: int) -> None:
        """Nothing to load."""

    def prepare_more(
        self, handle: PrefixHandle, cursor: Cursor, tokens: PackedTokens, *, num_computed: int, now: int
    ) -> None:
        """Nothing to load."""

    def save(
        self,
        cursor: Cursor,
        prefix: PrefixHandle,
        tokens: PackedTokens,
        *,
        now: int,
        then: Callable[[], None] = lambda: None,
    ) -> bool:
        """Nothing is saved."""
        return False

    def save_leaving(self, leaving: Leaving) -> None:
        """Nothing is saved."""

    def note_new(self, pages: PageIds) -> None:
        """Do nothing."""

    def note_evicted(self, pages: PageIds) -> None:
        """Do nothing."""

    def save_all(self, then: Callable[[], None]) -> Iterator[bool]:
        """Nothing is saved."""
        return iter(())

    def take_moves(self) -> tuple[list[Moves], list[Moves], bool]:
        """Return no moves."""
        return [], [], False

    def acknowledge(self, acks: Acks, *, now: int) -> None:
        """Do nothing."""

    def lose(self) -> None:
        """Do nothing."""

    def resume(self, acks: Acks = _NEW_RANKS) -> None:
        """Do nothing."""

    def counts(self) -> dict[str, float]:
        """Return no counters."""
        return {}


def _part_batches(device: RestorePoint, host: RestorePoint, last: PackedDigests) -> Iterator[Batch]:
    """Pair up the units of a restore point on both tiers, with the digests of its last pages."""
    for space, ids in host.parts.items():
        if ids:
            devices, hosts = np.array(device.parts[space], np.intp), np.array(ids, np.intp)
            yield _batch(space, devices, hosts, last[len(last) - len(ids) * DIGEST_BYTES :])


def _batch(space: str, devices: PageIds, hosts: PageIds, digests: PackedDigests) -> Batch:
    """Pair up device and host units to move, with the tags of their digests."""
    tags, count = tags_of(digests), len(devices)
    assert count == len(hosts) == len(tags), f"{space}: {count} devices, {len(hosts)} hosts, {len(tags)} tags"
    return Batch(space, devices, hosts, tags)
