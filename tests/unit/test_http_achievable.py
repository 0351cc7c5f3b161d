"""What caches of other sizes would have reused, over HTTP: GET /cache/achievable, /status and /metrics."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch.http.app import build_app
from raycache.achievable.tiers import Capacity
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.types import EngineInfo, EngineStats, Miss
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_asgi, run

_TEXT = "Read files before you change them, and run the tests afterwards. " * 4
_PATH = "/cache/achievable"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer, context=2000)


async def send(client: httpx.AsyncClient, *, key: str = "", **fields: Any) -> None:
    body = {"model": "tiny", "max_tokens": 5, "prompt": _TEXT, **fields}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text


def test_figures_add_up_and_are_the_same_everywhere(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        page = (await engine.info()).page_size
        async with over_asgi(engine, tokenizer) as client:
            assert "reuse" not in (await client.get("/status")).json()
            for cached, miss in ((0, Miss.NEVER_SEEN), (2 * page, Miss.EVICTED_DEVICE), (page, Miss.STATE_MISSING)):
                engine.reuse = {"cached_tokens": cached, "miss": miss}
                await send(client, n=2)  # a prompt counts once
            await send(client, prompt_logprobs=1)  # computes its whole prompt, whatever is cached
            found = (await client.get(_PATH)).json()
            status = (await client.get("/status")).json()["reuse"]
            text = (await client.get("/metrics")).text
            schema = (await client.get("/openapi.json")).json()
        size = len(engine.requests[0].prompt)
        whole = (size - 1) // page * page
        total = found["total"]
        assert found["tenants"] == {"": total}
        assert (total["requests"], total["prompt_tokens"], total["cached_tokens"]) == (4, 4 * size, 3 * page)
        assert total["achievable"] == pytest.approx(2 * whole / (4 * size), abs=1e-5) and total["error"] == 0
        lost = {(row["cause"], row["kind"]): row["tokens"] for row in total["lost"]}
        assert lost == {
            ("capacity", "evicted_device"): whole - 2 * page,
            ("granularity", "state_missing"): whole - page,
        }
        assert found["curve"][-1]["share"] == total["achievable"]
        assert status["achievable"] == total["achievable"]
        assert status["lost"].keys() == {"capacity", "granularity"}
        values = {
            (sample.name, sample.labels.get("cause", "")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.labels.get("tenant") == ""
        }
        assert values["raycache_tenant_prompt_tokens_total", ""] == 4 * size
        assert values["raycache_tenant_cached_prompt_tokens_total", ""] == 3 * page
        assert values["raycache_tenant_new_prompt_tokens_total", ""] == 4 * size - 2 * whole
        assert values["raycache_tenant_lost_prompt_tokens_total", "granularity"] == whole - page
        answer = {**schema["components"]["schemas"]["Achievable"], "components": schema["components"]}
        jsonschema.validate(found, answer)

    run(scenario())


def test_a_tenant_sees_its_own_figures_only(engine: ScriptedEngine, tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    lines = [f"{name} {hashlib.sha256(name.encode()).hexdigest()}" for name in ("alice", "bob", "operator")]
    keys.write_text("\n".join(lines) + " admin\n")
    keys.chmod(0o600)
    engine.reuse = {"cached_tokens": 0, "miss": Miss.NEVER_SEEN}

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, api_keys=str(keys)) as client:
            await send(client, key="alice")
            before = await asked(client, "bob")
            await send(client, key="bob")  # the same prompt as alice's
            own, seen = await asked(client, "bob"), await asked(client, "operator")
            refused = await client.get(_PATH)
            assert refused.status_code == 401
        assert before.keys() == own.keys() == {"tenants"} and own["tenants"].keys() == {"bob"}
        assert before["tenants"]["bob"]["requests"] == 0
        assert own["tenants"]["bob"]["achievable"] == 0  # what alice sent is not reusable for bob
        assert seen["tenants"].keys() == {"alice", "bob"} and seen["total"]["requests"] == 2

    run(scenario())


async def asked(client: httpx.AsyncClient, key: str) -> dict[str, Any]:
    answer = await client.get(_PATH, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_without_prefix_cache_there_is_nothing_to_compare(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, prefix_cache=False) as client:
            await send(client)
            assert (await client.get(_PATH)).status_code == 404
            assert "raycache_achievable_prompt_share{" not in (await client.get("/metrics")).text

    run(scenario())


def test_without_keys_only_this_machine_may_ask(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        app = build_app(engine, config=Config(), info=await engine.info(), tokenizer=tokenizer)
        transport = httpx.ASGITransport(app, client=("192.0.2.1", 4321))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            assert (await client.get(_PATH)).status_code == 403

    run(scenario())


def test_tiers_together_hold_what_their_write_policy_says() -> None:
    tiers = {"device": {"tokens": 100, "bytes": 1000}, "host": {"tokens": 300, "bytes": 3000}}
    info = EngineInfo("m", "", 10, (1,), 100, 1, 1, 1, tiers=tiers)
    stats = EngineStats(replicas={"0": EngineStats(), "1": EngineStats()})
    copied, exclusive = (Capacity.of(info, stats, is_exclusive=each) for each in (False, True))
    assert copied.tokens == {"device": 200, "host": 600}
    assert (copied.held(down_to="device"), copied.held(), copied.held(doubled="host")) == (200, 600, 1200)
    assert (exclusive.held(), exclusive.held(doubled="device")) == (800, 1000)
    stored = Capacity.of(info, EngineStats(tiers={"storage": {"bytes_limit": 10_000}}), is_exclusive=False)
    assert (stored.held(), stored.held(doubled="host"), stored.held(doubled="storage")) == (1000, 1000, 2000)
