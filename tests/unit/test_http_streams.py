"""GET /streams: which requests are in progress, and who sees which."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from launch.http.app import build_app
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import EngineStoppedError
from raycache.types import GenerateRequest, RequestOutput, StreamPhase, StreamState
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_asgi, run

_SECRET = "nobody else may read this prompt"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


class HeldEngine(ScriptedEngine):
    """Gives `first` tokens of each request, and the rest when it is let go."""

    def __init__(self, tokenizer: Tokenizer, *, first: int = 0) -> None:
        super().__init__(tokenizer)
        self.first, self.go_on = first, asyncio.Event()
        self.is_answering = True

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        number = 0
        async for output in super().generate(request):
            if number == self.first:
                await self.go_on.wait()
            number += 1
            yield replace(output, cached_by_tier={"device": 2})

    async def stream_states(self, request_ids: Any) -> Any:
        if not self.is_answering:
            await asyncio.Event().wait()
        return await super().stream_states(request_ids)


@asynccontextmanager
async def asking(
    engine: HeldEngine, client: httpx.AsyncClient, *, count: int = 1, key: str = "", **fields: Any
) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """Requests that are in progress in the block, and end after it."""
    body = {"model": "tiny", "prompt": _SECRET, "max_tokens": 3, **fields}
    before, tasks = len(engine.requests), []
    for number in range(count):  # in this order
        tasks.append(asyncio.create_task(client.post("/v1/completions", json=body, headers=header(key))))
        while len(engine.requests) < before + (number + 1) * fields.get("n", 1):
            await asyncio.sleep(0)
    await asyncio.sleep(0)  # the last one is listed when it is with the engine
    yield tasks
    engine.go_on.set()
    assert {(await task).status_code for task in tasks} == {200}
    engine.go_on.clear()


def header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def streams(client: httpx.AsyncClient, *, key: str = "", query: str = "") -> dict[str, Any]:
    answer = await client.get(f"/streams{query}", headers=header(key))
    assert answer.status_code == 200, answer.text
    assert _SECRET not in answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_it_lists_the_oldest_with_what_the_engine_says_of_them(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        engine = HeldEngine(tokenizer)
        async with over_asgi(engine, tokenizer) as client:
            assert await streams(client) == {"model": "tiny", "streams": [], "others": 0}
            async with asking(engine, client, count=5):
                ids = [request.request_id for request in engine.requests]
                engine.states = {
                    ids[0]: StreamState(StreamPhase.RUNNING, 7, 0, {"host": 4}, "1"),
                    ids[1]: StreamState(StreamPhase.LOADING),
                }
                found = await streams(client, query="?limit=3")
                schema = (await client.get("/openapi.json")).json()
                jsonschema.validate(found, {**schema["components"]["schemas"]["Streams"], **schema})
                assert [row["id"] for row in found["streams"]] == ids[:3] and found["others"] == 2
                first = found["streams"][0]
                size = len(engine.requests[0].prompt)
                assert 0 <= first.pop("age_s") < 30
                assert first == {
                    "id": ids[0],
                    "tenant": "",
                    "replica": "1",
                    "state": "running",
                    "prompt_tokens": size,
                    "computed_tokens": 7,
                    "cached_by_tier": {"host": 4},
                    "output_tokens": 0,
                    "tokens_per_s": 0.0,
                }
                assert [row["state"] for row in found["streams"]] == ["running", "loading", "waiting"]
                assert len((await streams(client))["streams"]) == 5
                for limit in ("0", "201", "x", "-1"):
                    assert (await client.get(f"/streams?limit={limit}")).status_code == 400
            assert (await streams(client))["streams"] == []

    run(scenario())


def test_tokens_and_choices_are_counted_as_the_client_gets_them(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        engine = HeldEngine(tokenizer, first=2)
        async with over_asgi(engine, tokenizer) as client, asking(engine, client, n=2, temperature=1.0):
            while sum(row["output_tokens"] for row in (await streams(client))["streams"]) < 4:
                await asyncio.sleep(0)
            rows = (await streams(client))["streams"]
            assert [row["id"][-2:] for row in rows] == ["-0", "-1"]
            for row in rows:
                assert (row["output_tokens"], row["cached_by_tier"]) == (2, {"device": 2})
                assert row["state"] == "running"  # the engine has it no more: the rest is on its way
                assert row["tokens_per_s"] > 0

    run(scenario())


def test_without_a_reply_of_the_engine_states_are_not_known(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.http.streams._TIMEOUT_S", 0.01)

    async def scenario() -> None:
        engine = HeldEngine(tokenizer)
        async with over_asgi(engine, tokenizer) as client, asking(engine, client):
            engine.is_answering = False
            assert [row["state"] for row in (await streams(client))["streams"]] == [None]
            engine.is_answering, engine.refusal = True, EngineStoppedError("recovering")
            assert [row["state"] for row in (await streams(client))["streams"]] == [None]
            engine.refusal = None

    run(scenario())


def test_cancelled_and_refused_requests_leave_the_list(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        engine = HeldEngine(tokenizer)
        async with over_asgi(engine, tokenizer) as client, asking(engine, client) as kept:
            gone = asyncio.create_task(client.post("/v1/completions", json={"model": "tiny", "prompt": "x"}))
            while len((await streams(client))["streams"]) < 2:
                await asyncio.sleep(0)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            assert len((await streams(client))["streams"]) == 1 and not kept[0].done()
            engine.refusal = EngineStoppedError("recovering")
            refused = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
            assert refused.status_code == 503
            engine.refusal = None
            assert len((await streams(client))["streams"]) == 1

    run(scenario())


def test_a_tenant_sees_its_own_and_an_operator_all(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("alice", "bob", "scraper", "operator")}
    rights = {"scraper": " metrics", "operator": " admin"}
    keys.write_text("".join(f"{name} {digest}{rights.get(name, '')}\n" for name, digest in digests.items()))
    keys.chmod(0o600)

    async def scenario() -> None:
        engine = HeldEngine(tokenizer)
        async with (
            over_asgi(engine, tokenizer, api_keys=str(keys)) as client,
            asking(engine, client, count=2, key="alice"),
            asking(engine, client, key="bob"),
        ):
            ids = [request.request_id for request in engine.requests]
            seen = {key: await streams(client, key=key) for key in digests}
            first = await streams(client, key="alice", query="?limit=1")
            assert (await client.get("/streams")).status_code == 401
        assert [row["id"] for row in seen["alice"]["streams"]] == ids[:2]
        assert [row["id"] for row in seen["bob"]["streams"]] == ids[2:]
        assert seen["scraper"]["streams"] == [] and seen["scraper"]["others"] == 0  # nor how many others have
        assert first["others"] == 1
        assert [row["tenant"] for row in seen["operator"]["streams"]] == ["alice", "alice", "bob"]

    run(scenario())


@pytest.mark.parametrize("path", ["/streams", "/history"])
def test_without_keys_only_this_machine_may_ask(tokenizer: Tokenizer, path: str) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(tokenizer)

        async def status(client: str = "127.0.0.1", settings: Any = None, **headers: str) -> int:
            app = build_app(engine, config=Config(**(settings or {})), info=await engine.info(), tokenizer=tokenizer)
            transport = httpx.ASGITransport(app, client=(client, 4321))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as found:
                return (await found.get(path, headers=headers)).status_code

        assert await status() == 200
        assert await status("192.0.2.1") == 403
        assert await status(Host="evil.example") == 403
        assert await status(Origin="http://evil.example") == 403
        assert await status(settings={"api_key": "k"}) == 401
        assert await status("192.0.2.1", {"api_key": "k"}, Authorization="Bearer k") == 200

    run(scenario())
