"""Endpoints that generate nothing: tokens, version, health; and what the server tolerates of clients."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

import raycache
from raycache.api.tokenizer import Tokenizer
from tests.oracle import tiny_tokenizers
from tests.security.raw import connection
from tests.unit.scripted import TEXT, ScriptedEngine, over_asgi, over_port, run

_CHAT = [{"role": "user", "content": "Grüße 🎉"}]
_RENDERED = "<|im_start|>user\nGrüße 🎉<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


def test_a_text_is_tokenised_and_back(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            for adds in (True, False):
                sent = {"prompt": TEXT, "add_special_tokens": adds, "return_token_strs": True}
                found = (await client.post("/tokenize", json=sent)).json()
                assert found["tokens"] == tokenizer.encode(TEXT, add_special_tokens=adds)
                assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 200)
                assert found["token_strs"] == [tokenizer.token_text(token_id) for token_id in found["tokens"]]
            back = await client.post("/detokenize", json={"model": "tiny", "tokens": found["tokens"]})
            assert back.json() == {"prompt": TEXT}

    run(scenario())


def test_a_conversation_is_tokenised_as_a_chat_is(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            found = (await client.post("/tokenize", json={"model": "tiny", "messages": _CHAT})).json()
            assert found["token_strs"] is None
            assert tokenizer.decode(found["tokens"], skip_special_tokens=False) == _RENDERED
            await client.post("/v1/chat/completions", json={"model": "tiny", "messages": _CHAT})
            assert list(engine.requests[0].prompt) == found["tokens"]
            sent = {"messages": _CHAT, "add_generation_prompt": False}
            bare = (await client.post("/tokenize", json=sent)).json()
            assert found["tokens"][: bare["count"]] == bare["tokens"] and bare["count"] < found["count"]
            long = (await client.post("/tokenize", json={"prompt": "x " * 500})).json()
            assert long["count"] > long["max_model_len"]

    run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": _CHAT}, 400, "messages"),
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/tokenize", {"messages": "x"}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, 2**40]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ],
)
def test_wrong_fields_are_named(
    engine: ScriptedEngine, tokenizer: Tokenizer, path: str, body: dict[str, Any], status: int, field: str
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)

    run(scenario())


def test_probes_of_clients_are_answered(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, api_key="secret") as client:
            for path in ("/", "/ping", "/health"):
                assert (await client.head(path)).status_code == (await client.get(path)).status_code == 200
            assert (await client.get("/version")).json() == {"version": raycache.__version__}
            assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 401
            client.headers["Authorization"] = "Bearer secret"
            assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()
            assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200

    run(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_event_has_the_usage_so_far(engine: ScriptedEngine, tokenizer: Tokenizer, path: str) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            options = {"include_usage": True, "continuous_usage_stats": True}
            said = {"prompt": "x"} if path == "/v1/completions" else {"messages": _CHAT}
            sent = {"model": "tiny", "stream": True, "stream_options": options, "max_tokens": 8, "n": 2, **said}
            text = (await client.post(path, json=sent)).text
            usages = [json.loads(line[6:])["usage"] for line in text.splitlines() if line.startswith("data: {")]
            counts = [usage["completion_tokens"] for usage in usages]
            assert counts == sorted(counts) and counts[-1] == 16 and len(counts) > 8
            assert {usage["prompt_tokens"] for usage in usages} == {len(engine.requests[0].prompt)}
            sent["stream_options"] = {"continuous_usage_stats": True}  # without include_usage, as in vLLM
            assert '"usage"' not in (await client.post(path, json=sent)).text

    run(scenario())


def test_a_prompt_that_is_too_long_is_told_in_the_words_clients_look_for(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            for fields in ({"prompt": "x " * 500}, {"prompt": "x", "max_tokens": 500}):
                error = (await client.post("/v1/completions", json={"model": "tiny", **fields})).json()["error"]
                assert error["code"] == "context_length_exceeded"
                assert "This model's maximum context length is 200 tokens" in error["message"]

    run(scenario())


def test_an_old_client_gets_a_stream_without_chunks(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_port(engine, tokenizer) as endpoint:
            sent = {"model": "tiny", "prompt": "x", "max_tokens": 100, "stream": True, "seed": 1}
            data = json.dumps(sent).encode()
            head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
            said = await spoken(endpoint, f"{head}\r\nConnection: keep-alive\r\n\r\n".encode() + data)
            head, _, body = said.partition(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            assert b"connection: close" in lines and not any(b"transfer-encoding" in line for line in lines)
            async with httpx.AsyncClient() as client:
                wanted = (await client.post(f"{endpoint}/v1/completions", json=sent)).text
            assert texts(body.decode()) == texts(wanted) and body.endswith(b"data: [DONE]\n\n")
            assert (await spoken(endpoint, b"GET /health HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")[2] == b"ok\n"

    run(scenario())


async def spoken(endpoint: str, data: bytes) -> bytes:
    """Everything that the server says until it closes the connection."""
    async with connection(endpoint) as (reader, writer):
        writer.write(data)
        return await reader.read()


def texts(events: str) -> list[str]:
    lines = [line[6:] for line in events.splitlines() if line.startswith("data: {")]
    return [choice["text"] for line in lines for choice in json.loads(line)["choices"]]
