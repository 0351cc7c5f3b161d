"""The cache as the scheduler uses it: the device tier, the tiers below, and running sequences.

A sequence is matched when it is admitted (`begin`); from then on its `Holding` reserves and releases what it needs.
This module has what concerns all sequences: tiers, eviction, counters and checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from raycache.cache.costs import Costs
from raycache.cache.evict import Eviction
from raycache.cache.holding import PLAIN_USE, Holding, Use
from raycache.cache.host_tier import HostTier, NoHost, WritePolicy
from raycache.cache.keys import PackedDigests
from raycache.cache.kv_events import KvEvents, NoKvEvents
from raycache.cache.spaces import SpaceSizes
from raycache.cache.storage_tier import NoStorage, StorageTier
from raycache.cache.tier import Tier
from raycache.cache.transfers import NoTransfers, Transfers
from raycache.cache.tree import NOTHING
from raycache.memory.component import FULL
from raycache.observe.kv_events import Medium
from raycache.parallel.board import Acks
from raycache.types import PackedTokens


class SequenceCache:
    """The device tier, the tiers below it, and the sequences that run on them.

    Args:
        sizes: pages and slots of the device pools.
        is_kept: whether computed pages are cached; if not, nothing is matched either.
        eviction: the device's eviction policy.
        host: the tier below.
        storage: the tier below that.
        costs: measured pace of moving and computing.
        events: told of the device's changes, as its tier "GPU"; the host's has its own.
    Attributes:
        page_size: tokens per page.
        device: the device's pages, units and prefix tree.
        transfers: moves between device and host.
    """

    def __init__(
        self,
        sizes: SpaceSizes,
        *,
        is_kept: bool,
        eviction: Eviction = Eviction.LRU,
        host: HostTier | NoHost | None = None,
        storage: StorageTier | NoStorage | None = None,
        costs: Costs | None = None,
        events: KvEvents | NoKvEvents | None = None,
    ) -> None:
        self.page_size = sizes.page_size
        self.is_kept = is_kept
        self.host, self.storage = host or NoHost(), storage or NoStorage()
        self.costs, self.events = costs or Costs(), events or NoKvEvents()
        saves_leaving = isinstance(self.host, HostTier) and self.host.policy is WritePolicy.BACK
        self.device = Tier(
            sizes,
            eviction=eviction,
            on_evict=lambda pages: self.transfers.note_evicted(pages),
            on_leave=(lambda leaving: self.transfers.save_leaving(leaving)) if saves_leaving else None,
            listener=self.events.tier(Medium.GPU, sizes),
        )
        self.transfers = Transfers(self.device, self.host) if isinstance(self.host, HostTier) else NoTransfers()

    @property
    def has_points(self) -> bool:
        """Whether sequences can be resumed only from restore points."""
        return self.device.has_points

    @property
    def num_obtainable(self) -> int:
        """Device pages that are free or evictable."""
        return self.device.num_obtainable

    def reusable_len(self, num_tokens: int) -> int:
        """Most tokens of a sequence that can be cached: whole pages, with at least one token left to compute."""
        return (num_tokens - 1) // self.page_size * self.page_size

    def has_pages_for(self, num_tokens: int) -> bool:
        """Whether the device has as many pages, free or not."""
        return -(-num_tokens // self.page_size) <= self.device.pages.num_pages

    def begin(
        self,
        tokens: PackedTokens,
        *,
        is_matched: bool,
        now: int,
        use: Use = PLAIN_USE,
        digests: PackedDigests = b"",
    ) -> Holding:
        """Lock the longest resumable prefix.

        Args:
            tokens: the sequence so far, packed.
            is_matched: whether it may reuse cached pages.
            now: step number, the LRU clock.
            use: tenant and eviction priority.
            digests: of its first pages, as many as are known already.
        """
        known = tokens if is_matched and self.is_kept else NOTHING
        handle = self.device.tree.match(known, now=now, root=use.root, priority=use.priority, until_s=use.until_s)
        cursor = self.transfers.open(known, root=use.root, now=now, digests=digests)
        return Holding(self.device, self.transfers, handle, cursor, use, self.is_kept)

    def known_len(self, tokens: PackedTokens, *, use: Use, now: int) -> int:
        """Length in tokens of a prompt's cached prefix on the device, whether it can be resumed there or not."""
        return self._lengths(tokens, use=use, now=now)[1]

    def device_len(self, tokens: PackedTokens, *, use: Use, now: int) -> int:
        """Length in tokens of a prompt's resumable prefix on the device."""
        return self._lengths(tokens, use=use, now=now)[0]

    def evict(self, space: str) -> bool:
        """Evict one page ("full"), or the next restore point with units of `space`, if any is unused.

        Returns:
            Whether anything was evicted.
        """
        if space != FULL:
            return space in self.device.units and self.device.tree.evict_point(space)
        evicted = self.device.tree.evict(1)
        self.device.pages.free(evicted)
        return len(evicted) > 0

    def clear(self) -> None:
        """Drop everything on the device that no running sequence holds."""
        self.device.clear()

    # --- tiers below --------------------------------------------------------------------------------------------------

    @property
    def has_moves(self) -> bool:
        """Whether page moves between tiers are in progress."""
        return self.transfers.has_moves or self.storage.num_open > 0

    def acknowledge(self, acks: Acks, *, now: int, now_s: float) -> None:
        """Apply the ranks' progress of moves and completed storage calls, and set the clock of priorities (seconds)."""
        self.device.tree.tick(now_s)
        self.host.tick(now_s)
        self.transfers.acknowledge(acks, now=now)
        self.storage.poll(now=now, now_s=now_s)

    # --- counters and checks ------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Page counts by field name of EngineStats."""
        device = self.device
        free, cached = device.pages.num_free, device.tree.num_cached
        return {
            "pages_total": device.pages.num_pages,
            "pages_free": free,
            "pages_in_use": device.pages.num_pages - free - cached,
            "pages_cached": cached,
            "pages_locked": device.tree.num_locked,
            "evicted_pages": device.num_evicted,
            "restore_points": device.tree.num_points,
            "evicted_restore_points": device.num_points_evicted,
        }

    def info(self) -> dict[str, str]:
        """Sizes that do not change, as texts."""
        host = self.host.tier.pages.num_pages if isinstance(self.host, HostTier) else 0
        return {
            "page_size": str(self.page_size),
            "pages": str(self.device.pages.num_pages),
            "host_pages": str(host),
            "prefix_cache": str(self.is_kept),
        }

    def tiers(self) -> dict[str, dict[str, float]]:
        """Counters of the tiers below the device."""
        if not self.host.is_present:
            return {}
        unsaved = {"evicted_unsaved_pages": self.transfers.num_evicted_unsaved}
        found = {"host": self.transfers.counts() | self.costs.figures() | unsaved}
        return found | ({"storage": self.storage.counts()} if self.storage.is_present else {})

    def num_units(self) -> dict[str, int]:
        """Units of each window and state space that no move between tiers holds."""
        found = {space: units.num_ids for space, units in self.device.units.items()}
        for point in self.transfers.held_points:
            for space, ids in point.parts.items():
                found[space] -= len(ids)
        return found

    def shared_counts(self) -> dict[str, tuple[int, int]]:
        """(total, free) of each window and state space."""
        return {space: counts for space, counts in self.device.components().items() if space != FULL}

    def components(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Tier -> component space -> (total, free) units."""
        host = {"host": self.host.tier.components()} if isinstance(self.host, HostTier) else {}
        return {"device": self.device.components(), **host}

    def check(self, holdings: Sequence[Holding]) -> None:
        """Assert that every page and slot is free, cached or held, with matching reference counts."""
        device = self.device
        self.host.check()
        units = {space: [i for holding in holdings for i in holding.units.all()[space]] for space in device.units}
        own = np.concatenate([np.empty(0, np.intp), *(holding.own for holding in holdings)])
        device.check(taken=own, units=units)
        is_idle = not holdings and not self.transfers.has_moves
        assert device.tree.num_locked == 0 or not is_idle, "pages are locked although nothing runs"
        points = [*self.transfers.held_points, *(point for holding in holdings for point in holding.points)]
        assert Counter(points) == Counter(device.held), "held restore points do not match their holders"

    def _lengths(self, tokens: PackedTokens, *, use: Use, now: int) -> tuple[int, int]:
        tree = self.device.tree
        return tree.match_lengths(tokens, now=now, root=use.root, priority=use.priority, until_s=use.until_s)
