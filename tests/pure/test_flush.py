"""Flushing device and host to the storage: all of it is there afterwards, nothing is held or waited for too long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raycache.cache.host_tier import WritePolicy
from raycache.errors import ConfigError
from raycache.memory.component import FULL
from raycache.types import CacheAction, CacheCommand, GenerateRequest, SamplingParams
from tests.oracle.tiered import Setup, Tiered
from tests.oracle.twin import VOCAB
from tests.oracle.twin_storage import StorageTrouble
from tests.pure.tiers_soak import KINDS

TEXT = np.random.default_rng(9).integers(1, VOCAB, 600).tolist()
SHARED = TEXT[:33]
PROMPTS = [SHARED + TEXT[start : start + 20] for start in range(40, 240, 20)]
SLOW = StorageTrouble(most_ticks=1 << 20)


def tiers_of(kind: str = "dense", **values: object) -> Tiered:
    window, has_state = KINDS[kind]
    setup = Setup(
        device_pages=200, host_pages=200, device_points=20, host_points=20, window=window, has_state=has_state
    )
    return Tiered(replace(setup, **{"has_storage": True, **values}))  # type: ignore[arg-type]


def flush(tiers: Tiered, *, timeout_s: float = 1000.0) -> Mapping[str, Any]:
    answer = tiers.engine.admin(CacheCommand(CacheAction.FLUSH, timeout_s=timeout_s))
    tiers.settle()
    return answer.result(0)


def start_storage(tiers: Tiered) -> None:
    tiers.engine.admin(CacheCommand(CacheAction.ATTACH)).result(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", WritePolicy)
def test_what_was_cached_before_the_storage_came_hits_from_it_afterwards(kind: str, policy: WritePolicy) -> None:
    tiers = tiers_of(kind, policy=policy, has_storage=False)
    for prompt in PROMPTS:
        tiers.ask(prompt, max_tokens=6)
    warm = {}
    for i, prompt in enumerate(PROMPTS):
        warm[i] = tiers.ask(prompt, max_tokens=6).cached_tokens
    start_storage(tiers)
    done = flush(tiers)
    assert done["is_in_time"] and done["missing_pages"] == 0 and done["persisted_pages"] > 0
    assert not tiers.cache.has_moves and not tiers.storage_tier.num_open
    tiers.forget("device", "host")
    for i, prompt in enumerate(PROMPTS):
        again = tiers.ask(prompt, max_tokens=6)
        assert again.cached_tokens >= warm[i] > 0 and set(again.cached_by_tier) <= {"device", "storage"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_that_is_too_small_for_the_device_passes_all_of_it_on(kind: str) -> None:
    tiers = tiers_of(kind, policy=WritePolicy.BACK, host_pages=20, host_points=2, prefetch_share=1.0)
    for prompt in PROMPTS[:4]:
        tiers.ask(prompt)
    assert tiers.counts()["saved_pages"] == 0
    flush(tiers)
    tiers.forget("device", "host")
    for prompt in PROMPTS[:4]:
        assert tiers.ask(prompt).cached_tokens == (len(prompt) - 1) // 4 * 4


def test_a_second_flush_has_nothing_to_do() -> None:
    tiers = tiers_of(policy=WritePolicy.BACK)
    for prompt in PROMPTS:
        tiers.ask(prompt)
    assert flush(tiers)["persisted_pages"] > 0
    saved = tiers.counts()["saved_pages"]
    assert flush(tiers) == {"is_in_time": True, "persisted_pages": 0, "missing_pages": 0}
    assert tiers.counts()["saved_pages"] == saved


def test_requests_run_while_it_goes_on_and_what_they_leave_is_stored_too() -> None:
    tiers = tiers_of(policy=WritePolicy.BACK, storage_trouble=StorageTrouble(most_ticks=6))
    for prompt in PROMPTS[:5]:
        tiers.ask(prompt)
    answer = tiers.engine.admin(CacheCommand(CacheAction.FLUSH, timeout_s=1000.0))
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=3)
    for i, prompt in enumerate(PROMPTS[5:]):
        tiers.engine.add(GenerateRequest(f"r{i}", prompt, sampling))
    tiers.settle()
    assert answer.result(0)["is_in_time"]
    tiers.forget("device", "host")
    assert tiers.ask(PROMPTS[0]).cached_by_tier == {"storage": 52}


def test_a_storage_that_hangs_costs_no_more_than_the_time_given() -> None:
    tiers = tiers_of(policy=WritePolicy.BACK)
    for prompt in PROMPTS:
        tiers.ask(prompt)
    tiers.storage.trouble = SLOW
    answer = tiers.engine.admin(CacheCommand(CacheAction.FLUSH, timeout_s=0.2))
    while not answer.done():
        tiers.engine.step()
    done = answer.result(0)
    assert not done["is_in_time"] and done["missing_pages"] > 0


def test_what_a_storage_refused_is_told_and_tried_again_by_the_next_flush() -> None:
    tiers = tiers_of(policy=WritePolicy.BACK)
    for prompt in PROMPTS:
        tiers.ask(prompt)
    tiers.storage.trouble = StorageTrouble(refused=1.0)
    assert flush(tiers)["missing_pages"] > 0
    tiers.storage.trouble = StorageTrouble()
    assert flush(tiers)["missing_pages"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_gang_that_is_lost_meanwhile_and_any_trouble_leave_nothing_locked(kind: str) -> None:
    for seed in range(20):
        trouble = StorageTrouble(errors=0.1, refused=0.1, late=0.1, most_ticks=5)
        tiers = tiers_of(kind, policy=WritePolicy.BACK, host_pages=40, storage_trouble=trouble, seed=seed)
        for prompt in PROMPTS:
            tiers.ask(prompt)
        answer = tiers.engine.admin(CacheCommand(CacheAction.FLUSH, timeout_s=1000.0))
        for _ in range(seed):
            tiers.engine.step()
        tiers.start_gang()
        tiers.settle()
        assert answer.result(0)["is_in_time"]
        tiers.forget("device", "host")
        tiers.engine.check()
        assert tiers.counts()["pages_free"] == tiers.counts()["pages_total"]


def test_a_storage_that_is_emptied_gets_nothing_that_was_ordered_before() -> None:
    tiers = tiers_of(policy=WritePolicy.BACK, storage_trouble=StorageTrouble(most_ticks=300))
    for prompt in PROMPTS:
        tiers.ask(prompt)
    tiers.engine.admin(CacheCommand(CacheAction.FLUSH, timeout_s=1000.0))
    while not tiers.storage_tier.persists.open:
        tiers.engine.step()
    waiting = [turn for turn in tiers.lanes._turns if turn.begins_in >= 0]
    assert waiting
    tiers.engine.admin(CacheCommand(CacheAction.CLEAR, tiers=("storage",))).result(0)
    units = {unit.digest for turn in waiting for unit in turn.command.units if unit.space == FULL}
    left = {unit.digest for turn in tiers.lanes._turns for unit in turn.command.units}
    assert not units & left
    tiers.settle()
    assert flush(tiers)["missing_pages"] == 0


def test_there_is_nothing_to_flush_to_without_a_storage() -> None:
    with pytest.raises(ConfigError, match="attach one with"):
        tiers_of(has_storage=False).engine.admin(CacheCommand(CacheAction.FLUSH, timeout_s=1.0))
