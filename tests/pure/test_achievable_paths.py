"""The tree of paths against a dictionary of pages, which is slow: the same references, sample and forgotten pages."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from raycache.achievable.recency import Use
from raycache.achievable.sample import PageSample

_MAX_PAGES, _KEPT = 16, 14


class Pages:
    """Each page with the number of its last use, and the limit of hashes in the sample."""

    def __init__(self, max_uses: int) -> None:
        self.last_use: dict[int, int] = {}
        self.limit: int | None = None
        self._max_uses, self._now = max_uses, 0

    def use(self, path: list[int]) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Places of the sampled pages, and of the known ones: place, last use, pages used after that."""
        places = [i for i, page in enumerate(path) if self.limit is None or page < self.limit]
        known = []
        for place in places:
            use = self.last_use.get(path[place])
            if use is None or self._now - use > self._max_uses:
                break
            newer = sum(use < other and self._now - other <= self._max_uses for other in self.last_use.values())
            known.append((place, use, newer))
        self.last_use |= {path[place]: self._now for place in places}
        self._now += 1
        return places, known

    def shrink(self) -> None:
        live = {page: use for page, use in self.last_use.items() if self._now - use <= self._max_uses}
        if len(live) > _KEPT:
            self.limit = sorted(live)[_KEPT]
            live = {page: use for page, use in live.items() if page < self.limit}
        self.last_use = live


def hashes(path: tuple[int, ...]) -> NDArray[np.uint64]:
    """A number per prefix, the same one for the same prefix, spread over all numbers."""
    values = [hash(path[: end + 1]) % 2**61 * 8 for end in range(len(path))]
    return np.array(values, np.uint64)


_PATHS = st.lists(st.lists(st.integers(0, 2), max_size=12).map(tuple), max_size=60)


@given(paths=_PATHS, max_uses=st.sampled_from([3, 1000]))
def test_the_tree_knows_what_a_dictionary_of_pages_does(paths: list[tuple[int, ...]], max_uses: int) -> None:
    sample, pages = PageSample(_MAX_PAGES, max_uses=max_uses), Pages(max_uses)
    uses: list[Use] = []
    for path in paths:
        weight = sample.weight
        uses.append(Use(0.0, 0.0))
        found = sample.use(hashes(path), uses[-1])
        places, known = pages.use(hashes(path).tolist())
        assert (list(found.places), found.num_known) == (places, len(known))
        assert [run.length for run in found.runs] == [
            sum(use == uses.index(run.use) for _, use, _ in known) for run in found.runs
        ]
        newer = [(run.num_newer, uses.index(run.use)) for run in found.runs for _ in range(run.length)]
        assert newer == [(count, use) for _, use, count in known]
        assert found.weight == weight
        if sample.weight != weight:
            pages.shrink()
            assert pages.limit is not None and sample.weight == 2**64 / pages.limit
