"""The cache as clients and operators see it over HTTP: salts, tiers and reasons in answers, commands, metrics."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import httpx
import pytest

from launch.http.app import build_app
from raycache.api.tokenizer import Tokenizer
from raycache.cache.keys import Identity
from raycache.config import Config
from raycache.errors import ConfigError, EngineStoppedError
from raycache.types import CacheAction, CacheCommand, Miss
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_asgi, run

_KEY = "secret"
_FROM_STORAGE = {
    "cached_tokens": 7,
    "cached_by_tier": {"device": 4, "storage": 3},
    "miss": Miss.STATE_MISSING,
    "cut_by": "state",
}
_CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def asked(path: str) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 5, **({"prompt": "x"} if path == "/v1/completions" else _CHAT)}


BOTH = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


# --- requests


@BOTH
def test_salt_priority_and_time_to_live_reach_the_engine(
    engine: ScriptedEngine, tokenizer: Tokenizer, path: str
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, eviction="priority") as client:
            fields = {"cache_salt": "tenant 東", "cache_priority": -3, "cache_ttl_s": 1.5, "n": 2}
            assert (await client.post(path, json={**asked(path), **fields})).status_code == 200
            assert (await client.post(path, json=asked(path))).status_code == 200

    run(scenario())
    found = [(one.cache_salt, one.cache_priority, one.cache_ttl_s) for one in engine.requests]
    assert found == [("tenant 東", -3, 1.5)] * 2 + [("", 0, 0.0)]


@pytest.mark.parametrize("weights", ["", "fingerprint"])
def test_digests_of_prompts_are_made_by_the_server_whatever_a_client_sends(
    engine: ScriptedEngine, tokenizer: Tokenizer, weights: str
) -> None:
    engine.chained_weights = weights
    prompts, salts = [list(range(33)), list(range(32)), [5] * 15], ["", "tenant"]

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            for salt in salts:
                body = {"model": "tiny", "max_tokens": 1, "prompt": prompts, "n": 2, "cache_salt": salt}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                await client.post("/v1/completions", json={**body, "page_chain": "AAAA"})

    run(scenario())
    assert len(engine.requests) >= 12
    for request in engine.requests:
        expected = [Identity(weights, 16, salt=request.cache_salt).seed()]
        for start in range(0, len(request.prompt) - 15, 16):
            page = b"".join(token.to_bytes(4, "little") for token in request.prompt[start : start + 16])
            expected.append(sha256(expected[-1] + page).digest())
        assert request.page_chain == (b"".join(expected) if weights else b"")


@BOTH
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"cache_salt": "x" * 257}, "cache_salt", "at most 256 characters, got 257"),
        ({"cache_salt": 5}, "cache_salt", "must be a string, got 5"),
        ({"cache_priority": 2**31}, "cache_priority", str(2**31 - 1)),
        ({"cache_priority": 1.0}, "cache_priority", "integer"),
        ({"cache_priority": 1}, "cache_priority", "--eviction priority"),
        ({"cache_ttl_s": -1, "cache_priority": 1}, "cache_ttl_s", "0"),
        ({"cache_ttl_s": 5}, "cache_ttl_s", "send both"),
        ({"return_cache_info": 1}, "return_cache_info", "boolean"),
        ({"cache_slat": "x"}, "cache_slat", "did you mean 'cache_salt'?"),
    ],
)
def test_cache_fields_that_cannot_work_are_refused(
    engine: ScriptedEngine, tokenizer: Tokenizer, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            answer = await client.post(path, json={**asked(path), **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert words in error["message"]

    run(scenario())
    assert engine.requests == []


@BOTH
def test_usage_tells_cached_tokens_by_tier(engine: ScriptedEngine, tokenizer: Tokenizer, path: str) -> None:
    engine.reuse = _FROM_STORAGE

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            details = (await client.post(path, json={**asked(path), "n": 3})).json()["usage"]["prompt_tokens_details"]
        assert details == {
            "cached_tokens": 7,
            "cached_tokens_by_tier": {"device": 4, "host": 0, "storage": 3},
            "cut_by": "state",
        }

    run(scenario())


@BOTH
@pytest.mark.parametrize("include_usage", [False, True])
def test_cache_info_is_in_the_answer_and_in_the_last_chunk_if_asked_for(
    engine: ScriptedEngine, tokenizer: Tokenizer, path: str, include_usage: bool
) -> None:
    engine.reuse = _FROM_STORAGE
    wanted = {"cached_by_tier": {"device": 4, "host": 0, "storage": 3}, "miss": "state_missing", "cut_by": "state"}

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            body = {**asked(path), "return_cache_info": True}
            assert (await client.post(path, json=body)).json()[
                "raycache"
            ] == wanted  # the first one: nothing to compare
            assert "raycache" not in (await client.post(path, json=asked(path))).json()
            options = {"stream": True, "stream_options": {"include_usage": include_usage}}
            *earlier, last = chunks_of(await client.post(path, json={**body, **options}))
            assert wanted.items() <= last["raycache"].items()
            assert (last["choices"], "usage" in last) == ([], include_usage)
            assert earlier[-1]["choices"][0]["finish_reason"] == "length"
            assert not any("raycache" in chunk for chunk in earlier)
            plain = chunks_of(await client.post(path, json={**asked(path), **options}))
            assert not any("raycache" in chunk for chunk in plain)

    run(scenario())


def test_a_request_that_reused_all_names_no_reason(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            body = {**asked("/v1/completions"), "return_cache_info": True}
            info = (await client.post("/v1/completions", json=body)).json()["raycache"]
            assert (info["miss"], info["cut_by"]) == ("", "")

    run(scenario())


def test_several_prompts_have_their_cache_info_each(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    engine.reuse = _FROM_STORAGE

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            body = {"model": "tiny", "prompt": ["a", "bb"], "n": 2, "max_tokens": 5, "return_cache_info": True}
            answer = (await client.post("/v1/completions", json=body)).json()
        assert [info["miss"] for info in answer["raycache"]["prompts"]] == ["state_missing"] * 2
        by_tier = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
        assert by_tier == {"device": 8, "host": 0, "storage": 6}

    run(scenario())


# --- commands


@pytest.mark.parametrize(
    ("action", "body", "command"),
    [
        ("attach", {"url": "redis://h:1/0"}, CacheCommand(CacheAction.ATTACH, url="redis://h:1/0")),
        ("attach", {"url": "file:///d", "size": "2KiB"}, CacheCommand(CacheAction.ATTACH, url="file:///d?size=2048")),
        ("attach", {"url": "file:///d?a=b", "size": 9}, CacheCommand(CacheAction.ATTACH, url="file:///d?a=b&size=9")),
        ("detach", {}, CacheCommand(CacheAction.DETACH)),
        ("scrub", {}, CacheCommand(CacheAction.SCRUB, timeout_s=3600.0)),
        ("flush", {"timeout_s": 2}, CacheCommand(CacheAction.FLUSH, timeout_s=2.0)),
        ("resize", {"size": "1.5GiB"}, CacheCommand(CacheAction.RESIZE, size=3 * 2**29)),
        ("clear", {"tiers": ["storage", "host"]}, CacheCommand(CacheAction.CLEAR, tiers=("storage", "host"))),
        ("clear", {}, CacheCommand(CacheAction.CLEAR, tiers=("device", "host", "storage"))),
        ("inspect", {"prompt": [5, 6, 7]}, CacheCommand(CacheAction.INSPECT, prompt=(5, 6, 7))),
        (
            "inspect",
            {"prompt": [[5, 6]], "cache_salt": "s", "n": 2, "model": "tiny"},
            CacheCommand(CacheAction.INSPECT, prompt=(5, 6), cache_salt="s"),
        ),
    ],
)
def test_a_command_reaches_the_engine_and_its_answer_the_operator(
    engine: ScriptedEngine, tokenizer: Tokenizer, action: str, body: dict[str, Any], command: CacheCommand
) -> None:
    engine.answer = {"tiers": {"host": 7}, "miss": Miss.EVICTED_HOST}

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            answer = await client.post(f"/cache/{action}", json=body)
            assert (answer.status_code, answer.json()) == (200, {"tiers": {"host": 7}, "miss": "evicted_host"})

    run(scenario())
    assert engine.commands == [command]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "one two Köln"}),
        ("/v1/chat/completions", {**_CHAT, "add_generation_prompt": False, "cache_salt": "s"}),
    ],
)
def test_an_inspected_prompt_is_that_of_the_same_request(
    engine: ScriptedEngine, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            assert (await client.post(path, json={"model": "tiny", **body})).status_code == 200
            assert (await client.post("/cache/inspect", json=body)).status_code == 200

    run(scenario())
    ((request,), (command,)) = engine.requests, engine.commands
    assert (command.prompt, command.cache_salt) == (tuple(request.prompt), request.cache_salt)


@pytest.mark.parametrize(
    ("action", "body", "status", "words"),
    [
        ("attach", {}, 400, "url is required"),
        ("attach", {"url": ""}, 400, "url must"),
        ("attach", {"url": "file:///d?size=1GiB", "size": "2GiB"}, 400, "send only one of them"),
        ("attach", {"url": "file:///d", "size": "big"}, 400, "50GiB"),
        ("resize", {"size": 0}, 400, "50GiB"),
        ("resize", {"size": "9" * 400 + "GiB"}, 400, "50GiB"),
        ("resize", {"size": True}, 400, "50GiB"),
        ("resize", {}, 400, "size is required"),
        ("clear", {"tiers": ["disk"]}, 400, "'device', 'host' or 'storage'"),
        ("clear", {"tiers": []}, 400, "tiers"),
        ("scrub", {"deep": True}, 400, "deep is not supported"),
        ("flush", {"timeout_s": 0}, 400, "timeout_s"),
        ("flush", {"timeout_s": 1e6}, 400, "timeout_s"),
        ("inspect", {}, 400, "prompt is required"),
        ("inspect", {"prompt": ["a", "b"]}, 400, "one prompt at a time"),
        ("inspect", {"prompt": "x", **_CHAT}, 400, "prompt is not supported"),
        ("inspect", {"prompt": [400]}, 400, "[0, 400)"),
        ("inspect", {"prompt": "x", "model": "other"}, 404, "'other' is not served"),
        ("melt", {}, 404, "use one of attach, detach, clear, resize, scrub, inspect, flush"),
        ("status", {}, 404, "use one of "),
    ],
)
def test_a_command_that_cannot_be_read_is_refused(
    engine: ScriptedEngine, tokenizer: Tokenizer, action: str, body: dict[str, Any], status: int, words: str
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            answer = await client.post(f"/cache/{action}", json=body)
        assert answer.status_code == status
        assert words in answer.json()["error"]["message"]

    run(scenario())
    assert engine.commands == []


def test_a_refusal_of_the_engine_is_told_to_the_operator(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    engine.answer = ConfigError("there is no host tier; start with --host-memory auto")

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            answers = [
                await client.post("/cache/attach", json={"url": "redis://h:1/0"}),
                await client.get("/cache?replica=7"),
            ]
        for answer in answers:
            assert answer.status_code == 400
            assert "--host-memory auto" in answer.json()["error"]["message"]

    run(scenario())


def test_the_cache_shows_its_settings_room_figures_and_warnings(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    engine.answer = {"tiers": {"host": {"pages_free": 5}}, "warnings": ("storage stores and never hits",)}

    async def scenario() -> None:
        async with over_asgi(
            engine, tokenizer, host_memory="1GiB", storage="redis://u:hidden@h/0", eviction="lfu"
        ) as client:
            answer = await client.get("/cache")
        found = answer.json()
        assert (found["settings"]["host_memory"], found["settings"]["eviction"]) == ("1GiB", "lfu")
        assert found["capacity"] == {"host": {"tokens": 4096}}
        assert found["tiers"] == {"host": {"pages_free": 5}}
        assert found["warnings"] == ["storage stores and never hits"]
        assert "hidden" not in answer.text

    run(scenario())
    assert engine.commands == [CacheCommand(CacheAction.STATUS)]


def test_a_command_without_a_body_needs_no_content_type(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            assert (await client.post("/cache/clear")).status_code == 200
            assert (await client.post("/cache/detach", headers={"Content-Length": "0"})).status_code == 200
            commands = list(engine.commands)
            # A web page can send it without asking the server first, but not without its origin.
            for origin in ("https://example.com", "null"):
                assert (await client.post("/cache/clear", headers={"Origin": origin})).status_code == 403
            # Nor under a name that a page's server has made lead here, which is the page's own origin then.
            for path in ("/cache/why", "/cache/tree"):
                assert (await client.get(path, headers={"Host": "evil.example"})).status_code == 403, path
            answer = await client.post("/cache/clear", headers={"Host": "evil.example:8000"})
            assert answer.status_code == 403
            assert "http://127.0.0.1" in answer.json()["error"]["message"]
            for options in ({"content": b"{}"}, {"content": _parts()}, {"headers": {"Content-Type": "text/plain"}}):
                assert (await client.post("/cache/clear", **options)).status_code == 415
            assert engine.commands == commands

    async def _parts() -> AsyncIterator[bytes]:
        yield b"{}"

    run(scenario())
    assert [command.kind for command in engine.commands] == [CacheAction.CLEAR, CacheAction.DETACH]


def test_commands_need_the_key_and_a_body_of_json(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    good = {"Authorization": f"Bearer {_KEY}"}

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, api_key=_KEY) as client:
            assert (await client.get("/cache")).status_code == 401
            assert (await client.post("/cache/detach", json={})).status_code == 401
            assert (await client.post("/cache/detach", headers=good, content=b"{}")).status_code == 415
            assert engine.commands == []
            assert (await client.get("/cache", headers=good)).status_code == 200
            assert (await client.post("/cache/detach", headers=good, json={})).status_code == 200

    run(scenario())


@pytest.mark.parametrize(
    ("host", "key", "status"),
    [
        ("127.0.0.1", "", 200),
        ("::1", "", 200),
        ("::ffff:127.0.0.1", "", 200),
        ("10.1.2.3", "", 403),
        ("::ffff:10.1.2.3", "", 403),
        ("a.socket", "", 403),
        ("10.1.2.3", _KEY, 200),
    ],
)
def test_without_a_key_commands_are_taken_from_this_machine_only(
    engine: ScriptedEngine, tokenizer: Tokenizer, host: str, key: str, status: int
) -> None:
    async def scenario() -> None:
        app = build_app(engine, config=Config(api_key=key), info=await engine.info(), tokenizer=tokenizer)
        transport = httpx.ASGITransport(app, client=(host, 999))
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
            assert (await client.post("/cache/clear", json={})).status_code == status
            assert (await client.get("/cache")).status_code == 200

    run(scenario())


# --- metrics


def test_metrics_tell_tiers_reasons_and_warnings(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    engine.figures = {
        "cached_by_tier": {"device": 100, "host": 20},
        "misses": {"never_seen": 4, "checksum": 1},
        "tiers": {
            "host": {"pages_total": 512, "saved_pages": 30, "state_slots": 8, "tokens": 4096},
            "storage": {"bytes_used": 2048, "saved_pages": 7, "hits": 6},
        },
        "warnings": ("storage stores and never hits",),
    }

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            lines = (await client.get("/metrics")).text.splitlines()
        model = 'model_name="tiny",replica="0"'
        for line in (
            f'raycache_cached_prompt_tokens_by_tier_total{{{model},tier="host"}} 20.0',
            'raycache_cache_misses_total{model_name="tiny",reason="checksum",replica="0"} 1.0',
            f'raycache_tier_pages{{{model},tier="host"}} 512.0',
            f'raycache_tier_saved_pages_total{{{model},tier="host"}} 30.0',
            f'raycache_tier_saved_pages_total{{{model},tier="storage"}} 7.0',
            f'raycache_tier_used_bytes{{{model},tier="storage"}} 2048.0',
            f'raycache_tier_object_hits_total{{{model},tier="storage"}} 6.0',
            f'raycache_tier{{{model},tier="host",what="state_slots"}} 8.0',
            f"raycache_cache_warnings{{{model}}} 1.0",
        ):
            assert line in lines
        helps = [line for line in lines if line.startswith("# HELP")]
        assert len(helps) == len(set(helps))  # a family is given once

    run(scenario())


def test_an_engine_that_is_stopped_takes_no_commands(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    engine.answer = EngineStoppedError("the engine is stopped")

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            assert (await client.get("/cache")).status_code == 503
            assert (await client.post("/cache/scrub", json={})).status_code == 503

    run(scenario())
