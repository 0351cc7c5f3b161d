"""`raycache cache` against a real server with a scripted engine: what it asks, what it prints, what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import service
from launch.cli.cache import summary
from launch.cli.main import main
from raycache.api.tokenizer import Tokenizer
from raycache.errors import ConfigError
from raycache.types import CacheAction, CacheCommand
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_port, run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No services but those of the test."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("RAYCACHE_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


Order = Callable[..., int]


@pytest.fixture
def order(engine: ScriptedEngine, tokenizer: Tokenizer) -> Order:
    """Serve, give one order, and return its exit code."""

    def order(*arguments: str, **settings: Any) -> int:
        codes: list[int] = []

        async def scenario() -> None:
            async with over_port(engine, tokenizer, **settings) as endpoint:
                command = ["cache", arguments[0], "--endpoint", endpoint, *arguments[1:]]
                codes.append(await asyncio.to_thread(main, command))

        run(scenario())
        return codes[0]

    return order


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["attach", "redis://h:1/0"], CacheCommand(CacheAction.ATTACH, url="redis://h:1/0")),
        (["attach", "file:///d", "--size", "1KiB"], CacheCommand(CacheAction.ATTACH, url="file:///d?size=1024")),
        (["detach"], CacheCommand(CacheAction.DETACH)),
        (["clear"], CacheCommand(CacheAction.CLEAR, tiers=("device", "host", "storage"))),
        (["clear", "--tier", "host", "--tier", "device"], CacheCommand(CacheAction.CLEAR, tiers=("host", "device"))),
        (["resize", "2MiB"], CacheCommand(CacheAction.RESIZE, size=2**21)),
        (["scrub"], CacheCommand(CacheAction.SCRUB, timeout_s=600.0)),
        (["flush"], CacheCommand(CacheAction.FLUSH, timeout_s=600.0)),
        (["flush", "--timeout-s", "5"], CacheCommand(CacheAction.FLUSH, timeout_s=5.0)),
    ],
)
def test_a_command_reaches_the_engine(
    engine: ScriptedEngine,
    order: Order,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    wanted: CacheCommand,
) -> None:
    assert order(*arguments) == 0
    assert engine.commands == [wanted] and capsys.readouterr().out == "done\n"


def test_an_inspected_prompt_is_text_a_file_or_a_request(
    engine: ScriptedEngine, order: Order, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("Grüße\n", encoding="utf-8")
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}], "cache_salt": "t"}))
    assert order("inspect", "Hello", "--cache-salt", "s") == 0
    assert order("inspect", "--file", str(text)) == 0
    assert order("inspect", "--file", str(request)) == 0
    prompts = [tuple(tokenizer.encode(text, add_special_tokens=True)) for text in ("Hello", "Grüße\n")]
    assert [one.prompt for one in engine.commands[:2]] == prompts
    assert tokenizer.decode(engine.commands[2].prompt, skip_special_tokens=False).startswith("<|im_start|>user\nHi")
    assert [one.cache_salt for one in engine.commands] == ["s", "", "t"]


def test_inspect_prints_what_each_tier_would_hit_and_why_not_more(
    engine: ScriptedEngine, order: Order, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = {"device": 0, "host": 256, "storage": 512}
    engine.answer = {"prompt_tokens": 1024, "tiers": tiers, "cut_by": "state", "miss": "state_missing"}
    assert order("inspect", "x") == 0
    assert capsys.readouterr().out.splitlines() == [
        "1024 tokens",
        "",
        "TIER     TOKENS HIT  OF THE PROMPT",
        "device   0           0.0 %",
        "host     256         25.0 %",
        "storage  512         50.0 %",
        "",
        "reason for the miss: state_missing (state)",
    ]


def test_status_prints_settings_room_figures_and_warnings(
    engine: ScriptedEngine, order: Order, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = {"host": {"pages_free": 12288, "hit_rate": 0.25}, "storage": {"bytes_used": 3 * 2**29, "up": True}}
    engine.answer = {"tiers": tiers, "warnings": ["storage stores and never hits: page_size differs"]}
    assert order("status", host_memory="1GiB") == 0
    said = capsys.readouterr().out
    assert "host_memory=1GiB" in said and "host       4,096 tokens\n" in said
    rows = [line.split(maxsplit=2) for line in said.splitlines()]
    for row in (
        ["host", "pages_free", "12,288"],
        ["host", "hit_rate", "0.250"],
        ["storage", "bytes_used", "1.5 GiB"],
        ["storage", "up", "True"],
    ):
        assert row in rows
    assert said.endswith("\nwarning: storage stores and never hits: page_size differs\n")


def test_json_is_the_whole_answer(engine: ScriptedEngine, order: Order, capsys: pytest.CaptureFixture[str]) -> None:
    engine.answer = {"checked": 5, "bad": 0, "by": {"kind": [1, 2]}}
    assert order("scrub", "--json") == 0
    assert json.loads(capsys.readouterr().out) == engine.answer
    assert order("scrub") == 0
    assert capsys.readouterr().out.splitlines() == ["WHAT     VALUE", "checked  5", "bad      0", "by.kind  1, 2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["resize", "big"], "HTTP 400: size must be a number of bytes"),
        (["attach", "file:///d?size=1B", "--size", "1B"], "send only one of them"),
        (["detach"], "HTTP 400: nothing is attached"),
        (["inspect"], "either a PROMPT or --file FILE"),
        (["inspect", "x", "--file", "y"], "either a PROMPT or --file FILE"),
        (["inspect", "--file", "/nowhere.txt"], "/nowhere.txt"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_2(
    engine: ScriptedEngine,
    order: Order,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    engine.answer = ConfigError("nothing is\nattached")
    assert order(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("raycache: error: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize("content", ["[1]", "{", '"x"'])
def test_a_file_that_holds_no_request_is_named(
    order: Order, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    file = tmp_path / "request.json"
    file.write_text(content)
    assert order("inspect", "--file", str(file)) == 2
    assert "request.json" in capsys.readouterr().err


def test_the_key_comes_from_the_flag_or_the_environment(
    engine: ScriptedEngine, order: Order, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert order("scrub", api_key="secret") == 2
    assert "set RAYCACHE_API_KEY" in capsys.readouterr().err and engine.commands == []
    assert order("scrub", "--api-key", "secret", api_key="secret") == 0
    monkeypatch.setenv("RAYCACHE_API_KEY", "secret")
    assert order("scrub", api_key="secret") == 0


def test_without_an_endpoint_the_only_service_is_asked(
    engine: ScriptedEngine, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with over_port(engine, tokenizer) as endpoint:
            with service.register(endpoint, model="tiny", ray_address="local", dashboard=""):
                assert await asyncio.to_thread(main, ["cache", "scrub"]) == 0
                with service.register("http://127.0.0.1:1", model="tiny", ray_address="local", dashboard=""):
                    assert await asyncio.to_thread(main, ["cache", "scrub"]) == 2

    assert main(["cache", "scrub"]) == 2
    assert "no service runs on this machine; name one with --endpoint" in capsys.readouterr().err
    run(scenario())
    assert len(engine.commands) == 1 and "several services run on this machine" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "status", "--endpoint", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9: " in capsys.readouterr().err


def test_room_is_summed_up_in_a_line_per_tier() -> None:
    tiers = {
        "device": {"tokens": 12288, "bytes": 2**20},
        "host": {"tokens": 131072, "bytes": 2**30, "components": {"full": 120 * 2**20, "state": 8 * 2**20}},
        "storage": {"name": "file:/var/cache", "bytes": 0},
    }
    assert summary(tiers) == [
        "device     12,288 tokens, 1.0 MiB",
        "host       131,072 tokens, 1.0 GiB (full 120.0 MiB, state 8.0 MiB)",
        "storage    file:/var/cache",
    ]
