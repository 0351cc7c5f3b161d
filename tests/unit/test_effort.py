"""Levels of reasoning effort, in templates that refuse some."""

from __future__ import annotations

from pathlib import Path

import pytest

import raycache.api
from raycache.api.chat import ChatTemplate
from raycache.api.chat_model import ChatModel
from raycache.api.formats.effort import LEVELS, accepted_efforts, nearest_effort
from raycache.api.schema import ChatBody, parse_body
from raycache.api.tokenizer import Tokenizer
from tests.oracle import tiny_tokenizers

KIMI = Path(raycache.api.__file__).with_name("chat_templates") / "kimi_k3.jinja"
STRICT = (
    "{%- if reasoning_effort is defined and reasoning_effort not in ['xhigh', 'medium', 'low'] %}"
    "{{- raise_exception('no such effort') }}{%- endif %}{{- reasoning_effort }}"
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens={})


@pytest.mark.parametrize(
    ("source", "accepted"),
    [
        (KIMI.read_text(encoding="utf-8"), ("low", "high", "max")),
        (STRICT, ("low", "medium", "xhigh")),
        ("{{ messages }}", LEVELS),
        ("{{ raise_exception('never') }}", ()),
    ],
)
def test_a_template_says_which_levels_it_takes(source: str, accepted: tuple[str, ...]) -> None:
    assert accepted_efforts(template(source)) == accepted


@pytest.mark.parametrize(
    ("wanted", "accepted", "expected"),
    [
        ("high", ("low", "medium", "xhigh"), "xhigh"),
        ("minimal", ("low", "medium", "xhigh"), "low"),
        ("medium", ("low", "high", "max"), "high"),
        ("xhigh", ("low", "high", "max"), "max"),
        ("low", ("low", "high", "max"), "low"),
        ("ultra", ("low", "high"), "ultra"),
        ("low", (), "low"),
    ],
)
def test_the_nearest_level_is_taken(wanted: str, accepted: tuple[str, ...], expected: str) -> None:
    assert nearest_effort(wanted, accepted) == expected


def test_a_chat_with_a_level_that_the_template_refuses_is_rendered(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(tmp_path))
    model = ChatModel(template(STRICT), tokenizer=tokenizer)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "high"}
    chat = parse_body(ChatBody, body)
    assert model.prompt(chat, chat.choose_tools()) == "xhigh"
    own = parse_body(ChatBody, {**body, "chat_template_kwargs": {"reasoning_effort": "low"}})
    assert model.prompt(own, own.choose_tools()) == "low"
