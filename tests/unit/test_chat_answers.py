"""Chats over HTTP as clients see them: tool calls, reasoning and the form of answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from llguidance import LLMatcher

from raycache.api.tokenizer import Tokenizer
from raycache.vocabulary.grammar_tokens import grammar_tokens
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_port, run

TEMPLATE = (
    "{%- if tools %}{{- '<|system|>Tools:' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- ' Call as <tool_call>{}</tool_call>.\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}{{- '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- if enable_thinking is not false %}{{- '<think>' }}"
    "{%- else %}{{- '<think></think>' }}{%- endif %}{%- endif %}"
)
ANSWER = (
    'I look it up.</think>Wait.\n<tool_call>\n{"name": "find", "arguments": {"what": "tea", "count": 2}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
FIND = {"name": "find", "parameters": {"type": "object", "properties": {"what": {"type": "string"}}}}
TOOLS: Any = [{"type": "function", "function": function} for function in (FIND, {"name": "now"})]
MESSAGES: Any = [{"role": "user", "content": "Tea?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return str(path)


@asynccontextmanager
async def served(engine: ScriptedEngine, tokenizer: Tokenizer, template: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        over_port(engine, tokenizer, chat_template=template) as endpoint,
        openai.AsyncOpenAI(base_url=f"{endpoint}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_calls_reasoning_and_content_arrive_whole_and_streamed(tokenizer: Tokenizer, template: str) -> None:
    async def test() -> None:
        engine = ScriptedEngine(tokenizer, text=ANSWER, context=2000)
        async with served(engine, tokenizer, template) as client:
            whole = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, tools=TOOLS, max_completion_tokens=500
            )
            message = whole.choices[0].message
            assert whole.choices[0].finish_reason == "tool_calls"
            assert message.content == "Wait."
            assert message.model_dump()["reasoning_content"] == "I look it up."
            calls = message.tool_calls or []
            assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [  # type: ignore[union-attr]
                ("find", {"what": "tea", "count": 2}),
                ("now", {}),
            ]
            assert len({call.id for call in calls}) == 2
            assert whole.usage and whole.usage.completion_tokens_details
            reasoning = whole.usage.completion_tokens_details.reasoning_tokens or 0
            assert 0 < reasoning < whole.usage.completion_tokens

            async with client.chat.completions.stream(
                model="tiny", messages=MESSAGES, tools=TOOLS, max_completion_tokens=500
            ) as stream:
                final = await stream.get_final_completion()
            streamed = final.choices[0]
            assert (streamed.finish_reason, streamed.message.content) == ("tool_calls", "Wait.")
            again = streamed.message.tool_calls or []
            assert [call.function.arguments for call in again] == [call.function.arguments for call in calls]  # type: ignore[union-attr]

            # The result goes back with the call; a message without content is fine.
            await client.chat.completions.create(
                model="tiny",
                tools=TOOLS,
                max_completion_tokens=8,
                messages=[
                    *MESSAGES,
                    {"role": "assistant", "content": None, "tool_calls": [call.model_dump() for call in calls]},
                    {"role": "tool", "tool_call_id": calls[0].id, "content": "two"},
                ],
            )
            prompt = tokenizer.decode(engine.requests[-1].prompt, skip_special_tokens=False)
            assert '"name": "find"' in prompt and "<|tool|>two" in prompt

    run(test())


def test_without_tools_or_with_none_calls_are_text(tokenizer: Tokenizer, template: str) -> None:
    async def test() -> None:
        engine = ScriptedEngine(tokenizer, text=ANSWER, context=2000)
        async with served(engine, tokenizer, template) as client:
            for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
                answer = await client.chat.completions.create(  # type: ignore[call-overload]
                    model="tiny", messages=MESSAGES, max_completion_tokens=500, **more
                )
                assert answer.choices[0].finish_reason == "stop" and not answer.choices[0].message.tool_calls
                assert '"name": "find"' in answer.choices[0].message.content
                assert "Tools:" not in tokenizer.decode(engine.requests[-1].prompt)
            hidden = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, max_completion_tokens=500, extra_body={"include_reasoning": False}
            )
            assert "reasoning_content" not in hidden.choices[0].message.model_dump()
            assert (hidden.choices[0].message.content or "").startswith("Wait.")
            off = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, max_completion_tokens=500, reasoning_effort="none"
            )
            assert "reasoning_content" not in off.choices[0].message.model_dump()

    run(test())


def test_a_template_that_does_not_show_tools_is_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    plain = tmp_path / "plain.jinja"
    plain.write_text("{%- for message in messages %}{{- message.content }}{%- endfor %}", encoding="utf-8")

    async def test() -> None:
        async with served(ScriptedEngine(tokenizer), tokenizer, str(plain)) as client:
            with pytest.raises(openai.BadRequestError, match="does not show tools"):
                await client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS)

    run(test())


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"response_format": {"type": "json_object"}}, ""),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}}, ""),
        ({"extra_body": {"structured_outputs": {"regex": "[ab]+"}}}, ""),
        ({"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}, ""),
        ({"extra_body": {"thinking_token_budget": 5}}, "thinking_token_budget"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"json": '{"type": "object"}'}}}, ""),
        ({"extra_body": {"structured_outputs": {"json": "{type: object}"}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"json": '{"const": "\\ud800"}'}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"json": '{"const": NaN}'}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"json": '{"not": ' * 999 + "{}" + "}" * 999}}}, "structured_outputs"),
    ],
)
def test_forms_of_answers_become_grammars_or_are_refused(
    tokenizer: Tokenizer, template: str, form: dict[str, Any], field: str
) -> None:
    async def test() -> None:
        engine = ScriptedEngine(tokenizer)
        async with served(engine, tokenizer, template) as client:
            asking = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5, **form)
            if field:
                with pytest.raises(openai.BadRequestError) as refused:
                    await asking
                assert str(refused.value.param).startswith(field), refused.value
                assert not engine.requests
            else:
                await asking
                assert "think" in engine.requests[0].sampling.grammar

    run(test())


CALLS = ANSWER.split("Wait.\n")[1]
JSON = '{"a": 1}'


@pytest.mark.parametrize(
    ("more", "allowed", "forbidden"),
    [
        ({"tool_choice": "required"}, [f"Hm.</think>{CALLS}"], [ANSWER, "Hm.</think>Tea!"]),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, [], [f"Hm.</think>{CALLS}"]),
        ({"parallel_tool_calls": False}, ["Hm.</think>Tea!"], [ANSWER]),
        ({"tools": [{"type": "function", "function": {**FIND, "strict": True}}]}, ["</think>Tea!"], [ANSWER]),
        ({"response_format": {"type": "json_object"}}, [f"</think>{JSON}", f"</think>{CALLS}"], ["</think>Tea!"]),
        ({"response_format": {"type": "json_object"}, "tools": []}, [f"Hm.</think>{JSON}"], [f"</think>{CALLS}"]),
        ({"response_format": {"type": "json_object"}, "tools": [], "reasoning_effort": "none"}, [JSON], ["Hm."]),
    ],
)
def test_grammars_allow_what_was_asked_for_and_nothing_else(
    tokenizer: Tokenizer, template: str, more: dict[str, Any], allowed: list[str], forbidden: list[str]
) -> None:
    async def test() -> None:
        engine = ScriptedEngine(tokenizer, context=2000)
        async with served(engine, tokenizer, template) as client:
            await client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "tools": TOOLS} | more)
        table = grammar_tokens(tokenizer.vocabulary, num_logits=tokenizer.vocab_size, eos_token_ids=(0,))
        for text in (*allowed, *forbidden):
            matcher = LLMatcher(table, engine.requests[0].sampling.grammar)
            ids = tokenizer.encode(text, add_special_tokens=False)
            is_accepted = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert is_accepted == (text in allowed), (text, matcher.get_error())

    run(test())
