"""Prompts that have left the history: known by digests of their prefixes, told apart from those never seen."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import pytest

from raycache.cache.keys import Identity, page_chain
from raycache.divergence.cause import Cause
from raycache.divergence.finding import Finding
from raycache.divergence.history import PromptHistory
from raycache.divergence.place import Asked
from raycache.divergence.prefixes import NOT_SEEN, SeenPrefixes
from raycache.divergence.text import TokenText
from raycache.types import Miss, RequestOutput, packed
from tests.unit.divergence import shared

PAGE = 16


def drawn(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(1000), k=count)


def chain_of(prompt: list[int], *, salt: str = "", page_size: int = PAGE) -> bytes:
    return page_chain(Identity("weights", page_size, salt=salt), packed(prompt))


@pytest.mark.parametrize(("seed", "page_size"), [(0, 16), (1, 64), (2, 48), (3, 1024)])
def test_a_prefix_is_found_if_and_only_if_it_was_seen(seed: int, page_size: int) -> None:
    draw = random.Random(seed)
    seen = SeenPrefixes(2**22, page_size=page_size)
    known: list[tuple[str, list[int]]] = []
    for number in range(60):
        base = draw.choice(known)[1] if known and draw.random() < 0.8 else []
        prompt = base[: draw.randint(0, len(base))] + drawn(draw, draw.randint(1, 6000))
        salt, behind = draw.choice(("", "salt")), draw.choice((0, 0, 1000))
        longest = max((shared(prompt, other) for of, other in known if of == salt), default=0)
        chain = chain_of(prompt, salt=salt, page_size=page_size)
        found = seen.add(chain, prompt_len=len(prompt), now=float(number), known=0, behind=behind)
        assert found.length == max((end for end in seen._ends if behind < end <= longest), default=0)
        assert found.length == 0 or found.seen_s < number
        known.append((salt, prompt))


@pytest.mark.parametrize("page_size", [1, 16, 48, 512, 1024])
def test_lengths_are_whole_pages_that_grow_by_half_at_most(page_size: int) -> None:
    ends = SeenPrefixes(2**20, page_size=page_size)._ends
    assert all(end % page_size == 0 for end in ends)
    assert ends[0] == max(page_size, -(-512 // page_size) * page_size)
    assert all(end < after <= max(1.5 * end, end + ends[0]) for end, after in itertools.pairwise(ends))
    assert ends[-1] >= 2**21


def test_memory_is_that_of_the_table_and_the_latest_are_kept() -> None:
    draw = random.Random(0)
    chains = [draw.randbytes(32 * 33) for _ in range(8000)]
    tracemalloc.start()
    seen = SeenPrefixes(2**16, page_size=PAGE)
    for number, chain in enumerate(chains):
        assert seen.add(chain, prompt_len=512, now=float(number), known=0, behind=0) is NOT_SEEN
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken <= 2**16 + 2**13
    found = [seen.add(chain, prompt_len=512, now=9000.0, known=0, behind=0).length for chain in reversed(chains[-400:])]
    assert found.count(512) > 330  # of 4,096 places
    assert seen.add(chains[0], prompt_len=512, now=9000.0, known=0, behind=0) is NOT_SEEN


# --- in the history


def history() -> PromptHistory:
    """One that holds the tokens of a few prompts of 3,500."""
    text = TokenText(lambda token_id: b" w", size=1000, is_special=lambda token_id: False)
    return PromptHistory(text, page_size=PAGE, max_bytes=2**16, clock=iter(range(10**6)).__next__)


def ask(
    known: PromptHistory, prompt: list[int], *, salt: str = "", cached: int = 0, miss: Miss = Miss.NEVER_SEEN
) -> Finding | None:
    chain = chain_of(prompt, salt=salt)
    with known.begin(prompt, salt=salt, tenant="", asked=Asked(), is_wanted=True, chain=chain) as watch:
        watch.take(RequestOutput("", (1,), cached_tokens=cached, miss=miss))
    return watch.finding


def fill(known: PromptHistory, draw: random.Random, *, salt: str = "") -> None:
    """Send so many new prompts that the tokens of those before are given up."""
    for _ in range(12):
        ask(known, drawn(draw, 3500), salt=salt)


@pytest.mark.parametrize(
    ("miss", "cause"),
    [(Miss.EVICTED_DEVICE, Cause.CAPACITY), (Miss.IDENTITY, Cause.FORMAT), (Miss.NEVER_SEEN, Cause.GONE)],
)
def test_a_prompt_of_long_ago_is_told_apart_from_a_new_one(miss: Miss, cause: Cause) -> None:
    draw, known = random.Random(0), history()
    first = drawn(draw, 3500)
    assert ask(known, first) is None
    fill(known, draw)
    assert known.seen.known_length("", first) == 0, "it is still in the history, so this shows nothing"
    found = ask(known, first, miss=miss)
    assert found is not None
    whole = 3072  # 3,500 tokens hold six blocks of 512
    assert (found.cause, found.kind, found.lost_tokens, found.token) == (cause, miss.value, whole, 0)
    assert found.age_s > 12 and found.examined is None
    assert ask(known, drawn(draw, 3500), miss=miss) is None  # never seen


def test_a_conversation_that_grew_in_small_steps_is_known_as_a_whole() -> None:
    draw, known = random.Random(3), history()
    growing = drawn(draw, 600)
    while len(growing) < 3100:
        growing += drawn(draw, 20)
        ask(known, growing, cached=len(growing) // PAGE * PAGE)
    fill(known, draw)
    found = ask(known, growing + drawn(draw, 3500), miss=Miss.EVICTED_DEVICE)
    assert found is not None and found.lost_tokens == 3072


def test_what_the_engine_still_has_of_long_ago_is_no_loss() -> None:
    draw, known = random.Random(1), history()
    first = drawn(draw, 3500)
    ask(known, first)
    fill(known, draw)
    assert ask(known, [*first, 7, 7, 7], cached=3488, miss=Miss.NONE) is None


def test_prompts_of_other_salts_are_not_known() -> None:
    draw, known = random.Random(2), history()
    first = drawn(draw, 3500)
    ask(known, first, salt="alice")
    fill(known, draw, salt="alice")
    assert ask(known, first, salt="bob", miss=Miss.EVICTED_DEVICE) is None
    assert ask(known, first, salt="alice", miss=Miss.EVICTED_DEVICE) is not None
