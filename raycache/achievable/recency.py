"""How many pages were used more recently than others: an order-statistics tree over the times of use."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class Use:
    """One use of a path of pages: a request, or the end of one.

    Attributes:
        place: in the order of all uses.
        pages: those whose last use it is.
        used_s: when.
        expires_s: when the requests' cache_ttl_s ends.
    """

    __slots__ = ("expires_s", "pages", "place", "used_s")

    def __init__(self, used_s: float, expires_s: float) -> None:
        self.place, self.pages = -1, 0
        self.used_s, self.expires_s = used_s, expires_s


class Recency:
    """Pages by their last use. A Fenwick tree: both operations take time logarithmic in `max_uses`.

    Args:
        max_uses: places; when they are taken, `renumber` gives those without pages back.
    """

    def __init__(self, max_uses: int) -> None:
        self._max_uses = max_uses
        self._tree = [0] * (max_uses + 1)
        self._next = 0
        self.num_pages = 0

    @property
    def is_full(self) -> bool:
        """Whether there is no place for another use."""
        return self._next == self._max_uses

    def append(self, use: Use, num_pages: int) -> None:
        """Add the most recent use."""
        assert not self.is_full, "no place is left"
        use.place, self._next = self._next, self._next + 1
        self.add(use, num_pages)

    def add(self, use: Use, num_pages: int) -> None:
        """Change the number of a use's pages."""
        use.pages += num_pages
        self.num_pages += num_pages
        tree, size = self._tree, self._max_uses
        at = use.place + 1
        while at <= size:
            tree[at] += num_pages
            at += at & -at

    def num_after(self, use: Use) -> int:
        """Pages that were used after those of a use."""
        tree, at, before = self._tree, use.place + 1, 0
        while at:
            before += tree[at]
            at &= at - 1
        return self.num_pages - before

    def renumber(self, uses: Iterable[Use]) -> None:
        """Start over with these uses, in their order and with their numbers of pages."""
        before = np.zeros(self._max_uses + 1, np.int64)  # pages of the uses up to each place
        ordered = sorted(uses, key=lambda use: use.place)
        for place, use in enumerate(ordered):
            use.place = place
        self._next = len(ordered)
        before[1 : self._next + 1] = np.cumsum([use.pages for use in ordered], dtype=np.int64)
        before[self._next + 1 :] = before[self._next]
        self.num_pages = int(before[-1])
        at = np.arange(self._max_uses + 1)
        self._tree = (before - before[at & (at - 1)]).tolist()
