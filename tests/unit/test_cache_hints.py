"""prompt_cache_key and prompt_cache_retention of the OpenAI API: hints, which never refuse a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.http.keys import new_key
from raycache.api.tokenizer import Tokenizer
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_asgi, run

_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
_COMPLETION = {"model": "tiny", "prompt": "x"}
_DAY_S = 86_400.0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


def test_a_key_is_an_affinity_among_those_of_its_tenant(
    engine: ScriptedEngine, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    keys, lines = zip(*(new_key(name) for name in ("alice", "bob")), strict=True)
    path = tmp_path / "tenants"
    path.write_text("\n".join(lines))
    path.chmod(0o600)

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, api_keys=str(path)) as client:
            for key, sent in ((keys[0], "a" * 5000), (keys[0], "a" * 5000), (keys[0], "b"), (keys[1], "b")):
                client.headers["Authorization"] = f"Bearer {key}"
                for url, body in (("/v1/chat/completions", _CHAT), ("/v1/completions", _COMPLETION)):
                    assert (await client.post(url, json={**body, "prompt_cache_key": sent})).status_code == 200
            assert (await client.post("/v1/completions", json=_COMPLETION)).status_code == 200

    run(scenario())
    *found, without = [one.affinity for one in engine.requests]
    assert without == "" and all(len(each) == 32 for each in found)
    assert found[::2] == found[1::2] and found[0] == found[2] and len(set(found)) == 3


@pytest.mark.parametrize(
    ("eviction", "sent", "kept"),
    [
        ("priority", {"prompt_cache_retention": "24h"}, (1, _DAY_S)),
        ("priority", {"prompt_cache_retention": "in_memory"}, (1, 600.0)),
        ("priority", {"prompt_cache_retention": "in_memory", "cache_priority": 7}, (7, 0.0)),
        ("priority", {"prompt_cache_retention": "24h", "cache_priority": 0}, (0, 0.0)),
        ("priority", {"prompt_cache_retention": "a week"}, (0, 0.0)),
        ("priority", {}, (0, 0.0)),
        ("lru", {"prompt_cache_retention": "24h"}, (0, 0.0)),
    ],
)
def test_a_retention_is_a_priority_where_there_are_priorities(
    engine: ScriptedEngine, tokenizer: Tokenizer, eviction: str, sent: dict[str, Any], kept: tuple[int, float]
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, eviction=eviction) as client:
            assert (await client.post("/v1/chat/completions", json={**_CHAT, **sent})).status_code == 200

    run(scenario())
    assert [(one.cache_priority, one.cache_ttl_s) for one in engine.requests] == [kept]
