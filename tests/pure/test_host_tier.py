"""The host tier alone: what it says it holds was acknowledged, has no holes, and is found again after a crash."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycache.cache.catalog import Catalog
from raycache.cache.evict import Eviction
from raycache.cache.host_tier import HostTier, WritePolicy
from raycache.cache.keys import tag_of
from raycache.cache.node import RestorePoint
from raycache.cache.saving import Cursor
from raycache.cache.spaces import SpaceSizes
from raycache.cache.tier import Tier
from raycache.cache.transfers import Transfers
from raycache.memory.component import FULL
from raycache.memory.moves import Moves
from raycache.parallel.board import Acks
from tests.oracle.tiered import Setup, Tiered
from tests.oracle.twin import VOCAB

SIZE = 2
SEEDS = (bytes(32), bytes([1] * 32))
TEXTS = [np.random.default_rng(i).integers(1, VOCAB, 60).astype(np.int32).tobytes() for i in range(3)]
TEXT = np.random.default_rng(9).integers(1, VOCAB, 300).tolist()


def packed(text: int, num_pages: int) -> bytes:
    return TEXTS[text][: 4 * SIZE * num_pages]


def chain(seed: bytes, tokens: bytes) -> list[bytes]:
    """Digests of whole pages, written out."""
    found = [seed]
    for start in range(0, len(tokens), 4 * SIZE):
        found.append(sha256(found[-1] + tokens[start : start + 4 * SIZE]).digest())
    return found[1:]


@dataclass
class Sequence:
    cursor: Cursor
    tokens: bytes
    seed: bytes


class Pages:
    """Device pages 0, 1, 2, ... of a sequence, with a restore point of slot 3 or none."""

    def __init__(self, num_pages: int, *, has_point: bool, release: Callable[[bool], None]) -> None:
        self._num_pages, self.release = num_pages, release
        self.point = RestorePoint(num_pages * SIZE, {"state": (3,)}) if has_point else None

    def take(self, first: int) -> np.ndarray:
        return np.arange(first, self._num_pages, dtype=np.intp)


class Alone:
    """A host tier whose saves are acknowledged by hand."""

    def __init__(self, *, num_pages: int = 12, num_points: int = 4, has_points: bool = True) -> None:
        self.sizes = SpaceSizes(num_pages, SIZE, states={"state": num_points} if has_points else {})
        self._units = {FULL: num_pages} | ({"state": num_points} if has_points else {})
        self._widths = {"state": 1} if has_points else {}
        num_bytes = Catalog.num_bytes(sizes=self._units, page_size=SIZE, part_widths=self._widths)
        self.memory = bytearray(num_bytes)
        self.tier = self._tier(self.memory)
        self.transfers = Transfers(Tier(self.sizes, eviction=Eviction.LRU), self.tier)
        self.planned: deque[Moves] = deque()
        self.num_done = self.num_bad = 0
        self.released: list[int] = []
        self.held: list[int] = []

    def open(self, text: int, num_pages: int, *, seed: bytes = SEEDS[0], digests: bytes = b"") -> Sequence:
        tokens = packed(text, num_pages)
        # A match leaves one token to compute: one more follows.
        cursor = self.transfers.open(tokens + bytes(4), root=seed, now=0, digests=digests)
        return Sequence(cursor, tokens, seed)

    def save(self, sequence: Sequence, num_pages: int, *, has_point: bool = True) -> bool:
        number = len(self.held)
        has_point &= "state" in self._units and num_pages > 0
        source = Pages(num_pages, has_point=has_point, release=lambda is_saved: self.released.append(number))
        is_planned = self.transfers.plan_save(sequence.cursor, source, sequence.tokens, stop=num_pages, now=0)
        if is_planned:
            self.held.append(number)
        self.planned += self.transfers.take_moves()[0]
        return is_planned

    def end_saves(self, count: int, *, is_bad: bool = False) -> None:
        for _ in range(min(count, len(self.planned))):
            self.num_done = self.planned.popleft().number
            if is_bad:
                self.num_bad = self.num_done
        self.transfers.acknowledge(Acks(saves=self.num_done, bad_save=self.num_bad), now=0)
        self.tier.check()

    def known_len(self, text: int, num_pages: int, *, seed: bytes = SEEDS[0], tier: HostTier | None = None) -> int:
        """Pages of a text that can be continued."""
        handle = (tier or self.tier).tier.tree.match(packed(text, num_pages) + bytes(4), root=seed, now=0)
        handle.release()
        return handle.length // SIZE

    def next_decider(self) -> HostTier:
        """A tier that finds a copy of the catalog as it is now."""
        tier = self._tier(bytearray(self.memory))
        tier.recover(lambda space, units, tags: [True] * len(units))
        tier.check()
        return tier

    def catalog(self) -> Catalog:
        return self._catalog(bytearray(self.memory))

    def _tier(self, memory: bytearray) -> HostTier:
        return HostTier(self.sizes, catalog=self._catalog(memory), eviction=Eviction.LRU)

    def _catalog(self, memory: bytearray) -> Catalog:
        return Catalog(memoryview(memory), sizes=self._units, page_size=SIZE, part_widths=self._widths)


@settings(max_examples=150)
@given(data=st.data(), has_points=st.booleans())
def test_whatever_fails_the_catalog_names_exactly_what_the_tree_holds_and_chains_without_holes(
    data: st.DataObject, has_points: bool
) -> None:
    alone = Alone(
        num_pages=data.draw(st.integers(3, 14)), num_points=data.draw(st.integers(1, 4)), has_points=has_points
    )
    running: list[tuple[int, Sequence]] = []
    for _ in range(data.draw(st.integers(1, 25), label="steps")):
        kind = data.draw(st.sampled_from(["open", "save", "save", "end", "fail", "close", "lose", "clear"]), label="do")
        if kind == "open":
            text = data.draw(st.integers(0, 2))
            running.append((text, alone.open(text, 7, seed=data.draw(st.sampled_from(SEEDS)))))
        elif kind == "save" and running:
            _, sequence = data.draw(st.sampled_from(running))
            alone.save(sequence, data.draw(st.integers(0, 7)), has_point=data.draw(st.booleans()))
        elif kind in ("end", "fail"):
            alone.end_saves(data.draw(st.integers(0, 3)), is_bad=kind == "fail")
        elif kind == "close" and running:
            running.pop(data.draw(st.integers(0, len(running) - 1)))[1].cursor.close()
        elif kind == "lose":
            alone.transfers.lose()
            alone.planned.clear()
            alone.num_done = alone.num_bad = 0
            alone.transfers.resume()
        elif kind == "clear":
            alone.tier.clear()
        alone.tier.check()
        check_against_catalog(alone)
    for _, sequence in running:
        sequence.cursor.close()
    alone.end_saves(100)
    assert sorted(alone.released) == alone.held, "device pages are let go exactly once"
    alone.tier.clear()
    alone.tier.check()
    counts = alone.transfers.counts()
    assert (counts["pages_free"], counts["pages_moving"]) == (counts["pages_total"], 0)


def check_against_catalog(alone: Alone) -> None:
    catalog, found = alone.catalog(), set[int]()
    for branch in catalog.recover():
        assert catalog.digests(branch.pages) == b"".join(chain(branch.seed, branch.tokens))
        found.update(branch.pages.tolist())
    assert len(found) == alone.transfers.counts()["pages_cached"]
    following = alone.next_decider()
    for text in range(3):
        for seed in SEEDS:
            assert alone.known_len(text, 7, seed=seed, tier=following) == alone.known_len(text, 7, seed=seed)
    assert following.counts()["restore_points"] == alone.transfers.counts()["restore_points"]


def test_pages_are_unseen_until_they_are_acknowledged() -> None:
    alone = Alone()
    alone.save(alone.open(0, 5), 5)
    assert alone.known_len(0, 5) == 0 and alone.next_decider().counts()["pages_cached"] == 0
    alone.end_saves(1)
    assert alone.known_len(0, 5) == 5 and alone.next_decider().counts()["pages_cached"] == 5


def test_a_failed_save_is_in_no_tree_and_neither_is_what_follows_it() -> None:
    alone = Alone()
    sequence = alone.open(0, 6)
    alone.save(sequence, 2)
    alone.end_saves(1)
    alone.save(sequence, 4)
    alone.save(sequence, 6)
    alone.end_saves(1, is_bad=True)
    alone.end_saves(1)
    assert alone.known_len(0, 6) == 2
    assert not alone.save(sequence, 6), "its parents are missing"
    sequence.cursor.close()
    assert alone.transfers.counts()["pages_free"] == 10
    assert alone.save(alone.open(0, 6), 6), "another sequence saves them"
    alone.end_saves(1)
    assert alone.known_len(0, 6) == 6


def test_two_sequences_that_save_the_same_pages_leave_one_copy() -> None:
    alone = Alone()
    first, second = alone.open(0, 5), alone.open(0, 5)
    assert alone.save(first, 5) and alone.save(second, 5)
    alone.end_saves(2)
    assert alone.transfers.counts()["pages_cached"] == 5 and alone.transfers.counts()["pages_free"] == 7
    alone.tier.check()


def test_salts_share_nothing() -> None:
    alone = Alone()
    alone.save(alone.open(0, 5, seed=SEEDS[0]), 5)
    alone.end_saves(1)
    assert alone.known_len(0, 5, seed=SEEDS[1]) == 0
    assert alone.known_len(0, 5, seed=SEEDS[0]) == 5


def test_a_prefix_that_does_not_fit_is_not_saved_and_counted() -> None:
    alone = Alone(num_pages=4)
    sequence = alone.open(0, 5)
    assert not alone.save(sequence, 5)
    assert alone.transfers.counts()["unsaved_pages"] == 5 and alone.released == []
    alone.tier.check()


def test_what_a_load_reads_stays_although_its_restore_point_makes_room() -> None:
    alone = Alone(num_points=1)
    alone.save(alone.open(0, 3), 3)
    alone.end_saves(1)
    loading = alone.open(0, 3)
    point = loading.cursor.found.point
    assert point is not None
    alone.tier.tier.hold(point)
    alone.save(alone.open(1, 3), 3)
    (moves,) = alone.planned
    assert [unit.space for unit in moves.units] == [FULL] * 3, "no slot is free for another point"
    alone.end_saves(1)
    alone.tier.tier.let_go(point)
    alone.tier.check()
    assert alone.save(alone.open(2, 3), 3) and "state" in {unit.space for unit in alone.planned[-1].units}


@pytest.mark.parametrize("num_known", range(7))
def test_known_digests_are_taken_as_they_are_and_continued(num_known: int) -> None:
    alone, digests = Alone(has_points=False), chain(SEEDS[0], packed(0, 6))
    sequence = alone.open(0, 6, digests=b"".join(digests[:num_known]))
    assert alone.save(sequence, 2) and alone.save(sequence, 6)
    assert [unit.tag for moves in alone.planned for unit in moves.units] == [tag_of(digest) for digest in digests]
    alone.end_saves(2)
    assert alone.catalog().recover()[0].tokens == packed(0, 6)
    # A page is not hashed again: others in their place are believed.
    believed = Alone(has_points=False)
    believed.save(believed.open(0, 6, digests=bytes(32 * num_known)), 6)
    assert [unit.tag for unit in believed.planned[0].units][:num_known] == [0] * num_known


def test_a_lost_gang_saves_nothing_more_and_the_next_starts_to_count_anew() -> None:
    alone = Alone()
    sequence = alone.open(0, 5)
    alone.save(sequence, 5)
    alone.transfers.lose()
    assert alone.released == [0]
    assert not alone.save(alone.open(1, 5), 5)
    alone.transfers.resume()
    alone.planned.clear()
    alone.save(alone.open(2, 5), 5)
    assert alone.planned[0].number == 1
    alone.end_saves(1)
    assert (alone.known_len(0, 5), alone.known_len(2, 5)) == (0, 5)


@pytest.mark.parametrize("has_state", [False, True])
def test_write_through_saves_prompts_at_once(has_state: bool) -> None:
    tiers = Tiered(Setup(device_pages=32, has_state=has_state))
    tiers.ask(TEXT[:30])
    assert tiers.counts()["saved_pages"] == 7


@pytest.mark.parametrize("has_state", [False, True])
def test_write_through_selective_saves_what_a_second_request_uses(has_state: bool) -> None:
    tiers = Tiered(Setup(device_pages=32, has_state=has_state, policy=WritePolicy.SELECTIVE))
    tiers.ask(TEXT[:17])
    assert tiers.counts()["saved_pages"] == 0
    tiers.ask([*TEXT[:17], *TEXT[100:108]])
    assert tiers.counts()["saved_pages"] == 4, "those that both have"
    tiers.forget("device")
    assert tiers.ask(TEXT[:17]).cached_by_tier == {"host": 16}


@pytest.mark.parametrize("has_state", [False, True])
def test_write_back_saves_what_leaves_before_it_is_overwritten(has_state: bool) -> None:
    tiers = Tiered(Setup(device_pages=16, has_state=has_state, policy=WritePolicy.BACK))
    tiers.ask(TEXT[:30])
    assert tiers.counts()["saved_pages"] == 0
    tiers.ask(TEXT[100:163])
    assert tiers.counts()["saved_pages"] >= 7
    saving = [plan for plan in tiers.executor.plans if plan.saves]
    assert saving and all(plan.is_saved_first for plan in saving)
    assert tiers.ask(TEXT[:30]).cached_by_tier == {"host": 28}


def test_a_full_host_forgets_what_was_used_longest_ago() -> None:
    tiers = Tiered(Setup(device_pages=32, host_pages=16))
    for start in (0, 50, 100):
        tiers.ask(TEXT[start : start + 29])
        tiers.forget("device")
    assert tiers.ask(TEXT[100:129]).cached_by_tier == {"host": 28}
    assert tiers.ask(TEXT[50:79]).cached_by_tier == {"host": 28}
    assert tiers.ask(TEXT[0:29]).cached_by_tier == {"host": 8}, "its end went first"
