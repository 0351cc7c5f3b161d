"""`raycache why` against a real server with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from launch.cli.main import main
from launch.cli.why import show
from raycache.api.tokenizer import Tokenizer
from raycache.types import Miss
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_port, run

_RULES = "Answer in few words. Read files before you change them, and run the tests afterwards. " * 2


def test_the_table_names_the_line_that_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(tmp_path))
    engine = ScriptedEngine(tokenizer, context=2000)
    engine.reuse = {"cached_tokens": 0, "miss": Miss.NEVER_SEEN}

    async def scenario() -> None:
        async with over_port(engine, tokenizer) as endpoint, httpx.AsyncClient(base_url=endpoint) as client:
            command = ["why", "--endpoint", endpoint]
            assert await asyncio.to_thread(main, command) == 0
            for number in (12345, 67890):
                body = {"model": "tiny", "max_tokens": 2, "prompt": f"x-request-id: {number}\n{_RULES}"}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert await asyncio.to_thread(main, command) == 0
            assert await asyncio.to_thread(main, [*command, "--json"]) == 0

    run(scenario())
    empty, head, row, *rest = capsys.readouterr().out.splitlines()
    assert empty == "no prompt has left a known one yet"
    assert head.split()[:4] == ["TENANT", "CAUSE", "PLACE", "REQUESTS"]
    assert row.startswith("-       volatile/header  line 1 of the prompt, x-request-id")
    assert json.loads("\n".join(rest))["tenants"][""]["requests"] == 2


def test_names_that_clients_chose_cannot_control_the_terminal() -> None:
    cause = {"cause": "changed", "kind": "tools", "place": "tool \x1b[2J", "requests": 1, "lost_tokens": 5}
    shown = show({"tenants": {"alice": {"causes": [{**cause, "lost_share": 0.5, "lost_s": 0.1}]}}})
    assert "\x1b" not in shown and "tool ?[2J" in shown
