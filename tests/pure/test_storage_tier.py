"""The storage tier as the decider has it: what it asks for, how long requests wait, what becomes of late answers."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from raycache.cache.host_tier import WritePolicy
from raycache.cache.prefetches import Waiting
from raycache.cache.storage_commands import CommandKind, StorageCommand, StorageResult
from raycache.memory.component import FULL
from raycache.types import CacheAction, CacheCommand, FinishReason, GenerateRequest, RequestOutput, SamplingParams
from tests.oracle.tiered import Setup, Tiered
from tests.oracle.twin import VOCAB
from tests.oracle.twin_storage import StorageTrouble
from tests.pure.tiers_soak import KINDS

TEXT = np.random.default_rng(5).integers(1, VOCAB, 400).tolist()
PROMPT = TEXT[:85]  # 21 whole pages: more than one command fetches
SLOW = StorageTrouble(most_ticks=1 << 20)
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


def stored(kind: str = "dense", **values: object) -> Tiered:
    """Tiers of which only the storage has the prompt."""
    window, has_state = KINDS[kind]
    plain = Setup(device_pages=64, window=window, has_state=has_state, has_storage=True)
    tiers = Tiered(replace(plain, **values))  # type: ignore[arg-type]
    tiers.ask(PROMPT)
    tiers.forget("device", "host")
    return tiers


def first_output(tiers: Tiered, *, most: int = 100_000) -> RequestOutput:
    for _ in range(most):
        if outputs := tiers.engine.step():
            return outputs[0]
    raise AssertionError("never ends")


def commands_of(tiers: Tiered) -> list[StorageCommand]:
    """All commands from now on, as they are done."""
    commands: list[StorageCommand] = []
    work = tiers.storage.work

    def remember(command: StorageCommand) -> StorageResult:
        commands.append(command)
        return work(command)

    tiers.storage.work = remember  # type: ignore[method-assign]
    return commands


def test_a_long_prefix_is_fetched_in_several_orders() -> None:
    tiers = stored()
    commands = commands_of(tiers)
    assert tiers.ask(PROMPT).cached_by_tier == {"storage": 84}
    assert {len(command.units) for command in commands if command.kind is CommandKind.FETCH} == {16, 5}
    assert not any(command.kind is CommandKind.PERSIST for command in commands), "it is stored already"


@pytest.mark.parametrize("kind", ["window", "state", "both"])
def test_a_restore_point_comes_with_its_last_pages(kind: str) -> None:
    tiers = stored(kind)
    commands = commands_of(tiers)
    assert tiers.ask(PROMPT).cached_by_tier == {"storage": 84}
    fetches = sorted(
        (command for command in commands if command.kind is CommandKind.FETCH), key=lambda command: command.number
    )
    assert {unit.space for unit in fetches[0].units} == {FULL}
    assert {unit.space for unit in fetches[1].units} == {FULL, *tiers.setup.widths}


def test_only_what_the_host_lacks_is_fetched() -> None:
    tiers = stored(has_storage=False)
    tiers.storage_tier.is_attached = True
    tiers.ask(PROMPT)
    tiers.forget("device", "host")
    tiers.storage_tier.is_attached = False
    tiers.ask(PROMPT[:41])
    tiers.forget("device")
    tiers.storage_tier.is_attached = True
    commands = commands_of(tiers)
    assert tiers.ask(PROMPT).cached_by_tier == {"host": 40, "storage": 44}
    assert sum(len(command.units) for command in commands if command.kind is CommandKind.FETCH) == 11


def test_nothing_is_asked_for_what_the_host_has_or_what_fills_no_page() -> None:
    tiers = stored()
    tiers.ask(PROMPT)
    tiers.forget("device")
    commands = commands_of(tiers)
    tiers.ask(PROMPT)
    tiers.ask(PROMPT[:4])
    assert commands == []


def test_best_effort_does_not_wait() -> None:
    tiers = stored(waiting=Waiting.BEST_EFFORT)
    tiers.storage.trouble = StorageTrouble(most_ticks=50)
    tiers.engine.add(GenerateRequest("r", PROMPT, ONE_TOKEN))
    steps = -(-len(PROMPT) // tiers.setup.max_step_tokens)
    assert first_output(tiers, most=steps).cached_tokens == 0


@pytest.mark.parametrize(("waiting", "least_s"), [(Waiting.TIMEOUT, 0.03), (Waiting.COMPLETE, 0.3)])
def test_no_wait_is_without_end(waiting: Waiting, least_s: float) -> None:
    tiers = stored(waiting=waiting, prefetch_timeout_s=0.03)
    tiers.storage.trouble = SLOW
    finds = tiers.lanes._is_late
    tiers.lanes._is_late = lambda command: False  # type: ignore[method-assign]
    start_s = time.monotonic()
    tiers.engine.add(GenerateRequest("r", PROMPT, ONE_TOKEN))
    first_output(tiers)
    assert least_s <= time.monotonic() - start_s < least_s + 5
    tiers.lanes._is_late = finds  # type: ignore[method-assign]


def test_a_request_that_waits_does_not_keep_others_from_running() -> None:
    tiers = stored()
    tiers.storage.trouble = SLOW
    tiers.engine.add(GenerateRequest("waits", PROMPT, ONE_TOKEN))
    tiers.engine.step()
    tiers.engine.add(GenerateRequest("runs", [1, 2, 3], ONE_TOKEN))
    assert first_output(tiers, most=3).request_id == "runs"


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_for_a_cancelled_request_is_kept_or_free(kind: str) -> None:
    tiers = stored(kind, storage_trouble=StorageTrouble(most_ticks=8))
    for count in range(12):
        tiers.engine.add(GenerateRequest("r", PROMPT, ONE_TOKEN))
        for _ in range(count):
            tiers.engine.step()
        tiers.engine.cancel("r")
        outputs = tiers.settle()
        assert all(output.finish_reason is not FinishReason.ERROR for output in outputs)
        assert tiers.storage_tier.counts()["prefetching_pages"] == 0
        tiers.forget("device", "host")
        tiers.engine.check()
        assert tiers.counts()["pages_free"] == tiers.counts()["pages_total"]


def test_pages_before_one_that_is_missing_are_used() -> None:
    tiers = stored()
    keys = [key for key in tiers.storage.objects if key[0] == FULL]
    del tiers.storage.objects[keys[17]]
    assert tiers.ask(PROMPT).cached_by_tier == {"storage": 68}
    assert tiers.storage_tier.counts()["prefetched_pages"] == 17
    tiers.forget("device", "host")
    assert tiers.ask(PROMPT).cached_by_tier == {"storage": 84}, "what was computed again is stored again"


@pytest.mark.parametrize("kind", ["window", "state", "both"])
def test_a_prefix_whose_restore_point_is_missing_is_computed(kind: str) -> None:
    tiers = stored(kind)
    tiers.storage.forget("state" if "state" in tiers.setup.widths else "window")
    assert tiers.ask(PROMPT).cached_by_tier == {}


def test_a_prefetch_takes_no_more_of_the_host_than_its_share() -> None:
    tiers = stored(host_pages=40, prefetch_share=0.55)
    for name in ("a", "b"):
        tiers.engine.add(GenerateRequest(name, PROMPT, ONE_TOKEN))
    most = 0.0
    while tiers.engine.has_work:
        tiers.engine.step()
        most = max(most, tiers.storage_tier.counts()["prefetching_pages"])
        tiers.engine.check()
    assert most == 21
    assert tiers.storage_tier.counts()["refused_prefetches"] == 1


def test_a_storage_that_is_detached_is_not_asked_and_gets_nothing() -> None:
    tiers = stored()
    tiers.engine.admin(CacheCommand(CacheAction.DETACH))
    commands = commands_of(tiers)
    assert tiers.ask(PROMPT).cached_by_tier == {} and commands == []
    tiers.engine.admin(CacheCommand(CacheAction.ATTACH))
    tiers.forget("device", "host")
    assert tiers.ask(PROMPT).cached_by_tier == {"storage": 84}


def test_a_storage_that_is_too_slow_to_take_what_is_saved_keeps_no_host_page_for_ever() -> None:
    tiers = Tiered(Setup(device_pages=64, has_storage=True, storage_trouble=SLOW, waiting=Waiting.BEST_EFFORT))
    for start in range(300):
        tiers.engine.add(GenerateRequest(f"r{start}", TEXT[start : start + 9], ONE_TOKEN))
        first_output(tiers)
    counts = tiers.storage_tier.counts()
    assert counts["open_requests"] < 1000
    assert counts["unpersisted_pages"] + tiers.counts()["unsaved_pages"] > 0
    tiers.engine.check()


@pytest.mark.parametrize("policy", WritePolicy)
def test_after_everything_stopped_the_storage_hits(policy: WritePolicy) -> None:
    tiers = Tiered(Setup(device_pages=32, has_storage=True, policy=policy))
    for _ in range(2):
        tiers.ask(PROMPT[:30])
    tiers.ask(TEXT[200:327])
    tiers.memory.slots.clear()
    tiers.catalog_memory[:] = bytes(len(tiers.catalog_memory))
    tiers.start_engine()
    assert tiers.ask(PROMPT[:30]).cached_by_tier == {"storage": 28}


def attach(tiers: Tiered, kind: CacheAction) -> None:
    tiers.engine.admin(CacheCommand(kind)).result(5)


def test_a_storage_that_is_attached_later_gets_the_begin_of_what_grows() -> None:
    tiers = stored()
    attach(tiers, CacheAction.DETACH)
    warm = TEXT[200:260]
    tiers.ask(warm)
    attach(tiers, CacheAction.ATTACH)
    longer = warm + TEXT[300:330]
    tiers.ask(longer)
    tiers.forget("device", "host")
    wanted = (len(longer) - 1) // tiers.setup.page_size * tiers.setup.page_size
    assert tiers.ask(longer).cached_by_tier == {"storage": wanted}


def test_a_prompt_that_the_device_has_asks_no_storage() -> None:
    tiers = stored(policy=WritePolicy.SELECTIVE)
    tiers.forget("storage")
    tiers.ask(PROMPT)
    commands = commands_of(tiers)
    tiers.ask(PROMPT)
    assert not any(command.kind is CommandKind.FIND for command in commands)


def test_forty_requests_that_wait_for_storage_keep_nobody_from_running() -> None:
    tiers = stored(waiting=Waiting.COMPLETE, prefetch_timeout_s=20.0, device_pages=200)
    warm = TEXT[200:260]
    tiers.ask(warm)
    tiers.storage.trouble = SLOW
    for i in range(40):
        tiers.engine.add(GenerateRequest(f"slow {i}", [1 + i % (VOCAB - 1), *PROMPT], ONE_TOKEN))
    tiers.engine.add(GenerateRequest("quick", warm, ONE_TOKEN))
    assert first_output(tiers).request_id == "quick"
