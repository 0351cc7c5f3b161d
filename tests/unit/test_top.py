"""`raycache top`: what a frame says, and that it fits."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch.cli.main import main
from launch.cli.top_view import Change, view
from raycache.api.tokenizer import Tokenizer
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_port, run

_ROOT = Path(__file__).resolve().parents[2]
_NODES = ("10.0.0.17", "10.0.0.18")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


def ranks(count: int) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "coords": f"pp 0, cp {rank // 8}, tp {rank % 8}",
            "node": _NODES[2 * rank // count],
            "device": f"cuda:{rank % 8}",
            "pages": 5120,
        }
        for rank in range(count)
    ]


def figures(**more: Any) -> dict[str, Any]:
    return {
        "model": "a-model-whose-name-is-rather-long-Instruct",
        "running": 12,
        "waiting": 3,
        "epoch": 2,
        "rebuilds": 1,
        "finished": {"stop": 12000, "length": 345},
        "prompt_tokens": 100_000,
        "cached_tokens": 40_000,
        "computed_tokens": 70_000,
        "output_tokens": 9_000,
        "cached_by_tier": {"device": 30_000, "host": 10_000},
        "misses": {"never_seen": 40, "evicted_host": 25, "timeout": 2, "salt": 1},
        "pages_total": 5120,
        "pages_free": 1280,
        "tiers": {
            "host": {"pages_total": 20000, "pages_free": 10000, "saved_bytes": 1 << 30, "save_s": 2.0, "load_s": 0.0},
            "storage": {"objects": 7, "bytes_used": 3 << 30, "bytes_limit": 4 << 30, "prefetched_bytes": 0},
        },
        "warnings": ["tier inert: storage has stored 700 pages and served none to 50 requests; most often: timeout"],
        "reuse": {
            "achieved": 0.41,
            "achievable": 0.583,
            "error": 0.004,
            "lost": {"gone": 0.01, "unavailable": 0.05, "granularity": 0.113},
            "gain_if_doubled": {"device": 0.0, "storage": 0.027},
        },
        "ranks": ranks(8),
        **more,
    }


def shown(change: Change, *, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(view(change, endpoint="http://127.0.0.1:8000", error=""))
    return capture.get()


def test_rates_are_those_between_two_looks() -> None:
    before = figures()
    tiers = {**before["tiers"], "host": {**before["tiers"]["host"], "saved_bytes": (1 << 30) + (40 << 20), "save_s": 3}}
    now = figures(prompt_tokens=102_000, cached_tokens=41_500, output_tokens=9_500, tiers=tiers)
    text = " ".join(shown(Change(now, before=before, seconds=4.0), width=100).split())
    for said in (
        *("prompt 500", "output 125", "computed 0", "75 % now, 41 % in total", "10.0 MiB/s", "save 25 % busy"),
        *("running 12", "waiting 3", "ended 12.3k", "epoch 2", "gangs lost 1"),
        "reuse 41 % of 58 % (+-0.4) possible twice the storage tier: +2.7 %",
        "lost granularity 11 % unavailable 5 % gone 1 %",
        *("75 % 5120 pages 29 %", "50 % 20.0k pages 10 %", "75 % 3.0 GiB", "never_seen 40 evicted_host 25 timeout 2"),
    ):
        assert said in text, said
    assert "salt" not in text


def test_an_engine_that_began_anew_counts_from_zero() -> None:
    change = Change(figures(output_tokens=50), before=figures(), seconds=2.0)
    assert change.rate("output_tokens") == 25.0
    assert Change(figures(), before={}, seconds=0.0).rate("output_tokens") is None


@pytest.mark.parametrize("count", [8, 32])
def test_a_frame_fits_80_columns_and_24_lines(count: int) -> None:
    change = Change(figures(ranks=ranks(count)), before=figures(), seconds=2.0)
    lines = shown(change).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert ("rank" in text and "pp 0, cp 0, tp 7" in text) if count == 8 else ("16: 16 to 31" in text)
    assert all(node in text for node in _NODES)
    assert "…" not in "".join(line for line in lines if not line.startswith(("!", "a-model")))
    assert "ready  epoch 2  gangs lost 1" in lines[0]


def test_replicas_are_shown_where_there_are_several() -> None:
    replicas = {"0": figures(output_tokens=400, running=7), "b": figures(output_tokens=600, running=5)}
    earlier = {"0": figures(output_tokens=300), "b": figures(output_tokens=100)}
    text = shown(Change(figures(replicas=replicas), before=figures(replicas=earlier), seconds=2.0))
    table = text[text.index("replica") : text.index("rank ")]
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line.startswith(("0 ", "b "))}
    assert rows["0"][1:4] == ["7", "3", "50"]
    assert rows["b"][1:4] == ["5", "3", "250"]
    assert "replica" not in shown(Change(figures(replicas={"0": replicas["0"]}), before={}, seconds=0.0))


def test_once_prints_a_frame_of_a_server(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine(tokenizer)
    engine.figures = {"output_tokens": 7, "cached_by_tier": {"device": 3}}

    async def scenario() -> None:
        async with over_port(engine, tokenizer) as endpoint:
            command = ["top", "--once", "--endpoint", endpoint, "--interval-s", "0.1"]
            assert await asyncio.to_thread(main, command) == 0

    run(scenario())
    text = capsys.readouterr().out
    assert "tiny" in text and "ready" in text and "device" in text
    assert main(["top", "--once", "--endpoint", "http://127.0.0.1:9", "--interval-s", "0.1"]) == 1
    assert "no response" in capsys.readouterr().out


def test_it_runs_in_a_terminal_until_q(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer)

    async def scenario() -> None:
        async with over_port(engine, tokenizer) as endpoint:
            await asyncio.to_thread(watch_and_quit, endpoint)

    run(scenario())


def watch_and_quit(endpoint: str) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "raycache", "top", "--endpoint", endpoint, "--interval-s", "0.2"]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(command, cwd=_ROOT, env=env, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    seen, until_s, is_asked = b"", time.monotonic() + 25, False
    try:
        while process.poll() is None and time.monotonic() < until_s:
            if select.select([leader], [], [], 0.2)[0]:
                seen += _read(leader)
            if seen.count(b"ready") >= 2 and not is_asked:
                is_asked = True
                os.write(leader, b"q")
        assert process.poll() == 0, seen[-500:]
    finally:
        process.kill()
        process.wait(10)
        os.close(leader)


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 65536)
    except OSError:  # the other end is closed: the process has ended
        return b""
