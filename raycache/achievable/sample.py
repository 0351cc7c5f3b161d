"""A sample of all page prefixes that requests have used, with their order of use.

A page is in the sample if the hash of its prefix is below a limit: one in 2 ** 64 / limit, the same ones in all
requests (spatial sampling; SHARDS, Waldspurger et al., FAST 2015). At first that is all of them. When the sample
exceeds its bound, the limit is lowered so that an eighth of it goes. Pages that none of the last MOST_USES uses has had
are forgotten, so the limit does not fall forever.

Of a request, the known pages are a prefix, and what follows is new. The sample shows where that is up to the next
sampled page, so what lies behind a boundary of any kind is estimated from the first sampled page behind it:

    pages      0 1 2 3 4 5 6 7 8 9        3 and 7 are in the sample, one page in 4: weight 4
    boundary          |                   first sampled page behind it: 7, so 10 - 7 + (4 - 1) = 6 pages are estimated

If no sampled page is behind it, the estimate is 0. The estimate is unbiased for any number of pages: each sampled page
stands for itself, and the first one also for those before it. Its variance is weight * (weight - 1) times the
probability that there is a sampled page. New pages are other ones in each request, so the sum of weight * (weight - 1)
over the requests that have a sampled one is an unbiased estimate of the variance of the sum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from raycache.achievable.paths import KEY_BYTES, Paths, Stretch
from raycache.achievable.prefixes import Hashes
from raycache.achievable.recency import Recency, Use

MOST_USES = 2**17
_ALL = 2**64
_KEPT, _OF = 7, 8
"""Share of the sample that stays when the limit is lowered: less often is cheaper, more often takes less at once."""


class Run(NamedTuple):
    """Sampled pages of a request that had the same last use.

    Attributes:
        begin: of these, among the request's sampled pages.
        length: sampled pages.
        num_newer: sampled pages used after them.
    """

    begin: int
    length: int
    num_newer: int
    use: Use


class Reference(NamedTuple):
    """The sampled pages of a request, as they were before it.

    Attributes:
        places: index of each among the pages of the request, ascending.
        num_known: of them, those that earlier requests have used; the first ones.
        runs: of the known ones, in the order of the pages.
        weight: pages for which a sampled one stands.
    """

    places: Sequence[int]
    num_known: int
    runs: Sequence[Run]
    weight: float

    def behind(self, boundary: int, end: int) -> float:
        """Estimate the new pages in [boundary, end); pages before the boundary are known for another reason."""
        index = max(self.num_known, bisect_left(self.places, boundary))
        if index == len(self.places) or self.places[index] >= end:
            return 0.0
        return end - self.places[index] + self.weight - 1


class PageSample:
    """The sample.

    Args:
        max_pages: in it.
        max_uses: after which a page that was not used again is forgotten.
    Attributes:
        weight: pages for which a sampled one stands.
    """

    def __init__(self, max_pages: int, *, max_uses: int = MOST_USES) -> None:
        assert max_pages >= 2, "a sample needs pages"
        self._max_pages = max_pages
        self._paths = Paths()
        self._recency = Recency(max_uses)
        self._num_forgotten = 0  # pages that may still be in _paths
        self._limit: np.uint64 | None = None
        self.weight = 1.0

    def __len__(self) -> int:
        return self._recency.num_pages

    def use(self, prefixes: Hashes, use: Use) -> Reference:
        """Look up the pages of a request, then count them as used, those at its end before those at its beginning.

        Args:
            use: a new one.
        """
        places: Sequence[int] = range(len(prefixes))
        weight = self.weight
        if self._limit is not None:
            (found,) = (prefixes < self._limit).nonzero()
            prefixes, places = prefixes[found], found.data
        keys = prefixes.tobytes()
        runs, num_known = self._runs(self._paths.use(keys, use))
        recency = self._recency
        for run in runs:
            recency.add(run.use, -run.length)
        self._num_forgotten += recency.append(use, len(keys) // KEY_BYTES)
        if self._paths.num_keys > self._max_pages:
            self._shrink()
        return Reference(places, num_known, runs, weight)

    def _runs(self, found: Sequence[Stretch]) -> tuple[list[Run], int]:
        """The known pages, and their number."""
        runs, begin = [], 0
        for length, use in found:
            runs.append(Run(begin, length, self._recency.num_after(use), use))
            begin += length
        return runs, begin

    def _shrink(self) -> None:
        """Give up the pages that are forgotten; if those are few, lower the limit to the hash of a page that goes."""
        if self._num_forgotten:
            self._num_forgotten = 0
            self._paths.drop_forgotten()
        kept = self._max_pages * _KEPT // _OF
        if self._paths.num_keys <= kept:
            return
        self._limit, dropped = self._paths.keep_smallest(kept)
        self.weight = _ALL / int(self._limit)
        self._recency.remove(dropped)
