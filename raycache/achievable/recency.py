"""How many pages were used more recently than others: counts by the place of their last use, in a ring.

    places      0 1 2 3 4 5 6 7          8 uses are remembered; the next one takes place 3, where the oldest one is
    uses        8 9 10 3 4 5 6 7

Counts of 64 places, and of 64 times as many, stand beside those of single places. So a count is changed in three
steps, and summed up in three short sums.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

_BITS = 6
_SPAN = 1 << _BITS


class Use:
    """One use of a path of pages: a request, or the end of one.

    Attributes:
        place: in the ring; negative: in none, as it has no pages, or was forgotten.
        pages: those whose last use it is.
        used_s: when.
        expires_s: when the requests' cache_ttl_s ends.
    """

    __slots__ = ("expires_s", "pages", "place", "used_s")

    def __init__(self, used_s: float, expires_s: float) -> None:
        self.place, self.pages = -1, 0
        self.used_s, self.expires_s = used_s, expires_s


class Recency:
    """Pages by their last use.

    Args:
        max_uses: places; behind them, the oldest use is forgotten.
    """

    def __init__(self, max_uses: int) -> None:
        self._max_uses = max_uses
        self._ones = array("i", bytes(4 * max_uses))
        self._spans = [0] * (-(-max_uses // _SPAN))
        self._wholes = [0] * (-(-max_uses // _SPAN**2))
        self._uses: dict[int, Use] = {}  # place -> use, if pages are left
        self._next = 0
        self._num_before_next = 0
        self.num_pages = 0

    def append(self, use: Use, num_pages: int) -> int:
        """Add the most recent use, which may have no pages; returns those that are forgotten for it."""
        place, num_forgotten = self._next, 0
        if (oldest := self._uses.get(place)) is not None:
            num_forgotten = oldest.pages
            self.add(oldest, -num_forgotten)
        if num_pages:
            use.place = place
            self._uses[place] = use
            self.add(use, num_pages)
            self._num_before_next += num_pages
        self._next = place + 1
        if self._next == self._max_uses:
            self._next = self._num_before_next = 0
        return num_forgotten

    def add(self, use: Use, num_pages: int) -> None:
        """Change the number of a use's pages; one without any leaves the ring."""
        place = use.place
        use.pages += num_pages
        self.num_pages += num_pages
        self._ones[place] += num_pages
        self._spans[place >> _BITS] += num_pages
        self._wholes[place >> 2 * _BITS] += num_pages
        if place < self._next:
            self._num_before_next += num_pages
        if not use.pages:
            use.place = -1
            del self._uses[place]

    def remove(self, pages: Mapping[Use, int]) -> None:
        """Take pages from many uses: what `add` does, without a call for each."""
        ones, spans, wholes, end = self._ones, self._spans, self._wholes, self._next
        for use, num_pages in pages.items():
            place = use.place
            use.pages -= num_pages
            self.num_pages -= num_pages
            ones[place] -= num_pages
            spans[place >> _BITS] -= num_pages
            wholes[place >> 2 * _BITS] -= num_pages
            if place < end:
                self._num_before_next -= num_pages
            if not use.pages:
                use.place = -1
                del self._uses[place]

    def num_after(self, use: Use) -> int:
        """Pages that were used after those of a use."""
        end = use.place + 1
        span, whole = end >> _BITS, end >> 2 * _BITS
        before = (
            sum(self._wholes[:whole]) + sum(self._spans[whole << _BITS : span]) + sum(self._ones[span << _BITS : end])
        )
        return self._num_before_next - before + (self.num_pages if end > self._next else 0)
