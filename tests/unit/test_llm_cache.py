"""Operators' commands to the tiers of a model in this process; answers never change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycache.errors import ConfigError, EngineStoppedError, RequestError
from raycache.llm import LLM
from raycache.types import CacheAction, CacheCommand, Miss, SamplingParams
from tests.matrix.trial import FixedPace
from tests.oracle.tiny import make_tiny
from tests.oracle.tiny_tokenizers import byte_level

VOCAB, PAGE, NUM_PAGES = 403, 8, 6
PROMPT = np.random.default_rng(5).integers(3, VOCAB, PAGE * NUM_PAGES + 3).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(byte_level(make_tiny(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, num_hidden_layers=2)))


@pytest.fixture
def llm(model: str, tmp_path: Path) -> Iterator[LLM]:
    storage = f"file://{tmp_path}/first?size=4MiB"
    settings = {"device": "cpu", "page_size": PAGE, "num_pages": 40, "prefetch_share": 1.0}
    with LLM(model, **settings, host_memory="4MiB", storage=storage, prefetch="wait_complete") as opened:
        yield opened
        opened.check()


def ask(llm: LLM) -> tuple[tuple[int, ...], dict[str, int], Miss]:
    (found,) = llm.generate([PROMPT], GREEDY)
    return found.token_ids, dict(found.cached_by_tier), found.miss


def clear(llm: LLM, *tiers: str) -> None:
    llm.cache(CacheCommand(CacheAction.CLEAR, tiers=tiers))


def test_a_prefix_comes_from_the_first_tier_that_was_not_cleared(llm: LLM) -> None:
    expected, cached, miss = ask(llm)
    assert (cached, miss) == ({}, Miss.NEVER_SEEN)
    assert ask(llm) == (expected, {"device": PAGE * NUM_PAGES}, Miss.NONE)
    clear(llm, "device")
    assert ask(llm) == (expected, {"host": PAGE * NUM_PAGES}, Miss.NONE)
    clear(llm, "device", "host")
    assert ask(llm) == (expected, {"storage": PAGE * NUM_PAGES}, Miss.NONE)
    clear(llm)
    assert ask(llm)[:2] == (expected, {})


def test_inspect_says_how_far_each_tier_reaches(llm: LLM) -> None:
    ask(llm)
    clear(llm, "device")
    found = llm.cache(CacheCommand(CacheAction.INSPECT, prompt=tuple(PROMPT)))
    assert found["tiers"] == {"device": 0, "host": PAGE * NUM_PAGES, "storage": PAGE * NUM_PAGES}
    assert found["prompt_tokens"] == len(PROMPT)


@pytest.mark.parametrize("prompt", [(), (-1,), (3, VOCAB), (2**31,), (2**63,), (1.5,), ("a",)])
def test_a_prompt_to_inspect_has_ids_of_the_vocabulary(llm: LLM, prompt: tuple[Any, ...]) -> None:
    with pytest.raises(RequestError, match="^prompt "):
        llm.cache(CacheCommand(CacheAction.INSPECT, prompt=prompt))


def test_a_storage_is_attached_and_detached_while_requests_come(llm: LLM, tmp_path: Path) -> None:
    llm.engine._scheduler.cache.costs.compute = FixedPace()  # or computing is found to be faster now and then
    expected, *_ = ask(llm)
    assert llm.cache(CacheCommand(CacheAction.DETACH)) == {"detached": f"file:{tmp_path}/first"}
    clear(llm, "device", "host")
    assert ask(llm)[:2] == (expected, {})
    llm.cache(CacheCommand(CacheAction.ATTACH, url=f"file://{tmp_path}/second?size=4MiB"))
    clear(llm, "device", "host")
    assert ask(llm)[:2] == (expected, {}), "the second storage is empty"
    llm.cache(CacheCommand(CacheAction.ATTACH, url=f"file://{tmp_path}/first?size=4MiB"))
    clear(llm, "device", "host")
    assert ask(llm)[:2] == (expected, {"storage": PAGE * NUM_PAGES}), "the first one has kept what it had"


def test_status_resize_and_scrub_tell_what_is_stored(llm: LLM) -> None:
    ask(llm)
    assert llm.cache(CacheCommand(CacheAction.RESIZE, size=2 << 20)) == {"bytes_limit": 2 << 20}
    tiers = llm.cache(CacheCommand(CacheAction.STATUS))["tiers"]
    assert tiers["storage"]["bytes_limit"] == 2 << 20
    assert tiers["host"]["pages_cached"] == tiers["storage"]["objects"] == NUM_PAGES
    assert llm.cache(CacheCommand(CacheAction.SCRUB))["checked"] == NUM_PAGES


def test_what_needs_a_tier_that_is_not_there_is_refused(model: str, tmp_path: Path) -> None:
    with LLM(model, device="cpu", page_size=PAGE, num_pages=40) as without:
        with pytest.raises(ConfigError, match="needs a host tier"):
            without.cache(CacheCommand(CacheAction.ATTACH, url=f"file://{tmp_path}/x?size=4MiB"))
        with pytest.raises(ConfigError, match="needs a host tier"):
            without.cache(CacheCommand(CacheAction.SCRUB))
        assert without.cache(CacheCommand(CacheAction.CLEAR))["cleared_pages"] == {"device": 0}
    with pytest.raises(EngineStoppedError):
        without.cache(CacheCommand(CacheAction.STATUS))


@pytest.mark.parametrize("tiers", [("host",), ("storage",), ("host", "storage")])
def test_only_tiers_that_are_there_can_be_cleared(model: str, tiers: tuple[str, ...]) -> None:
    with LLM(model, device="cpu", num_pages=8) as llm:
        with pytest.raises(ConfigError, match=f"there is no {' or '.join(tiers)} tier to clear"):
            llm.cache(CacheCommand(CacheAction.CLEAR, tiers=tiers))
        assert "cleared_pages" in llm.cache(CacheCommand(CacheAction.CLEAR, tiers=("device", *tiers)))


def test_a_cache_smaller_than_the_longest_request_is_told(model: str, caplog: pytest.LogCaptureFixture) -> None:
    for num_pages, is_told in ((8, True), (32, False)):
        caplog.clear()
        with LLM(model, device="cpu", num_pages=num_pages, page_size=16, max_model_len=512):
            pass
        assert ("room for 128 tokens, fewer than max_model_len=512" in caplog.text) == is_told
