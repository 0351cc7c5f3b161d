"""Clients as they come, each through a whole loop: it asks, the model calls its tool, it answers with the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from tests.agents.played import Server, call, playing

QUESTION = "How warm is it in Bern?"
RESULT = "21 degrees"
ANSWER = "It has 21 degrees in Bern."
CITY = {"name": "Bern", "inhabitants": 134_794}
CUES = {
    QUESTION: call("weather", city="Bern"),
    RESULT: f"<think>\nWarm.\n</think>\n\n{ANSWER}",
    "Describe Bern.": json.dumps(CITY),
    "Describe Bern by a call.": call("City", **CITY),
    "Say hello.": "Hello!",
}


class City(pydantic.BaseModel):
    """A city."""

    name: str
    inhabitants: int


def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Bern"
    return RESULT


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with playing(CUES) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.endpoint}/v1", api_key="none", max_retries=0) as made:
        yield made


def messages(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_openai_chat(server: Server, client: openai.OpenAI) -> None:
    function = {"name": "weather", "parameters": PARAMETERS}
    tools: Any = [{"type": "function", "function": function}]
    asked = messages(QUESTION)
    first = client.chat.completions.create(model="tiny", messages=asked, tools=tools)
    assert first.choices[0].finish_reason == "tool_calls"
    for called in first.choices[0].message.tool_calls or []:
        assert called.type == "function" and called.function.name == "weather"
        result = weather(**json.loads(called.function.arguments))
        asked += [first.choices[0].message, {"role": "tool", "tool_call_id": called.id, "content": result}]
    second = client.chat.completions.create(model="tiny", messages=asked, tools=tools)
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", ANSWER)
    assert second.choices[0].message.to_dict()["reasoning_content"] == "Warm."
    with client.chat.completions.stream(model="tiny", messages=asked, tools=tools) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        assert "".join(deltas) == stream.get_final_completion().choices[0].message.content == ANSWER
    assert len(deltas) > 3
    with client.chat.completions.stream(model="tiny", messages=messages(QUESTION), tools=tools) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, json.loads(event.arguments)) for event in done] == [("weather", {"city": "Bern"})]
    assert "<tool_response>\n21 degrees\n</tool_response>" in server.engine.prompts[-2]


def test_openai_parse(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="tiny", messages=messages("Describe Bern."), response_format=City)
    assert parsed.choices[0].message.parsed == City(**CITY)


def test_openai_responses(server: Server, client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}]
    asked = messages(QUESTION)
    first = client.responses.create(model="tiny", input=asked, tools=tools)
    asked += first.output
    for item in first.output:
        assert item.type == "function_call"
        result = weather(**json.loads(item.arguments))
        asked.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    second = client.responses.create(model="tiny", input=asked, tools=tools)
    assert second.output_text == ANSWER
    assert [item.type for item in second.output] == ["reasoning", "message"]
    with client.responses.stream(model="tiny", input=asked, tools=tools) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == ANSWER
    parsed = client.responses.parse(model="tiny", input="Describe Bern.", text_format=City)
    assert parsed.output_parsed == City(**CITY)


def test_anthropic(server: Server) -> None:
    tools: Any = [{"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}]
    with anthropic.Anthropic(base_url=server.endpoint, api_key="none", max_retries=0) as client:
        asked = messages(QUESTION)
        first = client.messages.create(model="tiny", max_tokens=200, messages=asked, tools=tools)
        assert first.stop_reason == "tool_use"
        asked.append({"role": "assistant", "content": first.content})
        for block in first.content:
            assert block.type == "tool_use"
            result = {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
            asked.append({"role": "user", "content": [result]})
        second = client.messages.create(model="tiny", max_tokens=200, messages=asked, tools=tools)
        assert [block.type for block in second.content] == ["thinking", "text"]
        with client.messages.stream(model="tiny", max_tokens=200, messages=asked, tools=tools) as stream:
            assert "".join(stream.text_stream) == ANSWER
            streamed = stream.get_final_message()
        assert [block.type for block in streamed.content] == ["thinking", "text"]
        assert streamed.usage.output_tokens == second.usage.output_tokens
        counted = client.messages.count_tokens(model="tiny", messages=asked, tools=tools)
        assert counted.input_tokens == len(server.engine.requests[-1].prompt)
        parsed = client.messages.parse(
            model="tiny", max_tokens=200, messages=messages("Describe Bern."), output_format=City
        )
        assert parsed.parsed_output == City(**CITY)


def test_anthropic_runs_tools_itself(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.endpoint, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="tiny", max_tokens=200, messages=messages(QUESTION), tools=[anthropic.beta_tool(weather)]
        )
        last = runner.until_done()
    assert [block.text for block in last.content if block.type == "text"] == [ANSWER]
