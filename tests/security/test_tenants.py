"""Who may come in, what each may do, and that no client reaches another tenant's cached tokens."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from launch.cli.main import main
from launch.http import keys
from launch.http.app import build_app
from launch.http.bind import bind
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import ConfigError
from tests.security.raw import connection, post
from tests.unit.scripted import ScriptedEngine, over_asgi, over_port, run

_ASK = {"model": "tiny", "prompt": "x", "max_tokens": 5}
_ALICE, _BOB, _OPERATOR, _SCRAPER = "alice's key", "bob's key", "the operator's key", "the scraper's key"


def line(name: str, key: str, rights: str = "") -> str:
    return f"{name} {hashlib.sha256(key.encode()).hexdigest()} {rights}\n"


def header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants"
    lines = [line("alice", _ALICE), line("bob", _BOB), line("operator", _OPERATOR, "admin")]
    path.write_text("# who may come in\n\n" + "".join(lines) + line("scraper", _SCRAPER, "metrics  # Prometheus"))
    path.chmod(0o600)
    return path


def test_a_key_opens_what_its_rights_say(engine: ScriptedEngine, tokenizer: Tokenizer, tenants: Path) -> None:
    doors = ("/v1/models", "/metrics", "/status", "/cache", "/replicas", "/anything")
    wanted = {
        "": (401,) * 6,
        "nobody's": (401,) * 6,
        _ALICE: (200, 403, 403, 403, 403, 403),
        _SCRAPER: (200, 200, 403, 403, 403, 403),
        _OPERATOR: (200, 200, 200, 200, 404, 404),
    }

    async def scenario() -> None:
        engine.answer = {"tiers": {}, "warnings": []}
        async with over_asgi(engine, tokenizer, api_keys=str(tenants)) as client:
            for key, statuses in wanted.items():
                found = tuple([(await client.get(path, headers=header(key))).status_code for path in doors])
                assert found == statuses, key
            for odd in ({"Authorization": _ALICE}, {"Authorization": f"Basic {_ALICE}"}, {"X-Api-Key": "nobody's"}):
                assert (await client.get("/v1/models", headers=odd)).status_code == 401
            assert (await client.get("/v1/models", headers={"X-Api-Key": _ALICE})).status_code == 200
            assert (await client.get("/v1/models", headers={"Authorization": f"bearer  {_ALICE}"})).status_code == 200
            for path in ("/health", "/openapi.json"):
                assert (await client.get(path)).status_code == 200
            refused = await client.post("/cache/clear", json={}, headers=header(_ALICE))
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_right")
        assert engine.commands and all(command.kind == "status" for command in engine.commands)

    run(scenario())


@pytest.mark.parametrize("prefix", ["/v1", "/v1/v1", "/api"])
def test_a_prefix_of_all_routes_changes_no_rights(
    engine: ScriptedEngine, tokenizer: Tokenizer, tenants: Path, prefix: str
) -> None:
    async def scenario() -> None:
        engine.answer = {"tiers": {}, "warnings": []}
        app = build_app(engine, config=Config(api_keys=str(tenants)), info=await engine.info(), tokenizer=tokenizer)
        transport = httpx.ASGITransport(app, root_path=prefix)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://test{prefix}") as client:
            wanted = {"/v1/models": (200, 200), "/metrics": (403, 200), "/status": (403, 200), "/cache": (403, 200)}
            for path, statuses in wanted.items():
                found = [(await client.get(path, headers=header(key))).status_code for key in (_ALICE, _OPERATOR)]
                assert tuple(found) == statuses, path
            assert (await client.post("/cache/clear", json={}, headers=header(_ALICE))).status_code == 403
            assert [(await client.get(path)).status_code for path in ("/health", "/v1/models")] == [200, 401]

    run(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/cache/inspect"])
def test_salts_divide_within_a_tenant_and_never_reach_another(
    engine: ScriptedEngine, tokenizer: Tokenizer, tenants: Path, path: str
) -> None:
    """The salt that the engine sees is all that decides whose cached tokens are found (see cache/keys.py)."""
    salts: dict[tuple[str, str], str] = {}
    body: dict[str, Any] = {"model": "tiny", "prompt": "x"}
    if "chat" in path or "messages" in path:
        body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}

    def seen() -> str:
        return engine.commands[-1].cache_salt if "cache" in path else engine.requests[-1].cache_salt

    async def scenario() -> None:
        lines = line("alice", _ALICE, "admin") + line("bob", _BOB, "admin")
        tenants.write_text(lines)
        async with over_asgi(engine, tokenizer, api_keys=str(tenants)) as client:
            for key in (_ALICE, _BOB):
                # What a client might try: nothing, a name, a key, its digest, and the salt that another one has.
                tries = ["", "a", "alice", _ALICE, hashlib.sha256(_ALICE.encode()).hexdigest(), *salts.values()]
                for salt in tries:
                    found = await client.post(path, json={**body, "cache_salt": salt}, headers=header(key))
                    assert found.status_code == 200, found.text
                    salts[key, salt] = seen()
            again = await client.post(path, json=body, headers=header(_ALICE))
            assert again.status_code == 200
            assert seen() == salts[_ALICE, ""]
        assert len(set(salts.values())) == len(salts)
        assert "" not in salts.values()

    run(scenario())


def test_without_tenants_the_salt_is_what_the_client_sends(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, api_key=_ALICE) as client:
            for salt in ("", "mine"):
                await client.post("/v1/completions", json={**_ASK, "cache_salt": salt}, headers=header(_ALICE))
        assert [request.cache_salt for request in engine.requests] == ["", "mine"]

    run(scenario())


def test_a_tenant_keeps_its_cache_when_a_second_key_is_added() -> None:
    first = keys.parse_tenants(line("alice", "old"), name="x")
    both = keys.parse_tenants(line("alice", "old") + line("alice", "new"), name="x")
    assert {tenant.salt("s") for tenant in both.values()} == {tenant.salt("s") for tenant in first.values()}
    renamed = keys.parse_tenants(line("alicia", "old"), name="x")
    assert next(iter(renamed.values())).salt("s") != next(iter(first.values())).salt("s")


def test_the_file_is_read_again_when_it_changes_and_stays_good_when_it_breaks(
    engine: ScriptedEngine,
    tokenizer: Tokenizer,
    tenants: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(keys, "_LOOK_AGAIN_S", 0.0)

    async def status(client: httpx.AsyncClient, key: str) -> int:
        return (await client.get("/v1/models", headers=header(key))).status_code

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, api_keys=str(tenants)) as client:
            assert await status(client, _BOB) == 200
            tenants.write_text(line("alice", _ALICE) + line("carol", "carol's key"))
            assert [await status(client, key) for key in (_ALICE, _BOB, "carol's key")] == [200, 401, 200]
            tenants.write_text("alice\n")
            assert [await status(client, key) for key in (_ALICE, _BOB)] == [200, 401]
            assert "line 1" in caplog.text
            tenants.unlink()
            assert await status(client, _ALICE) == 200

    with caplog.at_level(logging.WARNING):
        run(scenario())


def test_a_tenant_has_no_more_requests_at_a_time_than_it_may(tokenizer: Tokenizer, tenants: Path) -> None:
    engine = ScriptedEngine(tokenizer, delay_s=0.01)
    tenants.write_text(line("alice", _ALICE, "requests=2") + line("bob", _BOB))

    async def scenario() -> None:
        async with over_port(engine, tokenizer, api_keys=str(tenants)) as endpoint, httpx.AsyncClient() as client:
            long = post(
                {**_ASK, "max_tokens": 190, "ignore_eos": True, "stream": True},
                headers=f"Authorization: Bearer {_ALICE}\r\n",
            )

            async def status(key: str) -> int:
                found = await client.post(f"{endpoint}/v1/completions", json=_ASK, headers=header(key))
                return found.status_code

            async with connection(endpoint) as (_, first), connection(endpoint) as (_, second):
                first.write(long)
                second.write(long)
                while len(engine.running) < 2:
                    await asyncio.sleep(0.01)
                assert [await status(key) for key in (_ALICE, _BOB)] == [429, 200]
            while engine.running:
                await asyncio.sleep(0.01)
            assert await status(_ALICE) == 200

    run(scenario())


def test_the_chats_of_a_tenant_can_be_left_without_repairs(
    engine: ScriptedEngine, tokenizer: Tokenizer, tenants: Path
) -> None:
    tenants.write_text(line("alice", _ALICE, "repairs=off requests=2") + line("bob", _BOB))
    messages = [{"role": "user", "content": "session: 17\nSay hi"}]

    async def scenario() -> None:
        settings = {"api_keys": str(tenants), "drop_lines": r"session: \d+"}
        async with over_asgi(engine, tokenizer, **settings) as client:
            for key, names in ((_ALICE, None), (_BOB, "drop_lines")):
                sent = {"model": "tiny", "messages": messages, "max_tokens": 3}
                answer = await client.post("/v1/chat/completions", json=sent, headers=header(key))
                assert answer.headers.get("X-RayCache-Repairs") == names
                sent = {"model": "tiny", "messages": messages}
                counted = await client.post("/v1/messages/count_tokens", json=sent, headers=header(key))
                tokens = await client.post("/tokenize", json={"messages": messages}, headers=header(key))
                size = len(engine.requests[-1].prompt)
                assert (counted.json()["input_tokens"], tokens.json()["count"]) == (size, size)

    run(scenario())
    assert ["session: 17" in tokenizer.decode(request.prompt) for request in engine.requests] == [True, False]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "contains no tenants"),
        ("alice\n", "line 1: the name alice must be followed by the SHA-256"),
        ("# x\nalice 1234\n", "line 2: the name alice must be followed by the SHA-256"),
        (line("al/ice", "x"), "'al/ice' is not a valid name"),
        (line("alice", "x", "root"), "'root' is not a right; use admin, metrics, requests=N or repairs=off"),
        (line("alice", "x", "requests=0"), "'requests=0' is not a right"),
        (line("alice", "x") + line("bob", "x"), "line 2: this key already belongs to alice"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_listens(tenants: Path, text: str, words: str) -> None:
    tenants.write_text(text)
    with pytest.raises(ConfigError, match=words):
        bind(Config(port="auto", api_keys=str(tenants)))


def test_a_file_that_others_may_change_is_refused(tenants: Path, caplog: pytest.LogCaptureFixture) -> None:
    tenants.chmod(0o660)
    with pytest.raises(ConfigError, match="other users can write"):
        bind(Config(port="auto", api_keys=str(tenants)))
    tenants.chmod(0o604)
    bind(Config(port="auto", api_keys=str(tenants))).close()
    assert "can read" in caplog.text
    with pytest.raises(ConfigError, match="cannot be read"):
        bind(Config(port="auto", api_keys=str(tenants / "none")))
    with pytest.raises(ConfigError, match="exclude each other"):
        Config(api_keys="x", api_key="y")


def test_the_command_makes_keys_that_work(
    engine: ScriptedEngine, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made"
    made = []
    for arguments in (["alice", "requests=4"], ["operator", "admin", "metrics"]):
        assert main(["key", *arguments, "--file", str(path)]) == 0
        made.append(capsys.readouterr().out.strip())
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert not any(key in path.read_text() for key in made)
    assert main(["key", "alice"]) == 0
    said = capsys.readouterr()
    assert hashlib.sha256(said.out.strip().encode()).hexdigest() in said.err
    for arguments in (["a b"], ["alice", "root"]):
        assert main(["key", *arguments]) == 2

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, api_keys=str(path)) as client:
            found = [(await client.get("/status", headers=header(key))).status_code for key in made]
            assert found == [403, 200]

    run(scenario())


def test_commands_without_keys_come_from_this_machines_programs_only(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            page = {"Origin": "http://127.0.0.1:8000"}
            assert (await client.post("/cache/clear", json={}, headers=page)).status_code == 403
            assert (await client.post("/cache/clear", json={})).status_code == 200

    run(scenario())


def test_a_server_that_others_reach_without_a_key_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        bind(Config(port="auto")).close()
        assert not caplog.records
        bind(Config(port="auto", host="0.0.0.0")).close()
        assert "without an API key" in caplog.text
        caplog.clear()
        bind(Config(port="auto", host="0.0.0.0", api_key="x")).close()
        assert "sent unencrypted" in caplog.text
