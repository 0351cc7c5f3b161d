"""Prefixes on their way to the host: where they come from, how far they are, and what is held for them meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from raycache.cache.host_tier import HostTier
from raycache.cache.node import RestorePoint
from raycache.cache.tier import Tier
from raycache.cache.tree import PrefixHandle
from raycache.memory.pages import PageIds
from raycache.types import PackedTokens


class Source(Protocol):
    """A prefix of the device that is copied to the host."""

    @property
    def point(self) -> RestorePoint | None:
        """The restore point at its end."""

    def pages_from(self, first: int) -> PageIds:
        """The device pages without the first `first` ones, which are not copied."""

    def release(self, is_saved: bool) -> None:
        """Take in that the device's pages and units are not needed any more."""


class SavedPrefix:
    """A prefix that the device goes on to hold: locked until it is copied.

    Args:
        device: where it is.
        prefix: a lock on it, which may be released meanwhile.
        is_saved: device page -> whether the host has it; noted there.
        then: called when the copy is made or has failed.
    Attributes:
        point: as of `Source`.
    """

    def __init__(
        self, device: Tier, prefix: PrefixHandle, is_saved: npt.NDArray[np.bool_], then: Callable[[], None]
    ) -> None:
        self._device, self._is_saved, self._then = device, is_saved, then
        self._handle = prefix.clone()
        self._moved: list[PageIds] = []
        self.point = prefix.point
        if self.point is not None:
            device.hold(self.point)

    def pages_from(self, first: int) -> PageIds:
        """As of `Source`."""
        self._moved.append(self._handle.pages_from(first))
        return self._moved[-1]

    def let_go(self) -> None:
        """Unlock it."""
        self._handle.release()
        if self.point is not None:
            self._device.let_go(self.point)

    def release(self, is_saved: bool) -> None:
        """As of `Source`."""
        for pages in self._moved if is_saved else ():
            self._is_saved[pages] = True
        self.let_go()
        self._then()


class Cursor:
    """A sequence's place in the host tier.

    Args:
        found: the longest prefix there that can be continued.
        is_closed: whether there is no host tier to find or save anything.
    Attributes:
        found: as given.
        saved: the end of what the host knows or has saved of it.
        num_planned: pages that the host has or is getting.
        last_digests: of the last of those, as many as a restore point may need, at least one if there are any.
        is_closed: the sequence has ended; what is on its way comes to its end.
        is_broken: moves of it failed, those after them are of no use.
    """

    __slots__ = ("_num_open", "found", "is_broken", "is_closed", "last_digests", "num_planned", "saved")

    def __init__(self, found: PrefixHandle, *, is_closed: bool = False) -> None:
        self.found = found
        self.saved = found.clone()
        self.num_planned = 0
        self.last_digests: list[bytes] = []
        self.is_closed = is_closed
        self.is_broken = False
        self._num_open = 0

    def catch_up(self, host: HostTier, tokens: PackedTokens, *, stop: int, now: int) -> None:
        """Learn what the host has got of the first `stop` pages, from other sequences too."""
        if self._num_open:
            return
        limit = min(stop, len(tokens) // (4 * host.page_size)) * host.page_size
        if limit > self.saved.length:
            host.tier.tree.lengthen(self.saved, tokens, limit=limit, now=now)
        known = self.saved.length // host.page_size
        if known != self.num_planned:
            self.num_planned = known
            self.last_digests = host.last_digests(self.saved)

    def lacks_point(self, stop: int) -> bool:
        """Whether the host is not known to have a restore point behind the first `stop` pages."""
        return stop == self.num_planned and (self._num_open > 0 or not self.saved.node.has_point)

    def plan(self, digests: Sequence[bytes], *, num_kept: int) -> None:
        """Take in that pages are on their way; `num_kept` digests of the last ones are kept."""
        self.last_digests = [*self.last_digests, *digests][-num_kept:]
        self.num_planned += len(digests)
        self._num_open += 1

    def finish(self, *, is_done: bool) -> None:
        """Take in that the oldest moves have come to their end."""
        self._num_open -= 1
        self.is_broken |= not is_done
        self._release_saved()

    def close(self) -> None:
        """Unlock it; the second time does nothing."""
        if not self.is_closed:
            self.is_closed = True
            self.found.release()
            self._release_saved()

    def _release_saved(self) -> None:
        if self.is_closed and self._num_open == 0:
            self.saved.release()


@dataclass(frozen=True, slots=True, eq=False)
class Save:
    """Pages of one sequence on their way to the host.

    Attributes:
        number: of the moves.
        cursor: of the sequence.
        source: of the device.
        tokens: of the sequence; may grow.
        pages, digests: of the host.
        point: of the host, for the restore point at the end; None if there is none or no room for it.
    """

    number: int
    cursor: Cursor
    source: Source
    tokens: PackedTokens
    pages: PageIds
    digests: list[bytes]
    point: RestorePoint | None
