"""Page tables of all slots of a rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_LEAST = 8


class PageTables:
    """Page tables of one component space: a row per slot, all as wide as the longest so far.

    Attributes:
        ids: int32 [slots, width]; -1 for a page that is no longer held, arbitrary beyond the end of a row.
        num_pages: int64 [slots]; length of each row.
    """

    def __init__(self) -> None:
        self.ids: NDArray[np.int32] = np.empty((0, 0), np.int32)
        self.num_pages: NDArray[np.int64] = np.zeros(0, np.int64)

    def begin(self, slot: int, ids: Sequence[int]) -> None:
        """Assign a slot to a new request with these pages."""
        self._grow(slot, 0)
        self.num_pages[slot] = 0
        self.append(slot, ids)

    def append(self, slot: int, ids: Sequence[int]) -> None:
        """Append pages to the row of a slot."""
        count = int(self.num_pages[slot])
        self._grow(slot, count + len(ids))
        self.ids[slot, count : count + len(ids)] = ids
        self.num_pages[slot] = count + len(ids)

    def of(self, slot: int) -> NDArray[np.int32]:
        """Page ids of a slot, as a view."""
        return self.ids[slot, : self.num_pages[slot]]

    def _grow(self, slot: int, width: int) -> None:
        slots, most = self.ids.shape
        if slot < slots and width <= most:
            return
        # Doubling keeps the amortised cost of growth low.
        size = (
            max(2 * slots, slot + 1, _LEAST) if slot >= slots else slots,
            max(2 * most, width, _LEAST) if width > most else most,
        )
        grown = np.full(size, -1, np.int32)
        grown[:slots, :most] = self.ids
        counts = np.zeros(size[0], np.int64)
        counts[:slots] = self.num_pages
        self.ids, self.num_pages = grown, counts
