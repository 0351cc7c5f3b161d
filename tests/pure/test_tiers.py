"""The decider with all its tiers against a model without a cache: whatever happens, the same tokens, and nothing is
lost. The whole of it at length: `python -m tests.pure.tiers_soak`."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycache.cache.evict import Eviction
from raycache.cache.host_tier import WritePolicy
from raycache.cache.prefetches import Waiting
from raycache.memory.component import FULL
from raycache.types import GenerateRequest, Miss, SamplingParams
from tests.oracle.tiered import Setup, Tiered
from tests.oracle.twin import VOCAB
from tests.oracle.twin_host import Trouble
from tests.oracle.twin_storage import StorageTrouble
from tests.pure.tiers_soak import CELLS, FLOWS, KINDS, Cell, Story, setup_of

PROMPT = np.random.default_rng(7).integers(1, VOCAB, 200).tolist()


def setup_for(kind: str, **values: object) -> Setup:
    window, has_state = KINDS[kind]
    return Setup(window=window, has_state=has_state, **{"device_pages": 32, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(("policy", "kind"), list(product(WritePolicy, KINDS)))
def test_random_requests_get_the_right_tokens_whatever_fails(policy: WritePolicy, kind: str) -> None:
    for number, (eviction, waiting, flow) in enumerate(product(Eviction, Waiting, FLOWS)):
        random = Random(number)
        setup = setup_of((policy, eviction, waiting, kind, flow), random)
        story = Story(setup, random, has_damage=number % 3 == 0)
        assert story.run(5)["ended"] + story.counts["engines lost"] > 0


@given(cell=st.sampled_from(CELLS), random=st.randoms(use_true_random=False), has_damage=st.booleans())
def test_stories_that_can_be_shortened(cell: Cell, random: Random, has_damage: bool) -> None:
    Story(setup_of(cell, random), random, has_damage=has_damage).run(5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", WritePolicy)
def test_without_faults_the_tiers_below_give_back_all_that_they_were_given(policy: WritePolicy, kind: str) -> None:
    tiers = Tiered(setup_for(kind, policy=policy, has_storage=True))
    prompt = PROMPT[:30]
    tiers.ask(prompt)
    tiers.ask(prompt)  # used a second time
    if policy is WritePolicy.BACK:
        tiers.ask(PROMPT[50:177])  # needs all that the device has
    else:
        tiers.forget("device")
    assert tiers.ask(prompt).cached_by_tier == {"host": 28}
    tiers.forget("device", "host")
    assert tiers.ask(prompt).cached_by_tier == {"storage": 28}
    assert tiers.ask(prompt).cached_by_tier == {"device": 28}
    assert tiers.num_bad_loads == 0 and tiers.storage.num_unheld == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_loaded_can_be_reused_on_the_device_after_the_row_that_waited_for_it_went_on(kind: str) -> None:
    tiers = Tiered(setup_for(kind))
    tiers.ask(PROMPT[:25])
    tiers.forget("device")
    assert tiers.ask([*PROMPT[:25], 1, 2, 3], max_tokens=9).cached_by_tier == {"host": 24}
    assert tiers.ask([*PROMPT[:25], 4]).cached_by_tier == {"device": 24}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flow", FLOWS)
def test_a_request_waits_for_pages_and_slots_that_late_saves_still_hold(kind: str, flow: str) -> None:
    stages, plans_ahead = FLOWS[flow]
    setup = setup_for(kind, stages=stages, plans_ahead=plans_ahead, device_pages=8, max_running=1, device_points=0)
    tiers = Tiered(setup)
    tiers.mover.trouble = Trouble(most_late=40)
    for start in range(0, 120, 30):
        request = GenerateRequest(f"r{start}", PROMPT[start : start + 29], SamplingParams(temperature=0, max_tokens=2))
        tiers.engine.add(request)
    outputs = tiers.settle()
    assert len({output.request_id for output in outputs if output.finish_reason}) == 4


def test_a_running_request_goes_on_while_a_more_important_one_waits_for_its_prefetch() -> None:
    tiers = Tiered(Setup(device_pages=10, has_storage=True))  # too few for both
    tiers.ask(PROMPT[:30])
    tiers.forget("device", "host")
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=6)
    tiers.engine.add(GenerateRequest("plain", PROMPT[100:112], sampling, priority=1))
    tiers.engine.step()
    tiers.storage.trouble = StorageTrouble(most_ticks=200)
    tiers.engine.add(GenerateRequest("important", PROMPT[:30], sampling))
    outputs = tiers.settle()
    assert tiers.engine.stats().preemptions == 0
    assert [output.request_id for output in outputs if output.finish_reason] == ["plain", "important"]


@pytest.mark.parametrize("kind", ["window", "state", "both"])
def test_a_prefetched_restore_point_stands_where_it_belongs_though_the_host_has_pages_behind_it(kind: str) -> None:
    tiers = Tiered(setup_for(kind, has_storage=True))
    tiers.ask(PROMPT[:21])
    before = set(tiers.storage.objects)
    tiers.ask(PROMPT[:45])
    for key in set(tiers.storage.objects) - before:
        if key[0] != FULL:
            del tiers.storage.objects[key]  # the later point
    tiers.forget("device")
    while tiers.host.tier.tree.evict_point("state" if kind != "window" else "window"):  # pages stay, all points go
        pass
    assert tiers.ask([*PROMPT[:45], 1]).cached_by_tier == {"host": 20}
    assert tiers.storage_tier.counts()["prefetched_points"] == 1
    assert tiers.num_bad_loads == 0


@pytest.mark.parametrize("kind", KINDS)
def test_damage_on_the_host_costs_one_failed_load_and_is_mended(kind: str) -> None:
    tiers = Tiered(setup_for(kind))
    tiers.ask(PROMPT[:30])
    tiers.forget("device")
    tiers.memory.slots.clear()
    assert tiers.ask(PROMPT[:30]).miss is Miss.CHECKSUM
    tiers.forget("device")
    assert tiers.ask(PROMPT[:30]).cached_by_tier == {"host": 28}
    assert tiers.num_bad_loads == 1


def test_a_damaged_restore_point_of_pages_that_the_device_has_is_given_up() -> None:
    tiers = Tiered(setup_for("state"))
    tiers.ask(PROMPT[:30])
    while tiers.engine.evict("state"):
        pass
    for key in [key for key in tiers.memory.slots if key[0] == "state"]:
        del tiers.memory.slots[key]
    assert tiers.ask(PROMPT[:30]).miss is Miss.CHECKSUM
    tiers.forget("device")
    assert tiers.ask(PROMPT[:30]).cached_by_tier == {"host": 28}


def test_a_load_that_fails_is_all_that_a_request_reports_which_begins_again() -> None:
    tiers = Tiered(setup_for("state"))
    tiers.ask(PROMPT[:45])
    tiers.ask(PROMPT[:21])
    assert tiers.host.tier.tree.evict_point("state")  # the one at 44
    tiers.forget("device")
    tiers.memory.slots.clear()
    output = tiers.ask(PROMPT[:45])  # cut at 20 for lack of a state, at first
    assert (output.miss, output.cut_by) == (Miss.CHECKSUM, "")


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prompt_that_is_scored_is_not_looked_for_whatever_was_evicted(page_size: int) -> None:
    tiers = Tiered(setup_for("dense", page_size=page_size))
    tiers.ask(PROMPT[:30])
    while tiers.engine.evict(FULL):
        pass
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    tiers.engine.add(GenerateRequest("scored", PROMPT[:30], sampling))
    assert [output.miss for output in tiers.settle()] == [Miss.NEVER_SEEN]


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_gang_leaves_host_hits(kind: str) -> None:
    tiers = Tiered(setup_for(kind))
    tiers.ask(PROMPT[:30])
    tiers.start_gang()
    assert tiers.ask(PROMPT[:30]).cached_by_tier == {"host": 28}


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_engine_leaves_host_hits(kind: str) -> None:
    tiers = Tiered(setup_for(kind))
    tiers.ask(PROMPT[:30])
    tiers.start_engine()
    assert tiers.ask(PROMPT[:30]).cached_by_tier == {"host": 28}
    assert tiers.num_bad_loads == 0
