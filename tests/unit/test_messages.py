"""/v1/messages with a scripted engine and the official client, and as Claude Code asks."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from raycache.api.tokenizer import Tokenizer
from raycache.errors import EngineStoppedError, QueueFullError
from raycache.types import FinishReason
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import TEXT, ScriptedEngine, over_asgi, over_port, run
from tests.unit.test_chat_answers import ANSWER, TEMPLATE

_KEY = "secret"
_CONTEXT = 4096
_TOOL = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
_MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer, context=_CONTEXT)


@asynccontextmanager
async def official(
    engine: ScriptedEngine, tokenizer: Tokenizer, **settings: Any
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        over_port(engine, tokenizer, api_key=_KEY, **settings) as endpoint,
        anthropic.AsyncAnthropic(base_url=endpoint, api_key=_KEY, max_retries=0) as client,
    ):
        yield client


def ask(**fields: Any) -> Any:
    return {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}], **fields}


def claude_code(line: str, **fields: Any) -> dict[str, Any]:
    """A first request of Claude Code, its texts shortened."""
    return {
        "model": "tiny",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nNotes of the project.\n</system-reminder>"},
                    {"type": "text", "text": "Say hi.", **_MARK},
                ],
            },
            {"role": "system", "content": "Agents that can be asked: none."},
        ],
        "system": [
            {"type": "text", "text": line},
            {"type": "text", "text": "You are an agent.", **_MARK},
            {"type": "text", "text": "\nYou help with software.\n", **_MARK},
        ],
        "tools": [_TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        "metadata": {"user_id": '{"device_id":"a3f2"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **fields,
    }


def events_of(text: str) -> list[tuple[str, Any]]:
    """(name, data) of each server-sent event."""
    found = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_the_official_client_gets_a_message(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            whole = await client.messages.create(**ask(system="Be brief."))
            assert [block.to_dict() for block in whole.content] == [{"type": "text", "text": TEXT}]
            assert (whole.stop_reason, whole.stop_sequence, whole.model) == ("end_turn", None, "tiny")
            assert whole.id.startswith("msg_") and whole._request_id
            prompt_len, output_len = (
                len(engine.requests[0].prompt),
                len(tokenizer.encode(TEXT, add_special_tokens=False)) + 1,
            )
            usage = whole.usage
            assert usage.cache_read_input_tokens == prompt_len // 2 and usage.output_tokens == output_len
            assert usage.input_tokens + usage.cache_read_input_tokens + (usage.cache_creation_input_tokens or 0) == (
                prompt_len
            )
            async with client.messages.stream(**ask(system="Be brief.")) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                last = await stream.get_final_message()
            assert text == TEXT
            given, expected = last.to_dict(), whole.to_dict()
            assert given | {"id": ""} == expected | {"id": "", "stop_details": None}

    run(scenario())
    assert tokenizer.decode(engine.requests[0].prompt, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert engine.cancelled == []


def test_the_end_of_a_message_has_its_reason(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            stopped = await client.messages.create(**ask(stop_sequences=["six", "five"]))
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "five")
            assert stopped.content[0].to_dict()["text"] == TEXT[: TEXT.index("five")]
            cut = await client.messages.create(**ask(max_tokens=3))
            assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 3)
            async with client.messages.stream(**ask(stop_sequences=["five"])) as stream:
                last = await stream.get_final_message()
            assert (last.stop_reason, last.stop_sequence) == ("stop_sequence", "five")

    run(scenario())


def test_counted_tokens_are_those_of_the_prompt(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    body = {
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [_TOOL],
        "messages": [{"role": "user", "content": "Hi, " * 50}],
    }

    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            counted = await client.messages.count_tokens(**{"model": "tiny", **body})
            await client.messages.create(**ask(**body))
            assert counted.input_tokens == len(engine.requests[0].prompt)
            long: Any = [{"role": "user", "content": "x1" * _CONTEXT}]
            beyond = await client.messages.count_tokens(model="tiny", messages=long)
            assert beyond.input_tokens > _CONTEXT

    run(scenario())


@pytest.mark.parametrize("drop", [True, False])
def test_the_attribution_line_does_not_end_the_prefix(engine: ScriptedEngine, tokenizer: Tokenizer, drop: bool) -> None:
    lines = [f"x-anthropic-billing-header: cc_version=2.1.177.01c; cch={number};" for number in ("36ee5", "0a1b2")]

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, drop_attribution=drop) as client:
            for line in lines:
                answer = await client.post("/v1/messages?beta=true", json=claude_code(line))
                assert answer.status_code == 200, answer.text
            assert len({tuple(request.prompt) for request in engine.requests}) == (1 if drop else 2)
            system = {"role": "system", "content": [{"type": "text", "text": lines[0]}, {"type": "text", "text": "A"}]}
            body = ask(messages=[system, {"role": "user", "content": "Hi"}])
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200

    run(scenario())
    prompts = [tokenizer.decode(request.prompt) for request in engine.requests]
    assert all(("billing" in prompt) is not drop for prompt in prompts)


def test_a_request_of_claude_code_is_answered(
    engine: ScriptedEngine, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {
        "Authorization": f"Bearer {_KEY}",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    }

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, api_key=_KEY) as client:
            for _ in range(2):
                answer = await client.post("/v1/messages?beta=true", json=claude_code("x"), headers=headers)
                assert answer.status_code == 200
                assert answer.headers["content-type"].startswith("text/event-stream")
                assert answer.headers["request-id"] == answer.headers["x-request-id"]
            events = events_of(answer.text)
            assert all(name == data["type"] for name, data in events)
            names = [name for name, _ in events]
            assert names[:2] == ["message_start", "content_block_start"]
            assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
            assert set(names[2:-3]) == {"content_block_delta"}
            assert "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta") == TEXT

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert engine.requests[0].sampling.max_tokens == 32000  # the engine ends at the context's end
    warnings = [record.getMessage() for record in caplog.records if "web_search" in record.getMessage()]
    assert len(warnings) == 1


def test_errors_are_those_of_the_official_client(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with official(engine, tokenizer, max_body="64KiB") as client:
            create = client.messages.create
            with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].*only text") as bad:
                await create(**ask(messages=[{"role": "user", "content": [{"type": "image"}]}]))
            assert isinstance(bad.value.body, dict) and bad.value.body["error"]["type"] == "invalid_request_error"
            assert bad.value.body["request_id"] == bad.value.request_id
            with pytest.raises(anthropic.NotFoundError, match="use 'tiny'") as missing:
                await create(**ask(model="other"))
            assert missing.value.type == "not_found_error"
            with pytest.raises(anthropic.AuthenticationError) as key:
                await client.with_options(api_key="wrong").messages.create(**ask())
            assert key.value.type == "authentication_error" and key.value.request_id
            with pytest.raises(
                anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {_CONTEXT - 1} max"
            ):
                await create(**ask(messages=[{"role": "user", "content": "x1" * _CONTEXT}]))
            with pytest.raises(anthropic.APIStatusError) as large:
                await create(**ask(messages=[{"role": "user", "content": "x" * 2**17}]))
            assert (large.value.status_code, large.value.type) == (413, "request_too_large")
            for stream in (False, True):
                engine.refusal = QueueFullError(8, 2.5)
                with pytest.raises(anthropic.RateLimitError) as full:
                    await create(**ask(stream=stream))
                assert full.value.response.headers["retry-after"] == "3"
                engine.refusal = EngineStoppedError("the engine is stopped")
                with pytest.raises(anthropic.InternalServerError, match="the engine is stopped") as stopped:
                    await create(**ask(stream=stream))
                assert (stopped.value.status_code, stopped.value.type) == (503, "overloaded_error")

    run(scenario())


def test_a_failure_midway_is_an_error_event(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    engine.failure = (4, FinishReason.ERROR)

    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            seen = ""
            with pytest.raises(anthropic.APIError, match="rank 3 is lost"):
                async with client.messages.stream(**ask()) as stream:
                    async for text in stream.text_stream:
                        seen += text
            assert seen and TEXT.startswith(seen)
        async with over_asgi(engine, tokenizer) as plain:
            answer = await plain.post("/v1/messages", json=ask(stream=True))
            name, data = events_of(answer.text)[-1]
            assert (name, data["type"], data["error"]["type"]) == ("error", "error", "api_error")

    run(scenario())


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/models", "/v1/chat/completions"])
def test_a_key_can_come_as_x_api_key(engine: ScriptedEngine, tokenizer: Tokenizer, path: str) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, api_key=_KEY) as client:
            method = "GET" if path == "/v1/models" else "POST"

            async def status(**headers: str) -> int:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                return (await client.request(method, path, json=ask(), headers=named)).status_code

            assert await status(x_api_key=_KEY) == 200
            assert await status(x_api_key="wrong") == 401
            assert await status() == 401
            assert await status(authorization=f"Bearer {_KEY}", x_api_key="wrong") == 200
            assert await status(authorization="Bearer wrong", x_api_key=_KEY) == 401

    run(scenario())


@pytest.mark.parametrize(("eviction", "expected"), [("priority", (1, 300.0)), ("lru", (0, 0.0))])
def test_cache_marks_are_never_refused(
    engine: ScriptedEngine, tokenizer: Tokenizer, eviction: str, expected: tuple[int, float]
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, eviction=eviction) as client:
            assert (await client.post("/v1/messages", json=ask(**_MARK))).status_code == 200

    run(scenario())
    (request,) = engine.requests
    assert (request.cache_priority, request.cache_ttl_s) == expected


def test_pings_come_until_the_first_event(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycache.api.run.PING_S", 0.02)
    engine = ScriptedEngine(tokenizer, context=_CONTEXT, delay_s=0.05)

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            answer = await client.post("/v1/messages", json=ask(stream=True, max_tokens=3))
            names = [name for name, _ in events_of(answer.text)]
            assert names[0] == "ping" and names[names.count("ping")] == "message_start"
            assert names[-1] == "message_stop"
        async with official(engine, tokenizer) as official_client:
            whole = await official_client.messages.create(**ask(max_tokens=3))
            async with official_client.messages.stream(**ask(max_tokens=3)) as stream:
                assert (await stream.get_final_text()) == "".join(block.to_dict()["text"] for block in whole.content)
            engine.failure = (0, FinishReason.ERROR)
            with pytest.raises(anthropic.APIStatusError, match="rank 3 is lost"):
                await official_client.messages.create(**ask(stream=False))
            with pytest.raises(anthropic.APIError, match="rank 3 is lost"):
                async with official_client.messages.stream(**ask()) as stream:
                    await stream.get_final_message()

    run(scenario())


def test_a_client_that_goes_away_while_it_waits_cancels_its_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycache.api.run.PING_S", 0.02)
    engine = ScriptedEngine(tokenizer, context=_CONTEXT, delay_s=60.0)

    async def scenario() -> None:
        async with (
            over_port(engine, tokenizer) as endpoint,
            httpx.AsyncClient(base_url=endpoint) as client,
            client.stream("POST", "/v1/messages", json=ask(stream=True)) as answer,
        ):
            assert "ping" in await anext(answer.aiter_lines())
            assert len(engine.running) == 1
            await answer.aclose()
            while engine.running:
                await asyncio.sleep(0.01)

    run(scenario())
    assert len(engine.cancelled) == 1


def test_an_agent_loops_over_calls_and_results(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    find = {"name": "find", "input_schema": {"type": "object", "properties": {"what": {"type": "string"}}}}
    tools: Any = [find, {"name": "now", "input_schema": {"type": "object"}}]
    messages: list[Any] = [{"role": "user", "content": "Tea?"}]
    engine = ScriptedEngine(tokenizer, text=ANSWER, context=_CONTEXT)

    async def scenario() -> None:
        async with official(engine, tokenizer, chat_template=str(path)) as client:
            fields = {"tools": tools, "thinking": {"type": "adaptive"}, "max_tokens": 500}
            whole = await client.messages.create(**ask(messages=messages, **fields))
            thinking, text, first, second = [block.to_dict() for block in whole.content]
            assert thinking.pop("signature") and thinking == {"type": "thinking", "thinking": "I look it up."}
            assert text == {"type": "text", "text": "Wait."}
            assert (first["name"], first["input"]) == ("find", {"what": "tea", "count": 2})
            assert (second["name"], second["input"]) == ("now", {})
            assert whole.stop_reason == "tool_use" and first["id"] != second["id"]
            details = whole.usage.output_tokens_details
            assert details and 0 < details.thinking_tokens < whole.usage.output_tokens
            async with client.messages.stream(**ask(messages=messages, **fields)) as stream:
                streamed = await stream.get_final_message()
            assert [_without_id(block) for block in streamed.content] == [_without_id(block) for block in whole.content]
            assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": first["id"], "content": "two"},
                {"type": "tool_result", "tool_use_id": second["id"], "content": "no clock", "is_error": True},
                {"type": "text", "text": "Go on."},
            ]
            turns = [*messages, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
            await client.messages.create(**ask(messages=turns, **fields))
            off = await client.messages.create(**ask(messages=messages, thinking={"type": "disabled"}))
            assert [block.type for block in off.content] == ["text"]  # without tools, calls are text

    run(scenario())
    prompts = [tokenizer.decode(request.prompt, skip_special_tokens=False) for request in engine.requests]
    assert prompts[2].startswith(prompts[0].removesuffix("<|assistant|><think>"))
    calls = '<tool_call>{"name": "find", "arguments": {"what": "tea", "count": 2}}</tool_call>'
    assert f"<|assistant|>Wait.{calls}<tool_call>" in prompts[2]
    assert prompts[2].endswith("<|tool|>two\n<|tool|>Error: no clock\n<|user|>Go on.\n<|assistant|><think>")
    assert prompts[3].endswith("<|assistant|><think></think>")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "find"}])
def test_a_required_tool_is_enforced(tokenizer: Tokenizer, tmp_path: Path, choice: Any) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    engine = ScriptedEngine(tokenizer, text=ANSWER, context=_CONTEXT)
    find = {"name": "find", "input_schema": {"type": "object", "properties": {"what": {"type": "string"}}}}

    async def scenario() -> None:
        async with official(engine, tokenizer, chat_template=str(path)) as client:
            await client.messages.create(**ask(tools=[find], max_tokens=500))
            await client.messages.create(**ask(tools=[find], tool_choice=choice, max_tokens=500))

    run(scenario())
    assert ["find" in request.sampling.grammar for request in engine.requests] == [False, True]


def _without_id(block: Any) -> dict[str, Any]:
    return {name: value for name, value in block.to_dict().items() if name not in ("id", "parsed_output")}


def test_an_answer_in_a_form_is_constrained(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}

    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            wanted = {"format": {"type": "json_schema", "schema": schema}}
            await client.messages.create(**ask(output_config=wanted))
            assert "city" in engine.requests[0].sampling.grammar
            refused = {"format": {"type": "json_schema", "schema": {"not": {}}}}
            with pytest.raises(anthropic.BadRequestError, match='"output_config.format: the schema at #'):
                await client.messages.create(**ask(output_config=refused))
            with pytest.raises(anthropic.BadRequestError, match='"output_format: the schema at #'):
                await client.messages.create(**ask(extra_body={"output_format": refused["format"]}))
            with pytest.raises(anthropic.BadRequestError, match="stop_sequences must not contain an empty string"):
                await client.messages.create(**ask(stop_sequences=[""]))

    run(scenario())


@pytest.mark.parametrize("depth", [100, 300, 800, 900, 940, 980])
def test_deeply_nested_bodies_are_answered_or_refused(tokenizer: Tokenizer, tmp_path: Path, depth: int) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    engine = ScriptedEngine(tokenizer, context=_CONTEXT)
    nested = '{"a":' * depth + "{}" + "}" * depth
    call = {"type": "tool_use", "id": "t", "name": "n", "input": "HERE"}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [call]}]
    tool = {"name": "n", "input_schema": "HERE"}
    form = {"format": {"type": "json_schema", "schema": "HERE"}}

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, chat_template=str(path)) as client:
            for fields in ({"messages": turns}, {"tools": [tool]}, {"output_config": form}):
                body = json.dumps(ask(**fields)).replace('"HERE"', nested)
                answer = await client.post("/v1/messages", content=body, headers={"Content-Type": "application/json"})
                assert answer.status_code in (200, 400), answer.text

    run(scenario())


def test_very_many_messages_take_no_longer_than_their_number(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, context=_CONTEXT)

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            for content in ("x", [{"type": "text", "text": "x"}]):
                body = ask(messages=[{"role": "user", "content": content}] * 50_000)
                answer = await client.post("/v1/messages", json=body)
                assert "prompt is too long" in answer.text

    run(scenario())
