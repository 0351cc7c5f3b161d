"""Saves in progress from device to host: their source, their progress and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from raycache.cache.host_tier import HostTier
from raycache.cache.keys import DIGEST_BYTES, PackedDigests, chain_digests
from raycache.cache.node import RestorePoint
from raycache.cache.tier import Tier
from raycache.cache.tree import PrefixHandle
from raycache.memory.pages import PageIds
from raycache.types import PackedTokens


class Source(Protocol):
    """A device prefix that is being copied to the host."""

    @property
    def point(self) -> RestorePoint | None:
        """The restore point at its end."""

    def take(self, first: int) -> PageIds:
        """Keep it until `release`; returns its device pages from index `first` on, those to be copied."""

    def release(self, is_saved: bool) -> None:
        """Release the device's pages and units; `is_saved` tells whether the copy succeeded."""


class SavedPrefix:
    """A prefix that stays on the device: locked while it is copied.

    Args:
        device: the device tier.
        prefix: handle of it; the caller may release it after `take`.
        is_saved: device page -> whether the host has it; updated when the copy is made.
        then: called when the copy is made or has failed.
    """

    def __init__(
        self, device: Tier, prefix: PrefixHandle, is_saved: npt.NDArray[np.bool_], then: Callable[[], None]
    ) -> None:
        self._device, self._is_saved, self._then = device, is_saved, then
        self._prefix = prefix
        self.point = prefix.point if device.has_points else None

    def take(self, first: int) -> PageIds:
        """As of `Source`."""
        self._node = self._prefix.node  # the handle may move on
        self._device.tree.locks.add(self._node)
        if self.point is not None:
            self._device.hold(self.point)
        self._pages = self._prefix.pages_from(first)
        return self._pages

    def release(self, is_saved: bool) -> None:
        """As of `Source`."""
        if is_saved:
            self._is_saved[self._pages] = True
        self._device.tree.locks.remove(self._node)
        if self.point is not None:
            self._device.let_go(self.point)
        self._then()


class Cursor:
    """Tracks how much of a sequence the host has or is getting.

    Args:
        found: handle of the longest resumable prefix on the host.
        digests: of the sequence's first pages, as many as are known already.
        is_closed: True without a host tier.
    Attributes:
        saved: handle at the end of what the host has.
        num_planned: number of pages that the host has or is getting.
        is_closed: whether the sequence has ended; saves in progress still complete.
        is_broken: whether a save failed, which makes those after it useless.
    """

    __slots__ = ("_last", "_num_open", "digests", "found", "is_broken", "is_closed", "num_planned", "saved")

    def __init__(self, found: PrefixHandle, digests: PackedDigests = b"", *, is_closed: bool = False) -> None:
        self.found, self.digests = found, digests
        self.saved = found.clone()
        self.num_planned = 0
        self._last: PackedDigests | None = b""
        self.is_closed = is_closed
        self.is_broken = False
        self._num_open = 0

    def catch_up(self, host: HostTier, tokens: PackedTokens, *, stop: int, now: int) -> None:
        """Advance over those of the first `stop` pages that the host obtained, also from other sequences."""
        if self._num_open:
            return
        limit = min(stop, len(tokens) // (4 * host.page_size)) * host.page_size
        if limit > self.saved.length:
            host.tier.tree.lengthen(self.saved, tokens, limit=limit, now=now)
        known = self.saved.length // host.page_size
        if known != self.num_planned:
            self.num_planned = known
            self._last = None

    def lacks_point(self, stop: int) -> bool:
        """Whether the host is not known to have a restore point after the first `stop` pages."""
        return stop == self.num_planned and (self._num_open > 0 or not self.saved.node.has_point)

    def last_digests(self, host: HostTier) -> PackedDigests:
        """Digests of the last planned pages, as many as a restore point may need; at least one if there are any."""
        if self._last is None:
            self._last = host.last_digests(self.saved)
        return self._last

    def plan(self, host: HostTier, tokens: PackedTokens, *, stop: int) -> PackedDigests:
        """Record the pages behind the planned ones, up to `stop`, as planned; returns their digests."""
        first = self.num_planned
        digests = self.digests[first * DIGEST_BYTES : stop * DIGEST_BYTES]
        num_known = first + len(digests) // DIGEST_BYTES
        if num_known < stop:
            before = (digests or self.last_digests(host) or self.found.root)[-DIGEST_BYTES:]
            digests += chain_digests(before, tokens, first=num_known, stop=stop, page_size=host.page_size)
        size = host.num_last * DIGEST_BYTES
        before = self.last_digests(host) if len(digests) < size else b""
        self._last = (before + digests)[-size:]
        if stop > first:
            self.num_planned = stop
        self._num_open += 1
        return digests

    def finish(self, *, is_done: bool) -> None:
        """Record that the oldest save has completed or failed."""
        self._num_open -= 1
        self.is_broken |= not is_done
        self._release_saved()

    def close(self) -> None:
        """Release the locks; further calls do nothing."""
        if not self.is_closed:
            self.is_closed = True
            self.found.release()
            self._release_saved()

    def _release_saved(self) -> None:
        if self.is_closed and self._num_open == 0:
            self.saved.release()


@dataclass(slots=True, eq=False)
class Save:
    """One save: pages of one sequence in transfer to the host.

    Attributes:
        number: sequence number of its moves.
        cursor: the sequence's progress on the host.
        source: the device prefix.
        tokens: the sequence, packed; may grow.
        pages, digests: reserved host pages and their digests.
        point: host units for the restore point at the end; None if there is none or no space for it.
    """

    number: int
    cursor: Cursor
    source: Source
    tokens: PackedTokens
    pages: PageIds
    digests: PackedDigests
    point: RestorePoint | None
