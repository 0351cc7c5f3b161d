"""Which replica gets a request: the index against a slow twin, the rule, and a simulation against exact caches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.routing import ExactCache, simulate
from benchmarks.trace import synthetic_trace
from raycache.routing.choice import PrefixIndex, Route, Router
from raycache.types import FinishReason, GenerateRequest, Miss, RequestOutput, SamplingParams

_PAGE = 4


def pages_of(prefix: Sequence[int]) -> list[bytes]:
    return [repr(tuple(prefix[: end + 1])).encode() for end in range(len(prefix))]


class SlowIndex:
    """All pages with their last uses; the one to go is looked for among all."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.uses: dict[bytes, tuple[int, int]] = {}  # page -> (use, place from the end)
        self.num_uses = 0

    def add(self, pages: list[bytes]) -> None:
        self.num_uses += 1
        for place, page in enumerate(pages):
            self.uses[page] = (self.num_uses, -place)
        while len(self.uses) > self.capacity:
            del self.uses[min(self.uses, key=lambda page: self.uses[page])]

    def forget_through(self, use: int) -> None:
        self.uses = {page: at for page, at in self.uses.items() if at[0] > use}


prefixes = st.lists(st.integers(0, 2), min_size=1, max_size=6)
steps = st.lists(st.one_of(prefixes, st.integers(1, 40)), max_size=40)


@given(capacity=st.integers(1, 12), steps=steps)
@settings(max_examples=150, deadline=None)
def test_the_index_forgets_what_was_used_least_recently_and_a_page_vouches_for_those_before_it(
    capacity: int, steps: list[list[int] | int]
) -> None:
    index, slow = PrefixIndex(capacity), SlowIndex(capacity)
    for step in steps:
        if isinstance(step, int):
            index.forget_through(step)
            slow.forget_through(step)
        else:
            index.add(pages_of(step))
            slow.add(pages_of(step))
        assert len(index) == len(slow.uses) <= capacity
        for prefix in [each for each in steps if not isinstance(each, int)]:
            pages = pages_of(prefix)
            known = [page in slow.uses for page in pages]
            assert known == sorted(known, reverse=True)
            assert index.uses(pages) == [slow.uses[page][0] for page in pages if page in slow.uses]


def router_of(*names: str, policy: str = "prefix", num_pages: int = 1000) -> Router:
    router = Router(policy, page_size=_PAGE)
    for name in names:
        router.add(name, num_pages=num_pages)
    return router


def request(prompt: Sequence[int], *, salt: str = "", max_tokens: int | None = 8, **fields: object) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    return GenerateRequest("r", prompt, sampling, cache_salt=salt)


def serve(router: Router, asked: GenerateRequest, among: Sequence[str], *, cached: int = 0, **fields: object) -> Route:
    """From the choice to the end, with an answer of two tokens."""
    route = router.choose(asked, among)
    router.note(route, RequestOutput("r", (7,), cached_tokens=cached, **fields))  # type: ignore[arg-type]
    router.note(route, RequestOutput("r", (8,), finish_reason=FinishReason.STOP))
    router.end(route)
    return route


def test_the_same_prefix_goes_to_the_same_replica_and_others_spread() -> None:
    router = router_of("a", "b", "c")
    first = [serve(router, request([group] * 40), "abc").replica for group in range(6)]
    assert sorted(first) == ["a", "a", "b", "b", "c", "c"]
    again = [router.choose(request([group] * 40 + [99, 98]), "abc") for group in range(6)]
    assert [route.replica for route in again] == first and {route.expected_len for route in again} == {40}


def keyed(affinity: str, prompt: Sequence[int]) -> GenerateRequest:
    return replace(request(prompt), affinity=affinity)


def test_requests_of_one_key_go_to_one_replica_and_keys_spread() -> None:
    router = router_of("a", "b", "c")
    homes = {}
    for key in range(60):
        found = {serve(router, keyed(str(key), [key + 1, turn + 1] * 20), "abc").replica for turn in range(3)}
        assert len(found) == 1, "the prompts share no page"
        homes[key] = found.pop()
    assert all(10 <= list(homes.values()).count(name) <= 30 for name in "abc")
    router.remove("b")
    again = {key: serve(router, keyed(str(key), [key + 1] * 3), "ac").replica for key in homes}
    assert all(again[key] == home for key, home in homes.items() if home != "b")


def test_a_longer_prefix_elsewhere_outweighs_the_key() -> None:
    router = router_of("a", "b")
    held = serve(router, request([1] * 40), "ab").replica
    away = next(str(key) for key in range(99) if serve(router, keyed(str(key), [key + 9] * 8), "ab").replica != held)
    assert serve(router, keyed(away, [1] * 40 + [2]), "ab").replica == held


def test_a_home_with_more_to_do_than_the_request_is_worth_is_left() -> None:
    router = router_of("a", "b")
    home = serve(router, keyed("k", [9] * 8), "ab").replica
    busy = router.choose(request([1] * 100), [home])
    assert serve(router, keyed("k", [2] * 200), "ab").replica == home, "longer than the wait"
    assert serve(router, keyed("k", [3] * 50), "ab").replica != home
    router.end(busy)
    assert serve(router, keyed("k", [4] * 50), "ab").replica == home


@pytest.mark.parametrize("policy", ["load", "round_robin"])
def test_other_policies_know_no_keys(policy: str) -> None:
    router = router_of("a", "b", policy=policy)
    assert {serve(router, keyed("k", [1] * 9), "ab").replica for _ in range(2)} == {"a", "b"}


@given(
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.sampled_from("xyz")), min_size=1, max_size=25)
)
@settings(max_examples=100, deadline=None)
def test_a_key_never_costs_a_hit(prompts: list[tuple[int, int, str]]) -> None:
    router = router_of("a", "b", "c")
    for stream, length, affinity in prompts:
        asked = request([stream + 1] * length + [stream + 7] * 5)
        plain = router.choose(asked, "abc")
        router.end(plain)
        route = router.choose(replace(asked, affinity=affinity), "abc")
        assert route.expected_len >= plain.expected_len
        if length % 2:
            router.note(route, RequestOutput("r", (7,), cached_tokens=route.expected_len))
            router.end(route)


def test_an_answer_is_part_of_the_prefix_but_for_its_last_token() -> None:
    router = router_of("a", "b")
    held = serve(router, request([1] * 7), "ab").replica
    # 7 tokens and the first of the answer are two pages.
    assert router.choose(request([1] * 7 + [7, 8, 5]), "ab").expected_len == 2 * _PAGE
    assert router.choose(request([1] * 7 + [7, 8, 5]), [held]).expected_len == 2 * _PAGE
    serve(router, request([2] * 6), [held])
    assert router.choose(request([2] * 6 + [7, 8, 5]), [held]).expected_len == _PAGE, "nobody has read the token 8"


def test_a_prefix_is_worth_a_queue_that_is_shorter_than_it() -> None:
    router = router_of("a", "b")
    held = serve(router, request([1] * 400), "ab").replica
    other = "b" if held == "a" else "a"
    router.choose(request([2] * 100), [held])
    assert router.choose(request([1] * 400 + [3]), "ab").replica == held
    for group in range(4, 8):
        router.choose(request([group] * 100), [held])
    assert router.choose(request([1] * 400 + [3]), "ab").replica == other


def test_what_is_being_computed_counts_as_there() -> None:
    router = router_of("a", "b")
    router.choose(request([1] * 400), ["a"])
    router.choose(request([2] * 100), ["b"])
    # 400 tokens of "a" are to be waited for, and computing them behind the 100 of "b" would take longer.
    assert router.choose(request([1] * 400 + [2]), "ab").replica == "a"
    router = router_of("a", "b")
    gone = router.choose(request([1] * 400), ["a"])
    router.end(gone)  # cancelled before its first token
    assert router.choose(request([1] * 400 + [2]), ["a"]).expected_len == 0
    assert router.work("a") == 401 + 8


def test_tenants_share_no_prefix() -> None:
    router = router_of("a", "b")
    for salt in ("", "x", "y"):
        assert serve(router, request([1] * 40, salt=salt), "ab").expected_len == 0
    assert serve(router, request([1] * 41, salt="x"), "ab").expected_len == 40


def test_a_smaller_hit_than_expected_says_how_far_a_cache_reaches_back() -> None:
    router = router_of("a", "b")
    for group in range(10):
        serve(router, request([group] * 40), ["a"])
    # The replica has lost the second half of what was used fourth: so also all that was used before.
    serve(router, request([3] * 41), ["a"], cached=20, miss=Miss.EVICTED_DEVICE)
    known = [router.choose(request([group] * 41), ["a"]).expected_len for group in range(10)]
    assert known == [0, 0, 0, 40, 40, 40, 40, 40, 40, 40]


@pytest.mark.parametrize("miss", [Miss.STATE_MISSING, Miss.TIMEOUT, Miss.NO_CAPACITY, Miss.SLOWER, Miss.NONE])
def test_pages_that_were_there_and_not_used_are_not_forgotten(miss: Miss) -> None:
    router = router_of("a", "b")
    for group in range(3):
        serve(router, request([group] * 40), ["a"])
    serve(router, request([2] * 41), ["a"], cached=0, miss=miss)
    assert [router.choose(request([group] * 41), ["a"]).expected_len for group in range(3)] == [40, 40, 40]


def test_a_request_that_asks_before_the_first_one_is_done_proves_nothing() -> None:
    router = router_of("a", "b")
    serve(router, request([5] * 40), ["a"])
    first = router.choose(request([1] * 40), ["a"])
    serve(router, request([1] * 41), ["a"], cached=0, miss=Miss.NEVER_SEEN)
    router.note(first, RequestOutput("r", (7,)))
    assert router.choose(request([5] * 41), ["a"]).expected_len == 40


def test_all_log_probabilities_of_a_prompt_are_computed_wherever_it_is() -> None:
    router = router_of("a", "b")
    serve(router, request([1] * 40), ["a"])
    assert router.choose(request([1] * 41, prompt_logprobs=0), ["a"]).expected_len == 0


def test_work_is_what_is_left_and_nothing_at_the_end() -> None:
    router = router_of("a", "b")
    route = router.choose(request([1] * 40, max_tokens=3), ["a"])
    assert router.work("a") == 43
    router.note(route, RequestOutput("r", (1,)))
    assert router.work("a") == 2
    router.note(route, RequestOutput("r", (1, 2)))
    assert router.work("a") == 1, "it has not ended, so something is to come"
    router.end(route)
    assert router.work("a") == 0


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3), st.booleans()), max_size=30))
@settings(max_examples=60, deadline=None)
def test_work_balances_whatever_becomes_of_requests(cases: list[tuple[int, int, bool]]) -> None:
    router = router_of("a", "b", num_pages=10)
    open_ = []
    for length, num_outputs, is_ended in cases:
        route = router.choose(request([length % 3] * length, max_tokens=None), "ab")
        for _ in range(num_outputs):
            router.note(route, RequestOutput("r", (1, 2), cached_tokens=0, miss=Miss.NEVER_SEEN))
        if is_ended:
            router.end(route)
        else:
            open_.append(route)
        assert min(router.work("a"), router.work("b")) >= 0
    for route in open_:
        router.end(route)
    assert router.work("a") == router.work("b") == 0


def test_load_goes_to_the_least_work_and_round_robin_in_turn() -> None:
    router = router_of("a", "b", policy="load")
    busy = router.choose(request([1] * 100), "ab").replica
    assert {router.choose(request([1] * 10), "ab").replica for _ in range(4)} == set("ab") - {busy}
    router = router_of("a", "b", "c", policy="round_robin")
    assert [router.choose(request([1] * 10), "abc").replica for _ in range(6)] == list("abcabc")


def test_a_replica_that_left_can_still_end_its_requests() -> None:
    router = router_of("a", "b")
    route = router.choose(request([1] * 40), ["a"])
    router.remove("a")
    router.note(route, RequestOutput("r", (1,)))
    router.end(route)
    router.add("a", num_pages=10)
    assert router.choose(request([1] * 41), ["a"]).expected_len == 0


def test_the_exact_cache_gives_up_old_leaves_first() -> None:
    draw, cache = random.Random(1), ExactCache(30)
    sent: list[list[int]] = []
    for _ in range(300):
        group, depth = draw.randrange(8), draw.randint(1, 8)
        sent.append([group * 100 + level for level in range(depth)])
        cache.add(sent[-1])
        # What was just sent is there, and so are the latest ones that fit together.
        latest = set[int]()
        for prompt in reversed(sent):
            if len(latest | set(prompt)) > 30:
                break
            latest |= set(prompt)
            assert cache.hit([*prompt, -1]) == len(prompt)


def test_routing_by_prefix_is_close_to_knowing_the_caches_and_keeps_the_load_even() -> None:
    requests = synthetic_trace(1500, seed=3)
    seconds = requests[-1].time_s - requests[0].time_s
    speed = sum(len(each.blocks) for each in requests) / seconds / 4 / 0.8
    found = {
        policy: simulate(requests, policy, num_replicas=4, capacity=1500, blocks_per_s=speed, output_block_s=2.0)
        for policy in ("random", "round_robin", "load", "prefix", "oracle")
    }
    share = {policy: outcome.share for policy, outcome in found.items()}
    assert share["prefix"] > 0.93 * share["oracle"], share
    assert share["prefix"] > 1.3 * max(share["random"], share["round_robin"], share["load"]), share
    assert found["prefix"].imbalance < 1.1, found["prefix"].imbalance
