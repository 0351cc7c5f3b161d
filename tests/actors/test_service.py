"""The service over Ray actors: equal to transformers, clean after cancellations, alive after the loss of a rank."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.cluster import Cluster
from raycache.api.tokenizer import Tokenizer
from raycache.types import CacheAction, CacheCommand
from tests.actors.serving import Service, serving
from tests.oracle.kv_reader import Blocks, Reader
from tests.unit.test_kv_event_sockets import free_ports

_PAGE = 16
_GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


def prompts(count: int, *, shared: int, length: int) -> list[list[int]]:
    draw = random.Random(count)
    prefix = [draw.randrange(3, 260) for _ in range(shared)]
    return [prefix + [draw.randrange(3, 260) for _ in range(length)] for _ in range(count)]


def greedy(model: Path, prompt: list[int], count: int) -> list[int]:
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    oracle.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = oracle.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids))
    return out[0, len(prompt) :].tolist()


async def complete(service: Service, prompt: list[int], count: int) -> tuple[list[int], int]:
    """Tokens and cached tokens of one streamed completion."""
    stream = await service.client.completions.create(
        model=service.info.model,
        prompt=prompt,
        max_tokens=count,
        stream=True,
        stream_options={"include_usage": True},
        **_GREEDY,
    )
    tokens: list[int] = []
    cached = -1
    async for chunk in stream:
        for choice in chunk.choices:
            tokens += choice.model_dump().get("token_ids") or []
        if chunk.usage is not None:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
    return tokens, cached


@pytest.mark.parametrize(("tp", "pp", "cp"), [(2, 1, 2), pytest.param(1, 2, 1, marks=pytest.mark.long)])
def test_streams_equal_transformers_cold_and_cached(cluster: Cluster, model: Path, tp: int, pp: int, cp: int) -> None:
    async def run() -> None:
        async with serving(model, tp=tp, pp=pp, cp=cp, page_size=_PAGE, num_pages=64) as service:
            assert {row["transport"] for row in service.info.ranks} == {"gloo" if tp * cp > 1 else ""}
            cases = prompts(3, shared=50, length=20)
            wanted = [greedy(model, prompt, 12) for prompt in cases]
            cold = await complete(service, cases[0], 12)
            assert cold == (wanted[0], 0)
            together = await asyncio.gather(*(complete(service, prompt, 12) for prompt in cases))
            assert [tokens for tokens, _ in together] == wanted
            # 70 tokens are 4 whole pages; the others share 50, which are 3.
            assert [cached for _, cached in together] == [4 * _PAGE, 3 * _PAGE, 3 * _PAGE]
            await the_tree_shows_them(service, cases, wanted)
            await service.engine.check()

    asyncio.run(asyncio.wait_for(run(), 500))


async def the_tree_shows_them(service: Service, cases: list[list[int]], outputs: list[list[int]]) -> None:
    """Each prompt with its output is a branch of what they share."""
    async with httpx.AsyncClient() as client:
        answer = (await client.get(f"{service.endpoint}/cache/tree")).json()
    (root,) = answer["tiers"]["device"]["prefixes"]
    (shared,) = root["prefixes"]
    assert root["pages"] == (await service.engine.stats()).pages_cached
    assert (root["tenant"], shared["start"], shared["tokens"]) == ("", 0, 3 * _PAGE)
    tokens = [
        len(case) + len(output) - 1 for case, output in zip(cases, outputs, strict=True)
    ]  # the last is not computed
    assert [each["tokens"] for each in shared["prefixes"]] == [each // _PAGE * _PAGE - 3 * _PAGE for each in tokens]
    tokenizer = Tokenizer(service.info.model_dir)
    texts = {tokenizer.decode(case[3 * _PAGE : 4 * _PAGE], skip_special_tokens=False)[:160] for case in cases}
    assert {each["text"] for each in shared["prefixes"]} == texts


async def watch_streams(service: Service) -> set[str]:
    """The states that /streams shows until nothing is in progress any more."""
    states: set[str] = set()
    async with httpx.AsyncClient() as client:
        while True:
            found = (await client.get(f"{service.endpoint}/streams?limit=200")).json()
            if states and not found["streams"]:
                return states
            ages = [each["age_s"] for each in found["streams"]]
            assert ages == sorted(ages, reverse=True)
            states |= {each["state"] for each in found["streams"]}
            await asyncio.sleep(0.01)


def test_64_streams_with_random_cancellations_leave_no_page_in_use(cluster: Cluster, model: Path) -> None:
    draw = random.Random(64)

    async def one(service: Service, prompt: list[int], patience: int) -> None:
        stream = await service.client.completions.create(
            model=service.info.model, prompt=prompt, max_tokens=48, stream=True, **_GREEDY
        )
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == patience:
                await stream.close()
                return

    async def run() -> None:
        # 64 sequences of up to 9 pages want far more than 120 pages, so requests are preempted too.
        async with serving(model, cp=2, page_size=_PAGE, num_pages=120, max_running=32) as service:
            cases = prompts(64, shared=40, length=40)
            listed = asyncio.create_task(watch_streams(service))
            await asyncio.gather(*(one(service, prompt, draw.choice([1, 5, 20, 10**6])) for prompt in cases))
            assert {"waiting", "running"} <= await listed
            while (stats := await service.engine.stats()).running or stats.waiting:
                await asyncio.sleep(0.1)
            assert (stats.running, stats.waiting, stats.pages_in_use, stats.pages_locked) == (0, 0, 0, 0)
            assert stats.finished["cancelled"] > 0 and stats.finished["length"] > 0
            await service.engine.check()

    asyncio.run(asyncio.wait_for(run(), 500))


def test_readers_of_events_know_what_the_storage_has_also_after_a_restart(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    async def run(prompt: list[int]) -> Blocks:
        port, replay_port = free_ports()
        url = f"tcp://127.0.0.1:{port}?replay={replay_port}"
        storage = f"file://{tmp_path}/storage?size=64MiB"
        tiers = {"page_size": _PAGE, "num_pages": 64, "host_memory": "16MiB", "storage": storage}
        async with serving(model, tp=2, kv_events=url, **tiers) as service:
            await complete(service, prompt, 4)
            await service.engine.admin(CacheCommand(CacheAction.FLUSH, timeout_s=30))
            with Reader(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}") as reader:
                async with asyncio.timeout(60):
                    while tuple(prompt[48:64]) not in {
                        block.tokens for block in reader.index.blocks["STORAGE"].values()
                    }:
                        reader.ask()
                        await asyncio.sleep(0.05)
                return reader.index.blocks["STORAGE"]

    first, second = prompts(2, shared=50, length=20)
    before = asyncio.run(asyncio.wait_for(run(first), 250))
    assert {block.tokens for block in before.values()} == {
        tuple(first[start : start + _PAGE]) for start in range(0, len(first) // _PAGE * _PAGE, _PAGE)
    }
    after = asyncio.run(asyncio.wait_for(run(second), 250))
    assert before.keys() < after.keys() and len(after) == 5  # they share three
    assert {after[name].tokens for name in before} == {()}  # only hashes: they were stored before the start


def test_a_killed_rank_is_replaced_and_its_requests_go_on_with_the_same_tokens(cluster: Cluster, model: Path) -> None:
    async def run() -> None:
        async with serving(model, tp=2, page_size=_PAGE, num_pages=64) as service:
            case = prompts(1, shared=30, length=10)[0]
            running = asyncio.create_task(complete(service, case, 400))
            while (await service.engine.stats()).output_tokens < 20:
                await asyncio.sleep(0.02)
            ranks = [p for p in psutil.Process().children(recursive=True) if "RankActor" in p.name()]
            ranks[0].kill()
            tokens, _ = await running
            assert tokens == greedy(model, case, 400)
            await service.engine.check()

    asyncio.run(asyncio.wait_for(run(), 500))
