"""Which rows of a step share a launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from raycache.attention.row_order import stages
from raycache.step.inputs import RowInputs
from tests.unit.test_rows_in_turn import inputs_of


def row(read: int, write: int, *drafts: int, count: int = 1, start: int = 0) -> RowInputs:
    return RowInputs(0, range(start, start + count), range(0), (), read, write, drafts)


def order(rows: Sequence[RowInputs], *, longer_than: int = 0) -> list[list[list[int]]]:
    return stages(inputs_of(rows, is_decode=False), can_follow=lambda before, _: len(before.tokens) > longer_than)


def test_rows_of_a_prompt_are_a_chain() -> None:
    rows = (row(-1, 1), row(9, 9), row(1, 2), row(-1, 5, 6), row(2, 3), row(7, 8))
    assert order(rows) == [[[0, 2, 4], [1], [3], [5]]]
    assert stages(inputs_of((row(0, 0), row(0, 0)), is_decode=True), can_follow=lambda *_: True) == [[[0], [1]]]


def test_a_row_waits_where_it_may_not_follow() -> None:
    assert order((row(-1, 1), row(1, 2, count=3), row(2, 3), row(3, 4)), longer_than=2) == [[[0]], [[1, 2]], [[3]]]


def test_the_second_row_that_reads_a_state_waits() -> None:
    assert order((row(-1, 1), row(1, 2), row(1, 3), row(3, 4))) == [[[0, 1]], [[2, 3]]]


def test_a_row_that_goes_on_behind_a_draft_waits() -> None:
    assert order((row(-1, 1, 2), row(2, 3), row(-1, 4, 5), row(4, 6))) == [[[0], [2, 3]], [[1]]]


def test_a_slot_is_not_overwritten_by_the_launch_that_reads_or_writes_it() -> None:
    assert order((row(7, 1), row(1, 7))) == [[[0]], [[1]]]
    assert order((row(-1, 1), row(1, 1))) == [[[0]], [[1]]]


@given(st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 5), st.integers(1, 2)), max_size=12))
def test_every_row_comes_behind_the_one_whose_state_it_reads(drawn: list[tuple[int, int, int]]) -> None:
    rows = [row(read, write, count=count) for read, write, count in drawn]
    found = order(rows, longer_than=1)
    place = {i: (stage, chain) for stage, chains in enumerate(found) for chain in map(tuple, chains) for i in chain}
    assert sorted(place) == list(range(len(rows)))
    writer: dict[int, int] = {}
    for i, one in enumerate(rows):
        if (before := writer.get(one.read_state)) is not None:
            (stage, chain), (own_stage, own_chain) = place[before], place[i]
            is_next = (before, i) in pairwise(chain)
            assert stage < own_stage or (chain == own_chain and is_next)
        writer[one.write_state] = i
