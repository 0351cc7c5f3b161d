"""The cache resources of one running sequence, from its match to its end.

Whole pages enter the tree as soon as they are computed, so that others can use them, and are saved to the host by its
write policy. A prefix that the host has beyond the device's is loaded into the sequence's own pages, which the tree
adopts once the ranks acknowledge the load.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raycache.cache.held_units import Capacity, HeldUnits
from raycache.cache.node import RestorePoint
from raycache.cache.saving import Cursor
from raycache.cache.tier import Tier
from raycache.cache.transfers import Load, NoTransfers, PlannedLoad, Transfers
from raycache.cache.tree import PrefixHandle
from raycache.memory.component import FULL
from raycache.memory.pages import PageIds
from raycache.types import PackedTokens

_SAVED_TOGETHER = 8
"""Output pages per save: each save locks its prefix, which splits a node of the tree."""


_NO_PAGES_NEEDED = Capacity({})
_NO_PAGES = np.zeros(0, np.intp)


@dataclass(frozen=True, slots=True)
class Use:
    """On whose behalf the cache is used, and with which eviction priority.

    Attributes:
        root: seed of its digest chain; depends on model, adapter and tenant.
        priority, until_s: for eviction by priority; see `RadixTree.match`.
    """

    root: bytes = b""
    priority: int = 0
    until_s: float = 0.0


PLAIN_USE = Use()


class Holding:
    """The cache resources of one running sequence.

    Args:
        device: tier that it runs on.
        transfers: loads from and saves to the host.
        handle: the locked prefix to resume from.
        cursor: its position in the host tier.
        use: tenant and eviction priority.
        is_kept: whether its computed pages are cached.
    Attributes:
        pages: device pages of the sequence, in order.
        units: window pages and state slots.
        checkpoint: restore point at the last page boundary, or None.
        load: its load in progress, or None.
    """

    __slots__ = (
        "_device",
        "_duplicates",
        "_is_kept",
        "_is_started",
        "_num_saved",
        "_saved_point",
        "_transfers",
        "_use",
        "checkpoint",
        "cursor",
        "handle",
        "load",
        "pages",
        "units",
    )

    def __init__(
        self,
        device: Tier,
        transfers: Transfers | NoTransfers,
        handle: PrefixHandle,
        cursor: Cursor,
        use: Use,
        is_kept: bool,
    ) -> None:
        self._device, self._transfers, self._use, self._is_kept = device, transfers, use, is_kept
        self.handle, self.cursor = handle, cursor
        self.pages = array("q", handle.pages.tobytes() if handle.length else b"")
        self._duplicates: list[PageIds] = []
        self.units = HeldUnits(device, handle.point if device.has_points else None, is_kept)
        self.checkpoint: RestorePoint | None = None
        self.load: Load | None = None
        self._is_started = False
        self._num_saved = self._saved_point = (
            0  # pages passed to the host, and position of the last restore point passed, in pages
        )

    # --- on the device ------------------------------------------------------------------------------------------------

    def reserve(
        self, start: int, stop: int, *, num_drafts: int = 0, num_next_drafts: int = 0, num_open: int = 0
    ) -> Capacity | None:
        """Reserve pages and units for tokens [start, stop); None, with nothing taken, if too few can be freed.

        Evicts cached prefixes if necessary. The last `num_drafts` tokens are draft tokens, any of which may be
        rejected. A draft model writes to `num_next_drafts` further positions. The row begins up to `num_open` tokens
        later if the row in flight accepts draft tokens.
        """
        device = self._device
        next_len = stop - num_drafts
        stop += num_open + num_next_drafts
        missing = -(-stop // device.page_size) - len(self.pages)
        if missing <= 0 and self.units.have_room(stop):
            return _NO_PAGES_NEEDED  # nearly every decode step of a model without recurrent states
        counts = self.units.missing(next_len, stop, num_drafts=num_drafts) if device.units else {}
        pages = device.take_pages(missing) if missing > 0 else _NO_PAGES
        if pages is None:
            return None
        if counts and not all(device.make_free(space, count) for space, count in counts.items() if count):
            device.pages.free(pages)
            return None
        capacity = Capacity({})
        if missing > 0:
            self.pages.frombytes(pages.tobytes())
            capacity.new_pages[FULL] = self.pages[-missing:]
            self._transfers.note_new(pages)
        if device.units:
            self.units.take(counts, capacity, next_len=next_len, num_drafts=num_drafts)
        return capacity

    def advance(self, tokens: PackedTokens, num_computed: int, *, is_kept: bool, is_point: bool, now: int) -> None:
        """Record that the first `num_computed` tokens are computed.

        Args:
            tokens: the sequence, packed, at least `num_computed` tokens.
            is_kept: whether its whole pages enter the tree.
            is_point: whether to keep a restore point here.
            now: step number.
        """
        device = self._device
        if not device.units and num_computed - self.handle.length < device.page_size:
            return  # no further whole page
        if device.units:
            self.units.advance(num_computed)
        if not (is_kept and self._is_kept):
            return
        self._adopt(tokens, num_computed, now=now)
        if self.checkpoint is not None and self.checkpoint.position < self.handle.length:
            self._drop_checkpoint()  # the prefix ends elsewhere now, so it is of no use
        if device.has_points and num_computed == self.handle.length:
            self._drop_checkpoint()
            self.checkpoint = device.hold(self.units.point(num_computed))
            if is_point:
                self._keep_checkpoint()
        if self._transfers.saves_computed:
            # Pages of prompts are saved at once, those of outputs in batches.
            new = self.handle.length // device.page_size - self._num_saved
            if new >= _SAVED_TOGETHER or (new and (not self._num_saved or self.handle.point is not None)):
                self._save(tokens, now=now)

    def end(self, tokens: PackedTokens = b"", *, now: int = 0) -> None:
        """Release everything; the last page boundary becomes a restore point.

        Args:
            tokens: the sequence, packed; what the host lacks of it is saved.
            now: step number.
        """
        device = self._device
        if device.units:
            self._keep_checkpoint()
            self._drop_checkpoint()
        if self._is_started and self._transfers.saves_computed:
            self._save(tokens, now=now)
        self.drop_load()
        self.cursor.close()
        device.pages.free(self.own)
        self.handle.release()
        if device.units:
            self.units.release()

    @property
    def own(self) -> PageIds:
        """Pages that the tree did not adopt: it had the same from elsewhere, or they are not whole or not computed."""
        rest = self._pages(self.handle.length // self._device.page_size)
        return np.concatenate([*self._duplicates, rest]) if self._duplicates else rest

    @property
    def points(self) -> list[RestorePoint]:
        """Restore points on the device that it holds."""
        loaded = None if self.load is None else self.load.point
        return [point for point in (self.checkpoint, loaded) if point is not None]

    def tables(self) -> dict[str, Sequence[int]]:
        """Space -> page ids from the start of the sequence; -1 for pages not held."""
        return {FULL: self.pages[:]} | {
            space: [-1] * window.first + list(window.ids) for space, window in self.units.windows.items()
        }

    # --- from and to the host -----------------------------------------------------------------------------------------

    @property
    def num_loadable(self) -> int:
        """Tokens that a load from the host would add."""
        return max(0, self.cursor.found.length - self.handle.length)

    def start(self, tokens: PackedTokens, *, may_load: bool, now: int) -> int:
        """Prepare to run, and to load what the host has beyond the device if `may_load`.

        Returns:
            Number of tokens that need not be computed.
        """
        if may_load and self.cursor.found.length > self.handle.length:
            self.load = self._transfers.prepare(self.handle, self.cursor, tokens, now=now)
        if self.load is None:
            return self.handle.length
        self.pages.frombytes(self.handle.pages_from(len(self.pages)).tobytes())
        if self._device.has_points:
            self.units.release()
            self.units = HeldUnits(self._device, self.load.point, self._is_kept)
        return self.load.position

    def use(self, tokens: PackedTokens, *, now: int) -> None:
        """Count a use of the prefix, once the sequence got its first capacity; may save it to the host.

        Called only then, or each failed attempt to start would save the same pages again.
        """
        self._is_started = True
        if self._transfers.saves_used and self.load is None:
            self._save(tokens, now=now)

    def load_more(self, tokens: PackedTokens, num_computed: int, *, now: int) -> int:
        """Prepare to load pages that reached the host while the sequence runs; only for models without restore points.

        Returns:
            As `start`; `num_computed` if there is nothing to load.
        """
        self.load = self._transfers.prepare_more(self.handle, self.cursor, tokens, num_computed=num_computed, now=now)
        return num_computed if self.load is None else self.load.position

    def plan_load(self) -> PlannedLoad | None:
        """Plan the prepared load, if any, once the row that needs it has capacity."""
        if self.load is None:
            return None
        planned = self.load.plan(self._pages(self.load.first, self.load.position // self._device.page_size))
        self.load = planned
        return planned

    def drop_load(self) -> None:
        """Release what a load holds, after it ended or instead of making it."""
        if self.load is not None:
            self.load.drop()
            self.load = None

    def finish_load(self, load: PlannedLoad, tokens: PackedTokens, *, now: int) -> None:
        """The ranks have acknowledged a load."""
        self._adopt(tokens, load.position, now=now)
        load.finish(self.handle, self._pages(load.first, load.position // self._device.page_size))
        self.load = None

    def fail_load(self, load: PlannedLoad, tokens: PackedTokens, *, is_bad: bool) -> None:
        """The ranks have reported failed loads in the step; the sequence must restart.

        Args:
            load: the sequence's load in that step.
            tokens: the sequence, packed.
            is_bad: whether this load failed, so that the host drops its source.
        """
        self.drop_load()
        self.cursor.close()  # it locks what is to be dropped
        if is_bad:
            load.forget(tokens, root=self._use.root)

    # --- how ----------------------------------------------------------------------------------------------------------

    def _save(self, tokens: PackedTokens, *, now: int) -> None:
        """Save the sequence's cached pages to the host, with the restore point at the end of its handle."""
        device, handle = self._device, self.handle
        stop = handle.length // device.page_size
        point = stop if device.has_points and handle.point is not None else self._saved_point
        if stop == self._num_saved and point == self._saved_point:
            return
        self._num_saved, self._saved_point = stop, point
        if self.cursor.found.length >= handle.length and not device.has_points:
            return  # the host had all of it when the sequence was matched, and it is locked there
        self._transfers.save(self.cursor, handle, tokens, now=now)

    def _pages(self, first: int, stop: int | None = None) -> PageIds:
        return np.frombuffer(self.pages[first:stop], np.intp)

    def _adopt(self, tokens: PackedTokens, num_computed: int, *, now: int) -> None:
        """Hand computed whole pages to the tree."""
        page_size = self._device.page_size
        known, whole = self.handle.length // page_size, num_computed // page_size
        if whole > known:
            pages = self._pages(known, whole)
            num_known = self._device.tree.extend(self.handle, tokens, pages, now=now)
            if num_known:
                self._duplicates.append(pages[:num_known])

    def _keep_checkpoint(self) -> None:
        """Put the checkpoint into the tree, at the end of the sequence's prefix."""
        if self.checkpoint is None:
            return
        assert self.checkpoint.position == self.handle.length, "the checkpoint is not at the end of the prefix"
        if self._device.keep(self.handle, self.checkpoint):
            self.checkpoint = None

    def _drop_checkpoint(self) -> None:
        if self.checkpoint is not None:
            self._device.let_go(self.checkpoint)
            self.checkpoint = None
