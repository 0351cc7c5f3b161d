"""What one tenant learns of another's prompts from the explanations of its own: nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from raycache.api.tokenizer import Tokenizer
from raycache.types import Miss
from tests.unit.scripted import ScriptedEngine, over_asgi, run

_ALICE, _BOB, _OPERATOR = "alice's key", "bob's key", "the operator's key"
_RULES = "Answer in few words. Read files before you change them, and run the tests afterwards. " * 2
_SECRET = "The launch code is 48151623."


def line(name: str, key: str, rights: str = "") -> str:
    return f"{name} {hashlib.sha256(key.encode()).hexdigest()} {rights}\n"


def header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants"
    path.write_text(line("alice", _ALICE) + line("bob", _BOB) + line("operator", _OPERATOR, "admin"))
    path.chmod(0o600)
    return path


def chat(text: str, salt: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": f"{_RULES}\n{text}\n{_RULES}"}, {"role": "user", "content": "Say hi"}]
    options = {"return_cache_info": True, "cache_salt": salt}
    return {"model": "tiny", "max_tokens": 5, "messages": messages, **options}


def test_no_tenant_sees_anything_of_anothers_prompts(
    engine: ScriptedEngine, tokenizer: Tokenizer, tenants: Path
) -> None:
    engine.reuse = {"cached_tokens": 0, "miss": Miss.NEVER_SEEN}
    engine._context = 2000

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, api_keys=str(tenants)) as client:
            path = "/v1/chat/completions"
            secret = f"Password: {_SECRET}"
            assert (await client.post(path, json=chat(secret, "s"), headers=header(_ALICE))).status_code == 200
            salts = ["", "s", "alice", _ALICE, hashlib.sha256(_ALICE.encode()).hexdigest(), *_salts(engine)]
            for salt in salts:
                # The whole prompt, all of it but the secret, and guesses of the secret: no answer may differ by them.
                for guess in (secret, "Password: ", "Password: The launch code is 4", "Something else"):
                    sent = chat(guess, f"{salt}|{guess}")
                    info = (await client.post(path, json=sent, headers=header(_BOB))).json()["raycache"]
                    assert "divergence" not in info, (salt, guess)
            for salt in salts:
                first = await client.post(path, json=chat("Password: a", salt), headers=header(_BOB))
                again = await client.post(path, json=chat("Password: The b", salt), headers=header(_BOB))
                for answer in (first, again):
                    assert "48151623" not in answer.text and "launch" not in answer.text
            own = (await client.get("/cache/why", headers=header(_BOB))).json()
            assert set(own) == {"tenants"} and set(own["tenants"]) == {"bob"}
            assert "alice" not in json.dumps(own) and "launch" not in json.dumps(own)
            assert own["tenants"]["bob"]["requests"] == len(salts) * 6
            for tried in ("?tenant=alice", "?tenant=", "?tenant=operator"):
                asked = await client.get(f"/cache/why{tried}", headers=header(_BOB))
                assert set(asked.json()["tenants"]) == {"bob"}
            seen = (await client.get("/cache/why", headers=header(_OPERATOR))).json()
            assert set(seen["tenants"]) == {"alice", "bob"}
            assert "launch" not in json.dumps(seen)

    run(scenario())


def _salts(engine: ScriptedEngine) -> list[str]:
    """The salts that the engine has seen, as if they had leaked."""
    return sorted({request.cache_salt for request in engine.requests})


def test_a_key_is_needed_and_opens_no_command(engine: ScriptedEngine, tokenizer: Tokenizer, tenants: Path) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, api_keys=str(tenants)) as client:
            assert (await client.get("/cache/why")).status_code == 401
            assert (await client.get("/cache/why", headers=header("nobody's"))).status_code == 401
            assert (await client.post("/cache/why", json={}, headers=header(_ALICE))).status_code in (403, 404, 405)
            assert (await client.get("/cache", headers=header(_ALICE))).status_code == 403
        assert engine.commands == []

    run(scenario())
