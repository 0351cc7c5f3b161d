"""Clients as they come, each through a whole loop: it asks, the model calls its tool, it answers with the result.

Clients beside openai and anthropic exclude each other's dependencies: scripts/clients installs each into an environment
of its own and runs its tests there.
"""

from __future__ import annotations

import asyncio
import functools
import json
import operator
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from tests.agents.played import CONTEXT, Server, call, playing

QUESTION = "How warm is it in Bern?"
RESULT = "21 degrees"
ANSWER = "It has 21 degrees in Bern."
CITY = {"name": "Bern", "inhabitants": 134_794}
CUES = {
    QUESTION: call("weather", city="Bern"),
    RESULT: f"<think>\nWarm.\n</think>\n\n{ANSWER}",
    "Describe Bern.": json.dumps(CITY),
    "Fill City with Bern.": call("City", **CITY),
    "Fill final_result with Bern.": call("final_result", **CITY),
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


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(server: Server, monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    settings: Any = {"model": f"{provider}/tiny", "api_base": f"{server.endpoint}/v1", "api_key": "none"}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    asked = messages(QUESTION)
    first = litellm.completion(messages=asked, tools=tools, **settings).choices[0]
    assert first.finish_reason == "tool_calls"
    (called,) = first.message.tool_calls
    result = weather(**json.loads(called.function.arguments))
    asked += [first.message, {"role": "tool", "tool_call_id": called.id, "content": result}]
    second = litellm.completion(messages=asked, tools=tools, **settings).choices[0].message
    assert (second.content, second.reasoning_content) == (ANSWER, "Warm.")
    for history, content in ((asked, ANSWER), (asked[:1], "")):
        chunks = list(litellm.completion(messages=history, tools=tools, stream=True, **settings))
        whole = litellm.stream_chunk_builder(chunks).choices[0]
        assert (whole.message.content or "") == content
    assert whole.finish_reason == "tool_calls"
    assert json.loads(whole.message.tool_calls[0].function.arguments) == {"city": "Bern"}
    parsed = litellm.completion(messages=messages("Describe Bern."), response_format=City, **settings)
    assert City.model_validate_json(parsed.choices[0].message.content) == City(**CITY)
    required = litellm.completion(messages=messages(QUESTION), tools=tools, tool_choice="required", **settings)
    assert required.choices[0].finish_reason == "tool_calls"
    assert litellm.responses(input="Say hello.", **settings).output[-1].content[0].text == "Hello!"
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=messages("x " * CONTEXT), **settings)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_as_anthropic(server: Server, monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    settings: Any = {
        "model": f"{provider}/tiny",
        "max_tokens": 300,
        "api_base": f"{server.endpoint}/v1",
        "api_key": "none",
        "tools": [{"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}],
    }

    async def loop() -> None:
        asked = messages(QUESTION)
        first = await litellm.anthropic.messages.acreate(messages=asked, **settings)
        (block,) = [block for block in first["content"] if block["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": weather(**block["input"])}
        asked += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        second = await litellm.anthropic.messages.acreate(messages=asked, **settings)
        assert [block["text"] for block in second["content"] if block["type"] == "text"] == [ANSWER]

    asyncio.run(loop())


@pytest.mark.parametrize("uses_responses", [False, True], ids=["chat", "responses"])
def test_langchain(server: Server, uses_responses: bool) -> None:
    langchain = pytest.importorskip("langchain_openai")
    said = pytest.importorskip("langchain_core.messages")
    chat = langchain.ChatOpenAI(
        model="tiny", base_url=f"{server.endpoint}/v1", api_key="none", use_responses_api=uses_responses
    )
    bound = chat.bind_tools([weather])
    asked = [said.HumanMessage(QUESTION)]
    first = bound.invoke(asked)
    (called,) = first.tool_calls
    assert (called["name"], called["args"]) == ("weather", {"city": "Bern"})
    asked += [first, said.ToolMessage(weather(**called["args"]), tool_call_id=called["id"])]
    assert bound.invoke(asked).text == ANSWER
    pieces = list(bound.stream(asked))
    assert "".join(piece.text for piece in pieces) == ANSWER and len(pieces) > 3
    streamed = functools.reduce(operator.add, bound.stream(QUESTION))
    assert [(each["name"], each["args"]) for each in streamed.tool_calls] == [("weather", {"city": "Bern"})]
    assert chat.bind_tools([weather], tool_choice="any").invoke(QUESTION).tool_calls
    for method, question in (
        ("json_schema", "Describe Bern."),
        ("json_mode", "Describe Bern."),
        ("function_calling", "Fill City with Bern."),
    ):
        assert chat.with_structured_output(City, method=method).invoke(f"{question} Answer in JSON.") == City(**CITY)


def test_llama_index(server: Server) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like")
    agents = pytest.importorskip("llama_index.core.agent.workflow")
    said = pytest.importorskip("llama_index.core.llms")
    settings: Any = {"model": "tiny", "api_base": f"{server.endpoint}/v1", "api_key": "none", "is_chat_model": True}
    llm = like.OpenAILike(**settings, is_function_calling_model=True)

    async def loop() -> str:
        return str(await agents.FunctionAgent(tools=[weather], llm=llm).run(QUESTION))

    assert asyncio.run(loop()) == ANSWER
    assert llm.complete("Say hello.").text == "Hello!"
    hello = said.ChatMessage(role="user", content="Say hello.")
    assert "".join(each.delta for each in llm.stream_chat([hello])) == "Hello!"
    fill = said.ChatMessage(role="user", content="Fill City with Bern.")
    assert llm.as_structured_llm(City).chat([fill]).raw == City(**CITY)
    plain = like.OpenAILike(**settings, is_function_calling_model=False)
    assert plain.as_structured_llm(City).complete("Describe Bern.").raw == City(**CITY)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON"])
def test_instructor(server: Server, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    with openai.OpenAI(base_url=f"{server.endpoint}/v1", api_key="none", max_retries=0) as client:
        city = instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions.create(
            model="tiny",
            response_model=City,
            max_retries=1,
            messages=messages("Fill City with Bern." if "TOOLS" in mode else "Describe Bern."),
        )
    assert city.model_dump() == CITY


@pytest.mark.parametrize("api", ["Chat", "Responses"])
def test_pydantic_ai(server: Server, api: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=f"{server.endpoint}/v1", api_key="none")
    model = getattr(models, f"OpenAI{api}Model")("tiny", provider=provider)
    agent = pydantic_ai.Agent(model, instructions="Be brief.", tools=[weather])
    assert agent.run_sync(QUESTION).output == ANSWER

    async def stream() -> str:
        async with agent.run_stream(QUESTION) as answer:
            return "".join([piece async for piece in answer.stream_text(delta=True)])

    assert asyncio.run(stream()) == ANSWER
    filling = pydantic_ai.Agent(model, output_type=City)
    assert filling.run_sync("Fill final_result with Bern.").output == City(**CITY)
    native = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(City))
    assert native.run_sync("Describe Bern.").output == City(**CITY)


def test_pydantic_ai_as_anthropic(server: Server) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.anthropic")
    providers = pytest.importorskip("pydantic_ai.providers.anthropic")
    provider = providers.AnthropicProvider(base_url=server.endpoint, api_key="none")
    model = models.AnthropicModel("tiny", provider=provider)
    assert pydantic_ai.Agent(model, tools=[weather]).run_sync(QUESTION).output == ANSWER
    filling = pydantic_ai.Agent(model, output_type=City)
    assert filling.run_sync("Fill final_result with Bern.").output == City(**CITY)


@pytest.mark.parametrize("api", ["ChatCompletions", "Responses"])
def test_openai_agents(server: Server, api: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    tool = agents.function_tool(weather)

    async def loop() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.endpoint}/v1", api_key="none", max_retries=0) as client:
            model = getattr(agents, f"OpenAI{api}Model")("tiny", openai_client=client)
            agent = agents.Agent(name="Guide", instructions="Be brief.", model=model, tools=[tool])
            assert (await agents.Runner.run(agent, QUESTION)).final_output == ANSWER
            streamed = agents.Runner.run_streamed(agent, QUESTION)
            names = [event.name async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
            assert streamed.final_output == ANSWER and {"tool_called", "tool_output"} <= set(names)
            filling = agents.Agent(name="Guide", model=model, output_type=City)
            assert (await agents.Runner.run(filling, "Describe Bern.")).final_output == City(**CITY)

    asyncio.run(loop())
