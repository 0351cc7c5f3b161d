from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycache.cache.evict import Eviction, EvictionOrder, Leaving
from raycache.cache.node import Evictable, RestorePoint
from raycache.cache.tree import PrefixHandle, RadixTree

S = 4  # tokens per page


def packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def cache(
    tree: RadixTree, tokens: Sequence[int], pages: Sequence[int], *, now: int = 0, priority: int = 0, until_s: float = 0
) -> PrefixHandle:
    use = dict(now=now, priority=priority, until_s=until_s)
    handle = tree.match(packed([*tokens, 0]), **use)
    tree.extend(handle, packed(tokens), np.array(pages, np.intp), **use)
    return handle


def test_what_was_matched_least_often_goes_first() -> None:
    tree = RadixTree(S, eviction=Eviction.LFU)
    for i, num_matches in enumerate([2, 0, 1]):
        cache(tree, [i] * 4, [i], now=i).release()
        for _ in range(num_matches):
            tree.match(packed([i] * 5), now=3).release()
    assert tree.evict(3).tolist() == [1, 2, 0]
    tree.check()


def test_a_prefix_counts_the_matches_of_all_that_hung_below_it() -> None:
    tree = RadixTree(S, eviction=Eviction.LFU)
    for end in (2, 3):
        cache(tree, [1] * 4 + [end] * 4, [0, 2] if end == 2 else [3], now=0).release()
        tree.match(packed([1] * 4 + [end] * 5), now=1).release()
    cache(tree, [9] * 4, [9], now=2).release()
    for _ in range(2):
        tree.match(packed([9] * 5), now=3).release()
    assert tree.evict(2).tolist() == [2, 3]
    assert tree.evict(2).tolist() == [9, 0], "two matches against three: both ends, and that which added the second"
    tree.check()


def test_a_higher_priority_outlives_a_lower_one_until_its_time_has_passed() -> None:
    tree = RadixTree(S, eviction=Eviction.PRIORITY)
    for i, (priority, until_s) in enumerate([(2, 5.0), (1, 0.0), (0, 0.0), (2, 5.0), (-1, 0.0)]):
        cache(tree, [i] * 4, [i], now=i, priority=priority, until_s=until_s).release()
    tree.tick(4.9)
    assert tree.evict(2).tolist() == [4, 2]
    tree.tick(5.0)
    assert tree.evict(3).tolist() == [0, 3, 1]
    tree.check()


def test_the_clock_does_not_go_back() -> None:
    tree = RadixTree(S, eviction=Eviction.PRIORITY)
    tree.tick(6.0)
    tree.tick(1.0)
    cache(tree, [1] * 4, [1], now=0, priority=1, until_s=5.0).release()
    cache(tree, [2] * 4, [2], now=1).release()
    assert tree.evict(1).tolist() == [1]


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 6)), min_size=1, max_size=8))
def test_several_priorities_count_as_the_highest_that_holds(uses: list[tuple[int, int]]) -> None:
    item = Evictable(0, ())
    for priority, until_s in uses:
        item.use(0, Eviction.PRIORITY.claims_of(priority, float(until_s)))
    for now_s in range(8):
        in_force = [priority if until_s == 0 or now_s < until_s else 0 for priority, until_s in uses]
        assert Eviction.PRIORITY.worth(item, now_s) == (max(in_force), 0)
    assert len(item.claims) <= 4, "as many as there are priorities, not as uses"


@given(st.lists(st.tuples(st.sampled_from(["push", "use", "void", "first"]), st.integers(0, 9), st.integers(0, 20))))
def test_the_lazy_heap_agrees_with_sorting(operations: list[tuple[str, int, int]]) -> None:
    order: EvictionOrder[Evictable] = EvictionOrder(lambda item, now_s: (0, item.last_used))
    items = [Evictable(0, ()) for _ in range(10)]
    candidates: set[Evictable] = set()
    for name, i, now in operations:
        match name:
            case "push":
                order.push(items[i])
                candidates.add(items[i])
            case "use":
                items[i].use(now, ())
            case "void":
                order.void(items[i])
                candidates.discard(items[i])
            case "first":
                first = order.first()
                assert (first is None) == (not candidates)
                if first is not None:
                    assert first.last_used == min(item.last_used for item in candidates)
                    order.void(first)
                    candidates.remove(first)
        order.check(candidates)
        assert len(order) == len(candidates)


def test_entries_that_are_void_are_thrown_out() -> None:
    order: EvictionOrder[Evictable] = EvictionOrder(Eviction.PRIORITY.worth)
    item = Evictable(0, ((1, 5.0),))
    for _ in range(1000):
        order.push(item)
        order.void(item)
        order.check(set())


def test_what_leaves_is_seen_before_it_does() -> None:
    seen: list[tuple[Leaving, list[int]]] = []
    dropped: list[RestorePoint] = []
    tree = RadixTree(
        S,
        point_spaces=("state",),
        on_drop=dropped.append,
        on_leave=lambda leaving: seen.append((leaving, [point.parts["state"][0] for point in dropped])),
    )
    handle = tree.match(packed(range(13)), now=0, root=b"salt")
    tree.extend(handle, packed(range(4)), np.array([0], np.intp), now=0)
    assert tree.keep(handle, RestorePoint(4, {"state": (7,)}))
    tree.extend(handle, packed(range(12)), np.array([1, 2], np.intp), now=0)
    assert tree.keep(handle, RestorePoint(12, {"state": (8,)}))
    handle.release()
    assert tree.evict_point("state")
    assert tree.evict(1).tolist() == [2]
    assert tree.evict(1).tolist() == [1]
    assert tree.evict(1).tolist() == [0]
    told = [
        (
            len(leaving.tokens) // 4,
            leaving.pages.tolist(),
            leaving.num_kept,
            leaving.point and leaving.point.parts,
            dropped,
        )
        for leaving, dropped in seen
    ]
    assert told == [
        (4, [0], 1, {"state": (7,)}, []),
        (12, [0, 1, 2], 2, {"state": (8,)}, [7]),
        (8, [0, 1], 1, None, [7, 8]),
        (4, [0], 0, None, [7, 8]),
    ]
    assert all(
        leaving.root == b"salt" and leaving.tokens == packed(range(4 * len(leaving.pages))) for leaving, _ in seen
    )
    tree.check()


def test_what_is_cleared_or_discarded_is_not_seen() -> None:
    seen: list[Leaving] = []
    tree = RadixTree(S, on_leave=seen.append)
    cache(tree, range(8), [0, 1]).release()
    assert tree.discard(packed(range(8)), first_page=1).tolist() == [1]
    assert tree.clear().tolist() == [0]
    assert seen == []
    tree.check()


def test_discarding_gives_restore_points_back() -> None:
    dropped: list[RestorePoint] = []
    tree = RadixTree(S, point_spaces=("state",), on_drop=dropped.append)
    handle = cache(tree, range(8), [0, 1])
    assert tree.keep(handle, RestorePoint(8, {"state": (7,)}))
    assert tree.discard(packed(range(8))).tolist() == []
    handle.release()
    assert tree.discard(packed(range(8))).tolist() == [0, 1]
    assert [point.parts for point in dropped] == [{"state": (7,)}]
    assert tree.num_points == 0
    tree.check()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("eviction", list(Eviction))
def test_restore_points_go_in_the_order_of_the_policy(eviction: Eviction, seed: int) -> None:
    """Against a list of all points that is sorted anew for each eviction."""
    random, dropped = np.random.default_rng(seed), list[RestorePoint]()
    tree = RadixTree(S, point_spaces=("state",), eviction=eviction, on_drop=dropped.append)
    points: dict[int, tuple[int, list[int], list[tuple[int, float]]]] = {}  # last, matches, claims
    now_s, next_id = 0.0, 0
    for step in range(600):
        claim = (int(random.integers(-1, 3)), float(random.integers(2)) * (now_s + 3))
        prompt = [int(random.integers(12))] * S
        use = dict(now=step, priority=claim[0], until_s=claim[1])
        handle = tree.match(packed([*prompt, 0]), **use)
        if handle.length:
            _, matches, claims = points[handle.parts["state"][0]]
            points[handle.parts["state"][0]] = (step, [*matches, step], [*claims, claim])
        else:
            tree.extend(handle, packed(prompt), np.array([step], np.intp), **use)
            assert tree.keep(handle, RestorePoint(S, {"state": (next_id,)}))
            points[next_id] = (step, [], [claim])
            next_id += 1
        handle.release()
        now_s += float(random.random())
        tree.tick(now_s)
        if len(points) > 6 or random.random() < 0.1:
            worth = {}
            for i, (last, matches, claims) in points.items():
                in_force = [p if until == 0 or now_s < until else 0 for p, until in claims]
                rank = {Eviction.LRU: 0, Eviction.LFU: len(matches), Eviction.PRIORITY: max(in_force)}[eviction]
                worth[i] = (rank, last)
            assert tree.evict_point("state")
            victim = min(worth, key=worth.__getitem__)
            assert dropped.pop().parts == {"state": (victim,)}
            del points[victim]
        tree.check()
