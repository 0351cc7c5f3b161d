"""Restore points: where prefixes of models with windows and recurrent states can be continued, and what goes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from raycache.cache.held_units import Capacity
from raycache.cache.holding import Holding
from raycache.cache.node import RestorePoint
from raycache.cache.sequences import SequenceCache
from raycache.cache.spaces import SpaceSizes
from raycache.cache.tree import RadixTree
from raycache.decider.engine import Engine
from raycache.memory.component import window_pages
from raycache.memory.pages import SharedAllocator
from raycache.types import GenerateRequest, RequestOutput
from tests.oracle.twin import TwinExecutor, continuation
from tests.pure.test_scheduler import greedy, make_engine, prompt_of, prompt_scores, run

KINDS = {"state": {"has_state": True}, "window": {"window": 9}, "both": {"has_state": True, "window": 9}}


def packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


def ask(engine: Engine, prompt: Sequence[int], *, max_tokens: int = 4) -> RequestOutput:
    """Run one request to its end; its tokens are right, and its first increment is returned."""
    engine.add(GenerateRequest("r", prompt, greedy(max_tokens)))
    outputs = []
    while engine.has_requests:
        outputs += engine.step()
        engine.check()
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == continuation(prompt, greedy(max_tokens), max_len=engine.info.max_model_len)[0]
    return outputs[0]


def small_cache(*, num_pages: int = 16, window: int = 0, states: int = 8, pages: int = 32) -> SequenceCache:
    """Pages of 4 tokens."""
    windows = {"window": (window, pages)} if window else {}
    return SequenceCache(SpaceSizes(num_pages, 4, windows, {"state": states} if states else {}), is_kept=True)


def compute(
    cache: SequenceCache, tokens: Sequence[int], *, points: Sequence[int] = (), ends: bool = True
) -> Holding | None:
    """Compute a sequence in chunks that end at `points`, and end it."""
    holding = cache.begin(packed(tokens), is_matched=True, now=1)
    start = holding.handle.length
    for stop in sorted({*points, len(tokens)}):
        if stop > start:
            assert holding.reserve(start, stop) is not None
            holding.advance(packed(tokens), stop, is_kept=True, is_point=stop in points, now=1)
            cache.check([holding])
            start = stop
    if not ends:
        return holding
    holding.end()
    cache.check([])
    return None


def reusable(cache: SequenceCache, tokens: Sequence[int]) -> tuple[int, str]:
    """Length of the hit and what cut it."""
    holding = cache.begin(packed(tokens), is_matched=True, now=2)
    found = holding.handle.length, holding.handle.cut_by
    holding.end()
    cache.check([])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_prompt_again_is_a_hit_up_to_its_last_page(kind: str) -> None:
    engine, _ = make_engine(**KINDS[kind])
    assert ask(engine, prompt_of(0, 50)).cached_tokens == 0
    assert ask(engine, prompt_of(0, 50)).cached_tokens == 48


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_reused_by_the_next_turn(kind: str) -> None:
    engine, _ = make_engine(**KINDS[kind])
    prompt = prompt_of(0, 50)
    ask(engine, prompt, max_tokens=13)
    answer = continuation(prompt, greedy(13), max_len=engine.info.max_model_len)[0]
    assert ask(engine, [*prompt, *answer, 1, 2]).cached_tokens == 60  # 62 tokens were computed


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_prompt_of_a_branch_leaves_the_point_that_the_third_one_hits(kind: str) -> None:
    engine, _ = make_engine(**KINDS[kind])
    shared = prompt_of(0, 50)[:29]
    ask(engine, prompt_of(0, 50))
    second = ask(engine, shared + prompt_of(1, 20))
    assert (second.cached_tokens, second.cut_by) == (0, "window+state" if kind == "both" else kind)
    third = ask(engine, shared + prompt_of(2, 20))
    assert (third.cached_tokens, third.cut_by) == (28, "")


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_arrive_together_compute_what_they_share_once(kind: str) -> None:
    engine, executor = make_engine(**KINDS[kind])
    for i in range(4):
        engine.add(GenerateRequest(f"r{i}", prompt_of(2, 42) + [i + 1] * 5, greedy(3)))
    cached = {}
    while engine.has_requests:
        for output in engine.step():
            cached[output.request_id] = output.cached_tokens
        engine.check()
    assert cached == {"r0": 0, "r1": 40, "r2": 40, "r3": 40}
    assert sum(row.num_tokens for plan in executor.plans for row in plan.rows) == 47 + 3 * 7 + 4 * 2


def score(engine: Engine, prompt: Sequence[int]) -> RequestOutput:
    """Run a request for the log-probabilities of its prompt."""
    engine.add(GenerateRequest("scored", prompt, replace(greedy(1), prompt_logprobs=1)))
    outputs = []
    while engine.has_requests:
        outputs += engine.step()
        engine.check()
    assert outputs[0].prompt_logprobs == prompt_scores(prompt, num_top=1)
    assert outputs[0].cached_tokens == 0
    return outputs[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_scored_prompt_leaves_its_points_like_any_other(kind: str) -> None:
    engine, _ = make_engine(**KINDS[kind])
    score(engine, prompt_of(0, 50))
    assert ask(engine, prompt_of(0, 50)).cached_tokens == 48
    score(engine, prompt_of(0, 50))  # again, beside the cached one
    assert ask(engine, [*prompt_of(0, 50), 1]).cached_tokens == 48


@pytest.mark.parametrize("kind", KINDS)
def test_a_scored_prompt_leaves_a_point_where_it_branches(kind: str) -> None:
    engine, _ = make_engine(**KINDS[kind])
    shared = prompt_of(0, 50)[:29]
    ask(engine, prompt_of(0, 50))
    score(engine, shared + prompt_of(1, 20))
    third = ask(engine, shared + prompt_of(2, 20))
    assert (third.cached_tokens, third.cut_by) == (28, "")


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_wait_for_the_point_of_one_that_is_scored(kind: str) -> None:
    engine, _ = make_engine(**KINDS[kind])
    shared = prompt_of(2, 42)
    engine.add(GenerateRequest("scored", [*shared, 1, 1], replace(greedy(1), prompt_logprobs=0)))
    engine.add(GenerateRequest("plain", [*shared, 2, 2], greedy(3)))
    cached = {}
    while engine.has_requests:
        for output in engine.step():
            cached[output.request_id] = output.cached_tokens
        engine.check()
    assert cached == {"scored": 0, "plain": 40}


@pytest.mark.parametrize("kind", KINDS)
def test_a_scored_prompt_of_more_than_half_the_pool_ends(kind: str) -> None:
    engine, _ = make_engine(**KINDS[kind], num_pages=8, page_size=4, max_step_tokens=4)
    ask(engine, prompt_of(0, 24))
    score(engine, prompt_of(0, 24))
    ask(engine, prompt_of(0, 24))


def test_points_inside_a_prompt_stand_at_intervals() -> None:
    engine, _ = make_engine(has_state=True, interval=16)
    ask(engine, prompt_of(0, 50))
    engine.evict("state")  # the oldest: at 16
    assert ask(engine, [*prompt_of(0, 40)[:35], 1, 2, 3]).cached_tokens == 32


def test_evicting_a_window_keeps_the_pages_and_names_the_component() -> None:
    cache = small_cache(window=5)
    compute(cache, range(20), points=[8, 16])
    assert reusable(cache, range(20)) == (16, "")
    for _ in range(3):
        assert cache.evict("window")
    assert reusable(cache, range(20)) == (0, "window")
    assert cache.counts()["pages_cached"] == 5


def test_a_lost_point_falls_back_to_the_one_before_and_is_named() -> None:
    cache = small_cache()
    compute(cache, range(20), points=[8, 16])
    reusable(cache, range(9))  # the point at 8 was used last, that at the end before it
    reusable(cache, [*range(20), 1])
    reusable(cache, range(9))
    assert cache.evict("state")
    assert reusable(cache, [*range(20), 1]) == (20, "")
    assert reusable(cache, range(20)) == (8, "state")


def test_what_was_taken_to_make_room_is_named_among_several() -> None:
    cache = small_cache(window=5)
    compute(cache, range(20), points=[16])
    while cache.evict("state"):
        pass
    assert reusable(cache, range(20)) == (0, "state")


def test_a_checkpoint_that_the_prefix_has_left_behind_is_not_kept() -> None:
    cache = small_cache()
    holding = cache.begin(packed(range(20)), is_matched=True, now=1)
    for start, stop in ((0, 8), (8, 14)):
        assert holding.reserve(start, stop) is not None
        holding.advance(packed(range(20)), stop, is_kept=True, is_point=False, now=1)
    holding.end()
    assert reusable(cache, range(20))[0] == 0
    cache.check([])


@pytest.mark.parametrize(("page_size", "window"), [(1, 9), (4, 5), (4, 9), (16, 128), (64, 512), (64, 5)])
def test_a_running_sequence_never_holds_more_than_it_is_guaranteed(page_size: int, window: int) -> None:
    random = np.random.default_rng(page_size + window)
    for _ in range(30):
        cache = SequenceCache(SpaceSizes(4096, page_size, {"window": (window, 4096)}, {"state": 4096}), is_kept=True)
        length = 8 * window + 5 * page_size
        tokens = packed(range(length))
        holding = cache.begin(tokens, is_matched=True, now=1)
        start = 0
        while start < length:
            stop = min(
                length, start + int(random.choice([1, 2, page_size, page_size + 1, random.integers(1, 3 * window)]))
            )
            assert holding.reserve(start, stop) is not None
            kept = {} if holding.checkpoint is None else holding.checkpoint.parts
            held = holding.units.all()
            assert len({*held["window"], *kept.get("window", ())}) <= 2 * window_pages(window, page_size)
            assert len({*held["state"], *kept.get("state", ())}) <= 2
            holding.advance(tokens, stop, is_kept=True, is_point=bool(random.random() < 0.1), now=1)
            start = stop
        holding.end()
        cache.check([])


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(("page_size", "window"), [(1, 9), (4, 5), (16, 128)])
def test_a_row_planned_ahead_writes_to_nothing_that_a_restore_point_holds(
    page_size: int, window: int, is_kept: bool
) -> None:
    random = np.random.default_rng(page_size + window)
    cache = SequenceCache(SpaceSizes(4096, page_size, {"window": (window, 4096)}, {"state": 4096}), is_kept=is_kept)
    length = 8 * window + 5 * page_size
    tokens = packed(range(length))
    holding = cache.begin(tokens, is_matched=True, now=1)
    in_flight: list[tuple[int, int, Capacity]] = []
    planned = computed = num_points = 0
    while computed < length:
        if planned < length and len(in_flight) < 2 and random.random() < 0.7:
            stop = min(length, planned + int(random.choice([1, 1, 1, page_size, random.integers(1, 2 * window)])))
            capacity = holding.reserve(planned, stop)
            assert capacity is not None
            before = in_flight[-1][2].write_state if in_flight else holding.units.state
            assert capacity.read_state == before, "a row continues the one before"
            in_flight.append((planned, stop, capacity))
            planned = stop
        elif in_flight:
            _, computed, _ = in_flight.pop(0)
            holding.advance(tokens, computed, is_kept=True, is_point=bool(random.random() < 0.1), now=1)
            for point in [] if holding.checkpoint is None else [holding.checkpoint]:
                num_points += 1
                for _, _, later in in_flight:
                    assert later.write_state not in point.parts["state"]
                    assert not {*later.new_pages.get("window", ())} & {*point.parts["window"]} - {-1}
        cache.check([holding])
        assert len(holding.units.all()["state"]) <= (3 if is_kept else 1)
    holding.end()
    cache.check([])
    assert (num_points > 0) is is_kept


def test_evicting_many_points_does_not_let_the_tree_grow() -> None:
    cache = small_cache(num_pages=64, states=4)
    for i in range(300):
        compute(cache, [i] * 9, points=[8])
    assert len(cache.device.tree._evictor._leaves._heap) < 4 * 64


def test_an_interval_is_rounded_up_to_pages_and_bounds_chunks() -> None:
    engine, executor = make_engine(has_state=True, interval=14, max_step_tokens=64)
    ask(engine, prompt_of(0, 50), max_tokens=1)
    assert [row.num_tokens for plan in executor.plans for row in plan.rows] == [16, 16, 16, 2]
    assert engine.stats().restore_points == 3


def test_chunks_that_the_budget_cuts_end_on_a_page() -> None:
    engine, executor = make_engine(has_state=True, max_step_tokens=11)
    ask(engine, prompt_of(0, 30), max_tokens=1)
    assert [row.num_tokens for plan in executor.plans for row in plan.rows] == [8, 8, 8, 4, 2]


def test_a_state_is_handed_over_and_not_copied() -> None:
    cache = small_cache()
    holding = cache.begin(packed(range(12)), is_matched=True, now=1)
    first = holding.reserve(0, 8)
    holding.advance(packed(range(12)), 8, is_kept=True, is_point=True, now=1)
    second = holding.reserve(8, 12)
    assert first is not None and second is not None
    assert (first.read_state, second.read_state) == (-1, first.write_state)
    assert second.write_state != second.read_state, "the restore point keeps its slot"
    holding.advance(packed(range(12)), 12, is_kept=True, is_point=False, now=1)
    holding.end()
    cache.check([])


def test_a_point_that_is_evicted_while_it_is_used_stays_whole_until_then() -> None:
    cache = small_cache(window=5)
    compute(cache, range(12), points=[8])
    holding = cache.begin(packed(range(12)), is_matched=True, now=2)
    while cache.evict("state"):
        pass
    room = holding.reserve(8, 12)
    assert room is not None and room.read_state == room.write_state >= 0, "nobody else holds it any more"
    assert set(holding.tables()["window"][1:]).isdisjoint({-1})
    cache.check([holding])
    holding.end()
    cache.check([])


def test_a_long_prompt_holds_the_pages_of_its_window_only() -> None:
    cache = small_cache(num_pages=64, window=9, pages=8, states=0)
    holding = cache.begin(packed(range(200)), is_matched=True, now=1)
    for start in range(0, 200, 50):
        assert holding.reserve(start, start + 50) is not None
        holding.advance(packed(range(200)), start + 50, is_kept=True, is_point=False, now=1)
        cache.check([holding])
        assert len(holding.units.windows["window"].held) <= 3
    assert len(holding.pages) == 50
    holding.end()


def test_room_that_is_not_there_takes_nothing() -> None:
    cache = small_cache(num_pages=4, window=5, pages=4)
    holding = compute(cache, range(8), ends=False)
    assert holding is not None
    before = cache.counts(), cache.shared_counts()
    assert holding.reserve(8, 40) is None
    assert (cache.counts(), cache.shared_counts()) == before
    cache.check([holding])
    holding.end()


def test_pages_behind_the_last_point_are_evicted_before_older_prefixes() -> None:
    tree = RadixTree(4, point_spaces=("state",))
    old = tree.match(packed(range(100, 109)), now=1)
    tree.extend(old, packed(range(100, 108)), np.array([0, 1], np.int32), now=1)
    assert tree.keep(old, RestorePoint(8, {"state": (0,)}))
    old.release()
    new = tree.match(packed(range(9)), now=5)
    tree.extend(new, packed(range(8)), np.array([2, 3], np.int32), now=5)
    new.release()
    assert tree.evict(2).tolist() == [3, 2]
    tree.check()


def test_evicting_the_end_of_a_prefix_gives_its_point_back() -> None:
    dropped: list[RestorePoint] = []
    tree = RadixTree(4, point_spaces=("state",), on_drop=dropped.append)
    handle = tree.match(packed(range(9)), now=1)
    tree.extend(handle, packed(range(8)), np.array([0, 1], np.int32), now=1)
    assert tree.keep(handle, RestorePoint(8, {"state": (7,)}))
    assert not tree.keep(handle, RestorePoint(8, {"state": (8,)})), "there is one already; the other stays the caller's"
    handle.release()
    assert tree.evict(1).tolist() == [1]
    assert [point.parts for point in dropped] == [{"state": (7,)}]
    tree.check()


def test_shared_ids_are_free_when_the_last_holder_lets_go() -> None:
    allocator = SharedAllocator(2)
    (slot,) = allocator.allocate(1)
    allocator.share([slot])
    allocator.release([slot])
    assert allocator.num_free == 1
    allocator.check([slot])
    allocator.release([slot])
    allocator.check([])
    with pytest.raises(AssertionError, match="more often than held"):
        allocator.release([slot])


# --- rows that follow each other --------------------------------------------------------------------------------------


def rows_of(executor: TwinExecutor) -> list[list[tuple[int, int]]]:
    """Start and length of the rows of each plan."""
    return [[(row.start, row.num_tokens) for row in plan.rows] for plan in executor.plans]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_computed_in_one_step_with_its_restore_points(kind: str) -> None:
    engine, executor = make_engine(**KINDS[kind], interval=16, max_step_tokens=64)
    ask(engine, prompt_of(0, 50), max_tokens=1)
    assert rows_of(executor) == [[(0, 16), (16, 16), (32, 16), (48, 2)]]
    assert ask(engine, prompt_of(0, 50)[:37] + [1] * 9).cached_tokens == 32


def test_rows_of_a_prompt_follow_each_other_as_far_as_the_budget_goes() -> None:
    engine, executor = make_engine(has_state=True, interval=16, max_step_tokens=38)
    ask(engine, prompt_of(0, 50), max_tokens=1)
    assert rows_of(executor) == [[(0, 16), (16, 16), (32, 4)], [(36, 12), (48, 2)]]


def test_every_prompt_gets_its_first_row_before_one_gets_its_second() -> None:
    engine, executor = make_engine(has_state=True, interval=16, max_step_tokens=44)
    for name in ("a", "b"):
        engine.add(GenerateRequest(name, prompt_of(ord(name), 50), greedy(1)))
    run(engine)
    assert [(row.slot, row.start) for row in executor.plans[0].rows] == [(0, 0), (1, 0), (0, 16)]


def test_a_row_without_a_free_state_behind_it_waits_for_the_next_step() -> None:
    engine, executor = make_engine(has_state=True, interval=16, max_step_tokens=64, max_running=1, points=0)
    ask(engine, prompt_of(0, 50), max_tokens=1)
    assert rows_of(executor) == [[(0, 16), (16, 16)], [(32, 16)], [(48, 2)]]


def test_no_row_follows_one_of_a_single_token() -> None:
    """A step whose rows all have one token is a decode step."""
    engine, executor = make_engine(has_state=True, page_size=1, max_step_tokens=64)
    ask(engine, prompt_of(0, 5), max_tokens=1)
    assert rows_of(executor) == [[(0, 4), (4, 1)]]
    ask(engine, [*prompt_of(0, 2), 9, 9, 9], max_tokens=1)  # leaves a point where it branches
    before = len(executor.plans)
    ask(engine, [*prompt_of(0, 2), 9, 8, 8], max_tokens=1)
    assert rows_of(executor)[before:] == [[(2, 1)], [(3, 1)], [(4, 1)]]


def test_scored_prompts_take_a_step_per_row() -> None:
    engine, executor = make_engine(has_state=True, interval=16, max_step_tokens=64)
    score(engine, prompt_of(0, 50))
    assert rows_of(executor) == [[(0, 16)], [(16, 16)], [(32, 16)], [(48, 2)]]


@pytest.mark.parametrize("points", [0, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_follow_take_nothing_that_other_stages_need(kind: str, points: int) -> None:
    engine, executor = make_engine(
        **KINDS[kind], stages=2, interval=4, points=points, max_running=6, num_pages=256, max_step_tokens=64
    )
    for i in range(24):
        engine.add(GenerateRequest(f"r{i}", prompt_of(i, 40), greedy(3)))
    run(engine)
    assert engine.stats().preemptions == 0
    assert sum(row.num_tokens for plan in executor.plans for row in plan.rows) == 24 * 42
    slots = [[row.slot for row in plan.rows] for plan in executor.plans]
    assert any(len(set(some)) < len(some) for some in slots) or not points
