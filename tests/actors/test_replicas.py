"""Two replicas of a tiny model behind one endpoint: where prefixes go, and what becomes of requests when one leaves."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from actors import supervisor
from actors.cluster import Cluster
from actors.replicas import Replicas
from actors.starter import Starter
from launch.http.app import build_app
from launch.http.bind import bind
from launch.http.replicas import ReplicasApi
from launch.http.serve import serve
from raycache.api.replicas import ReplicaAction, ReplicaCommand
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import ConfigError
from raycache.routing.totals import total_info
from raycache.types import CacheAction, CacheCommand
from tests.unit.storage_media import redis_server

_PAGE = 16
_DEADLINE_S = 500


@dataclass
class Service:
    """A service that runs."""

    replicas: Replicas
    client: openai.AsyncOpenAI

    async def ask(self, prompt: Sequence[int], count: int) -> tuple[list[int], int]:
        """Tokens and cached tokens of one streamed completion, greedy."""
        tokens, cached = list[int](), -1
        stream = await self.client.completions.create(
            model="tiny",
            prompt=list(prompt),
            max_tokens=count,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "return_token_ids": True},
            timeout=200,
        )
        async for chunk in stream:
            tokens += [each for choice in chunk.choices for each in choice.model_dump().get("token_ids") or []]
            if chunk.usage is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens
        return tokens, cached

    async def command(self, kind: ReplicaAction, **fields: Any) -> dict[str, Any]:
        return dict(await self.replicas.carry_out(ReplicaCommand(kind, **fields)))


@asynccontextmanager
async def serving(model: Path, **settings: Any) -> AsyncIterator[Service]:
    """Start a service of two replicas, and end it with nothing left."""
    settings = {"replicas": 2, "page_size": _PAGE, "num_pages": 64, "drain_timeout_s": 2, **settings}
    config = Config(model=str(model), device="cpu", port="auto", rank_timeout_s=60, **settings)
    starter = Starter(config, device="cpu")
    try:
        started = await asyncio.to_thread(starter.start_all, on_progress=lambda phase, share: None)
        replicas = Replicas(config, starter, started)
        info = total_info({name: facts for name, (_, facts) in started.items()})
        assert sorted({row["replica"] for row in info.ranks}) == sorted(started)
        routes = ReplicasApi(replicas, config=config).routes()
        app = build_app(replicas, config=config, info=info, tokenizer=Tokenizer(model), routes=routes)
        stop, on_started = asyncio.Event(), asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            serve(app, sock=bind(config), stop=stop, on_started=on_started.set_result, config=config)
        )
        endpoint = await on_started
        async with openai.AsyncOpenAI(base_url=f"{endpoint}/v1", api_key="none", max_retries=0) as client:
            yield Service(replicas, client)
        stop.set()
        await task
    finally:
        await asyncio.to_thread(starter.stop)


def prompts(count: int, *, seed: int, length: int = 60) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 260) for _ in range(length)] for _ in range(count)]


async def until_serving(service: Service, count: int) -> None:
    """Wait until there are so many replicas."""
    while True:
        rows = (await service.command(ReplicaAction.STATUS))["replicas"]
        if [row["state"] for row in rows] == ["serving"] * count:
            return
        await asyncio.sleep(0.2)


@pytest.mark.long
def test_prefixes_stay_with_their_replica_and_move_with_a_drained_one(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    async def run(storage: str) -> None:
        settings = {"host_memory": "16MiB", "storage": storage, "prefetch": "wait_complete"}
        async with serving(model, **settings) as service:
            cases = prompts(6, seed=1)
            calm = [await service.ask(prompt, 12) for prompt in cases]
            assert [cached for _, cached in calm] == [0] * 6
            spread = {name: each.prompt_tokens for name, each in (await service.replicas.stats()).replicas.items()}
            assert spread == {"0": 3 * 60, "1": 3 * 60}
            again = await asyncio.gather(*(service.ask(prompt, 12) for prompt in cases))
            assert [cached for _, cached in again] == [3 * _PAGE] * 6, "each was sent to where its prefix is"
            assert [tokens for tokens, _ in again] == [tokens for tokens, _ in calm]

            # One is drained while both write long answers: those move with the tokens that they have.
            wanted = [await service.ask(prompt, 300) for prompt in cases[:2]]
            long = [asyncio.create_task(service.ask(prompt, 300)) for prompt in cases[:2] * 2]
            while not all(row["requests"] for row in (await service.command(ReplicaAction.STATUS))["replicas"]):
                await asyncio.sleep(0.01)
            done = await service.command(ReplicaAction.SCALE, count=1)
            (drained,) = done["drained"]
            assert drained["saved"]["is_in_time"] and drained["saved"]["missing_pages"] == 0, drained
            assert [(await each)[0] for each in long] == [tokens for tokens, _ in wanted] * 2
            (left,) = [row["name"] for row in done["replicas"]]
            for prompt, (tokens, _) in zip(cases, calm, strict=True):
                assert await service.ask(prompt, 12) == (tokens, 3 * _PAGE)
            stats = await service.replicas.stats()
            # Three were the other one's; one of them may have been computed again when its long answer moved.
            assert stats.cached_by_tier["storage"] >= 2 * 3 * _PAGE, f"{left} found what {drained['name']} had"
            await service.replicas.check()

    with redis_server(tmp_path) as port:
        asyncio.run(asyncio.wait_for(run(f"redis://127.0.0.1:{port}/0"), _DEADLINE_S))


def test_a_replica_that_is_lost_for_good_costs_no_token_and_is_started_again(
    cluster: Cluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MAX_LOSSES", 0)  # the first lost engine is one too many

    async def run() -> None:
        async with serving(model) as service:
            cases = prompts(4, seed=2)
            wanted = [await service.ask(prompt, 200) for prompt in cases]
            running = [asyncio.create_task(service.ask(prompt, 200)) for prompt in cases]
            while not all(row["requests"] for row in (await service.command(ReplicaAction.STATUS))["replicas"]):
                await asyncio.sleep(0.01)
            engines = [each for each in psutil.Process().children(recursive=True) if "EngineActor" in each.name()]
            os.kill(engines[0].pid, signal.SIGKILL)
            assert [(await each)[0] for each in running] == [tokens for tokens, _ in wanted]
            await until_serving(service, 2)
            new = await asyncio.gather(*(service.ask(prompt, 20) for prompt in prompts(4, seed=3)))
            assert [len(tokens) for tokens, _ in new] == [20] * 4
            by_replica = (await service.replicas.stats()).replicas
            assert len(by_replica) == 2 and all(each.output_tokens for each in by_replica.values())

            # A command to the cache goes to all.
            only = await service.replicas.admin(CacheCommand(CacheAction.CLEAR, replica="1"))
            assert only["cleared_pages"]["device"] > 0 and "replicas" not in only
            with pytest.raises(ConfigError, match="no replica '7'; replicas"):
                await service.replicas.admin(CacheCommand(CacheAction.CLEAR, replica="7"))
            found = await service.replicas.admin(CacheCommand(CacheAction.CLEAR))
            assert sorted(found["replicas"]) == ["0", "1"] and found["cleared_pages"]["device"] > 0
            assert [(await service.ask(prompt, 5))[1] for prompt in cases] == [0] * 4
            with pytest.raises(ConfigError, match="one replica at a time"):
                await service.replicas.admin(CacheCommand(CacheAction.ATTACH, url="file:///tmp/x?size=1GiB"))

            # In place: one leaves before its successor starts, and nobody is turned away.
            restart = asyncio.create_task(service.command(ReplicaAction.RESTART, drain_first=True))
            await asyncio.sleep(0.05)
            with pytest.raises(ConfigError, match="another change of the replicas"):
                await service.command(ReplicaAction.SCALE, count=3)
            while not restart.done():
                assert len((await service.ask(cases[0], 10))[0]) == 10
            done = await restart
            assert sorted(done["started"]) == sorted(one["name"] for one in done["drained"]) == ["0", "1"]
            await service.replicas.check()

    asyncio.run(asyncio.wait_for(run(), _DEADLINE_S))
