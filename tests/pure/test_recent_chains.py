"""Digests of prompts that share prefixes are those of each prompt alone, and only what is new is hashed."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycache.api import recent_chains
from raycache.api.recent_chains import RecentChains
from raycache.cache.keys import Identity, chain_digests, page_chain
from raycache.types import packed

_PAGE = 4
_ALICE, _BOB = Identity("w", _PAGE, salt="alice"), Identity("w", _PAGE, salt="bob")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages hashed by each call."""
    counts: list[int] = []

    def counted(before: bytes, tokens: bytes, *, first: int, stop: int, **more: Any) -> bytes:
        counts.append(stop - first)
        return chain_digests(before, tokens, first=first, stop=stop, **more)

    monkeypatch.setattr(recent_chains, "chain_digests", counted)
    return counts


def prompt(*runs: tuple[int, int]) -> bytes:
    """Runs of (number of tokens, seed)."""
    return packed([token for count, seed in runs for token in random.Random(seed).choices(range(9), k=count)])


@given(
    prompts=st.lists(
        st.tuples(
            st.sampled_from([_ALICE, _BOB]), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=4)
        ),
        max_size=12,
    ),
    max_bytes=st.sampled_from([0, 300, 1500, 10**6]),
)
def test_chains_are_those_of_each_prompt_alone(
    prompts: list[tuple[Identity, list[tuple[int, int]]]], max_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recent_chains, "_LEAST_PAGES", 2)
        chains = RecentChains(max_bytes)
        for identity, runs in prompts:
            assert chains.page_chain(identity, prompt(*runs)) == page_chain(identity, prompt(*runs))
            assert chains.num_bytes <= max_bytes


def test_only_pages_behind_the_longest_shared_prefix_are_hashed(hashed: list[int]) -> None:
    chains = RecentChains()
    chains.page_chain(_ALICE, prompt((4000, 1)))
    chains.page_chain(_ALICE, prompt((4000, 1)))
    chains.page_chain(_ALICE, prompt((4000, 1), (400, 2)))  # a conversation goes on
    chains.page_chain(_ALICE, prompt((3202, 1), (900, 3)))  # another one leaves it within a page
    chains.page_chain(_BOB, prompt((4000, 1)))
    assert hashed == [1000, 0, 100, 225, 1000]


def test_conversations_with_one_beginning_are_known_beside_each_other(hashed: list[int]) -> None:
    chains = RecentChains()
    begin = (400, 0)
    for turn in range(1, 4):
        for chat in range(1, 5):
            chains.page_chain(_ALICE, prompt(begin, (1200, chat), *((80, chat + 10 * n) for n in range(1, turn))))
    assert hashed == [400, 300, 300, 300, *[20] * 8]


def test_the_least_recently_used_prompts_are_given_up(hashed: list[int]) -> None:
    size = len(prompt((400, 1))) + len(page_chain(_ALICE, prompt((400, 1))))
    chains = RecentChains(2 * size)
    for number in (1, 2, 1, 3, 1, 2):
        chains.page_chain(_ALICE, prompt((400, number)))
    assert hashed == [100, 100, 0, 100, 0, 100]
    assert chains.num_bytes == 2 * size


def test_threads_may_use_it_together() -> None:
    chains = RecentChains(20_000)
    wanted = [prompt((300 + 40 * (number % 7), 1), (number, 2)) for number in range(200)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda tokens: chains.page_chain(_ALICE, tokens), wanted))
    assert made == [page_chain(_ALICE, tokens) for tokens in wanted]
