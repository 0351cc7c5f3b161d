"""kill -9 of a service's processes under load: a client sees a pause, and the same tokens as without."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from actors.cluster import Cluster
from raycache.errors import ConfigError, EngineStoppedError
from raycache.types import CacheAction, CacheCommand
from tests.actors.serving import Service, serving
from tests.selection import mostly_long

_PAGE = 16


@dataclass
class Heard:
    """What one client got."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    cached: int = -1
    finish_reason: str = ""
    logprobs: list[float] = field(default_factory=list)


async def listen(service: Service, prompt: Sequence[int], count: int, heard: Heard, **sampling: Any) -> Heard:
    """One streamed completion; `heard` grows while it runs."""
    stream = await service.client.completions.create(
        model=service.info.model,
        prompt=list(prompt),
        max_tokens=count,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
        timeout=200,
        **sampling,
    )
    async for chunk in stream:
        for choice in chunk.choices:
            heard.tokens += choice.model_dump().get("token_ids") or []
            heard.text += choice.text
            heard.finish_reason = choice.finish_reason or heard.finish_reason
            if choice.logprobs is not None:
                heard.logprobs += choice.logprobs.token_logprobs
        if chunk.usage is not None:
            heard.cached = chunk.usage.prompt_tokens_details.cached_tokens
    return heard


def prompts(count: int, *, seed: int, shared: int = 40, length: int = 20) -> list[list[int]]:
    draw = random.Random(seed)
    prefix = [draw.randrange(3, 260) for _ in range(shared)]
    return [prefix + [draw.randrange(3, 260) for _ in range(length)] for _ in range(count)]


def kill(name: str, number: int = 0, *, how: int = signal.SIGKILL) -> int:
    """Send a signal to one of the processes below this one whose actor is called so; returns its id."""
    found = [p for p in psutil.Process().children(recursive=True) if name in p.name() and p.status() != "zombie"]
    os.kill(found[number].pid, how)
    return found[number].pid


async def spoken(heard: Sequence[Heard], *, at_least: int) -> None:
    """Wait until all together have so many tokens."""
    while sum(len(each.tokens) for each in heard) < at_least:
        await asyncio.sleep(0.01)


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "seed": 8, "frequency_penalty": 0.5, "logprobs": 1},
    {"temperature": 0, "presence_penalty": 1.0},
]


def test_streams_go_on_without_gap_or_repetition_when_the_engine_is_killed(cluster: Cluster, model: Path) -> None:
    async def together(service: Service, heard: list[Heard]) -> None:
        tasks = []
        for prompt, sampling, into in zip(prompts(8, seed=1), SAMPLINGS * 2, heard, strict=True):
            if len(tasks) == 4:
                await spoken(heard, at_least=4)
            tasks.append(asyncio.create_task(listen(service, prompt, 50, into, **sampling)))
        await asyncio.gather(*tasks)

    async def run() -> None:
        # More requests than run, and as many as run and wait: a new engine cannot take all of them at once.
        async with serving(model, page_size=_PAGE, num_pages=96, max_running=4, max_queue=4) as service:
            calm = [Heard() for _ in range(8)]
            await together(service, calm)
            heard = [Heard() for _ in range(8)]
            running = asyncio.create_task(together(service, heard))
            for share in (40, 220):
                await spoken(heard, at_least=share)
                kill("EngineActor")
            await running
            for before, after in zip(calm, heard, strict=True):
                assert after.tokens == before.tokens and after.text == before.text
                assert after.finish_reason == "length" and len(after.tokens) == 50
                assert after.logprobs == pytest.approx(before.logprobs, abs=1e-3)
            await service.engine.check()

    asyncio.run(asyncio.wait_for(run(), 500))


def test_a_stream_goes_on_when_the_engine_is_frozen(
    cluster: Cluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.handle._SILENT_S", 12.0)  # it is heard of every 5 s

    async def run() -> None:
        async with serving(model, page_size=_PAGE, num_pages=64) as service:
            prompt, heard = prompts(1, seed=11)[0], Heard()
            calm = await listen(service, prompt, 120, Heard(), temperature=0)
            running = asyncio.create_task(listen(service, prompt, 120, heard, temperature=0))
            await spoken([heard], at_least=20)
            frozen = kill("EngineActor", how=signal.SIGSTOP)
            await running
            assert heard.tokens == calm.tokens
            assert not psutil.pid_exists(frozen)

    asyncio.run(asyncio.wait_for(run(), 500))


@pytest.mark.long
def test_a_new_engine_takes_what_came_meanwhile_and_goes_on_with_the_same_random_numbers(
    cluster: Cluster, model: Path
) -> None:
    async def run() -> None:
        async with serving(model, page_size=_PAGE, num_pages=64) as service:
            prompt, heard = prompts(1, seed=2)[0], Heard()
            calm = await listen(service, prompt, 30, Heard(), temperature=0)
            unseeded = asyncio.create_task(listen(service, prompt, 120, heard, temperature=1.0))
            await spoken([heard], at_least=20)
            (seed,) = [stream.request.sampling.seed for stream in service.engine.streams]
            kill("EngineActor")
            first = asyncio.create_task(listen(service, prompt, 30, Heard(), temperature=0))
            await asyncio.sleep(0.5)
            with pytest.raises(EngineStoppedError, match="recovering"):
                await service.engine.stats()
            second = asyncio.create_task(listen(service, prompt, 30, Heard(), temperature=0))
            assert [(await each).tokens for each in (first, second)] == [calm.tokens] * 2
            # Asked for again with the seed that was drawn for it, it is the same stream.
            again = await listen(service, prompt, 120, Heard(), temperature=1.0, seed=seed)
            assert (await unseeded).tokens == again.tokens and len(again.tokens) == 120

    asyncio.run(asyncio.wait_for(run(), 500))


@pytest.mark.long
def test_an_engine_that_never_gets_anywhere_is_given_up(cluster: Cluster, model: Path) -> None:
    async def run() -> None:
        async with serving(model, page_size=_PAGE, num_pages=64) as service:
            running = asyncio.create_task(listen(service, prompts(1, seed=4)[0], 30, Heard(), temperature=0))
            watch = asyncio.create_task(service.engine.watch())
            while not watch.done():
                names = [p.name() for p in psutil.Process().children(recursive=True)]
                if any("EngineActor" in name for name in names):
                    kill("EngineActor")
                await asyncio.sleep(0.05)
            with pytest.raises(EngineStoppedError, match="the engine actor died"):
                await watch
            with pytest.raises(openai.APIError, match="the engine actor died"):
                await running

    asyncio.run(asyncio.wait_for(run(), 500))


@pytest.mark.parametrize("victims", [["RankActor"], ["EngineActor", "ArenaActor"]])
@pytest.mark.long
def test_hits_in_the_host_tier_outlive_all_that_use_it(cluster: Cluster, model: Path, victims: list[str]) -> None:
    async def run() -> None:
        settings = {"tp": 2, "page_size": _PAGE, "num_pages": 64, "host_memory": "64MiB"}
        async with serving(model, **settings) as service:
            cases = prompts(3, seed=5, shared=0, length=70)
            calm = [await listen(service, prompt, 20, Heard(), temperature=0) for prompt in cases]
            await asyncio.sleep(1)
            heard = Heard()
            running = asyncio.create_task(listen(service, cases[0], 200, heard, temperature=0))
            await spoken([heard], at_least=10)
            for victim in victims:
                kill(victim)
            await running
            assert heard.tokens[:20] == calm[0].tokens
            for prompt, before in list(zip(cases, calm, strict=True))[1:]:
                after = await listen(service, prompt, 20, Heard(), temperature=0)
                assert after.tokens == before.tokens and after.cached == 4 * _PAGE
            stats = await service.engine.stats()
            assert stats.cached_by_tier["host"] >= 2 * 4 * _PAGE
            await service.engine.check()

    asyncio.run(asyncio.wait_for(run(), 500))


async def figure_of(service: Service, name: str, *, at_least: float) -> float:
    """A figure of the storage tier, once it is so high; whoever waits for that has the deadline."""
    while True:
        figure = (await service.engine.stats()).tiers.get("storage", {}).get(name, -1)
        if figure >= at_least:
            return figure
        await asyncio.sleep(0.1)


async def flush(service: Service) -> None:
    """Have all that is in the cache stored."""
    flushed = await service.engine.admin(CacheCommand(CacheAction.FLUSH, timeout_s=200))
    assert flushed["is_in_time"] and flushed["missing_pages"] == 0, flushed


@pytest.mark.parametrize("reader", mostly_long(["the same service", "the next one"], but=["the same service"]))
def test_another_owner_of_the_arena_goes_on_with_arena_and_storage(
    cluster: Cluster, model: Path, tmp_path: Path, reader: str
) -> None:
    storage = f"file://{tmp_path}/store?size=64MiB"

    async def run() -> None:
        settings = {"page_size": _PAGE, "num_pages": 64, "host_memory": "32MiB", "storage": storage}
        settings |= {"prefetch": "wait_complete", "prefetch_timeout_s": 100.0}  # a find that comes late is a miss
        cases = prompts(4, seed=6, shared=0, length=70)
        wanted: list[Heard] = []

        async def check_storage(service: Service) -> None:
            before = (await service.engine.stats()).cached_by_tier.get("storage", 0)
            for prompt, expected in zip([cases[0], *cases[2:]], wanted, strict=True):
                after = await listen(service, prompt, 40, Heard(), temperature=0)
                assert after.tokens == expected.tokens and after.cached == 4 * _PAGE
            assert (await service.engine.stats()).cached_by_tier["storage"] - before == 3 * 4 * _PAGE

        async with serving(model, tp=2, **settings) as service:
            wanted.append(await listen(service, cases[0], 40, Heard(), temperature=0))
            await flush(service)  # what is not stored is lost with the owner
            heard = Heard()
            running = asyncio.create_task(listen(service, cases[1], 200, heard, temperature=0))
            await spoken([heard], at_least=10)
            kill("ArenaActor")
            await running
            # What the new one stores is found there.
            wanted += [await listen(service, prompt, 40, Heard(), temperature=0) for prompt in cases[2:]]
            await flush(service)
            if reader == "the same service":
                await service.engine.admin(CacheCommand(CacheAction.CLEAR, tiers=("device", "host")))
                await check_storage(service)
            else:
                assert (await listen(service, cases[0], 40, Heard(), temperature=0)).tokens == wanted[0].tokens
            await service.engine.check()
        if reader == "the next one":
            async with serving(model, cp=2, **settings) as service:
                await check_storage(service)

    asyncio.run(asyncio.wait_for(run(), 500))


def test_operators_commands_reach_decider_and_storage_and_outlive_the_engine(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    async def run() -> None:
        command = CacheCommand
        async with serving(model, page_size=_PAGE, num_pages=64, host_memory="32MiB") as service:
            admin = service.engine.admin
            prompt = prompts(1, seed=7, shared=0, length=70)[0]
            with pytest.raises(ConfigError, match="attach one first"):
                await admin(command(CacheAction.SCRUB))
            assert await admin(command(CacheAction.ATTACH, url=f"file://{tmp_path}/store?size=64MiB")) == {
                "storage": f"file:{tmp_path}/store"
            }
            await listen(service, prompt, 20, Heard(), temperature=0)
            stored = await figure_of(service, "stored", at_least=5)
            await admin(command(CacheAction.RESIZE, size=32 << 20))
            kill("EngineActor")
            await listen(service, prompts(1, seed=8)[0], 20, Heard(), temperature=0)
            assert (await admin(command(CacheAction.SCRUB)))["checked"] >= stored
            assert (await admin(command(CacheAction.STATUS)))["tiers"]["storage"]["bytes_limit"] == 32 << 20
            facts = (await service.engine.info()).tiers["storage"]
            assert facts == {"name": f"file:{tmp_path}/store", "bytes": 32 << 20}
            await admin(command(CacheAction.CLEAR, tiers=("device", "host")))
            seen = await admin(command(CacheAction.INSPECT, prompt=tuple(prompt)))
            assert seen["tiers"] == {"device": 0, "host": 0, "storage": 4 * _PAGE}
            await admin(command(CacheAction.DETACH))
            seen = await admin(command(CacheAction.INSPECT, prompt=tuple(prompt)))
            assert seen["tiers"] == {"device": 0, "host": 0}
            await service.engine.check()

    asyncio.run(asyncio.wait_for(run(), 500))


@pytest.mark.long
def test_a_service_without_a_host_tier_says_what_storage_needs(cluster: Cluster, model: Path) -> None:
    async def run() -> None:
        async with serving(model, page_size=_PAGE, num_pages=64) as service:
            for kind in (CacheAction.ATTACH, CacheAction.DETACH, CacheAction.RESIZE, CacheAction.SCRUB):
                with pytest.raises(ConfigError, match="host tier"):
                    await service.engine.admin(CacheCommand(kind, url="file:///tmp/x?size=1GiB", size=1))
            assert (await service.engine.admin(CacheCommand(CacheAction.CLEAR)))["cleared_pages"] == {"device": 0}

    asyncio.run(asyncio.wait_for(run(), 500))
