"""What a request is told about its cached tokens is what happened: one scripted situation per reason."""

from __future__ import annotations

import numpy as np
import pytest

from raycache.cache.costs import ENOUGH, Costs
from raycache.cache.host_tier import WritePolicy
from raycache.cache.prefetches import Waiting
from raycache.cache.storage_commands import CommandKind, Fetch, StorageCommand, StorageResult
from raycache.decider.hits import CacheReport, Hits
from raycache.types import CacheAction, CacheCommand, GenerateRequest, Miss, RequestOutput, SamplingParams
from tests.oracle.tiered import Setup, Tiered
from tests.oracle.twin import VOCAB
from tests.oracle.twin_host import Trouble
from tests.oracle.twin_storage import StorageTrouble, TwinStorage

TEXT = np.random.default_rng(3).integers(1, VOCAB, 400).tolist()
PROMPT = TEXT[:30]
OTHERS = TEXT[100:227]  # with its first token generated, it needs the whole device


def tiers_of(**values: object) -> Tiered:
    return Tiered(Setup(device_pages=32, **values))  # type: ignore[arg-type]


def told(output: RequestOutput) -> tuple[dict[str, int], Miss, str]:
    return dict(output.cached_by_tier), output.miss, output.cut_by


class OneFault:
    """Gives one answer to every fetch, whatever is stored."""

    def __init__(self, storage: TwinStorage, fetch: Fetch) -> None:
        self._work, self._fetch = storage.work, fetch

    def work(self, command: StorageCommand) -> StorageResult:
        answer = self._work(command)
        if command.kind is not CommandKind.FETCH:
            return answer
        return StorageResult(
            command.number, command.kind, command.owner, answer.outcome, fetches=(self._fetch,) * len(command.units)
        )


def stored(**values: object) -> Tiered:
    """Tiers of which only the storage has the prompt."""
    tiers = tiers_of(has_storage=True, **values)
    tiers.ask(PROMPT)
    tiers.forget("device", "host")
    return tiers


def test_a_prompt_that_nobody_sent_was_never_seen() -> None:
    for tiers in (tiers_of(), tiers_of(has_storage=True)):
        assert told(tiers.ask(PROMPT)) == ({}, Miss.NEVER_SEEN, "")


def test_an_empty_storage_that_replies_while_the_prompt_is_computed_is_no_timeout() -> None:
    slow = StorageTrouble(most_ticks=1)
    for seed in (0, 5, 7):  # the reply comes after the request has started
        tiers = tiers_of(has_storage=True, waiting=Waiting.BEST_EFFORT, storage_trouble=slow, seed=seed)
        assert told(tiers.ask(TEXT[:60])) == ({}, Miss.NEVER_SEEN, "")


def test_an_empty_storage_that_replies_during_the_only_step_of_a_prompt_is_no_timeout() -> None:
    slow = StorageTrouble(most_ticks=1)  # with this seed, the reply is there when the first token is
    tiers = tiers_of(has_storage=True, waiting=Waiting.BEST_EFFORT, storage_trouble=slow, seed=7)
    assert told(tiers.ask(TEXT[:9])) == ({}, Miss.NEVER_SEEN, "")


def test_the_rest_of_a_prompt_whose_begin_is_cached_was_never_seen() -> None:
    tiers = tiers_of(has_storage=True)
    tiers.ask(PROMPT[:10])
    assert told(tiers.ask(PROMPT)) == ({"device": 8}, Miss.NEVER_SEEN, "")


def test_all_that_can_be_reused_is_no_miss() -> None:
    tiers = tiers_of()
    tiers.ask(PROMPT)
    assert told(tiers.ask(PROMPT)) == ({"device": 28}, Miss.NONE, "")


def test_less_than_a_page_cannot_be_reused() -> None:
    tiers = tiers_of()
    for prompt in (PROMPT[:3], PROMPT[:4]):
        tiers.ask(prompt)
        assert told(tiers.ask(prompt)) == ({}, Miss.SHORTER_THAN_PAGE, "")


def test_what_left_the_device_and_was_not_saved_was_evicted_there() -> None:
    tiers = tiers_of(policy=WritePolicy.SELECTIVE)
    tiers.ask(PROMPT)
    tiers.ask(OTHERS)
    assert told(tiers.ask(PROMPT)) == ({}, Miss.EVICTED_DEVICE, "")


def test_what_left_the_host_was_evicted_there() -> None:
    tiers = tiers_of(host_pages=31)
    tiers.ask(PROMPT)
    tiers.ask(OTHERS)
    assert told(tiers.ask(PROMPT)) == ({}, Miss.EVICTED_HOST, "")


def test_what_left_the_host_and_then_the_storage_was_evicted_there() -> None:
    tiers = tiers_of(host_pages=31, has_storage=True, most_objects=31)
    tiers.ask(PROMPT)
    tiers.ask(OTHERS)
    assert told(tiers.ask(PROMPT)) == ({}, Miss.EVICTED_STORAGE, "")


@pytest.mark.parametrize(
    ("values", "space"),
    [({"has_state": True}, "state"), ({"window": 6}, "window"), ({"window": 6, "has_state": True}, "state")],
)
def test_tokens_without_the_state_behind_them_name_the_component(values: dict[str, int], space: str) -> None:
    tiers = tiers_of(policy=WritePolicy.BACK, **values)
    tiers.ask(PROMPT)
    tiers.host.clear()
    while tiers.engine.evict(space):
        pass
    tiers.host.clear()
    assert told(tiers.ask(PROMPT)) == ({}, Miss.STATE_MISSING, space)


def test_a_prefix_that_branches_before_its_restore_point_lacks_all_components() -> None:
    tiers = tiers_of(window=6, has_state=True)
    tiers.ask(PROMPT)
    assert told(tiers.ask([*PROMPT[:20], 1, 1, 1, 1, 1])) == ({}, Miss.STATE_MISSING, "window+state")


def test_damaged_host_memory_fails_its_checksum() -> None:
    tiers = tiers_of()
    tiers.ask(PROMPT)
    tiers.forget("device")
    tiers.memory.slots.clear()
    assert told(tiers.ask(PROMPT)) == ({}, Miss.CHECKSUM, "")


@pytest.mark.parametrize(
    ("fetch", "miss"),
    [(Fetch.CORRUPT, Miss.CHECKSUM), (Fetch.FOREIGN, Miss.IDENTITY), (Fetch.UNAVAILABLE, Miss.TIMEOUT)],
)
def test_what_the_storage_says_of_an_object_is_the_reason(fetch: Fetch, miss: Miss) -> None:
    tiers = stored()
    tiers.storage.work = OneFault(tiers.storage, fetch).work  # type: ignore[method-assign]
    assert told(tiers.ask(PROMPT)) == ({}, miss, "")


def test_an_object_that_is_gone_once_it_is_fetched_was_evicted() -> None:
    tiers = stored(storage_trouble=StorageTrouble(lost=1.0))
    assert told(tiers.ask(PROMPT)) == ({}, Miss.EVICTED_STORAGE, "")


def test_a_storage_that_is_away_gives_nothing_in_time() -> None:
    tiers = stored()
    tiers.storage.trouble = StorageTrouble(errors=1.0)
    assert told(tiers.ask(PROMPT)) == ({}, Miss.TIMEOUT, "")


def test_another_models_objects_are_of_another_identity() -> None:
    tiers = tiers_of(has_storage=True, storage_trouble=StorageTrouble(foreign=1.0))
    assert told(tiers.ask(PROMPT)) == ({}, Miss.IDENTITY, "")


@pytest.mark.parametrize("waiting", [Waiting.BEST_EFFORT, Waiting.TIMEOUT])
def test_a_slow_storage_is_not_in_time(waiting: Waiting) -> None:
    tiers = stored(waiting=waiting, prefetch_timeout_s=0.02)
    tiers.storage.trouble = StorageTrouble(most_ticks=1 << 20)
    tiers.engine.add(GenerateRequest("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=1)))
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = tiers.engine.step()
    assert told(outputs[0]) == ({}, Miss.TIMEOUT, "")


def test_a_host_that_computing_beats_is_not_used() -> None:
    tiers = tiers_of()
    tiers.ask(PROMPT)
    tiers.forget("device")
    costs = tiers.cache.costs
    for _ in range(ENOUGH):
        assert costs.is_load_worth(1000), "nothing is known yet"
        costs.compute.note(1.0, 1000)
        costs.load.note(2.0, 1000)
    assert told(tiers.ask(PROMPT)) == ({}, Miss.SLOWER, "")


def test_a_storage_that_computing_beats_is_not_waited_for() -> None:
    tiers = stored()
    for _ in range(ENOUGH):
        tiers.cache.costs.compute.note(1e-6, 1000)
        tiers.cache.costs.fetch.note(2.0, 1000)
    tiers.storage.trouble = StorageTrouble(most_ticks=40)
    assert told(tiers.ask(PROMPT)) == ({}, Miss.SLOWER, "")


def test_a_storage_that_is_slower_than_it_was_is_not_waited_for_longer_than_computing_takes() -> None:
    costs = Costs()
    assert costs.is_wait_worth(1000, waited_s=10.0), "nothing is known yet"
    for _ in range(ENOUGH):
        costs.compute.note(0.02, 1000)
        costs.fetch.note(0.001, 1000)
    assert costs.is_wait_worth(1000, waited_s=0.05), "too short to say anything"
    assert not costs.is_wait_worth(1000, waited_s=0.15)
    assert costs.is_wait_worth(10_000, waited_s=0.15)


def test_a_prefetch_that_finds_no_pages_on_the_host_has_no_capacity() -> None:
    tiers = stored(prefetch_share=0.05)
    assert told(tiers.ask(PROMPT)) == ({}, Miss.NO_CAPACITY, "")


def test_a_prefetched_restore_point_without_a_slot_on_the_host_has_no_capacity() -> None:
    tiers = tiers_of(has_state=True, has_storage=True, host_points=1)
    tiers.ask(PROMPT)
    tiers.forget("device", "host")
    held = tiers.host.tier.new_point(0, {"state": 1})
    tiers.engine.add(GenerateRequest("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=1)))
    assert held and told(tiers.settle()[0]) == ({}, Miss.NO_CAPACITY, "")


def test_another_salt_is_told_nothing() -> None:
    tiers = tiers_of(has_storage=True)
    tiers.ask(PROMPT, salt="a")
    assert told(tiers.ask(PROMPT, salt="b")) == ({}, Miss.NEVER_SEEN, "")
    tiers.forget("device", "host")
    assert told(tiers.ask(PROMPT, salt="c")) == ({}, Miss.NEVER_SEEN, "")


def test_each_tier_counts_what_it_gave() -> None:
    tiers = tiers_of(has_storage=True)
    tiers.ask(PROMPT[:10])
    tiers.forget("device")
    tiers.ask(PROMPT[:18])
    tiers.forget("host")
    tiers.ask(PROMPT)
    stats = tiers.engine.stats()
    assert stats.cached_by_tier == {"host": 8, "device": 16}
    tiers.forget("device", "host")
    assert told(tiers.ask(PROMPT))[0] == {"storage": 28}
    assert tiers.engine.stats().misses == {"never_seen": 3}


def test_failed_saves_leave_the_next_tier_out() -> None:
    tiers = tiers_of(trouble=Trouble(bad_saves=1.0))
    tiers.ask(PROMPT)
    tiers.forget("device")
    assert told(tiers.ask(PROMPT)) == ({}, Miss.NEVER_SEEN, "")


def test_inspecting_a_prompt_says_how_far_each_tier_reaches() -> None:
    tiers = tiers_of(has_storage=True)
    tiers.ask(PROMPT)
    tiers.forget("device", "host")
    tiers.ask(PROMPT[:18])
    answer = tiers.engine.admin(CacheCommand(CacheAction.INSPECT, prompt=tuple(PROMPT)))
    tiers.settle()
    found = answer.result(timeout=0)
    assert found["tiers"] == {"device": 16, "host": 16, "storage": 28} and found["miss"] == Miss.NONE


def test_a_tier_that_stores_and_never_hits_is_named_with_the_likely_cause() -> None:
    tiers = tiers_of(has_storage=True)
    for start in range(60):
        tiers.ask(TEXT[3 * start : 3 * start + 9])
    warnings = tiers.engine.stats().warnings
    assert len(warnings) == 2 and all("never_seen" in warning and "share no prefix" in warning for warning in warnings)
    assert warnings[0].startswith("tier inert: host has stored 1") and "storage has stored 1" in warnings[1]


def test_a_tier_that_was_hit_or_stores_nothing_is_not_inert() -> None:
    hits = Hits()
    tiers = {"host": {"saved_pages": 9.0}, "storage": {"persisted_pages": 0.0}}
    for _ in range(100):
        hits.count(report(miss=Miss.EVICTED_HOST))
    assert len(hits.warnings(tiers)) == 1 and "--host-memory" in hits.warnings(tiers)[0]
    hits.count(report(miss=Miss.NONE, host=4))
    assert hits.warnings(tiers) == ()


def test_a_tier_below_one_that_holds_everything_is_not_blamed_on_prompts() -> None:
    hits = Hits()
    for _ in range(60):
        hits.count(report(miss=Miss.NEVER_SEEN, device=40))
    (warning,) = hits.warnings({"host": {"saved_pages": 9.0}})
    assert warning.endswith("60 requests; the tiers above hold everything that is reused")
    hits.count(report(miss=Miss.CHECKSUM, device=40))
    assert "most often: checksum (1)" in hits.warnings({"host": {"saved_pages": 9.0}})[0]


def test_few_requests_say_nothing_about_a_tier() -> None:
    hits = Hits()
    for _ in range(10):
        hits.count(report(miss=Miss.NEVER_SEEN))
    assert hits.warnings({"host": {"saved_pages": 9.0}}) == ()


def report(*, miss: Miss, **by_tier: int) -> CacheReport:
    return CacheReport(sum(by_tier.values()), by_tier, miss)
