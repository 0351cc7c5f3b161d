"""Window pages and state slots of a running sequence."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from raycache.cache.sequences import SequenceCache
from raycache.cache.spaces import SpaceSizes
from raycache.types import packed


@given(
    windows=st.dictionaries(st.sampled_from(["near", "far"]), st.integers(2, 20)),
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=12),
)
def test_a_row_with_room_needs_no_pages(windows: dict[str, int], steps: list[tuple[int, int]]) -> None:
    sizes = SpaceSizes(200, 4, {space: (window, 200) for space, window in windows.items()})
    cache = SequenceCache(sizes, is_kept=True)
    tokens = packed(range(200))
    holding = cache.begin(tokens, is_matched=True, now=1)
    stop = 0
    for count, num_drafts in steps:
        start, stop = stop, stop + count
        units = holding.units
        counts, needed = units.missing(stop, stop + num_drafts, num_drafts=num_drafts), -(-(stop + num_drafts) // 4)
        has_room = units.have_room(stop + num_drafts)
        assert not (has_room and any(counts.values()))
        before = copy.deepcopy(units.windows)
        num_free = cache.num_units()
        capacity = holding.reserve(start, stop + num_drafts, num_drafts=num_drafts)
        assert capacity is not None
        assert len(holding.pages) == max(needed, len(holding.pages))
        for space, window in windows.items():
            held = holding.units.windows[space]
            # The next row's queries, and those of the drafts, see no page that is not there.
            seen = range(max(0, stop - window + 1) // 4, needed)
            assert all(held.ids[page - held.first] >= 0 for page in seen)
        if has_room:
            assert holding.units.windows == before
            assert not any(space in capacity.new_pages for space in windows)
            assert cache.num_units() == num_free
        holding.advance(tokens, stop, is_kept=True, is_point=False, now=1)
        cache.check([holding])
    holding.end()
    cache.check([])
