"""What applies to requests that set nothing: sampling of generation_config.json, and max_tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.cli.main import main
from raycache.api.defaults import Defaults
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import ConfigError
from raycache.llm import LLM
from raycache.types import SamplingParams
from tests.oracle import tiny_tokenizers
from tests.oracle.tiny import make_tiny
from tests.unit.scripted import ScriptedEngine, over_asgi, run

_QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1], "max_length": 9}
_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
_COMPLETION = {"model": "tiny", "prompt": "x"}
_LIMIT = 200  # of the scripted engine


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


def written(folder: Path, **values: Any) -> str:
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("values", "taken"),
    [
        (_QWEN, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7}, {}),
        ({"do_sample": None, "top_k": -1, "top_p": None}, {"top_k": 0}),
        ({"min_p": 0.1, "repetition_penalty": 1.05}, {"min_p": 0.1, "repetition_penalty": 1.05}),
        ({}, {}),
    ],
)
def test_the_files_sampling_is_taken(tmp_path: Path, values: dict[str, Any], taken: dict[str, float]) -> None:
    model = written(tmp_path, **values)
    for settings in (
        {"model": model},
        {"generation_config": model},
        {"generation_config": f"{model}/generation_config.json"},
    ):
        assert Defaults.of(Config(**settings)).sampling == taken
    assert Defaults.of(Config(model=model, generation_config="none")).sampling == {}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": "0.6"}, "temperature must be a number, got '0.6'"),
        ({"top_k": 1.5}, "top_k must be a number"),
        ({"top_p": True}, "top_p must be a number"),
        ({"top_p": 2}, "top_p"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_a_wrong_value_is_named_with_the_way_out(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        Defaults.of(Config(model=written(tmp_path, **values)))
    assert "generation_config=none" in str(error.value) and str(tmp_path) in str(error.value)


def test_a_file_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    assert Defaults.of(Config(model=str(tmp_path))) == Defaults()
    with pytest.raises(ConfigError, match="use auto, none or a path"):
        Defaults.of(Config(generation_config=str(tmp_path)))


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", _CHAT), ("/v1/completions", _COMPLETION)])
def test_a_requests_own_values_win(
    engine: ScriptedEngine, tokenizer: Tokenizer, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, model=written(tmp_path, **_QWEN)) as client:
            card = (await client.get("/v1/models")).json()["data"][0]
            assert card["default_sampling"] == {
                "temperature": 0.6,
                "top_p": 0.95,
                "top_k": 20,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            }
            for sent in ({}, {"temperature": None}, {"temperature": 1.0, "top_k": -1}, {"temperature": 0, "top_p": 1}):
                assert (await client.post(path, json={**body, **sent})).status_code == 200
            shown = (await client.get("/openapi.json")).json()["components"]["schemas"]["ChatBody"]["properties"]
            assert shown["temperature"]["anyOf"][0]["default"] == 0.6

    run(scenario())
    found = [(one.sampling.temperature, one.sampling.top_p, one.sampling.top_k) for one in engine.requests]
    assert found == [(0.6, 0.95, 20), (0.6, 0.95, 20), (1.0, 0.95, 0), (0.0, 1.0, 20)]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", _CHAT), ("/v1/completions", _COMPLETION)])
def test_too_large_a_max_tokens_is_refused_or_cut(
    engine: ScriptedEngine, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        for setting, status in (("refuse", 400), ("cut", 200)):
            async with over_asgi(engine, tokenizer, excess_max_tokens=setting) as client:
                answer = await client.post(path, json={**body, "max_tokens": 32_000})
                assert answer.status_code == status
                assert (await client.get("/v1/models")).json()["data"][0]["excess_max_tokens"] == setting
                too_long = await client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * _LIMIT})
                assert too_long.json()["error"]["code"] == "context_length_exceeded"

    run(scenario())


def test_a_default_of_max_tokens_is_for_those_that_set_none(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        for settings in ({}, {"default_max_tokens": 7}, {"default_max_tokens": 5000}):
            async with over_asgi(engine, tokenizer, **settings) as client:
                shown = (await client.get("/v1/models")).json()["data"][0]["default_max_tokens"]
                assert shown == settings.get("default_max_tokens")
                for path, body in (("/v1/chat/completions", _CHAT), ("/v1/completions", _COMPLETION)):
                    assert (await client.post(path, json=body)).status_code == 200
                    assert (await client.post(path, json={**body, "max_tokens": 3})).status_code == 200

    run(scenario())
    assert [one.sampling.max_tokens for one in engine.requests] == [None, 3, 16, 3, 7, 3, 7, 3, 5000, 3, 5000, 3]


def test_a_model_in_this_process_and_the_doctor_read_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_tokenizers.byte_level(make_tiny(tmp_path, vocab_size=403, num_hidden_layers=2))
    model = written(folder, do_sample=True, temperature=0.0, repetition_penalty=1.5)
    with LLM(model, device="cpu", page_size=8, num_pages=64, max_model_len=32) as llm:
        wanted = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, repetition_penalty=1.5))
        assert llm.generate([[5, 6, 7]])[0].token_ids == wanted[0].token_ids
        huge = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=10**6))
        assert huge[0].token_ids == wanted[0].token_ids  # the engine ends it with the context
    main(["doctor", model, "--device", "cpu", "--port", "auto", "--kv-memory", "1MiB"])
    said = " ".join(capsys.readouterr().out.split())
    assert "sampling defaults ok temperature=0, repetition_penalty=1.5 (generation_config.json)" in said


def test_the_reference_says_how_many_tokens_a_completion_gets() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    fields = page.partition("## Fields of `/v1/completions`")[2].partition("\n## ")[0]
    (row,) = (line for line in fields.splitlines() if line.startswith("| `max_tokens` "))
    assert f"default: {Defaults().completion_tokens()}," in row
