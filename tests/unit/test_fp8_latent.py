"""How the keys of queries are split into items of work; the kernels are in tests/gpu/test_flashinfer.py."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raycache.attention.flashinfer_kernels import PARTIAL_BYTES
from raycache.attention.fp8_latent import FEWEST_KEYS, num_splits, split_keys, tile_shape

LENS = st.lists(st.just(0) | st.integers(1, 300) | st.integers(1, 200_000), min_size=1, max_size=40)


@given(LENS, st.integers(1, 264), st.sampled_from([16, 32, 64]))
def test_items_cover_the_keys_of_each_query_once_and_parts_are_those_of_split_ones(
    lens: list[int], most: int, step: int
) -> None:
    first_ids = np.arange(len(lens), dtype=np.int32) * 7
    items, spans = split_keys(first_ids, np.array(lens, np.int32), most=most, step=step)
    assert items.dtype == spans.dtype == np.int32
    assert len(items) <= len(lens) + most and spans[-1] <= 2 * most
    for query, length in enumerate(lens):
        own = sorted(items[items[:, 0] == query, :5].tolist(), key=lambda item: item[2])
        assert [begin for _, _, begin, _, _ in own] == [0, *(end for _, _, _, end, _ in own[:-1])]
        assert own[-1][3] == length and all(end > begin for _, _, begin, end, _ in own) == (length > 0)
        assert all(end % step == 0 for _, _, _, end, _ in own[:-1])
        assert {first for _, first, _, _, _ in own} == {7 * query}
        parts = list(range(spans[query], spans[query + 1]))
        assert [part for *_, part in own] == (parts or [-1])


@given(LENS, st.integers(1, 264))
def test_the_longest_items_come_first(lens: list[int], most: int) -> None:
    items, _ = split_keys(np.zeros(len(lens), np.int32), np.array(lens, np.int32), most=most, step=32)
    lengths = items[:, 3] - items[:, 2]
    assert (np.diff(lengths) <= 0).all()


@given(st.integers(1, 20_000), st.sampled_from([108, 132, 264]), st.integers(1, 2048))
def test_splits_are_as_many_as_end_first(num_programs: int, at_once: int, most_keys: int) -> None:
    splits = num_splits(num_programs, at_once=at_once, most_keys=most_keys)
    assert splits == 1 or most_keys // splits >= FEWEST_KEYS
    heads = 64 if at_once < 264 else 16
    num_bytes = num_programs * splits * heads * 516 * 4 if splits > 1 else 0
    assert num_bytes <= PARTIAL_BYTES, "there is room for partial results"
    if num_programs * 2 <= at_once and most_keys >= 4 * FEWEST_KEYS:
        assert splits > 1, "no processor is idle while others have much to do"


def test_a_tile_has_room_for_all_heads_or_is_the_largest() -> None:
    assert [tile_shape(heads).heads for heads in (1, 16, 17, 32, 64, 128)] == [16, 16, 32, 32, 64, 64]
