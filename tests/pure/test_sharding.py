"""The placement arithmetic against counting by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycache.parallel.owned_tokens import owned_prefix_lens, owned_slots
from raycache.parallel.sharding import (
    Coords,
    Split,
    even_range,
    shared_head_range,
    split_chunk,
    split_span,
    vocab_range,
)
from tests.oracle.staged import staged

splits = st.builds(Split, tp=st.integers(1, 8), pp=st.integers(1, 8), cp=st.integers(1, 8))
cp_sizes = st.sampled_from([1, 2, 3, 4, 8])
shares = st.sampled_from([1, 2, 5, 16])


@given(splits)
def test_coords_and_rank_are_inverse(split: Split) -> None:
    ranks = range(split.world_size)
    assert [split.rank(split.coords(rank)) for rank in ranks] == list(ranks)
    grid = itertools.product(range(split.pp), range(split.cp), range(split.tp))
    # tp is the fastest axis, so that its ranks are neighbours; pp the slowest.
    assert [split.coords(rank) for rank in ranks] == [Coords(pp=pp, cp=cp, tp=tp) for pp, cp, tp in grid]


@given(splits)
def test_the_rows_of_an_axis_partition_the_gang_and_differ_in_that_axis_alone(split: Split) -> None:
    for axis in ("tp", "pp", "cp"):
        rows = {split.axis_members(axis, rank) for rank in range(split.world_size)}
        assert sorted(itertools.chain(*rows)) == list(range(split.world_size))
        for row in rows:
            assert [getattr(split.coords(rank), axis) for rank in row] == list(range(len(row)))
            others = {"tp", "pp", "cp"} - {axis}
            assert all(len({getattr(split.coords(rank), other) for rank in row}) == 1 for other in others)
            assert all(split.axis_members(axis, rank) == row for rank in row)


@given(splits)
def test_the_ranks_of_a_stage_are_those_with_its_layers_and_tp_varies_fastest(split: Split) -> None:
    for rank in range(split.world_size):
        members = split.stage_members(rank)
        assert rank in members and len(members) == split.tp * split.cp
        assert {split.coords(member).pp for member in members} == {split.coords(rank).pp}
        assert [split.coords(member).tp for member in members] == [*range(split.tp)] * split.cp


@given(st.integers(0, 200), st.integers(1, 20))
def test_even_ranges_partition_and_differ_by_at_most_one(count: int, parts: int) -> None:
    ranges = [even_range(count, part, parts) for part in range(parts)]
    assert list(itertools.chain(*ranges)) == list(range(count))
    lengths = [len(each) for each in ranges]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(st.integers(1, 100), st.data())
def test_every_layer_has_one_stage_and_no_stage_is_empty(num_layers: int, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, num_layers))
    split = staged(Split(pp=pp), num_layers)
    ranges = [split.stage_layers(num_layers, stage) for stage in range(pp)]
    assert list(itertools.chain(*ranges)) == list(range(num_layers))
    assert min(map(len, ranges)) >= 1


@given(st.integers(1, 5000), st.integers(1, 16))
def test_vocab_ranges_partition_in_order_and_only_the_last_are_shorter(vocab_size: int, tp: int) -> None:
    ranges = [vocab_range(vocab_size, rank, tp) for rank in range(tp)]
    assert list(itertools.chain(*ranges)) == list(range(vocab_size))
    rows = len(ranges[0])
    # Gathering over tp pads every part to the length of the first one and cuts the end off.
    assert all(each.start == min(rank * rows, vocab_size) for rank, each in enumerate(ranges))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_each_query_head_finds_its_kv_head_on_its_rank(a: int, group: int, tp: int, is_replicated: bool) -> None:
    num_kv_heads = a if is_replicated else a * tp
    tp = a * tp if is_replicated else tp
    num_heads = num_kv_heads * group * (tp // num_kv_heads if is_replicated else 1)
    for rank in range(tp):
        queries, keys = even_range(num_heads, rank, tp), shared_head_range(num_kv_heads, rank, tp)
        per_key = len(queries) // len(keys)
        for local, head in enumerate(queries):
            # What attention reads on the rank is what the whole model reads.
            assert keys[local // per_key] == head // (num_heads // num_kv_heads)


@given(st.lists(st.integers(0, 300)), cp_sizes, shares)
def test_every_token_has_one_owner_and_prefix_lengths_count_them(lens: list[int], cp: int, share: int) -> None:
    page_size = cp * share
    owners = [[position % page_size // share for position in range(prefix_len)] for prefix_len in lens]
    for rank in range(cp):
        owned = owned_prefix_lens(np.array(lens, np.int64), page_size=page_size, cp_rank=rank, cp_size=cp)
        assert owned.tolist() == [owner.count(rank) for owner in owners]


@given(st.integers(0, 100), st.integers(0, 80), cp_sizes, shares, st.randoms())
def test_owned_slots_hold_each_token_once_and_a_prefix_is_a_run_of_rows(
    start: int, count: int, cp: int, share: int, random: object
) -> None:
    page_size = cp * share
    num_pages = -(-(start + count) // page_size) if start + count else 0
    table = np.random.default_rng(random.getrandbits(32)).permutation(200)[:num_pages].astype(np.int32)  # type: ignore[attr-defined]
    positions = np.arange(start, start + count)
    seen = []
    for rank in range(cp):
        pages = table[positions // page_size]
        index, slots = owned_slots(positions, pages, page_size=page_size, cp_rank=rank, cp_size=cp)
        seen += index.tolist()
        rows = [slot for page in table.tolist() for slot in range(page * share, (page + 1) * share)]
        lens = np.array([start, start + count])
        before, upto = owned_prefix_lens(lens, page_size=page_size, cp_rank=rank, cp_size=cp).tolist()
        # Rows of a rank in order of the sequence: the new ones follow those of the prefix without a gap.
        assert slots.tolist() == rows[before:upto]
    assert sorted(seen) == list(range(count))


@given(st.integers(0, 300), cp_sizes, st.integers(0, 20))
def test_a_chunk_is_computed_once_in_order_whatever_the_turn(num_tokens: int, cp: int, turn: int) -> None:
    runs = [split_chunk(num_tokens, rank, cp, turn=turn) for rank in range(cp)]
    assert sorted(itertools.chain(*itertools.chain(*runs))) == list(range(num_tokens))
    for mine in runs:
        tokens = list(itertools.chain(*mine))
        assert tokens == sorted(tokens)


@given(st.integers(0, 300), cp_sizes, st.integers(0, 20), st.data())
def test_a_span_is_divided_like_its_chunk(num_tokens: int, cp: int, turn: int, data: st.DataObject) -> None:
    span = range(*sorted(data.draw(st.tuples(*[st.integers(0, num_tokens)] * 2))))
    found: list[list[int]] = [[] for _ in range(cp)]
    for rank, tokens in split_span(span, num_tokens, cp, turn=turn):
        found[rank] += tokens
    for rank, tokens in enumerate(found):
        mine = itertools.chain(*split_chunk(num_tokens, rank, cp, turn=turn))
        assert tokens == [token for token in mine if token in span]


@given(st.integers(64, 3000), st.sampled_from([2, 3, 4, 8]), st.integers(0, 9))
def test_causal_work_and_tokens_are_even_over_the_ranks(num_tokens: int, cp: int, turn: int) -> None:
    tokens = [list(itertools.chain(*split_chunk(num_tokens, rank, cp, turn=turn))) for rank in range(cp)]
    counts = [len(mine) for mine in tokens]
    work = [sum(token + 1 for token in mine) for mine in tokens]
    assert max(counts) - min(counts) <= 2
    # A run more or less is at most one token; each token costs at most num_tokens.
    assert max(work) - min(work) <= 2 * num_tokens


@pytest.mark.parametrize("cp", [2, 4])
def test_single_tokens_of_many_rows_are_spread_over_the_ranks(cp: int) -> None:
    owners = [
        rank for turn in range(8) for rank in range(cp) for run in split_chunk(1, rank, cp, turn=turn) for _ in run
    ]
    assert [owners.count(rank) for rank in range(cp)] == [8 // cp] * cp
