"""Web pages of other origins: which may use the server, and that browsers may ask before they have a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import ConfigError
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_asgi, run

_PAGE = "https://chat.example.com"
_ASKS = {
    "Origin": _PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}
_BODY = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


@pytest.mark.parametrize("allowed", [_PAGE, f"http://localhost:3000, {_PAGE}", "*"])
def test_a_page_may_ask_without_a_key_and_read_with_one(
    engine: ScriptedEngine, tokenizer: Tokenizer, allowed: str
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, api_key="secret", allow_origin=allowed) as client:
            asked = await client.options("/v1/chat/completions", headers=_ASKS)
            assert asked.status_code == 200
            assert asked.headers["access-control-allow-origin"] in (_PAGE, "*")
            assert "POST" in asked.headers["access-control-allow-methods"]
            assert set(_ASKS["Access-Control-Request-Headers"].split(",")) <= {
                name.strip().lower() for name in asked.headers["access-control-allow-headers"].split(",")
            }
            key = {"Origin": _PAGE, "Authorization": "Bearer secret"}
            for headers, status in ((key, 200), ({"Origin": _PAGE}, 401)):
                answer = await client.post("/v1/chat/completions", json=_BODY, headers=headers)
                assert answer.status_code == status
                assert answer.headers["access-control-allow-origin"] in (_PAGE, "*")
            assert answer.json()["error"]["code"] == "invalid_api_key"

    run(scenario())


@pytest.mark.parametrize("allowed", ["none", "https://other.example.com"])
def test_other_pages_may_not(engine: ScriptedEngine, tokenizer: Tokenizer, allowed: str) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, allow_origin=allowed) as client:
            asked = await client.options("/v1/chat/completions", headers=_ASKS)
            assert asked.status_code in (400, 405)
            answer = await client.post("/v1/chat/completions", json=_BODY, headers={"Origin": _PAGE})
            for one in (asked, answer):
                assert one.headers.get("access-control-allow-origin") != _PAGE

    run(scenario())


def test_commands_of_pages_need_a_key_whatever_the_origin(
    engine: ScriptedEngine, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, allow_origin="*") as client:
            answer = await client.post("/cache/clear", json={}, headers={"Origin": _PAGE})
            assert (answer.status_code, engine.commands) == (403, [])

    run(scenario())


@pytest.mark.parametrize("wrong", ["chat.example.com", f"{_PAGE}/", f"{_PAGE};x", "", f"{_PAGE},"])
def test_what_is_no_origin_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="allow_origin"):
        Config(allow_origin=wrong)
