"""Where chat templates come from, and the built-in one of DeepSeek-V3.2."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.doctor.check import Outcome
from launch.doctor.command import examine
from raycache.api.chat import ChatTemplate
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import CheckpointError, RequestError
from tests.oracle import dsv32
from tests.oracle.tiny_tokenizers import byte_level

MARKS = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "é <now>", "parameters": {"type": "object", "properties": {}}},
    },
    {"type": "function", "function": {"name": "clock", "parameters": {}}},
]
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return byte_level(tmp_path, chat_template=None)


@pytest.fixture
def deepseek(folder: Path) -> Path:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([tokenizers.AddedToken(mark) for mark in MARKS])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v32"}))
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder = byte_level(tmp_path_factory.mktemp("deepseek"), chat_template=None)
    source = (Path(__file__).parents[2] / "raycache/api/chat_templates/deepseek_v32.jinja").read_text()
    return ChatTemplate({"default": source}, special_tokens=Tokenizer(folder).special_tokens)


def rendered(folder: Path, **given: Any) -> tuple[str, str]:
    template = ChatTemplate.load(Tokenizer(folder))
    return template.origin, template.render(ASK, **given)


def write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def test_the_first_file_that_has_a_template_is_used(folder: Path) -> None:
    assert Tokenizer(folder).templates.origin == ""
    write(folder / "chat_template.json", {"chat_template": "of a vision model"})
    assert rendered(folder) == ("chat_template.json", "of a vision model")
    write(folder / "tokenizer_config.json", {"chat_template": "of the tokenizer"})
    assert rendered(folder) == ("tokenizer_config.json", "of the tokenizer")
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    write(folder / "tokenizer_config.json", {"chat_template": named})
    assert rendered(folder) == ("tokenizer_config.json", "plain")
    assert rendered(folder, tools=TOOLS) == ("tokenizer_config.json", "with tools")
    write(folder / "chat_template.jinja", "of a file")
    assert rendered(folder, tools=TOOLS) == ("chat_template.jinja", "of a file")
    write(folder / "additional_chat_templates/tool_use.jinja", "tools of a file")
    assert rendered(folder) == ("chat_template.jinja", "of a file")
    assert rendered(folder, tools=TOOLS) == ("chat_template.jinja", "tools of a file")


@pytest.mark.parametrize(
    "value",
    [5, {"default": 1}, ["x"], [{"name": "default"}], [{"name": "default", "template": None}]],
    ids=str,
)
def test_a_template_of_another_form_is_refused(folder: Path, value: object) -> None:
    write(folder / "tokenizer_config.json", {"chat_template": value})
    if value == ["x"]:  # nothing with a name in it
        assert Tokenizer(folder).templates.origin == ""
        return
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: chat_template must be"):
        Tokenizer(folder)


def test_a_model_without_any_template_says_what_to_do(folder: Path) -> None:
    with pytest.raises(RequestError, match="no chat template; use /v1/completions, or .* --chat-template FILE"):
        rendered(folder)
    found = {one.check: one for one in examine({"model": str(folder), "device": "cpu", "port": "auto"})}
    assert found["chat template"].outcome is Outcome.WARNING


def test_deepseek_v32_has_a_built_in_template_which_log_and_doctor_name(
    deepseek: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origin, text = rendered(deepseek)
    assert (origin, text) == ("built in (deepseek_v32)", "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>")
    ids = Tokenizer(deepseek).encode(text, add_special_tokens=False)
    assert [Tokenizer(deepseek).token_text(token_id) for token_id in ids if token_id >= 400] == [
        *("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>")
    ]
    with caplog.at_level(logging.WARNING):
        Tokenizer.of(Config(model=str(deepseek)), vocab_size=500)
    assert [record.getMessage() for record in caplog.records] == [
        "the model publishes no chat template; the one built in (deepseek_v32) is used"
    ]
    found = {one.check: one for one in examine({"model": str(deepseek), "device": "cpu", "port": "auto"})}
    assert found["chat template"].text == "built in (deepseek_v32)"
    assert found["tokenizer"].text == "406 tokens, tokenizer.json (BPE)"
    caplog.clear()
    Tokenizer.of(Config(model=str(deepseek), chat_template="mine.jinja"), vocab_size=500)
    assert not caplog.records


def test_the_built_in_template_gives_way_to_the_model_s_and_needs_its_tokens(deepseek: Path) -> None:
    write(deepseek / "chat_template.jinja", "its own")
    assert rendered(deepseek) == ("chat_template.jinja", "its own")
    (deepseek / "chat_template.jinja").unlink()
    write(deepseek / "config.json", {"model_type": "llama"})
    assert Tokenizer(deepseek).templates.origin == ""
    byte_level(deepseek, chat_template=None)  # without the tokens
    write(deepseek / "config.json", {"model_type": "deepseek_v32"})
    assert Tokenizer(deepseek).templates.origin == ""


def test_the_example_that_the_vendor_publishes(template: ChatTemplate) -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hello! I am DeepSeek.", "reasoning_content": "thinking..."},
        {"role": "user", "content": "1+1=?"},
    ]
    assert template.render(messages, variables={"thinking": True}) == (
        "<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜></think>Hello! I am DeepSeek.<｜end▁of▁sentence｜>"
        "<｜User｜>1+1=?<｜Assistant｜><think>"
    )
    assert template.render(messages).endswith("<｜User｜>1+1=?<｜Assistant｜></think>")
    assert template.render(messages, add_generation_prompt=False).endswith("<｜User｜>1+1=?")


_TEXT = st.sampled_from(["ok", "你好\n{{ x }}", "<b> & 'c'", "1 < 2"])
_VALUES = st.dictionaries(
    st.sampled_from(["a", "ü"]),
    st.one_of(_TEXT, st.none(), st.booleans(), st.integers(), st.lists(_TEXT, max_size=2), st.just({"k": 1.5})),
    max_size=2,
)


@st.composite
def _conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(_TEXT)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(_TEXT)})
        for _ in range(draw(st.integers(0, 2))):
            answer: dict[str, Any] = {"role": "assistant", "content": draw(_TEXT)}
            if draw(st.booleans()):
                answer["reasoning_content"] = draw(_TEXT)
            values = draw(st.lists(_VALUES, max_size=2))
            if values:
                answer["tool_calls"] = [
                    {"id": str(i), "type": "function", "function": {"name": "f", "arguments": json.dumps(value)}}
                    for i, value in enumerate(values)
                ]
            messages.append(answer)
            num_results = draw(st.sampled_from([len(values)] * 9 + [len(values) + 1]))
            messages += [{"role": "tool", "tool_call_id": str(i), "content": draw(_TEXT)} for i in range(num_results)]
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
        wanted = dsv32.encode(messages, tools=tools, is_thinking=is_thinking)
    except ValueError:
        with pytest.raises(RequestError, match="the chat template refuses these messages"):
            ours()
    else:
        assert ours() == wanted


def test_an_answer_is_continued_and_a_role_that_nobody_knows_is_refused(template: ChatTemplate) -> None:
    begun = [*ASK, {"role": "assistant", "content": "Once"}]
    text = template.render(begun, add_generation_prompt=False, continue_final_message=True)
    assert text == "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>Once"
    with pytest.raises(RequestError, match="unknown role function"):
        template.render([{"role": "function", "content": "x"}])
    developer = template.render([{"role": "developer", "content": "x"}])
    assert developer == "<｜begin▁of▁sentence｜><｜User｜>\n\n# The user's message is: x<｜Assistant｜></think>"
