"""An index built from the KV events is the tree, whatever happens to requests, gangs and engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from raycache.cache.evict import Eviction
from raycache.cache.host_tier import WritePolicy
from raycache.cache.keys import Identity
from raycache.cache.kv_events import KvEvents
from raycache.cache.node import RestorePoint
from raycache.cache.prefetches import Waiting
from raycache.cache.spaces import SpaceSizes
from raycache.cache.tier import Tier
from raycache.observe.kv_events import Event, Medium, pack
from raycache.types import packed
from tests.oracle.kv_reader import Index, blocks_of
from tests.oracle.tiered import Tiered
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
        assert story.index.blocks == {"GPU": {}, "CPU": {}}  # a story ends with clearing both
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
