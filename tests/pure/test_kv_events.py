"""An index built from the KV events is the tree, whatever happens to requests, gangs and engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from random import Random

import pytest

from raycache.cache.evict import Eviction
from raycache.cache.host_tier import WritePolicy
from raycache.cache.keys import Identity, tag_of
from raycache.cache.kv_events import KvEvents
from raycache.cache.node import RestorePoint
from raycache.cache.prefetches import Waiting
from raycache.cache.spaces import SpaceSizes
from raycache.cache.storage_commands import NOTHING_LISTED
from raycache.cache.tier import Tier
from raycache.observe.kv_events import Event, Medium, pack
from raycache.types import packed
from tests.oracle.kv_reader import Index, blocks_of
from tests.oracle.tiered import Setup, Tiered
from tests.oracle.twin_storage import StorageTrouble, TwinStorage
from tests.pure.tiers_soak import KINDS, Story, setup_of

_MOST_OPEN = 20


class Direct:
    """Hands batches to an index, without sockets."""

    def __init__(self) -> None:
        self.index = Index()

    def publish(self, events: Sequence[Event]) -> None:
        self.index.take(pack(events, rank=0))

    def close(self) -> None:
        pass


def assert_alike(index: Index, tiers: Tiered) -> None:
    tiers.cache.events.flush()
    plain = Identity("twin", tiers.setup.page_size).seed()
    for medium, tier in (("GPU", tiers.cache.device), ("CPU", tiers.host.tier)):
        assert index.blocks[medium] == blocks_of(tier.tree, has_points=tier.has_points, plain_root=plain), medium
    index.check()


def assert_storage_alike(index: Index, tiers: Tiered) -> None:
    """After what moves has settled, and the storage has been asked for changes without trouble."""
    trouble, tiers.storage.trouble = tiers.storage.trouble, StorageTrouble()
    tiers.storage_tier.blocks.want()
    tiers.settle()
    tiers.cache.events.flush()
    tiers.storage.trouble = trouble
    blocks, digests = index.blocks["STORAGE"], {tag_of(digest): digest for digest in tiers.storage.digests}
    if not tiers.storage_tier.is_attached:
        digests = {}
    assert blocks.keys() == digests.keys()
    roots = {None: tiers.root("")} | {(tiers.root(salt).hex()[:16],): tiers.root(salt) for salt in ("b",)}
    for name, block in blocks.items():
        assert isinstance(name, int)
        before = roots[block.namespace] if block.parent is None else digests.get(int(block.parent))
        if block.tokens and before is not None:
            assert sha256(before + packed(block.tokens)).digest() == digests[name]
    index.check()


class Watched(Story):
    """A story that compares the index with the trees after every event."""

    def __init__(self, kind: str, flow: str, *, seed: int, every: int) -> None:
        random, publisher = Random(seed), Direct()
        policy, eviction, waiting = random.choice(list(WritePolicy)), random.choice(list(Eviction)), Waiting.COMPLETE
        setup = setup_of((policy, eviction, waiting, kind, flow), random)
        super().__init__(replace(setup, host_points=6), random, publisher=publisher)
        self.index, self._every, self._num_happened = publisher.index, every, 0

    def _happen(self) -> None:
        super()._happen()
        while len(self.wanted) > _MOST_OPEN:
            self.step()
        self._num_happened += 1
        if self._num_happened % self._every == 0:
            assert_alike(self.index, self.tiers)


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_of_the_events_is_the_tree_at_any_time(kind: str) -> None:
    stored = removed = 0
    for seed, flow in enumerate(("alone", "ahead", "stages")):
        story = Watched(kind, flow, seed=seed, every=1)
        story.run(20)
        assert_alike(story.index, story.tiers)
        assert story.index.blocks["GPU"] == story.index.blocks["CPU"] == {}  # a story ends with clearing both
        assert_storage_alike(story.index, story.tiers)
        stored, removed = stored + story.index.num_stored, removed + story.index.num_removed
        assert story.index.num_cleared == 1 + story.counts["engines lost"]
    assert stored > 100 and removed > 100


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dense", "both"])
def test_after_ten_thousand_requests_with_evictions_and_restarts_too(kind: str) -> None:
    story = Watched(kind, "alone", seed=7, every=97)
    story.run(10_000)
    assert story.counts["engines lost"] > 50 and story.counts["gangs lost"] > 50
    assert_alike(story.index, story.tiers)
    assert_storage_alike(story.index, story.tiers)


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_of_the_events_is_the_storage_after_stores_evictions_and_restarts(kind: str) -> None:
    stored = evicted = restarts = 0
    for seed in range(6):
        story = Watched(kind, "alone", seed=seed, every=10_000)
        setup = replace(story.tiers.setup, has_storage=True, most_objects=(20, 1000)[seed % 2])
        direct = Direct()
        story.tiers, story.index = Tiered(setup, publisher=direct), direct.index
        for _ in range(6):
            story.run(story.counts["requests"] + 5)
            story.tiers.cache.events.flush()
            assert_storage_alike(story.index, story.tiers)
        stored, restarts = stored + len(story.index.blocks["STORAGE"]), restarts + story.counts["engines lost"]
        evicted += story.tiers.storage.num_evicted
    assert stored > 50 and evicted > 20 and restarts > 3


def test_after_a_restart_the_hashes_of_what_the_storage_has_are_told() -> None:
    direct = Direct()
    tiers = Tiered(Setup(has_storage=True), publisher=direct)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    tiers.ask(prompt)
    blocks = direct.index.blocks["STORAGE"]
    assert_storage_alike(direct.index, tiers)
    assert [block.tokens for block in blocks.values()] == [(1, 2, 3, 4), (5, 6, 7, 8)]
    first, second = blocks
    assert (blocks[first].parent, blocks[second].parent) == (None, first)
    tiers.start_engine()
    tiers.settle()
    again = direct.index.blocks["STORAGE"]
    assert again is not blocks and again.keys() == blocks.keys()
    assert {block.tokens for block in again.values()} == {()}  # but the host still has their tokens
    assert direct.index.blocks["CPU"].keys() == again.keys()
    tiers.ask([1, 2, 3, 4, 9, 9, 9, 9, 9], name="other")
    assert len(again) == 3 and (9, 9, 9, 9) in {block.tokens for block in again.values()}
    tiers.storage_tier.attach(is_attached=False)
    tiers.cache.events.flush()
    assert direct.index.blocks["STORAGE"] == {} and not tiers.engine.has_work
    tiers.storage_tier.attach(is_attached=True)
    tiers.settle()
    assert_storage_alike(direct.index, tiers)
    tiers.forget("storage")
    tiers.settle()
    assert direct.index.blocks["STORAGE"] == {}


def test_a_storage_that_will_be_emptied_is_not_asked_before() -> None:
    direct = Direct()
    tiers = Tiered(Setup(has_storage=True), publisher=direct)
    tiers.ask([1, 2, 3, 4, 5])
    assert len(direct.index.blocks["STORAGE"]) == 1
    tiers.storage_tier.attach(is_attached=True, is_emptied=True)
    tiers.forget("device", "host")
    for now_s in (100.0, 100.9):
        assert not tiers.engine.has_work
        tiers.storage_tier.poll(now=1, now_s=now_s)
    tiers.cache.events.flush()
    assert direct.index.blocks["STORAGE"] == {} and tiers.storage.digests
    tiers.storage_tier.poll(now=1, now_s=101.1)  # what is still there now has stayed
    tiers.settle()
    assert_storage_alike(direct.index, tiers)
    assert len(direct.index.blocks["STORAGE"]) == 1


def test_a_storage_that_is_away_is_asked_again_later() -> None:
    direct = Direct()
    tiers = Tiered(Setup(has_storage=True, storage_trouble=StorageTrouble(errors=1.0)), publisher=direct)
    for now_s in (100.0, 100.1):
        tiers.storage_tier.poll(now=1, now_s=now_s)
    assert not tiers.engine.has_work  # an idle engine does not ask over and over
    tiers.storage.objects["full", b"d" * 32] = ()
    tiers.calm()
    for now_s in (100.9, 101.1, 101.2):
        tiers.storage_tier.poll(now=1, now_s=now_s)
        tiers.cache.events.flush()
        assert bool(direct.index.blocks["STORAGE"]) == (now_s > 101.1)


def test_a_storage_that_does_not_tell_has_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = Direct()
    tiers = Tiered(Setup(has_storage=True), publisher=direct)
    monkeypatch.setattr(TwinStorage, "list_pages", lambda self, command: NOTHING_LISTED)
    tiers.ask([1, 2, 3, 4, 5])
    assert tiers.storage.digests and direct.index.blocks["STORAGE"] == {}


def test_pages_that_lead_to_no_restore_point_are_not_announced() -> None:
    direct = Direct()
    events = KvEvents(direct, plain_root=b"plain")
    sizes = SpaceSizes(16, 2, states={"state": 8})
    tier = Tier(sizes, eviction=Eviction.LRU, listener=events.tier(Medium.GPU, sizes))

    def run(tokens: Sequence[int], *, has_point: bool) -> RestorePoint | None:
        handle = tier.tree.match(packed([*tokens, 0]), now=1, root=b"plain")
        new = tier.take_pages(len(tokens) // 2 - handle.length // 2)
        assert new is not None
        tier.tree.extend(handle, packed(tokens), new, now=1)
        point = tier.new_point(len(tokens), {"state": 1}) if has_point else None
        if point is not None:
            assert tier.keep(handle, point)
        handle.release()
        events.flush()
        return point

    def told() -> list[tuple[int, ...]]:
        return sorted(block.tokens for block in direct.index.blocks["GPU"].values())

    run([1, 2, 3, 4], has_point=False)
    assert told() == []
    run([1, 2, 3, 4, 5, 6], has_point=True)
    assert told() == [(1, 2), (3, 4), (5, 6)]
    run([1, 2, 7, 8], has_point=True)
    assert told() == [(1, 2), (3, 4), (5, 6), (7, 8)]
    assert tier.make_free("state", 7)  # the first one goes
    events.flush()
    assert told() == [(1, 2), (7, 8)]
    assert tier.make_free("state", 8)
    events.flush()
    assert told() == [] and tier.tree.num_cached == 4  # the pages are still there, of use to nobody


def test_a_prefix_with_a_salt_is_marked_and_has_other_hashes() -> None:
    direct = Direct()
    events = KvEvents(direct, plain_root=b"plain")
    sizes = SpaceSizes(16, 2)
    tier = Tier(sizes, eviction=Eviction.LRU, listener=events.tier(Medium.GPU, sizes))
    for root in (b"plain", b"salted"):
        handle = tier.tree.match(b"", now=1, root=root)
        for stop in (2, 4):
            pages = tier.take_pages(1)
            assert pages is not None
            tier.tree.extend(handle, packed([1, 2, 3, 4][:stop]), pages, now=1)
        handle.release()
    events.flush()
    blocks = direct.index.blocks["GPU"]
    assert {(block.tokens, block.namespace) for block in blocks.values() if block.parent is None} == {
        ((1, 2), None),
        ((1, 2), (b"salted".hex(),)),
    }
    assert len(blocks) == 4
