"""Answers do not depend on how many tokens an increment has: a server that is behind gets several at a time."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from actors.streams import Streams
from raycache.api.run import _interleave
from raycache.api.tokenizer import Tokenizer
from raycache.types import FinishReason, GenerateRequest, RequestOutput
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_asgi, run
from tests.unit.test_responses import _TEMPLATE, _TOOLS, _TURN, Conversing

_HEARD = {"messages": [{"role": "user", "content": "Hi"}]}
_TOOL = {"name": "look", "parameters": {"type": "object"}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/responses",
        {"input": "Hi", "tools": _TOOLS, "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    ),
    ("/v1/responses", {"input": "Hi", "tools": _TOOLS}),
    (
        "/v1/chat/completions",
        {**_HEARD, "tools": [{"type": "function", "function": _TOOL}], "logprobs": True, "return_token_ids": True},
    ),
    ("/v1/chat/completions", {**_HEARD, "stop": ["well", "lo"], "n": 2}),
    ("/v1/completions", {"prompt": [1, 2, 3], "logprobs": 2, "echo": True, "max_tokens": 20}),
    ("/v1/completions", {"prompt": "Hi", "stop": "ar", "logprobs": 1, "return_token_ids": True}),
    ("/v1/messages", {**_HEARD, "max_tokens": 200, "tools": [{"name": "look", "input_schema": {"type": "object"}}]}),
]
_OWN = {"id", "created", "created_at", "completed_at", "item_id", "call_id", "response_id", "sequence_number"}
"""Fields that differ between two answers to one request."""


class Behind(Conversing):
    """Its increments are read after some have come; how many is drawn."""

    def __init__(self, tokenizer: Tokenizer, text: str, *, seed: int | None) -> None:
        super().__init__(tokenizer, text)
        self._random = None if seed is None else random.Random(seed)

    def _outputs(self, request: GenerateRequest) -> Any:
        outputs = super()._outputs(request)
        return outputs if self._random is None else self._joined(request, outputs)

    def _joined(self, request: GenerateRequest, outputs: Sequence[RequestOutput]) -> list[Any]:
        assert self._random is not None
        found, begin, streams = [], 0, Streams()
        stream = streams.open(request)
        while begin < len(outputs):
            end = begin + self._random.choice([1, 2, 3, 8, 60])
            streams.take([(request.request_id, output) for output in outputs[begin:end]])
            with pytest.raises(StopIteration) as received:  # it does not wait
                stream.unread.get().send(None)
            found.append(received.value.value)
            begin = end
        return found


def without_own(value: Any) -> Any:
    match value:
        case dict():
            return {name: without_own(each) for name, each in value.items() if name not in _OWN}
        case list() | tuple():
            return [without_own(each) for each in value]
    return value


def put_together(path: str, events: list[dict[str, Any]]) -> Any:
    """What a stream gives in the end, in a form that does not show its events."""
    if path == "/v1/responses":
        (last,) = (event["response"] for event in events if event["type"] == "response.completed")
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        return last, [entry for event in deltas for entry in event.get("logprobs", ())]
    if path == "/v1/messages":
        texts = [list(event["delta"].values())[1] for event in events if event["type"] == "content_block_delta"]
        return "".join(texts), [event for event in events if event["type"] == "message_delta"]
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        whole = choices.setdefault(choice["index"], defaultdict(str, logprobs=[], token_ids=[], finish_reason=None))
        for name, text in {"text": choice.get("text"), **choice.get("delta", {})}.items():
            whole[name] += text if isinstance(text, str) else ""
        for call in choice.get("delta", {}).get("tool_calls", ()):
            whole["calls"] += call["function"].get("name", "") + call["function"]["arguments"]
        whole["token_ids"] += choice.get("token_ids", [])
        found = choice["logprobs"] or {}
        columns = (found.get(name, ()) for name in ("tokens", "token_logprobs", "text_offset"))
        whole["logprobs"] += found.get("content") or list(zip(*columns, strict=True))
        whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
    return choices


@pytest.mark.parametrize(
    "text", [_TURN, "<think>\nHm.\n</think>\n\nAll well, look: all 🙂 well."], ids=["call", "text"]
)
@pytest.mark.parametrize(("path", "body"), BODIES, ids=lambda value: value if isinstance(value, str) else "")
def test_answers_are_the_same_however_many_tokens_come_at_a_time(
    path: str, body: dict[str, Any], text: str, tmp_path: Any
) -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(tmp_path, chat_template=_TEMPLATE))

    async def answers(seed: int | None) -> Any:
        engine: ScriptedEngine = Behind(tokenizer, text, seed=seed)
        async with over_asgi(engine, tokenizer) as client:
            whole = await client.post(path, json={"model": "tiny", **body})
            streamed = await client.post(path, json={"model": "tiny", **body, "stream": True})
        assert (whole.status_code, streamed.status_code) == (200, 200), whole.text
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        return without_own([whole.json(), put_together(path, events)])

    async def compare() -> None:
        wanted = await answers(None)
        for seed in range(8):
            assert await answers(seed) == wanted, seed

    run(compare())


def test_increments_of_several_choices_are_joined_while_one_is_sent() -> None:
    streams = Streams()
    names = ("a", "b")
    opened = {name: streams.open(GenerateRequest(name, (1,))) for name in names}

    def come(*token_ids: int, reason: FinishReason | None = None) -> None:
        for token_id in token_ids:
            streams.take([(name, RequestOutput(name, (token_id,), finish_reason=reason)) for name in names])

    async def increments(name: str) -> AsyncGenerator[Any, None]:
        while True:
            output = await opened[name].unread.get()
            assert isinstance(output, RequestOutput)
            yield name, output.token_ids
            if output.finish_reason is not None:
                return

    async def read() -> None:
        found = []
        come(0)
        async for item in _interleave([increments(name) for name in names]):
            if not found:  # it takes long to send the first one
                for token_id in range(1, 5):
                    come(token_id)
                    await asyncio.sleep(0)
                come(5, reason=FinishReason.LENGTH)
            found.append(item)
        assert sorted(found) == [(name, ids) for name in names for ids in ((0,), (1, 2, 3, 4, 5))]

    run(read())
