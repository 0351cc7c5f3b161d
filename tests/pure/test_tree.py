from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from raycache.cache.evict import Eviction, Leaving
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
    assert tree.discard(packed(range(20)), first_page=2).tolist() == [2, 3, 4]
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
    assert tree.num_roots == 0
    handle = tree.match(packed(range(9)), now=0, root=b"salt")
    tree.extend(handle, packed(range(4)), page_ids(0), now=0)
    assert tree.evict(1).tolist() == []
    handle.release()
    assert tree.num_roots == 1
    assert tree.evict(1).tolist() == [0]
    assert tree.num_roots == 0
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
    assert tree.num_ghosts < 1000
    tree.check()


Position = tuple[bytes, tuple[int, ...]]  # a root, and a prefix of whole pages
PAGE = 2  # tokens per page in the state machine


@dataclass(eq=False)
class Running:
    """A request: its root, its tokens, its handle, and the duplicates that it computed."""

    root: bytes
    tokens: list[int]
    handle: PrefixHandle
    duplicates: list[int] = field(default_factory=list)
    claim: tuple[int, float] = (0, 0.0)

    @property
    def position(self) -> Position:
        return self.root, tuple(self.tokens[: self.handle.length])

    @property
    def positions(self) -> list[Position]:
        return positions(self.root, self.position[1])


def positions(root: bytes, tokens: Sequence[int]) -> list[Position]:
    """All prefixes in whole pages, shortest first."""
    return [(root, tuple(tokens[:end])) for end in range(PAGE, len(tokens) + 1, PAGE)]


@dataclass
class Use:
    """How a page was used, by every handle that ever covered it."""

    last: int = 0
    num_matches: int = 0
    claims: set[tuple[int, float]] = field(default_factory=set)

    def worth(self, eviction: Eviction, now_s: float) -> tuple[int, int]:
        in_force = [priority if now_s < until_s or until_s == 0 else 0 for priority, until_s in self.claims]
        ranks = {Eviction.LRU: 0, Eviction.LFU: self.num_matches, Eviction.PRIORITY: max(in_force, default=0)}
        return ranks[eviction], self.last


token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=11)
roots = st.sampled_from([b"", b"salt"])
priorities = st.sampled_from([0, 0, 0, 1, 2, -1])
times_to_live = st.sampled_from([0.0, 1.0, 3.0])


class TreeAgainstDict(RuleBasedStateMachine):
    """The tree, against dicts from every cached position to its page and its uses, and a set of what was evicted."""

    running = Bundle("running")
    eviction = Eviction.LRU

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(PAGE, eviction=self.eviction, on_leave=self._see)
        self.pool = PageAllocator(24)
        self.page_of: dict[Position, int] = {}
        self.uses: dict[Position, Use] = {}
        self.evicted: set[Position] = set()
        self.leaving: list[Leaving] = []
        self.requests: list[Running] = []
        self.now = 0
        self.now_s = 0.0

    @rule(target=running, tokens=token_lists, root=roots, priority=priorities, ttl_s=times_to_live)
    def start(self, tokens: list[int], root: bytes, priority: int, ttl_s: float) -> Running:
        self.now += 1
        claim = self._claim(priority, ttl_s)
        handle = self.tree.match(packed(tokens), now=self.now, root=root, priority=claim[0], until_s=claim[1])
        request = Running(root, tokens, handle, claim=claim)
        self.requests.append(request)
        assert handle.length == self._cached_len(root, tokens)
        assert handle.root == root
        self._use(request, is_match=handle.length > 0)
        self._check_reason(request)
        return request

    @rule(request=running, more=token_lists, priority=priorities, ttl_s=times_to_live)
    def rematch(self, request: Running, more: list[int], priority: int, ttl_s: float) -> None:
        self.now += 1
        before = request.handle.length
        request.tokens, request.claim = [*request.position[1], *more], self._claim(priority, ttl_s)
        kwargs = dict(priority=request.claim[0], until_s=request.claim[1])
        self.tree.rematch(request.handle, packed(request.tokens), now=self.now, **kwargs)
        assert request.handle.length == max(before, self._cached_len(request.root, request.tokens))
        self._use(request, is_match=request.handle.length > before)
        self._check_reason(request)

    @rule(request=running, more=token_lists)
    def lengthen(self, request: Running, more: list[int]) -> None:
        self.now += 1
        request.tokens = [*request.position[1], *more]
        limit = len(request.tokens) // PAGE * PAGE
        self.tree.lengthen(request.handle, packed(request.tokens), limit=limit, now=self.now)
        known = [position for position in positions(request.root, request.tokens) if position in self.page_of]
        assert request.positions == known
        self._use(request)

    @rule(target=running, request=running)
    def clone(self, request: Running) -> Running:
        clone = Running(request.root, list(request.tokens), request.handle.clone(), claim=request.claim)
        assert (clone.handle.root, clone.handle.key) == (request.handle.root, request.handle.key)
        assert clone.handle.known_length == request.handle.known_length
        assert clone.handle.was_evicted == request.handle.was_evicted
        self.requests.append(clone)
        return clone

    @rule(request=running, more=token_lists, same_step=st.booleans(), same_claim=st.booleans(), priority=priorities)
    def extend(self, request: Running, more: list[int], same_step: bool, same_claim: bool, priority: int) -> None:
        self.now += not same_step
        start = request.handle.length
        request.tokens = [*request.position[1], *more]
        request.claim = request.claim if same_claim else (priority, 0.0)
        pages = self.pool.allocate(min(len(more) // PAGE, self.pool.num_free))
        kwargs = dict(priority=request.claim[0], until_s=request.claim[1])
        adopted = self.tree.extend(request.handle, packed(request.tokens), pages, now=self.now, **kwargs)
        assert request.handle.length == start + len(pages) * PAGE
        for position, page, is_adopted in zip(request.positions[start // PAGE :], pages, adopted, strict=True):
            assert is_adopted == (position not in self.page_of)
            if is_adopted:
                self.page_of[position] = int(page)
                self.uses[position] = Use()
                self.evicted.discard(position)
            else:
                request.duplicates.append(int(page))
        self._use(request)

    @rule(request=consumes(running))
    def release(self, request: Running) -> None:
        request.handle.release()
        self.requests.remove(request)
        self.pool.free(page_ids(*request.duplicates))

    @rule(passed_s=st.sampled_from([0.5, 2.0]))
    def tick(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.tree.tick(self.now_s)

    @rule(num_pages=st.integers(0, 8))
    def evict(self, num_pages: int) -> None:
        num_evictable = self.tree.num_evictable
        evicted = self.tree.evict(num_pages)
        assert len(evicted) == min(num_pages, num_evictable)
        seen = [leaving.pages[leaving.num_kept :][::-1] for leaving in self.leaving]
        assert np.concatenate([page_ids(), *seen]).tolist() == evicted.tolist()
        self.leaving.clear()
        self._forget(evicted)

    @rule(tokens=token_lists, root=roots, first_page=st.integers(0, 3))
    def discard(self, tokens: list[int], root: bytes, first_page: int) -> None:
        prefix, locked = tuple(tokens[: (first_page + 1) * PAGE]), self._locked()
        below = {(r, p) for r, p in self.page_of if r == root and p[: len(prefix)] == prefix}
        gone = below - locked if len(prefix) == (first_page + 1) * PAGE else set()
        pages = self.tree.discard(packed(tokens), root=root, first_page=first_page)
        assert sorted(pages.tolist()) == sorted(self.page_of.pop(position) for position in gone)
        self.evicted = {position for position in self.evicted if self._is_below_what_is_known(position)}
        self.pool.free(pages)

    @precondition(lambda self: self.pool.num_free < 4)
    @rule()
    def clear(self) -> None:
        self._forget(self.tree.clear())
        self.evicted.clear()
        assert set(self.page_of) == self._locked()

    @invariant()
    def pages_balance(self) -> None:
        self.tree.check()
        assert not self.leaving
        duplicates = page_ids(*[page for request in self.requests for page in request.duplicates])
        self.pool.check(in_use=duplicates, cached=self.tree.cached_pages())

    @invariant()
    def tree_and_dict_agree(self) -> None:
        assert sorted(self.tree.cached_pages().tolist()) == sorted(self.page_of.values())
        assert self.tree.num_locked == len(self._locked())
        used = {root for root, _ in self.page_of} | {request.root for request in self.requests}
        assert self.tree.num_roots == len(used)
        for request in self.requests:
            assert request.handle.pages.tolist() == [self.page_of[position] for position in request.positions]

    @invariant()
    def keys_are_equal_where_positions_are(self) -> None:
        keys = {request.handle.key for request in self.requests}
        pairs = {(request.handle.key, request.position) for request in self.requests}
        assert len(keys) == len(pairs) == len({request.position for request in self.requests})

    def _claim(self, priority: int, ttl_s: float) -> tuple[int, float]:
        return priority, self.now_s + ttl_s if ttl_s else 0.0

    def _cached_len(self, root: bytes, tokens: list[int]) -> int:
        return max((len(p[1]) for p in positions(root, tokens[:-1]) if p in self.page_of), default=0)

    def _locked(self) -> set[Position]:
        return {position for request in self.requests for position in request.positions}

    def _use(self, request: Running, *, is_match: bool = False) -> None:
        for position in request.positions:
            use = self.uses[position]
            use.last = self.now
            use.num_matches += is_match
            use.claims.add(request.claim)

    def _check_reason(self, request: Running) -> None:
        end = request.handle.known_length + PAGE
        lacked = request.root, tuple(request.tokens[:end])
        assert request.handle.was_evicted == (end <= len(request.tokens) and lacked in self.evicted)

    def _is_below_what_is_known(self, position: Position) -> bool:
        return all(above in self.page_of or above in self.evicted for above in positions(*position))

    def _see(self, leaving: Leaving) -> None:
        path = positions(leaving.root, np.frombuffer(leaving.tokens, "<i4").tolist())
        assert leaving.pages.tolist() == [self.page_of[position] for position in path]
        assert leaving.position == len(path) * PAGE
        assert (leaving.num_kept < len(path), leaving.parts) == (True, {})
        self.leaving.append(leaving)

    def _forget(self, evicted: np.ndarray) -> None:
        """Each evicted page was, in its turn, the end of an unlocked prefix, and none such was worth less."""
        locked = self._locked()
        for page in evicted.tolist():
            parents = {(root, prefix[:-PAGE]) for root, prefix in self.page_of}
            ends = [position for position in self.page_of if position not in parents and position not in locked]
            victim = next(position for position in ends if self.page_of[position] == page)
            worth = {position: self.uses[position].worth(self.eviction, self.now_s) for position in ends}
            assert worth[victim] == min(worth.values())
            del self.page_of[victim], self.uses[victim]
            self.evicted.add(victim)
        self.pool.free(evicted)


class TreeByUses(TreeAgainstDict):
    eviction = Eviction.LFU


class TreeByPriority(TreeAgainstDict):
    eviction = Eviction.PRIORITY


TestTreeAgainstDict = TreeAgainstDict.TestCase
TestTreeByUses = TreeByUses.TestCase
TestTreeByPriority = TreeByPriority.TestCase
TestTreeAgainstDict.settings = TestTreeByUses.settings = TestTreeByPriority.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("machine", [TreeAgainstDict, TreeByUses, TreeByPriority])
def test_a_long_random_life_agrees_with_the_dict(machine: type[TreeAgainstDict], seed: int) -> None:
    """Goes where short examples do not: deep trees, evicted and cached again many times."""
    life, random = machine(), np.random.default_rng(seed)

    def draw(*choices: int | float) -> float:
        return choices[random.integers(len(choices))]

    def tokens() -> list[int]:
        return random.integers(0, 2, random.integers(1, 12)).tolist() if draw(0, 0, 1) else [0] * int(draw(5, 8, 11))

    for _ in range(1500):
        claim = dict(priority=int(draw(0, 0, 0, 1, 2, -1)), ttl_s=draw(0.0, 1.0, 3.0))
        if not life.requests or (len(life.requests) < 6 and draw(0, 0, 1)):
            life.start(tokens(), root=[b"", b"", b"salt"][random.integers(3)], **claim)
        request = life.requests[random.integers(len(life.requests))]
        match random.integers(12):
            case 0:
                life.rematch(request, tokens(), **claim)
            case 1:
                life.lengthen(request, tokens())
            case 2 if len(life.requests) < 8:
                life.clone(request)
            case 3 | 4 | 5:
                life.extend(request, tokens(), draw(True, False), draw(True, False), claim["priority"])
            case 6 | 7 | 8:
                life.release(request)
            case 9:
                life.tick(draw(0.5, 2.0))
            case 10:
                life.evict(int(draw(1, 1, 2, 5)))
            case 11 if draw(0, 0, 0, 1):
                life.discard(tokens(), root=[b"", b"salt"][random.integers(2)], first_page=random.integers(4))
            case 11 if draw(0, 0, 0, 0, 0, 0, 0, 1):
                life.clear()
        life.pages_balance()
        life.tree_and_dict_agree()
        life.keys_are_equal_where_positions_are()
