"""The share of tokens that an LRU cache of any size would have reused: the distances of all references, by size.

A reference to a page is a hit in a cache that holds at least as many pages as were used since its last use, itself
included (Mattson et al., 1970). Prefixes stay whole: of a path, the last page is evicted first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from raycache.achievable.sample import Reference

_STEPS_PER_DOUBLING = 4
_LARGEST = 2**40


class Curve:
    """Pages that were reused from a cache of each of some sizes.

    Args:
        sizes: in pages, at which the curve is to be exact where all pages are in the sample; others are added between.
    Attributes:
        sizes: ascending.
        num_pages: pages that requests could have reused.
    """

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        steps, size = set(sizes), 1.0
        while size < _LARGEST:
            steps.add(round(size))
            size *= 2 ** (1 / _STEPS_PER_DOUBLING)
        self.sizes = sorted(steps)
        self.num_pages = 0
        self._missed = 0.0
        self._hits = [0.0] * (len(self.sizes) + 1)  # of pages that need this size and no smaller one

    def add(self, found: Reference, end: int) -> None:
        """Count a request that could have reused its pages [0, end)."""
        self.num_pages += end
        places, weight = found.places, found.weight
        num_places = bisect_left(places, end)
        if num_places == 0:
            return
        self._missed += end - places[0] + weight - 1
        for run in found.runs:
            self._add_run(run.begin, min(run.begin + run.length, num_places), run.num_newer, found, end)

    def _add_run(self, begin: int, stop: int, num_newer: int, found: Reference, end: int) -> None:
        """Add sampled pages [begin, stop), each of which stands for itself and those up to the next sampled one."""
        places, weight = found.places, found.weight
        at = begin
        while at < stop:
            # Of sampled pages used since, each stands for `weight`; the page itself is one.
            slot = bisect_left(self.sizes, (num_newer + at - begin) * weight + 1)
            most = self.sizes[slot] if slot < len(self.sizes) else _LARGEST * weight
            following = min(stop, max(at, begin + int((most - 1) / weight) - num_newer) + 1)
            is_last = following == len(places) or places[following] >= end
            behind = end + weight - 1 if is_last else places[following]
            self._hits[slot] += behind - places[at]
            at = following

    def missed(self) -> list[float]:
        """Estimate of the pages that a cache of each of the sizes would have missed."""
        return [max(0.0, self._missed - hits) for hits in accumulate(self._hits[:-1])]

    def missed_at(self, size: float) -> float:
        """The same for any size in pages, between those of the curve by a straight line."""
        missed = self.missed()
        at = bisect_left(self.sizes, size)
        if at == len(self.sizes):
            return missed[-1]
        if self.sizes[at] == size:
            return missed[at]
        low, least = (self.sizes[at - 1], missed[at - 1]) if at else (0, self._missed)
        return least + (missed[at] - least) * (size - low) / (self.sizes[at] - low)
