"""What caches of other sizes would have reused, against an unlimited cache and an LRU stack that are slow and exact."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycache.achievable.prefixes import ChainedDigests, PrefixHasher, PrefixSource
from raycache.achievable.recency import Recency, Use
from raycache.achievable.reuse import Reuse
from raycache.cache.keys import Identity, chain_digests, page_chain
from raycache.types import GenerateRequest, Miss, RequestOutput, packed

_SIZE = 2
_SIZES = tuple(range(1, 40))
Path = tuple[int, ...]


class UnlimitedCache:
    """All prefixes of whole pages that requests have had."""

    def __init__(self) -> None:
        self._known: set[Path] = set()

    def reuse(self, prompt: Path) -> int:
        """Return the tokens that are known, whole pages without the last token; the prompt is known from now on."""
        ends = range(_SIZE, len(prompt) + 1, _SIZE)
        hit_len = max((end for end in ends if end < len(prompt) and prompt[:end] in self._known), default=0)
        self._known.update(prompt[:end] for end in ends)
        return hit_len


class LruStack:
    """Pages in the order of their last use, the most recent one first. A path is used from its end to its beginning."""

    def __init__(self) -> None:
        self._stack: list[Path] = []

    def missed(self, prompt: Path, num_pages: int) -> int:
        """Pages that a cache of some size would have to compute, of those that can be reused."""
        ends = range(_SIZE, len(prompt), _SIZE)
        return sum(prompt[:end] not in self._stack[:num_pages] for end in ends)

    def use(self, tokens: Path) -> None:
        for end in reversed(range(_SIZE, len(tokens) + 1, _SIZE)):
            if tokens[:end] in self._stack:
                self._stack.remove(tokens[:end])
            self._stack.insert(0, tokens[:end])


def sent(prompt: Sequence[int], salt: str = "") -> GenerateRequest:
    identity = Identity("weights", _SIZE, salt=salt)
    return GenerateRequest("", prompt, cache_salt=salt, page_chain=page_chain(identity, packed(prompt)))


def follow(reuse: Reuse, prompt: Sequence[int], *, cached: int = 0, output: Sequence[int] = (1,), **how: str) -> None:
    """A whole request."""
    tenant, miss = how.get("tenant", ""), Miss(how.get("miss", Miss.NEVER_SEEN))
    with reuse.follow(sent(prompt, how.get("salt", "")), tenant=tenant) as watch:
        for token in output:
            watch.take(RequestOutput("", (token,), cached_tokens=cached, miss=miss))


_TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


def digests() -> PrefixSource:
    """Those of the tiers."""

    def extend(before: bytes, tokens: bytes) -> bytes:
        return chain_digests(before, tokens, first=0, stop=len(tokens) // (4 * _SIZE), page_size=_SIZE)

    return ChainedDigests(extend)


@pytest.mark.parametrize("source", [None, digests()], ids=["hashed", "digests"])
@given(
    requests=st.lists(st.tuples(_TOKENS, st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)), max_size=12)
)
def test_all_sizes_are_exact_while_all_pages_are_in_the_sample(
    source: PrefixSource | None, requests: list[tuple[Path, Path]]
) -> None:
    reuse = Reuse(page_size=_SIZE, sizes=_SIZES, max_pages=1000, source=source)
    unlimited, stack = UnlimitedCache(), LruStack()
    achievable, missed = 0, dict.fromkeys(_SIZES, 0)
    for prompt, output in requests:
        achievable += unlimited.reuse(prompt)
        for size in _SIZES:
            missed[size] += stack.missed(prompt, size)
        stack.use(prompt)
        # What was generated is used with its prompt, when the request ends; the last token is not in the cache.
        whole = prompt + output[:-1]
        if len(whole) // _SIZE > len(prompt) // _SIZE:
            unlimited.reuse(whole)
            stack.use(whole)
        follow(reuse, prompt, output=output)
    total = reuse.tallies.total
    assert total.prompt - total.new == achievable
    assert total.error == 0 and reuse.sample.weight == 1
    assert [reuse.curve.missed_at(size) for size in _SIZES] == [missed[size] for size in _SIZES]


def trace(num_requests: int, *, seed: int, num_topics: int = 6) -> Iterator[Path]:
    """Conversations that begin with one of some long prefixes and grow."""
    draw = random.Random(seed)
    topics = [tuple(draw.choices(range(1000), k=_SIZE * draw.randrange(40))) for _ in range(num_topics)]
    open_ones: list[Path] = []
    for _ in range(num_requests):
        if open_ones and draw.random() < 0.6:
            before = open_ones.pop(draw.randrange(len(open_ones)))
        else:
            before = draw.choice(topics)
        prompt = before + tuple(draw.choices(range(1000), k=draw.randrange(1, 60)))
        open_ones.append(prompt)
        yield prompt


def test_sampled_estimates_are_unbiased_and_their_stated_error_is_right() -> None:
    prompts, unlimited, stack = list(trace(150, seed=1)), UnlimitedCache(), LruStack()
    wanted = sum(map(unlimited.reuse, prompts)) / sum(map(len, prompts))
    size, missed = 600, 0
    for prompt in prompts:
        missed += stack.missed(prompt, size)
        stack.use(prompt)
    deviations, z_scores, missed_estimates = [], [], []
    for seed in range(60):
        reuse = Reuse(page_size=_SIZE, sizes=[size], max_pages=200, source=PrefixHasher(_SIZE, seed=seed))
        for prompt in prompts:
            follow(reuse, prompt)
        total = reuse.tallies.total
        assert len(reuse.sample) <= 200 and reuse.sample.weight > 4
        deviations.append(1 - total.new / total.prompt - wanted)
        z_scores.append(1.96 * deviations[-1] / total.error)
        missed_estimates.append(reuse.curve.missed_at(size))
    assert abs(np.mean(deviations)) < 4 * np.std(deviations) / 60**0.5
    assert 0.75 < np.std(z_scores) < 1.25
    assert abs(np.mean(missed_estimates) - missed) < 4 * np.std(missed_estimates) / 60**0.5
    assert np.std(missed_estimates) < 0.15 * missed


def test_memory_is_bounded_whatever_requests_say() -> None:
    draw, max_pages = np.random.default_rng(0), 1024
    reuse = Reuse(page_size=16, max_pages=max_pages)
    follow(reuse, range(16 * 1000), tenant="warm")
    tracemalloc.start()
    for number in range(300):
        follow(reuse, draw.integers(0, 1000, 16 * 30).tolist(), tenant=str(number), salt=str(number % 7))
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(reuse.sample) <= max_pages < reuse.tallies.total.prompt / 16
    assert len(reuse.tallies.tenants) == 257
    assert num_bytes < 200 * max_pages + 257 * 2000


@given(requests=st.lists(_TOKENS, max_size=40), max_uses=st.integers(1, 9))
def test_pages_that_were_not_used_for_long_are_forgotten(requests: list[Path], max_uses: int) -> None:
    reuse = Reuse(page_size=_SIZE, max_pages=1000, max_uses=max_uses)
    last_use: dict[Path, int] = {}
    wanted = 0
    for number, prompt in enumerate(requests):
        ends = range(_SIZE, len(prompt) + 1, _SIZE)
        known = (end for end in ends if end < len(prompt) and number - last_use.get(prompt[:end], -99) <= max_uses)
        wanted += max(known, default=0)
        last_use.update((prompt[:end], number) for end in ends)
        follow(reuse, prompt)
        kept = [path for path, use in last_use.items() if number - use < max_uses]
        assert len(reuse.sample) == len(kept)
    assert reuse.tallies.total.prompt - reuse.tallies.total.new == wanted


def test_the_sample_neither_grows_nor_gets_sparser_while_traffic_goes_on() -> None:
    """Its memory too: nothing of what was forgotten stays. Tables are full after some hundred requests; how many
    depends on Python's hashes."""
    draw = np.random.default_rng(0)
    reuse = Reuse(page_size=16, max_pages=256, max_uses=100)
    held, weights = list[int](), list[float]()
    tracemalloc.start()
    for number in range(1200):
        follow(reuse, draw.integers(0, 1000, 16 * 30).tolist())
        if number in (599, 899, 1199):
            held.append(tracemalloc.get_traced_memory()[0])
            weights.append(reuse.sample.weight)
    tracemalloc.stop()
    assert max(held) < 1.1 * min(held)
    assert weights[0] > 8 and weights[-1] < 1.5 * weights[0]
    assert len(reuse.sample) > 150


# --- causes and tenants


def test_what_was_lost_is_split_by_cause() -> None:
    reuse = Reuse(page_size=16)
    prompt = list(range(161))
    follow(reuse, prompt)  # new
    follow(reuse, prompt, cached=160, miss=Miss.NONE)
    follow(reuse, prompt, cached=64, miss=Miss.EVICTED_HOST)
    follow(reuse, prompt, cached=96, miss=Miss.STATE_MISSING)
    follow(reuse, prompt, miss=Miss.NEVER_SEEN)  # cleared
    facts = reuse.tallies.total.facts()
    assert facts["achievable"] == round(4 * 160 / (5 * 161), 5)
    assert facts["achieved"] == round((160 + 64 + 96) / (5 * 161), 5)
    lost = {(row["cause"], row["kind"]): row["tokens"] for row in facts["lost"]}
    assert lost == {
        ("gone", "never_seen"): 160,
        ("capacity", "evicted_host"): 96,
        ("granularity", "state_missing"): 64,
    }
    shares = sum(row["share"] for row in facts["lost"])
    assert shares == pytest.approx(facts["achievable"] - facts["achieved"], abs=1e-4)


def test_what_another_request_still_computes_is_lost_to_concurrency() -> None:
    now_s = iter(np.arange(100.0))
    reuse = Reuse(page_size=16, clock=lambda: float(next(now_s)))
    prompt, first = list(range(100)), RequestOutput("", (1,), miss=Miss.NEVER_SEEN)
    with reuse.follow(sent(prompt), tenant="") as one, reuse.follow(sent(prompt), tenant="") as other:
        one.take(first)
        other.take(first)
    (row,) = reuse.tallies.total.facts()["lost"]
    assert (row["cause"], row["tokens"]) == ("concurrent", 96)


def test_the_first_token_does_not_wait_until_it_is_counted() -> None:
    reuse = Reuse(page_size=16)
    with reuse.follow(sent(range(100)), tenant="") as watch:
        watch.take(RequestOutput("", (1,)))
        assert not reuse.tallies.total.requests
        watch.take(RequestOutput("", (2,)))
        assert reuse.tallies.total.requests == 1
    assert reuse.tallies.total.requests == 1


def test_what_was_cached_before_the_server_began_is_achievable() -> None:
    reuse = Reuse(page_size=16)
    follow(reuse, list(range(100)), cached=64, miss=Miss.NEVER_SEEN)
    total = reuse.tallies.total
    assert total.achieved == total.achievable == 0.64 and not total.facts()["lost"]


def test_requests_without_a_token_count_nothing() -> None:
    reuse = Reuse(page_size=16)
    with reuse.follow(sent(range(100)), tenant="") as watch:
        watch.take(RequestOutput("", ()))
    assert reuse.tallies.total.requests == 0 and not len(reuse.sample)


def test_salts_share_nothing_and_tenants_are_counted_apart() -> None:
    reuse = Reuse(page_size=16)
    for tenant in ("alice", "bob"):
        follow(reuse, list(range(100)), salt=f"salt of {tenant}", tenant=tenant)
    follow(reuse, list(range(100)), salt="salt of bob", tenant="bob")
    assert reuse.tallies.tenants["alice"].achievable == 0
    assert reuse.tallies.tenants["bob"].achievable == 0.48
    assert reuse.tallies.facts("carol")["requests"] == 0


# --- parts


@given(st.data())
def test_prefixes_are_equal_if_and_only_if_their_hashes_are(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 3, 16, 64]))
    hasher = PrefixHasher(size)
    draw = random.Random(data.draw(st.integers(0, 10**6)))
    one = draw.choices(range(262_144), k=draw.randrange(6 * size))
    place = draw.randrange(len(one) + 1)
    other = one[:place] + draw.choices(range(262_144), k=draw.randrange(6 * size))
    hashes, others = hasher.of(one).hashes.tolist(), hasher.of(np.array(other, dtype=np.int32)).hashes.tolist()
    assert len(hashes) == len(one) // size
    for index, (this, that) in enumerate(zip(hashes, others, strict=False)):
        assert (this == that) == (one[: (index + 1) * size] == other[: (index + 1) * size])
    cut = draw.randrange(len(one) // size + 1) * size
    assert hasher.extended(hasher.of(one[:cut]), one[cut:]).hashes.tolist() == hashes
    assert not set(hasher.of(one, salt="another").hashes.tolist()) & set(hashes)


def test_hashes_are_spread_evenly() -> None:
    """The pages of texts that count up, as those of logs do, are sampled like any other."""
    hasher = PrefixHasher(16, seed=3)
    firsts = [hasher.of([number] * 16).hashes[0] for number in range(10_000)]
    deep = hasher.of([5] * 16 * 10_000).hashes
    for hashes in (np.array(firsts), deep):
        assert len(np.unique(hashes)) == 10_000
        sampled = int((hashes < np.uint64(2**58)).sum())
        assert abs(sampled - 10_000 / 64) < 5 * (10_000 / 64) ** 0.5


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(-3, 5)), max_size=60))
def test_recency_counts_as_a_list_does(changes: list[tuple[int, int]]) -> None:
    recency, uses = Recency(8), list[Use | None]()
    for which, change in changes:
        use = uses[which] if which < len(uses) else None
        if use is not None:
            recency.add(use, max(change, -use.pages))
            uses[which] = use if use.pages else None
        else:
            oldest = uses[-8] if len(uses) >= 8 else None
            forgotten, new = oldest.pages if oldest else 0, Use(0.0, 0.0)
            assert recency.append(new, abs(change)) == forgotten
            uses = [None if one is oldest else one for one in uses] + [new if change else None]
        assert recency.num_pages == sum(use.pages for use in uses if use)
        for index, use in enumerate(uses):
            if use is not None:
                assert recency.num_after(use) == sum(later.pages for later in uses[index + 1 :] if later)
