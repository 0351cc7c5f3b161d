"""Why prompts were computed again, over HTTP: in the answer of one request, and summed up at GET /cache/why."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from launch.http.app import build_app
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.types import Miss
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_asgi, run

_RULES = "Answer in few words. Read files before you change them, and run the tests afterwards. " * 2
_NOTHING = {"cached_tokens": 0, "miss": Miss.NEVER_SEEN}
_CONTEXT = 2000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    engine = ScriptedEngine(tokenizer, context=_CONTEXT)
    engine.reuse = _NOTHING
    return engine


def chat(clock: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": f"Time: {clock}\n{_RULES}"}, {"role": "user", "content": "Say hi"}]
    return {"model": "tiny", "max_tokens": 5, "messages": messages, "return_cache_info": True, **fields}


def test_the_answer_says_where_the_prompt_left_a_known_one(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            first = (await client.post("/v1/chat/completions", json=chat("10:15:02"))).json()["raycache"]
            assert "divergence" not in first
            second = (await client.post("/v1/chat/completions", json=chat("11:48:59"))).json()["raycache"]
            streamed = await client.post("/v1/chat/completions", json=chat("12:48:59", stream=True))
        found = second["divergence"]
        assert (found["cause"], found["kind"]) == ("volatile", "time")
        assert found["place"] == {
            "message": 0,
            "role": "system",
            "line": 1,
            "key": "Time",
            "text": "line 1 of the system message, Time",
        }
        assert (found["before"][-7:], found["this"][:7], found["other"][:7]) == ("Time: 1", "1:48:59", "0:15:02")
        assert found["token"] == len(tokenizer.encode("<|im_start|>system\nTime: 1", add_special_tokens=False))
        assert found["lost_tokens"] > 100 and found["lost_s"] >= 0
        *_, last = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert last["raycache"]["divergence"]["cause"] == "volatile"

    run(scenario())


def test_completions_and_several_prompts_have_a_divergence_each(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            body = {"model": "tiny", "max_tokens": 5, "n": 2, "return_cache_info": True}
            await client.post("/v1/completions", json={**body, "prompt": [f"id: 12345\n{_RULES}"]})
            prompts = [f"id: 67890\n{_RULES}", "Something else"]
            infos = (await client.post("/v1/completions", json={**body, "prompt": prompts})).json()["raycache"]
            first, second = infos["prompts"]
            assert (first["divergence"]["cause"], first["divergence"]["place"]["line"]) == ("volatile", 1)
            assert "divergence" not in second
            sums = (await client.get("/cache/why")).json()["tenants"][""]
            assert sums["requests"] == 3  # a prompt counts once, however many choices are made for it

    run(scenario())


def test_the_sums_name_cause_place_and_share(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            for minute in range(10, 20):
                await client.post("/v1/chat/completions", json=chat(f"10:{minute}:02", return_cache_info=False))
            answer = (await client.get("/cache/why")).json()
        sums = answer["tenants"][""]
        size = len(engine.requests[0].prompt)
        assert (sums["requests"], sums["prompt_tokens"], sums["computed_tokens"]) == (10, 10 * size, 10 * size)
        (cause,) = sums["causes"]
        assert (cause["cause"], cause["kind"], cause["place"]) == (
            "volatile",
            "time",
            "line 1 of the system message, Time",
        )
        assert cause["requests"] == 9
        assert cause["lost_share"] == pytest.approx(cause["lost_tokens"] / sums["computed_tokens"], abs=1e-4)
        assert 0 < answer["history_bytes"] < 2**20

    run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", lambda clock: {"system": f"Time: {clock}\n{_RULES}", "max_tokens": 5}),
        ("/v1/responses", lambda clock: {"instructions": f"Time: {clock}\n{_RULES}", "store": False}),
    ],
)
def test_other_apis_are_counted_too(engine: ScriptedEngine, tokenizer: Tokenizer, path: str, body: Any) -> None:
    async def scenario() -> None:
        asked = {"input": "Say hi"} if "responses" in path else {"messages": [{"role": "user", "content": "Say hi"}]}
        async with over_asgi(engine, tokenizer) as client:
            for clock in ("10:15:02", "11:48:59"):
                found = await client.post(path, json={"model": "tiny", **asked, **body(clock)})
                assert found.status_code == 200, found.text
            (cause,) = (await client.get("/cache/why")).json()["tenants"][""]["causes"]
        assert (cause["kind"], cause["place"]) == ("time", "line 1 of the system message, Time")

    run(scenario())


@pytest.mark.parametrize("settings", [{"prompt_history": "none"}, {"prefix_cache": False}])
def test_without_a_history_nothing_is_said(
    engine: ScriptedEngine, tokenizer: Tokenizer, settings: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, **settings) as client:
            for clock in ("10:15:02", "11:48:59"):
                info = (await client.post("/v1/chat/completions", json=chat(clock))).json()["raycache"]
                assert "divergence" not in info
            refused = await client.get("/cache/why")
            assert (refused.status_code, "--prompt-history" in refused.text) == (404, True)

    run(scenario())


def test_without_keys_only_this_machine_may_ask(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        app = build_app(engine, config=Config(), info=await engine.info(), tokenizer=tokenizer)
        transport = httpx.ASGITransport(app, client=("192.0.2.1", 4321))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            assert (await client.get("/cache/why")).status_code == 403

    run(scenario())


def test_with_tiers_a_prompt_is_known_after_its_tokens_are_given_up(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    engine.chained_weights = "weights"

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, prompt_history="32KiB") as client:

            async def send(first: int) -> dict[str, Any]:
                body = {
                    "model": "tiny",
                    "prompt": [first, *range(200), *range(200)] * 2,
                    "max_tokens": 1,
                    "return_cache_info": True,
                }
                response = await client.post("/v1/completions", json=body)
                return response.json()["raycache"]

            for number in range(10):
                assert "divergence" not in await send(number)
            engine.reuse = {"cached_tokens": 0, "miss": Miss.EVICTED_DEVICE}
            assert "divergence" not in await send(10)
            found = (await send(0))["divergence"]
        assert (found["cause"], found["kind"], found["lost_tokens"]) == ("capacity", "evicted_device", 512)
        assert "place" not in found and "this" not in found

    run(scenario())
