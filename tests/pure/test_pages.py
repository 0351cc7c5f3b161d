import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycache.memory.pages import PageAllocator

NONE = np.empty(0, np.intp)


def test_a_fresh_pool_hands_out_ascending_contiguous_pages() -> None:
    pool = PageAllocator(8)
    first, second = pool.allocate(3), pool.allocate(2)
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [3, 4]
    assert first.dtype == np.intp
    assert pool.num_free == 3
    pool.check(in_use=np.concatenate((first, second)), cached=NONE)


def test_pages_given_back_together_come_again_in_the_same_order() -> None:
    pool = PageAllocator(8)
    pages = pool.allocate(4)
    pool.free(pages)
    assert pool.allocate(4).tolist() == pages.tolist()
    pool.check(in_use=NONE, cached=pages)


def test_allocating_more_than_is_free_is_refused() -> None:
    pool = PageAllocator(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="2 pages wanted, 1 of 2 are free"):
        pool.allocate(2)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([3], "freed twice"),
        ([0, 0], "twice in one free"),
        ([-1], "not of the pool"),
        ([-4], "not of the pool"),
        ([4], "not of the pool"),
        ([8], "out of bounds"),
        ([0, 1, 2], "only 2 are taken"),
    ],
)
def test_a_wrong_free_is_refused(pages: list[int], message: str) -> None:
    pool = PageAllocator(4)
    pool.allocate(2)
    with pytest.raises((AssertionError, IndexError), match=message):
        pool.free(np.array(pages, np.intp))


@pytest.mark.parametrize(
    ("in_use", "cached", "message"),
    [([0], [], "lost pages"), ([0, 1], [1], "two places"), ([0, 1], [2], "two places"), ([0, 1], [9], "beyond")],
)
def test_check_finds_lost_and_doubly_held_pages(in_use: list[int], cached: list[int], message: str) -> None:
    pool = PageAllocator(4)
    pool.allocate(2)
    with pytest.raises(AssertionError, match=message):
        pool.check(in_use=np.array(in_use, np.intp), cached=np.array(cached, np.intp))


@given(st.lists(st.integers(0, 12), max_size=40))
def test_free_and_taken_pages_balance_after_any_history(counts: list[int]) -> None:
    pool, taken = PageAllocator(32), set[int]()
    for count in counts:
        if count <= pool.num_free:
            pages = pool.allocate(count)
            assert taken.isdisjoint(pages.tolist())
            taken.update(pages.tolist())
        back = sorted(taken, key=lambda page: hash((page, count)))[: count // 2]
        taken.difference_update(back)
        pool.free(np.array(back, np.intp))
        pool.check(in_use=np.array(sorted(taken), np.intp), cached=NONE)
        assert pool.num_free == 32 - len(taken)
