from collections.abc import Sequence

import numpy as np
import pytest

from raycache.cache.tree import PrefixHandle, RadixTree

S = 4  # tokens per page in the tests by hand


def packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def page_ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.intp)


def cache(tree: RadixTree, tokens: Sequence[int], pages: Sequence[int], *, now: int = 0) -> PrefixHandle:
    """What a request does: match its prompt, compute the rest, and let the tree adopt it."""
    handle = tree.match(packed(tokens), now=now)
    tree.extend(handle, packed(tokens), page_ids(*pages), now=now)
    return handle


def test_an_empty_tree_matches_nothing() -> None:
    tree = RadixTree(S)
    handle = tree.match(packed(range(9)), now=0)
    assert handle.length == 0
    assert handle.pages.tolist() == []
    handle.release()
    tree.check()


def test_a_match_is_the_longest_cached_prefix_in_whole_pages() -> None:
    tree = RadixTree(S)
    cache(tree, range(12), [5, 6, 7]).release()
    handle = tree.match(packed([*range(10), 99, 99, 99]), now=1)
    assert handle.length == 8
    assert handle.pages.tolist() == [5, 6]
    assert handle.pages.dtype == np.intp
    tree.check()


@pytest.mark.parametrize(
    ("num_tokens", "matched"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (50, 12)]
)
def test_a_match_leaves_at_least_one_token_to_compute(num_tokens: int, matched: int) -> None:
    tree = RadixTree(S)
    cache(tree, range(12), [0, 1, 2]).release()
    assert tree.match(packed(range(num_tokens)), now=1).length == matched
    tree.check()


def test_tokens_may_be_a_bytearray_that_grows() -> None:
    tree, tokens = RadixTree(S), bytearray(packed(range(8)))
    handle = tree.match(tokens, now=0)
    tree.extend(handle, tokens, page_ids(0, 1), now=0)
    tokens += packed(range(8, 12))
    tree.extend(handle, tokens, page_ids(2), now=1)
    assert tree.match(tokens + packed([0]), now=2).pages.tolist() == [0, 1, 2]
    tree.check()


def test_the_callers_page_table_may_change_after_it_was_adopted() -> None:
    tree, pages = RadixTree(S), page_ids(0, 1)
    handle = tree.match(packed(range(8)), now=0)
    tree.extend(handle, packed(range(8)), pages, now=0)
    pages[:] = -7
    assert handle.pages.tolist() == [0, 1]
    tree.check()


def test_only_the_matched_prefix_is_protected() -> None:
    tree = RadixTree(S)
    cache(tree, range(16), [0, 1, 2, 3]).release()
    handle = tree.match(packed([*range(8), 99]), now=1)
    assert (tree.num_cached, tree.num_locked, tree.num_evictable) == (4, 2, 2)
    assert tree.evict(9).tolist() == [3, 2]
    assert handle.pages.tolist() == [0, 1]
    tree.check()


def test_pages_that_the_tree_has_already_stay_the_callers() -> None:
    tree = RadixTree(S)
    first, second = tree.match(packed(range(12)), now=0), tree.match(packed(range(12)), now=0)
    assert tree.extend(first, packed(range(8)), page_ids(0, 1), now=1) == 0
    assert tree.extend(second, packed(range(12)), page_ids(7, 8, 9), now=1) == 2
    assert second.pages.tolist() == [0, 1, 9]
    assert second.pages_from(2).tolist() == [9]
    tree.check()


def test_a_prefix_can_be_extended_in_two_ways() -> None:
    tree = RadixTree(S)
    first = cache(tree, [1] * 8 + [2] * 4, [0, 1, 2])
    second = cache(tree, [1] * 8 + [3] * 4, [3])
    assert first.pages.tolist() == [0, 1, 2]
    assert second.pages.tolist() == [0, 1, 3]
    assert tree.num_cached == tree.num_locked == 4
    tree.check()


def test_a_handle_and_its_key_survive_splits() -> None:
    tree = RadixTree(S)
    handle = cache(tree, range(16), [0, 1, 2, 3])
    key = handle.key
    for num_tokens in (5, 9, 13):
        tree.match(packed([*range(num_tokens - 1), 99]), now=1).release()
    twin = tree.match(packed(range(17)), now=2)
    assert handle.pages.tolist() == [0, 1, 2, 3]
    assert key == handle.key == twin.key
    assert hash(handle.key) == hash(twin.key)
    assert tree.match(packed(range(13)), now=2).key != key
    tree.check()


def test_two_requests_at_one_place_see_the_same_key_until_one_moves_on() -> None:
    tree = RadixTree(S)
    cache(tree, range(8), [0, 1]).release()
    first, second = tree.match(packed(range(20)), now=1), tree.match(packed(range(20)), now=1)
    key = first.key
    assert key == second.key
    tree.extend(first, packed(range(12)), page_ids(2), now=2)
    assert first.key != key == second.key
    tree.rematch(second, packed(range(20)), now=3)
    assert first.key == second.key
    assert second.length == 12
    tree.check()


def test_a_rematch_finds_what_others_have_computed_since() -> None:
    tree = RadixTree(S)
    waiting = tree.match(packed(range(13)), now=0)
    cache(tree, range(8), [0, 1]).release()
    tree.rematch(waiting, packed(range(13)), now=1)
    assert waiting.pages.tolist() == [0, 1]
    assert tree.num_locked == 2
    tree.rematch(waiting, packed(range(8)), now=1)  # a handle is never shortened
    assert waiting.length == 8
    tree.check()


def test_a_long_output_stays_one_node() -> None:
    tree, tokens = RadixTree(S), packed(range(400))
    handle = cache(tree, range(40), range(10))
    for page in range(10, 100):
        assert tree.extend(handle, tokens, page_ids(page), now=page) == 0
    assert handle.pages.tolist() == list(range(100))
    assert tree.trie.num_nodes == 1
    assert tree.num_cached == tree.num_locked == 100
    handle.release()
    tree.check()


def test_a_second_turn_grows_the_first_ones_node() -> None:
    tree = RadixTree(S)
    cache(tree, range(8), [0, 1]).release()
    cache(tree, range(16), [2, 3]).release()
    assert tree.trie.num_nodes == 1
    tree.check()


def test_growing_one_request_does_not_move_the_end_of_another() -> None:
    tree = RadixTree(S)
    first = cache(tree, range(8), [0, 1])
    second = tree.match(packed(range(9)), now=1)
    tree.extend(first, packed(range(12)), page_ids(2), now=2)
    assert (first.length, second.length) == (12, 8)
    assert second.pages.tolist() == [0, 1]
    first.release()
    assert tree.num_locked == 2
    tree.check()


def test_parts_of_a_split_grow_without_touching_each_other() -> None:
    tree = RadixTree(S)
    handle = cache(tree, range(8), [0, 1])
    for page in (2, 3, 4):
        tree.extend(handle, packed(range(20)), page_ids(page), now=1)
    handle.release()
    upper = tree.match(packed([*range(8), 99]), now=2)  # cuts between pages 1 and 2
    assert tree.discard(packed(range(20)), first_page=2).tolist() == [2, 3, 4]
    tree.extend(upper, packed([*range(8), *[7] * 8]), page_ids(8, 9), now=3)
    assert upper.pages.tolist() == [0, 1, 8, 9]
    assert tree.trie.num_nodes == 1
    tree.check()


def test_the_least_recently_used_prefix_goes_first() -> None:
    tree = RadixTree(S)
    for i in range(3):
        cache(tree, [i] * 4, [i], now=i).release()
    tree.match(packed([0] * 5), now=3).release()
    assert tree.evict(2).tolist() == [1, 2]
    assert tree.evict(2).tolist() == [0]
    tree.check()


def test_a_long_prefix_is_trimmed_at_its_end() -> None:
    tree = RadixTree(S)
    cache(tree, range(20), range(5)).release()
    assert tree.evict(2).tolist() == [4, 3]
    assert tree.match(packed(range(30)), now=1).pages.tolist() == [0, 1, 2]
    tree.check()


def test_a_parent_outlives_a_child_that_was_used_later_than_another_prefix() -> None:
    tree = RadixTree(S)
    cache(tree, [1] * 4, [0], now=0).release()
    cache(tree, [1] * 4 + [2] * 4, [1], now=5).release()
    cache(tree, [1] * 4 + [3] * 4, [2], now=1).release()
    cache(tree, [9] * 4, [3], now=3).release()
    assert tree.evict(4).tolist() == [2, 3, 1, 0]
    tree.check()


def test_a_parent_is_as_recent_as_children_that_went_before_it() -> None:
    tree = RadixTree(S)
    old = cache(tree, [9] * 4, [0], now=5)
    left, right = [1] * 4 + [2] * 4, [1] * 4 + [3] * 4
    cache(tree, left, [1, 2], now=0).release()
    cache(tree, right, [3], now=0).release()
    for tokens in (left, right):
        tree.match(packed([*tokens, 0]), now=8).release()
    assert tree.evict(2).tolist() == [2, 3]
    old.release()
    assert tree.evict(2).tolist() == [0, 1]
    tree.check()


def test_nothing_locked_is_evicted_or_cleared() -> None:
    tree = RadixTree(S)
    handle = cache(tree, range(8), [0, 1])
    cache(tree, [9] * 4, [2]).release()
    assert tree.clear().tolist() == [2]
    assert tree.evict(5).tolist() == []
    handle.release()
    assert tree.clear().tolist() == [1, 0]
    assert tree.num_cached == tree.trie.num_nodes == 0
    tree.check()


def test_a_handle_is_released_exactly_once() -> None:
    tree = RadixTree(S)
    handle = tree.match(packed(range(5)), now=0)
    handle.release()
    with pytest.raises(AssertionError, match="exactly once"):
        handle.release()
    with pytest.raises(AssertionError, match="is released"):
        tree.rematch(handle, packed(range(5)), now=1)
    tree.check()


@pytest.mark.parametrize("num_pages", [1, 2, 9, 10, 11, 31, 64, 100, 5000, 9000, 9999])
def test_a_long_run_is_matched_to_the_page(num_pages: int) -> None:
    tree, rng = RadixTree(64), np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, 10_000 * 64, dtype=np.int32)
    handle = tree.match(tokens.tobytes(), now=0)
    tree.extend(handle, tokens.tobytes(), np.arange(10_000, dtype=np.intp), now=0)
    tokens[num_pages * 64 + 63] += 1  # the last token of the first page that differs
    other = tree.match(tokens.tobytes(), now=1)
    assert other.length == num_pages * 64
    assert other.pages.tolist() == list(range(num_pages))
    assert handle.pages.tolist() == list(range(10_000))
    tree.check()


def test_prefixes_of_different_roots_share_nothing_but_the_order_of_eviction() -> None:
    tree = RadixTree(S)
    for page, root in enumerate((b"", b"salt")):
        handle = tree.match(packed(range(9)), now=page, root=root)
        assert (handle.length, handle.root) == (0, root)
        tree.extend(handle, packed(range(4)), page_ids(page), now=page)
        handle.release()
    assert tree.match(packed(range(9)), now=2, root=b"salt").pages.tolist() == [1]
    assert tree.evict(2).tolist() == [0]
    tree.check()


def test_a_root_is_forgotten_with_its_last_page_and_lock() -> None:
    tree = RadixTree(S)
    for i in range(100):
        tree.match(packed(range(9)), now=0, root=bytes([i])).release()
    assert len(tree.trie.roots) == 0
    handle = tree.match(packed(range(9)), now=0, root=b"salt")
    tree.extend(handle, packed(range(4)), page_ids(0), now=0)
    assert tree.evict(1).tolist() == []
    handle.release()
    assert len(tree.trie.roots) == 1
    assert tree.evict(1).tolist() == [0]
    assert len(tree.trie.roots) == 0
    assert tree.match(packed(range(9)), now=0, root=b"salt").was_evicted
    tree.check()


def test_a_clone_stays_where_it_is_when_the_other_moves_on() -> None:
    tree = RadixTree(S)
    handle = cache(tree, range(8), [0, 1])
    clone = handle.clone()
    tree.extend(handle, packed(range(12)), page_ids(2), now=1)
    assert (clone.pages.tolist(), handle.pages.tolist()) == ([0, 1], [0, 1, 2])
    handle.release()
    assert tree.evict(3).tolist() == [2]
    assert clone.pages_from(1).tolist() == [1]
    clone.release()
    assert tree.evict(3).tolist() == [1, 0]
    tree.check()


def test_a_handle_is_lengthened_over_pages_behind_the_last_restore_point() -> None:
    tree = RadixTree(S, point_spaces=("state",))
    cache(tree, range(12), [0, 1, 2]).release()
    handle = tree.match(packed(range(13)), now=1)
    assert (handle.length, handle.known_length, handle.cut_by) == (0, 12, "state")
    assert tree.match_lengths(packed(range(13)), now=1) == (0, 12)
    tree.lengthen(handle, packed(range(13)), limit=8, now=1)
    assert (handle.length, handle.known_length, handle.pages.tolist()) == (8, 12, [0, 1])
    assert tree.evict(9).tolist() == [2]
    tree.check()


@pytest.mark.parametrize(("first_page", "given_up"), [(0, [0, 1, 2, 3]), (1, [1, 2, 3]), (2, [2]), (3, [])])
def test_a_prefix_is_discarded_from_a_page_on(first_page: int, given_up: list[int]) -> None:
    tree = RadixTree(S)
    cache(tree, [1] * 8 + [2] * 4, [0, 1, 2]).release()
    cache(tree, [1] * 8 + [3] * 4, [3]).release()
    tokens = packed([1] * 8 + [2] * 4 + [4] * 4)
    assert sorted(tree.discard(tokens, first_page=first_page).tolist()) == given_up
    assert tree.discard(tokens, root=b"other").tolist() == []
    tree.check()
    assert tree.num_cached == 4 - len(given_up)


def test_what_a_handle_protects_and_what_is_above_it_is_not_discarded() -> None:
    tree = RadixTree(S)
    handle = cache(tree, [1] * 8 + [2] * 4, [0, 1, 2])
    cache(tree, [1] * 8 + [3] * 4, [3]).release()
    cache(tree, [1] * 8 + [2] * 8, [4]).release()
    assert sorted(tree.discard(packed([1] * 8), first_page=1).tolist()) == [3, 4]
    assert handle.pages.tolist() == [0, 1, 2]
    tree.check()


def lacks_what_was_evicted(tree: RadixTree, tokens: Sequence[int]) -> bool:
    handle = tree.match(packed(tokens), now=9)
    handle.release()
    return handle.was_evicted


def test_a_match_tells_whether_the_page_that_it_lacks_was_evicted() -> None:
    tree = RadixTree(S)
    cache(tree, range(20), range(5)).release()
    assert not lacks_what_was_evicted(tree, [*range(20), *[9] * 8])
    tree.evict(1)
    tree.evict(3)
    cases = {"evicted": [*range(21)], "another": [*range(4), *[9] * 5], "no whole page": [*range(7)]}
    found = {name: lacks_what_was_evicted(tree, tokens) for name, tokens in cases.items()}
    assert found == {"evicted": True, "another": False, "no whole page": False}
    tree.check()


def test_what_came_back_in_part_is_known_to_have_gone_on() -> None:
    tree = RadixTree(S)
    cache(tree, range(20), range(5)).release()
    tree.evict(4)
    cache(tree, [*range(8), *[9] * 4], [5, 6]).release()
    assert lacks_what_was_evicted(tree, range(20))
    assert not lacks_what_was_evicted(tree, [*range(8), *[7] * 9])
    cache(tree, range(21), [7, 8, 9]).release()
    assert not lacks_what_was_evicted(tree, range(24))
    tree.check()


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 6, 16, 64])
def test_pages_of_any_size_that_came_back_in_part_are_known(page_size: int) -> None:
    tree, tokens = RadixTree(page_size), np.arange(5 * page_size + 1)
    cache(tree, tokens[:-1], range(5)).release()
    tree.evict(5)
    cache(tree, [*tokens[: 2 * page_size], *[7] * page_size], [5, 6, 7]).release()
    assert lacks_what_was_evicted(tree, tokens)
    assert not lacks_what_was_evicted(tree, [*tokens[: 2 * page_size], *[9] * (page_size + 1)])
    tree.check()


def test_a_page_that_differs_in_one_token_was_not_evicted() -> None:
    tree = RadixTree(64)
    cache(tree, [0] * 192, range(3)).release()
    tree.evict(3)
    tokens = np.zeros(193, int)
    assert lacks_what_was_evicted(tree, tokens)
    for position in range(64):
        tokens[position] = 1
        assert not lacks_what_was_evicted(tree, tokens)
        tokens[position] = 0


def test_clearing_forgets_what_was_evicted() -> None:
    tree = RadixTree(S)
    cache(tree, range(20), range(5)).release()
    tree.evict(2)
    tree.clear()
    assert not lacks_what_was_evicted(tree, range(20))
    tree.check()


def test_the_memory_of_what_was_evicted_is_bounded() -> None:
    tree = RadixTree(S)
    for i in range(3000):
        cache(tree, [i] * 4, [0]).release()
        tree.evict(1)
    assert not tree.match(packed([0] * 5), now=1).was_evicted
    assert tree.match(packed([2999] * 5), now=1).was_evicted
    assert len(tree.trie.ghosts) < 1000
    tree.check()
