"""The built-in chat template of Kimi-K3, compared with a plain encoder of the published format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycache.api.chat import ChatTemplate
from raycache.api.tokenizer import Tokenizer
from raycache.errors import RequestError
from tests.oracle import k3, tiny_kimi

MARKS = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]
TOOLS = [
    {"type": "function", "function": {"parameters": {"type": "object", "b": "é<>", "a": 1}, "name": "get_weather"}}
]
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder = tmp_path_factory.mktemp("k3")
    ranks = tiny_kimi.write(folder)
    added = {len(ranks) + place: {"content": mark, "special": True} for place, mark in enumerate(MARKS)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    (folder / "chat_template.jinja").unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k3"}))
    return ChatTemplate.load(Tokenizer(folder))


def test_it_is_found_by_model_type_and_tokens(template: ChatTemplate, tmp_path: Path) -> None:
    assert template.origin == "built in (kimi_k3)"
    tiny_kimi.write(tmp_path)  # of Kimi-K2: no such tokens
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k3"}))
    assert Tokenizer(tmp_path).templates.origin == ""


def test_a_question_as_the_vendor_encodes_it(template: ChatTemplate) -> None:
    question = '<|open|>message role="user"<|sep|>hi<|close|>message<|sep|><|end_of_msg|>'
    begin = f'{question}<|open|>message role="assistant"<|sep|>'
    assert template.render(ASK, variables={"thinking": False}) == f"{begin}<|open|>response<|sep|>"
    text = template.render(ASK)
    assert text.startswith('<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on')
    assert text.endswith(f"`thinking_effort=max`.<|close|>message<|sep|><|end_of_msg|>{begin}<|open|>think<|sep|>")
    assert text == template.render(ASK, variables={"thinking_effort": "max"})
    assert "`thinking_effort=low`" in template.render(ASK, variables={"reasoning_effort": "low"})
    with pytest.raises(RequestError, match="thinking_effort must be low, high or max"):
        template.render(ASK, variables={"reasoning_effort": "medium"})
    assert "thinking_effort" not in template.render(ASK, variables={"enable_thinking": False})


_TEXT = st.sampled_from(["ok", "你好\n{{ x }}", '<b> & "c"', "1 < 2"])
_VALUES = st.dictionaries(
    st.sampled_from(["a", 'k"&']),
    st.one_of(_TEXT, st.none(), st.booleans(), st.integers(), st.floats(0, 1), st.lists(_TEXT), st.just({"k": 1})),
    max_size=2,
)
_NAMES = st.sampled_from(["get_weather", 'a&b"c'])


@st.composite
def _conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(_TEXT), "name": draw(st.sampled_from(["", "policy"]))})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(_TEXT)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(_TEXT)}
        answer["reasoning_content"] = draw(st.sampled_from(["", " \n", "so"]))
        ids = draw(st.lists(st.sampled_from("abc"), max_size=3))  # of calls; two may be the same
        if ids:
            answer["tool_calls"] = [
                {
                    "id": i,
                    "type": "function",
                    "function": {"name": draw(_NAMES), "arguments": json.dumps(draw(_VALUES))},
                }
                for i in ids
            ]
        messages.append(answer)
        for i in draw(st.permutations(ids + draw(st.sampled_from([[], [], ["unknown"]])))):
            named = draw(st.sampled_from([{}, {"name": "stale"}]))
            messages.append({"role": "tool", "tool_call_id": i, "content": draw(_TEXT), **named})
    return messages


@settings(max_examples=200, deadline=None)
@given(messages=_conversations(), is_thinking=st.booleans(), has_tools=st.booleans())
def test_conversations_are_encoded_as_the_vendor_describes(
    template: ChatTemplate, messages: list[dict[str, Any]], is_thinking: bool, has_tools: bool
) -> None:
    tools = TOOLS if has_tools else []

    def ours() -> str:
        return template.render(messages, tools=tools, variables={"thinking": is_thinking})

    try:
        wanted = k3.encode(messages, tools=tools, is_thinking=is_thinking)
    except ValueError:
        with pytest.raises(RequestError, match="a tool message must follow the assistant message with its call"):
            ours()
    else:
        assert ours() == wanted


def test_tools_that_come_later_and_roles_that_nobody_knows(template: ChatTemplate) -> None:
    text = template.render([*ASK, {"role": "system", "content": "", "tools": TOOLS}, *ASK])
    assert (
        "<|sep|>## New Tools Available\n" in text
        and '```json\n[{"function":{"name":"get_weather","parameters":' in text
    )
    with pytest.raises(RequestError, match="unknown role function"):
        template.render([{"role": "function", "content": "x"}])
