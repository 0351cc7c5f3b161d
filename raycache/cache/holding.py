"""What one running sequence holds of the cache, from its match to its end.

Whole pages go to the tree as soon as they are computed, so that others can use them. What is computed is saved to the
host by its write policy, and a prefix that the host has beyond the device's is loaded: into own pages, which the tree
adopts once the ranks say that they are whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raycache.cache.held_units import Capacity, HeldUnits
from raycache.cache.node import RestorePoint
from raycache.cache.saving import Cursor
from raycache.cache.tier import Tier
from raycache.cache.transfers import Load, NoTransfers, PlannedLoad, Transfers
from raycache.cache.tree import PrefixHandle
from raycache.memory.component import FULL
from raycache.types import PackedTokens

_SAVED_TOGETHER = 8
"""Pages of an answer that are saved at a time: each save locks its prefix, which cuts the tree's runs there."""


_NO_PAGES_NEEDED = Capacity({})


@dataclass(frozen=True, slots=True)
class Use:
    """Who uses the cache, and how.

    Attributes:
        root: seed of the chain of its prefixes: model, adapter and tenant.
        priority, until_s: for eviction by priority; see `RadixTree.match`.
    """

    root: bytes = b""
    priority: int = 0
    until_s: float = 0.0


PLAIN_USE = Use()


class Holding:
    """What one running sequence holds.

    Args:
        device: tier that it runs on.
        transfers: from and to the tier below.
        handle: the locked prefix that it goes on from.
        cursor: its place in the host tier.
        use: who it belongs to.
        is_kept: whether what it computes is kept for others.
    Attributes:
        handle, cursor: as given.
        pages: of the sequence, in order.
        own: those of them that the tree did not adopt.
        units: of window and state spaces.
        checkpoint: the last page boundary that it passed.
        load: what is being loaded for it.
    """

    __slots__ = (
        "_device",
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
        "own",
        "pages",
        "units",
    )

    def __init__(
        self,
        device: Tier,
        transfers: Transfers | NoTransfers,
        *,
        handle: PrefixHandle,
        cursor: Cursor,
        use: Use,
        is_kept: bool,
    ) -> None:
        self._device, self._transfers, self._use, self._is_kept = device, transfers, use, is_kept
        self.handle, self.cursor = handle, cursor
        self.pages: list[int] = handle.pages.tolist()
        self.own: set[int] = set()
        self.units = HeldUnits(device, handle.point)
        self.checkpoint: RestorePoint | None = None
        self.load: Load | None = None
        self._is_started = False
        self._num_saved = self._saved_point = 0  # pages, and pages before the last restore point, that were handed down

    # --- on the device ------------------------------------------------------------------------------------------------

    def reserve(self, start: int, stop: int, *, num_drafts: int = 0, num_next_drafts: int = 0) -> Capacity | None:
        """Pages and units for the tokens [start, stop) of the sequence; None, with nothing taken, if too few are free.

        What others could reuse is evicted for it. The last `num_drafts` tokens may turn out to be wrong; the sequence
        goes on behind any of them then. A draft model guesses on `num_next_drafts` places more.
        """
        device = self._device
        next_len = stop - num_drafts
        stop += num_next_drafts
        missing = -(-stop // device.page_size) - len(self.pages)
        if missing <= 0 and not device.units:
            return _NO_PAGES_NEEDED  # nearly every decode step of a dense model
        counts = self.units.missing(next_len, stop, num_drafts=num_drafts)
        if not all(device.make_free(space, count) for space, count in {FULL: missing, **counts}.items()):
            return None
        capacity = Capacity({})
        if missing > 0:
            pages = capacity.new_pages[FULL] = device.pages.allocate(missing).tolist()
            self.pages += pages
            self.own.update(pages)
            self._transfers.note_new(pages)
        self.units.take(counts, capacity, next_len=next_len, num_drafts=num_drafts)
        return capacity

    def advance(self, tokens: PackedTokens, num_computed: int, *, is_kept: bool, is_point: bool, now: int) -> None:
        """The sequence has computed its first `num_computed` tokens.

        Args:
            tokens: of the sequence, packed, at least so many.
            num_computed: in tokens.
            is_kept: whether its whole pages go to the tree.
            is_point: whether this should become a restore point.
            now: step number.
        """
        device = self._device
        if not device.units and num_computed - self.handle.length < device.page_size:
            return  # no whole page more
        if device.units:
            self.units.advance(num_computed)
        if not (is_kept and self._is_kept):
            return
        self._adopt(tokens, num_computed, now=now)
        if self.checkpoint is not None and self.checkpoint.position < self.handle.length:
            self._drop_checkpoint()  # the prefix ends elsewhere now: nobody could use it
        if device.has_points and num_computed == self.handle.length:
            self._drop_checkpoint()
            self.checkpoint = device.hold(self.units.point(num_computed))
            if is_point:
                self._keep_checkpoint()
        if self._transfers.saves_computed:
            # Pages of prompts are handed down at once, of answers some at a time.
            new = self.handle.length // device.page_size - self._num_saved
            if new >= _SAVED_TOGETHER or (new and (not self._num_saved or self.handle.point is not None)):
                self._save(tokens, now=now)

    def end(self, tokens: PackedTokens = b"", *, now: int = 0) -> None:
        """Give everything back; the last page boundary becomes a restore point.

        Args:
            tokens: of the sequence, packed; what the host lacks of them is saved.
            now: step number.
        """
        device = self._device
        self._keep_checkpoint()
        self._drop_checkpoint()
        if self._is_started and self._transfers.saves_computed:
            self._save(tokens, now=now)
        self.drop_load()
        self.cursor.close()
        device.pages.free(np.asarray(sorted(self.own), np.int32))
        self.handle.release()
        self.units.release()

    @property
    def points(self) -> list[RestorePoint]:
        """Restore points of the device that it holds."""
        loaded = None if self.load is None else self.load.point
        return [point for point in (self.checkpoint, loaded) if point is not None]

    def tables(self) -> dict[str, list[int]]:
        """Space -> page ids from the sequence's begin on, -1 for those that are not held."""
        return {FULL: list(self.pages)} | {
            space: [-1] * window.first + list(window.ids) for space, window in self.units.windows.items()
        }

    # --- from and to the host -----------------------------------------------------------------------------------------

    @property
    def num_loadable(self) -> int:
        """Tokens that it would gain from the host."""
        return max(0, self.cursor.found.length - self.handle.length)

    def start(self, tokens: PackedTokens, *, may_load: bool, now: int) -> int:
        """The sequence is about to run: prepare to load what the host has beyond the device, if that is wanted.

        Returns:
            Where it goes on, in tokens.
        """
        if may_load and self.num_loadable:
            self.load = self._transfers.prepare(self.handle, self.cursor, tokens, now=now)
        if self.load is None:
            return self.handle.length
        self.pages += self.handle.pages_from(len(self.pages)).tolist()
        if self._device.has_points:
            self.units.release()
            self.units = HeldUnits(self._device, self.load.point)
        return self.load.position

    def use(self, tokens: PackedTokens, *, now: int) -> None:
        """The sequence has its first capacity and runs: what a second one uses now is saved.

        Not before: one that tries again and again would save the same pages each time.
        """
        self._is_started = True
        if self._transfers.saves_used and self.load is None:
            self._save(tokens, now=now)

    def load_more(self, tokens: PackedTokens, num_computed: int, *, now: int) -> int:
        """Prepare to load what the host has got behind a sequence that runs; only for models without restore points.

        Returns:
            As `start`; `num_computed` if there is nothing.
        """
        self.load = self._transfers.prepare_more(self.handle, self.cursor, tokens, num_computed=num_computed, now=now)
        return num_computed if self.load is None else self.load.position

    def plan_load(self) -> PlannedLoad | None:
        """Plan the moves that were prepared, if any, once the row behind them has capacity."""
        if self.load is None:
            return None
        planned = self.load.plan(self.pages[self.load.first : self.load.position // self._device.page_size])
        self.load = planned
        return planned

    def drop_load(self) -> None:
        """Let go of what a load needs: it is over, or is not made."""
        if self.load is not None:
            self.load.drop()
            self.load = None

    def finish_load(self, load: PlannedLoad, tokens: PackedTokens, *, now: int) -> None:
        """The ranks have said that a load brought what was saved."""
        self._adopt(tokens, load.position, now=now)
        load.finish(self.handle, self.pages[load.first : load.position // self._device.page_size])
        self.load = None

    def fail_load(self, load: PlannedLoad, tokens: PackedTokens, *, is_bad: bool) -> None:
        """The ranks have said that loads of the step are not what was saved; the sequence has to end.

        Args:
            load: of the sequence.
            tokens: of the sequence, packed.
            is_bad: whether it was this one, so that the host has to forget it.
        """
        self.drop_load()
        self.cursor.close()  # it locks what is to go
        if is_bad:
            load.forget(tokens, root=self._use.root)

    # --- how ----------------------------------------------------------------------------------------------------------

    def _save(self, tokens: PackedTokens, *, now: int) -> None:
        """Copy the tree's pages of the sequence to the host, with the restore point at the end of its handle."""
        stop = self.handle.length // self._device.page_size
        point = self._saved_point if self.handle.point is None else stop
        if (stop, point) != (self._num_saved, self._saved_point):
            self._num_saved, self._saved_point = stop, point
            self._transfers.save(self.cursor, self.handle, tokens, now=now)

    def _adopt(self, tokens: PackedTokens, num_computed: int, *, now: int) -> None:
        """Hand the whole pages that were computed to the tree."""
        page_size = self._device.page_size
        known, whole = self.handle.length // page_size, num_computed // page_size
        if whole > known:
            pages = np.asarray(self.pages[known:whole], np.int32)
            adopted = self._device.tree.extend(self.handle, tokens, pages, now=now)
            self.own.difference_update(pages[adopted].tolist())

    def _keep_checkpoint(self) -> None:
        """Put the checkpoint, where the sequence's prefix ends, into the tree."""
        if self.checkpoint is None:
            return
        assert self.checkpoint.position == self.handle.length, "a checkpoint that the prefix has left behind"
        if self._device.keep(self.handle, self.checkpoint):
            self.checkpoint = None

    def _drop_checkpoint(self) -> None:
        if self.checkpoint is not None:
            self._device.let_go(self.checkpoint)
            self.checkpoint = None
