from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from raycache.cache.tree import PrefixHandle, RadixTree
from raycache.memory.pages import PageAllocator

S = 4  # tokens per page in the tests by hand


def packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def page_ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


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
    assert handle.pages.dtype == np.int32
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
    assert tree.extend(first, packed(range(8)), page_ids(0, 1), now=1).tolist() == [True, True]
    assert tree.extend(second, packed(range(12)), page_ids(7, 8, 9), now=1).tolist() == [False, False, True]
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
        assert tree.extend(handle, tokens, page_ids(page), now=page).tolist() == [True]
    assert handle.pages.tolist() == list(range(100))
    assert tree.num_nodes == 1
    assert tree.num_cached == tree.num_locked == 100
    handle.release()
    tree.check()


def test_a_second_turn_grows_the_first_ones_node() -> None:
    tree = RadixTree(S)
    cache(tree, range(8), [0, 1]).release()
    cache(tree, range(16), [2, 3]).release()
    assert tree.num_nodes == 1
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
    assert tree.evict(3).tolist() == [4, 3, 2]
    tree.extend(upper, packed([*range(8), *[7] * 8]), page_ids(8, 9), now=3)
    assert upper.pages.tolist() == [0, 1, 8, 9]
    assert tree.num_nodes == 1
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
    assert tree.num_cached == tree.num_nodes == 0
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
    tree.extend(handle, tokens.tobytes(), np.arange(10_000, dtype=np.int32), now=0)
    tokens[num_pages * 64 + 63] += 1  # the last token of the first page that differs
    other = tree.match(tokens.tobytes(), now=1)
    assert other.length == num_pages * 64
    assert other.pages.tolist() == list(range(num_pages))
    assert handle.pages.tolist() == list(range(10_000))
    tree.check()


Prefix = tuple[int, ...]
PAGE = 2  # tokens per page in the state machine


@dataclass(eq=False)
class Running:
    """A request: its tokens, its handle, and the duplicates that it computed."""

    tokens: list[int]
    handle: PrefixHandle
    duplicates: list[int] = field(default_factory=list)

    @property
    def prefix(self) -> Prefix:
        return tuple(self.tokens[: self.handle.length])


def prefixes(tokens: Sequence[int]) -> Iterator[Prefix]:
    """All prefixes in whole pages, shortest first."""
    return (tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE))


token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=11)


class TreeAgainstDict(RuleBasedStateMachine):
    """The tree, against a dict from every cached prefix to its page and another to the time of its last use."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(PAGE)
        self.pool = PageAllocator(24)
        self.page_of: dict[Prefix, int] = {}
        self.last_used: dict[Prefix, int] = {}
        self.requests: list[Running] = []
        self.now = 0

    @rule(target=running, tokens=token_lists)
    def start(self, tokens: list[int]) -> Running:
        self.now += 1
        request = Running(tokens, self.tree.match(packed(tokens), now=self.now))
        self.requests.append(request)
        assert request.handle.length == self._cached_len(tokens)
        self._use(request)
        return request

    @rule(request=running, more=token_lists)
    def rematch(self, request: Running, more: list[int]) -> None:
        self.now += 1
        before = request.handle.length
        request.tokens = [*request.prefix, *more]
        self.tree.rematch(request.handle, packed(request.tokens), now=self.now)
        assert request.handle.length == max(before, self._cached_len(request.tokens))
        self._use(request)

    @rule(request=running, more=token_lists, same_step=st.booleans())
    def extend(self, request: Running, more: list[int], same_step: bool) -> None:
        self.now += not same_step
        start = request.handle.length
        request.tokens = [*request.prefix, *more]
        count = min(len(more) // PAGE, self.pool.num_free)
        pages = self.pool.allocate(count)
        adopted = self.tree.extend(request.handle, packed(request.tokens), pages, now=self.now)
        assert request.handle.length == start + count * PAGE
        for prefix, page, is_adopted in zip(
            list(prefixes(request.prefix))[start // PAGE :], pages, adopted, strict=True
        ):
            assert is_adopted == (prefix not in self.page_of)
            if is_adopted:
                self.page_of[prefix] = int(page)
            else:
                request.duplicates.append(int(page))
        self._use(request)

    @rule(request=consumes(running))
    def release(self, request: Running) -> None:
        request.handle.release()
        self.requests.remove(request)
        self.pool.free(page_ids(*request.duplicates))

    @rule(num_pages=st.integers(0, 8))
    def evict(self, num_pages: int) -> None:
        num_evictable = self.tree.num_evictable
        evicted = self.tree.evict(num_pages)
        assert len(evicted) == min(num_pages, num_evictable)
        self._forget(evicted)

    @precondition(lambda self: self.pool.num_free < 4)
    @rule()
    def clear(self) -> None:
        self._forget(self.tree.clear())
        assert set(self.page_of) == self._locked()

    @invariant()
    def pages_balance(self) -> None:
        self.tree.check()
        duplicates = page_ids(*[page for request in self.requests for page in request.duplicates])
        self.pool.check(in_use=duplicates, cached=self.tree.cached_pages())

    @invariant()
    def tree_and_dict_agree(self) -> None:
        assert sorted(self.tree.cached_pages().tolist()) == sorted(self.page_of.values())
        assert self.tree.num_locked == len(self._locked())
        for request in self.requests:
            assert request.handle.pages.tolist() == [self.page_of[prefix] for prefix in prefixes(request.prefix)]

    @invariant()
    def keys_are_equal_where_positions_are(self) -> None:
        keys = {request.handle.key for request in self.requests}
        pairs = {(request.handle.key, request.prefix) for request in self.requests}
        assert len(keys) == len(pairs) == len({request.prefix for request in self.requests})

    def _cached_len(self, tokens: list[int]) -> int:
        return max((len(prefix) for prefix in prefixes(tokens[:-1]) if prefix in self.page_of), default=0)

    def _locked(self) -> set[Prefix]:
        return {prefix for request in self.requests for prefix in prefixes(request.prefix)}

    def _use(self, request: Running) -> None:
        self.last_used.update(dict.fromkeys(prefixes(request.prefix), self.now))

    def _forget(self, evicted: np.ndarray) -> None:
        """Each evicted page was, in its turn, the end of an unlocked prefix, and none such was used less recently."""
        locked = self._locked()
        for page in evicted.tolist():
            parents = {prefix[:-PAGE] for prefix in self.page_of}
            ends = [prefix for prefix in self.page_of if prefix not in parents and prefix not in locked]
            victim = next(prefix for prefix in ends if self.page_of[prefix] == page)
            assert self.last_used[victim] == min(self.last_used[prefix] for prefix in ends)
            del self.page_of[victim], self.last_used[victim]
        self.pool.free(evicted)


TestTreeAgainstDict = TreeAgainstDict.TestCase
TestTreeAgainstDict.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
