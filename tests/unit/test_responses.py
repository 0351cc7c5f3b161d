"""POST /v1/responses with a scripted engine and the official client."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest

from raycache.api.tokenizer import Tokenizer
from raycache.errors import EngineStoppedError, QueueFullError
from raycache.types import EngineInfo, FinishReason, GenerateRequest
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import TEXT, ScriptedEngine, over_asgi, run

_CODEX = json.loads((Path(__file__).parents[1] / "data" / "codex_request.json").read_text())
_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    '{{ "\n" if message.content or not loop.first }}'
    '<tool_call>\n{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TURN = (
    "<think>\nI need it.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "look", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "maps__now", "arguments": {}}\n</tool_call>'
)
_TOOLS: Any = [
    {
        "type": "function",
        "name": "look",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
        "strict": False,
    },
    {
        "type": "namespace",
        "name": "maps",
        "description": "Maps.",
        "tools": [{"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}],
    },
]


class Conversing(ScriptedEngine):
    """Gives one text after another, the last one for good; takes long prompts."""

    def __init__(self, tokenizer: Tokenizer, *texts: str) -> None:
        super().__init__(tokenizer, text=texts[0])
        self._texts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]

    async def info(self) -> EngineInfo:
        return replace(await super().info(), max_model_len=20_000)

    def _outputs(self, request: GenerateRequest) -> Any:
        self._script = self._texts[min(len(self.requests), len(self._texts)) - 1]
        return super()._outputs(request)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer"), chat_template=_TEMPLATE))


@asynccontextmanager
async def official(engine: ScriptedEngine, tokenizer: Tokenizer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with over_asgi(engine, tokenizer) as client:
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=client, max_retries=0)


class Trip(pydantic.BaseModel):
    city: str
    days: int


async def drained(stream: Any) -> list[Any]:
    return [event async for event in stream]


def stream_texts(events: list[Any]) -> list[Any]:
    return [event for event in events if event.type == "response.output_text.delta"]


def prompt(engine: ScriptedEngine, tokenizer: Tokenizer, number: int = -1) -> str:
    return tokenizer.decode(engine.requests[number].prompt, skip_special_tokens=False)


def named(items: Any) -> list[dict[str, Any]]:
    """Items of an output without their ids, which are random."""
    return [{name: of for name, of in item.to_dict().items() if name not in ("id", "call_id")} for item in items]


async def raw_events(client: httpx.AsyncClient, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    answer = await client.post("/v1/responses", json={"model": "tiny", "input": "Hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_a_text_whole_and_streamed(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer)

    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            whole = await client.responses.create(
                model="tiny", input="Hi", instructions="Be brief.", metadata={"a": "b"}
            )
            assert (whole.output_text, whole.status, whole.object) == (TEXT, "completed", "response")
            assert (whole.instructions, whole.metadata, whole.error) == ("Be brief.", {"a": "b"}, None)
            assert (whole.to_dict()["store"], whole.tools, whole.parallel_tool_calls) == (False, [], True)
            assert whole.id.startswith("resp_") and whole.output[0].id and whole.output[0].id.startswith("msg_")
            usage, prompt_len = whole.usage, len(engine.requests[0].prompt)
            assert usage and usage.input_tokens == prompt_len
            details = usage.input_tokens_details
            kept_len = prompt_len // 16 * 16  # whole pages
            assert details.cached_tokens == prompt_len // 2
            assert details.cache_write_tokens == kept_len - prompt_len // 2
            assert usage.output_tokens == len(tokenizer.encode(TEXT, add_special_tokens=False)) + 1
            assert usage.total_tokens == usage.input_tokens + usage.output_tokens
            async with client.responses.stream(model="tiny", input="Hi", instructions="Be brief.") as stream:
                events = [event async for event in stream]
                final = await stream.get_final_response()
            assert [event.sequence_number for event in events] == list(range(len(events)))
            deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
            assert len(deltas) > 5 and "".join(deltas) == TEXT
            assert (final.output_text, final.usage) == (TEXT, usage)
            assert engine.requests[0].prompt == engine.requests[1].prompt

    run(scenario())
    assert prompt(engine, tokenizer) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_events_of_a_text_in_full(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(ScriptedEngine(tokenizer, text="one two"), tokenizer) as client:
            events = await raw_events(client, {})
        assert all(name == data["type"] for name, data in events)
        (_, created), (_, progress), (_, added) = events[:3]
        assert created["response"]["output"] == [] and created["response"]["usage"] is None
        assert created["response"]["status"] == progress["response"]["status"] == "in_progress"
        item = added["item"]["id"]
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        whole_part = {**part, "text": "one two"}
        message = {"type": "message", "id": item, "status": "in_progress", "role": "assistant", "content": []}
        whole = {**message, "status": "completed", "content": [whole_part]}
        place = {"item_id": item, "output_index": 0, "content_index": 0}
        deltas = [data for name, data in events if name == "response.output_text.delta"]
        texts = [data["delta"] for data in deltas]
        expected: list[dict[str, Any]] = [
            {"type": "response.output_item.added", "output_index": 0, "item": message},
            {"type": "response.content_part.added", **place, "part": part},
            *({"type": "response.output_text.delta", **place, "delta": text, "logprobs": []} for text in texts),
            {"type": "response.output_text.done", **place, "text": "one two", "logprobs": []},
            {"type": "response.content_part.done", **place, "part": whole_part},
            {"type": "response.output_item.done", "output_index": 0, "item": whole},
        ]
        numbered = [{**event, "sequence_number": number} for number, event in enumerate(expected, 2)]
        assert [data for _, data in events[2:-1]] == numbered
        name, completed = events[-1]
        assert name == "response.completed" and completed["response"]["output"] == [whole]
        changing = ("status", "output", "usage", "completed_at")
        same = [{k: v for k, v in data["response"].items() if k not in changing} for data in (created, completed)]
        assert same[0] == same[1]

    run(scenario())


def test_reasoning_and_calls_whole_and_streamed(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with official(Conversing(tokenizer, _TURN), tokenizer) as client:
            ask: Any = {"model": "tiny", "input": "Hi", "tools": _TOOLS, "include": ["reasoning.encrypted_content"]}
            whole = await client.responses.create(**ask)
            reasoning, message, look, now = whole.output
            assert (reasoning.type, message.type, look.type, now.type) == (
                *("reasoning", "message", "function_call", "function_call"),
            )
            assert reasoning.content and reasoning.content[0].text.strip() == "I need it."
            assert reasoning.encrypted_content and reasoning.summary == []
            assert whole.output_text.strip() == "Let me look."
            assert (look.name, look.namespace) == ("look", None)
            assert json.loads(look.arguments) == {"city": "Zürich", "days": [1, 2]}
            assert (now.name, now.namespace, json.loads(now.arguments)) == ("now", "maps", {})
            assert look.call_id != now.call_id
            assert whole.usage and whole.usage.output_tokens_details.reasoning_tokens > 3
            stream = await client.responses.create(**ask, stream=True)
            events = [event async for event in stream]
            kinds = [event.type.removeprefix("response.") for event in events]
            changes = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
            assert changes == [
                *("created", "in_progress"),
                *("output_item.added", "content_part.added", "reasoning_text.delta"),
                *("reasoning_text.done", "content_part.done", "output_item.done"),
                *("output_item.added", "content_part.added", "output_text.delta"),
                *("output_text.done", "content_part.done", "output_item.done"),
                *("output_item.added", "function_call_arguments.delta"),
                *("function_call_arguments.done", "output_item.done"),
                *("output_item.added", "function_call_arguments.delta"),
                *("function_call_arguments.done", "output_item.done"),
                "completed",
            ]
            done = [event.item for event in events if event.type == "response.output_item.done"]
            last: Any = events[-1]
            assert done == last.response.output
            assert named(done) == named(whole.output)
            pieces = ["", "", "", ""]
            for event in events:
                if event.type.endswith(".delta"):
                    pieces[event.output_index] += event.delta  # type: ignore[union-attr]
            texts = [reasoning.content[0].text, whole.output_text, look.arguments, now.arguments]
            assert pieces == texts
            async with client.responses.stream(**ask) as accumulated:
                assert named((await accumulated.get_final_response()).output)[0] == named(whole.output)[0]

    run(scenario())


_PATCH = '*** Begin Patch\n+say "hi"\n\\ Grüße\n*** End Patch'
_PATCHES = [
    (json.dumps({"input": _PATCH}), _PATCH),
    (json.dumps({"input": _PATCH}, ensure_ascii=False, indent=1), _PATCH),
    (json.dumps({"patch": "x"}), '{"patch": "x"}'),
    ("{}", "{}"),
]


@pytest.mark.parametrize(("arguments", "text"), _PATCHES)
def test_calls_of_custom_tools_whole_and_streamed(tokenizer: Tokenizer, arguments: str, text: str) -> None:
    turn = f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'
    engine = Conversing(tokenizer, turn)

    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            tool: Any = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
            ask: Any = {"model": "tiny", "input": "Hi", "tools": [*_TOOLS, tool]}
            [called] = (await client.responses.create(**ask)).output
            assert (called.type, called.name, called.input) == ("custom_tool_call", "apply_patch", text)
            events = await drained(await client.responses.create(**ask, stream=True))
            assert [event.type.removeprefix("response.") for event in events] == [
                *("created", "in_progress", "output_item.added"),
                *("custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
                "completed",
            ]
            added, delta, done, item = events[2:6]
            assert (added.item.input, delta.delta, done.input, item.item.input) == ("", text, text, text)
            assert named(events[-1].response.output) == named([called])
            result = {"type": "custom_tool_call_output", "call_id": called.call_id, "output": "Done."}
            await client.responses.create(**ask | {"input": [{"role": "user", "content": "Hi"}, called, result]})

    run(scenario())
    assert json.dumps({"input": text}, ensure_ascii=False)[1:-1] in prompt(engine, tokenizer)


@pytest.mark.parametrize("max_tokens", [60, 75])
def test_a_cut_call_of_a_custom_tool_has_the_text_so_far(tokenizer: Tokenizer, max_tokens: int) -> None:
    turn = f'<tool_call>\n{{"name": "apply_patch", "arguments": {json.dumps({"input": _PATCH})}}}\n</tool_call>'

    async def scenario() -> None:
        async with official(Conversing(tokenizer, turn), tokenizer) as client:
            ask: Any = {"model": "tiny", "input": "Hi", "tools": [{"type": "custom", "name": "apply_patch"}]}
            found = await client.responses.create(**ask, max_output_tokens=max_tokens)
            [called] = found.output
            assert found.status == "incomplete" and called.type == "custom_tool_call"
            assert called.input and _PATCH.startswith(called.input) and called.input != _PATCH

    run(scenario())


@pytest.mark.parametrize("kept", ["everything", "as Codex", "by the client's words"])
def test_the_next_turn_continues_the_prompt(tokenizer: Tokenizer, kept: str) -> None:
    engine = Conversing(tokenizer, _TURN, "All well.")

    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            items: list[Any] = [{"type": "message", "id": "msg_a", "role": "user", "content": "Hi"}]
            ask: Any = {"model": "tiny", "tools": _TOOLS, "include": ["reasoning.encrypted_content"]}
            answer = await client.responses.create(input=items, **ask)
            output = [item.to_dict() for item in answer.output]
            if kept == "as Codex":  # which drops the reasoning's content and all statuses
                for item in output:
                    item.pop("status", None)
                output[0].pop("content")
            elif kept == "by the client's words":
                output[0].pop("encrypted_content")
            calls = [item for item in answer.output if item.type == "function_call"]
            items = [{**items[0], "id": "msg_b"}, *output]
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "fine"} for call in calls]
            last = await client.responses.create(input=items, **ask)
            assert last.output_text == "All well."
            assert [item.type for item in last.output] == ["message"]

    run(scenario())
    first, second = prompt(engine, tokenizer, 0), prompt(engine, tokenizer, 1)
    assert second == (
        f"{first}{_TURN}<|im_end|>\n<|im_start|>tool\nfine<|im_end|>\n<|im_start|>tool\nfine<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_log_probabilities_are_those_of_the_message(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with official(Conversing(tokenizer, "<think>\nHm.\n</think>\n\nAll well."), tokenizer) as client:
            ask: Any = {"model": "tiny", "input": "Hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
            whole = await client.responses.create(**ask)
            message = whole.output[1]
            assert message.type == "message" and message.content[0].type == "output_text" and whole.top_logprobs == 2
            entries = message.content[0].logprobs
            assert entries and "".join(entry.token for entry in entries).strip() == "All well."
            assert all(entry.logprob == -0.25 and len(entry.top_logprobs) == 2 for entry in entries)
            stream = await client.responses.create(**ask, stream=True)
            shown = [e for event in stream_texts(await drained(stream)) for e in event.logprobs]
            assert [entry.token for entry in shown] == [entry.token for entry in entries]
            plain = await client.responses.create(model="tiny", input="Hi")
            assert plain.output[1].type == "message" and plain.output[1].content[0].logprobs == []  # type: ignore[union-attr]

    run(scenario())


def test_forms_of_answers_and_required_calls_are_constrained(tokenizer: Tokenizer) -> None:
    engine = Conversing(tokenizer, '{"city": "Köln", "days": 3}')

    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            parsed = await client.responses.parse(model="tiny", input="Hi", text_format=Trip)
            assert parsed.output_parsed == Trip(city="Köln", days=3)
            await client.responses.create(model="tiny", input="Hi", text={"format": {"type": "json_object"}})
            choices: list[Any] = ["required", {"type": "function", "name": "look"}, "auto"]
            for choice in choices:
                await client.responses.create(model="tiny", input="Hi", tools=_TOOLS, tool_choice=choice)

    run(scenario())
    grammars = [request.sampling.grammar for request in engine.requests]
    assert [bool(grammar) for grammar in grammars] == [True, True, True, True, False]
    assert "city" in grammars[0] and "look" in grammars[2] and "maps__now" in grammars[2]
    assert "look" in grammars[3] and "maps__now" not in grammars[3]


def test_the_request_of_codex_is_answered(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    engine = Conversing(tokenizer, "hi")

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            for _ in range(2):
                events = await raw_events(client, _CODEX)
                assert events[-1][0] == "response.completed"
                assert events[-1][1]["response"]["tools"] == _CODEX["tools"]
                assert events[-1][1]["response"]["prompt_cache_key"] == "0198"

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert [record.getMessage() for record in caplog.records if "web_search" in record.getMessage()] == [
        "tools of type 'web_search' are not served; /v1/responses leaves them out of the prompt"
    ]
    text = prompt(engine, tokenizer)
    assert "agents__spawn" in text and "web_search" not in text and "f1e" not in text
    conversation = text.partition("<|im_end|>\n")[2]
    assert conversation == (
        "<|im_start|>system\nYou write code.\n\n"
        "<skills>None.</skills>\n<permissions>Read only.</permissions><|im_end|>\n"
        "<|im_start|>user\n<environment>\n  <shell>bash</shell>\n</environment><|im_end|>\n"
        "<|im_start|>user\nsay hi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"content": "hi", "role": "user", "type": "message"}], "stream": False},
        {"include": [], "input": [{"content": "hi", "role": "user"}], "instructions": "be brief", "tools": _TOOLS[:1]},
    ],
    ids=["langchain", "openai-agents"],
)
def test_requests_of_other_clients_are_answered(tokenizer: Tokenizer, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with over_asgi(Conversing(tokenizer, "hi"), tokenizer) as client:
            answer = await client.post("/v1/responses", json={"model": "tiny", **body})
            assert answer.status_code == 200, answer.text
            assert answer.json()["output"][0]["content"][0]["text"] == "hi"

    run(scenario())


def test_a_cut_answer_is_incomplete(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with official(ScriptedEngine(tokenizer), tokenizer) as client:
            whole = await client.responses.create(model="tiny", input="Hi", max_output_tokens=3)
            assert (whole.status, whole.max_output_tokens, whole.completed_at) == ("incomplete", 3, None)
            assert whole.incomplete_details and whole.incomplete_details.reason == "max_output_tokens"
            assert whole.output[0].type == "message" and whole.output[0].status == "incomplete"
            assert TEXT.startswith(whole.output_text) and whole.usage and whole.usage.output_tokens == 3
            stream = await client.responses.create(model="tiny", input="Hi", max_output_tokens=3, stream=True)
            last: Any = [event async for event in stream][-1]
            assert last.type == "response.incomplete"
            assert named(last.response.output) == named(whole.output)

    run(scenario())


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.CANCELLED])
def test_a_failure_midway_is_told(tokenizer: Tokenizer, reason: FinishReason) -> None:
    engine = ScriptedEngine(tokenizer)
    engine.failure = (4, reason)

    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            with pytest.raises(openai.APIStatusError):
                await client.responses.create(model="tiny", input="Hi")
            stream = await client.responses.create(model="tiny", input="Hi", stream=True)
            events: list[Any] = [event async for event in stream]
            assert events[-1].type == "response.failed"
            failed = events[-1].response
            assert (failed.status, failed.error.code) == ("failed", "server_error")
            assert failed.error.message and failed.id == events[0].response.id
            assert [event.sequence_number for event in events] == list(range(len(events)))

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_errors_before_the_answer_have_a_status(tokenizer: Tokenizer, stream: bool) -> None:
    engine = ScriptedEngine(tokenizer)

    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            ask: Any = {"model": "tiny", "input": "Hi", "stream": stream}
            with pytest.raises(openai.BadRequestError, match="send the whole conversation") as bad:
                await client.responses.create(**ask, previous_response_id="resp_1")
            assert bad.value.param == "previous_response_id"
            with pytest.raises(openai.BadRequestError, match="maximum context length is 200 tokens") as long:
                await client.responses.create(**ask | {"input": "x" * 1000})
            assert (long.value.param, long.value.code) == ("input", "context_length_exceeded")
            with pytest.raises(openai.NotFoundError) as other:
                await client.responses.create(**ask | {"model": "other"})
            assert other.value.code == "model_not_found"
            engine.refusal = QueueFullError(8, 2.5)
            with pytest.raises(openai.RateLimitError):
                await client.responses.create(**ask)
            engine.refusal = EngineStoppedError("the engine is stopped")
            with pytest.raises(openai.InternalServerError, match="the engine is stopped"):
                await client.responses.create(**ask)

    run(scenario())
