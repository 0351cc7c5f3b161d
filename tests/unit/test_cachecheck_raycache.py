"""`raycache cachecheck` against RayCache itself: tiny models of several kinds of state, all tiers, over HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from launch.cli.main import main
from raycache.cachecheck.client import Client, Connection
from tests.oracle import tiny_tokenizers
from tests.oracle.families import make_family
from tests.oracle.stepped_server import served


async def flush(url: str) -> bool:
    client = Client(Connection(url), budget=0)
    try:
        return await client.command("/cache/clear")
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"host_memory": "64MiB", "num_pages": 120}),  # long prompts leave device memory
        pytest.param("gemma3", {"draft": "ngram"}, marks=pytest.mark.long),
        pytest.param("qwen3_next", {"host_memory": "64MiB", "num_pages": 200}, marks=pytest.mark.long),
    ],
)
def test_no_fault_is_found_in_raycache(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    settings: dict[str, Any],
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # not for addresses of this machine
    model = make_family(tmp_path / "model", family, vocab_size=400)
    tiny_tokenizers.byte_level(model)
    page = tmp_path / "report.html"
    with served(model, page_size=16, **{"num_pages": 400, **settings}) as url:
        flags = ["--prompt-tokens", "60", "--budget-requests", "120", "--seed", "3", "--json", "--html", str(page)]
        code = main(["cachecheck", url, *flags])
        assert asyncio.run(flush(url))
    found = json.loads(capsys.readouterr().out)
    assert code == 0, found["verdict"]
    rows = found["scenarios"]
    assert found["target"]["cold"] == "salt" and found["target"]["shows_cached"]
    assert all(rows[name]["hits"] for name in ("repeated", "branched", "grown", "tools", "cut", "load"))
    assert found["target"]["has_drafts"] == ("draft" in settings)
    assert "</html>" in page.read_text()
