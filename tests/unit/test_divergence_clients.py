"""Causes planted into requests of real clients, sent over their APIs: each is found, with its place and its cost."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from raycache.api.tokenizer import Tokenizer
from raycache.types import GenerateRequest, Miss, RequestOutput
from tests.oracle import tiny_tokenizers
from tests.unit.divergence import PAGE, TEMPLATE, call_of, shared, tool
from tests.unit.scripted import ScriptedEngine, over_asgi, run

Body = dict[str, Any]
Change = Callable[[Body], None]

_CODEX = json.loads((Path(__file__).parents[1] / "data" / "codex_request.json").read_text())
_RULES = "Read files before you change them, and run the tests afterwards. Never delete what you did not write. " * 3
_SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}
_MARK = {"cache_control": {"type": "ephemeral"}}
_CLAUDE_CODE = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": f"<system-reminder>\nsession: 8f14e45f-ceea\n{_RULES}</system-reminder>"},
                {"type": "text", "text": f"Say hi. {_RULES}", **_MARK},
            ],
        },
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"},
        {"type": "text", "text": "You are an agent.", **_MARK},
        {"type": "text", "text": f"\nYou help with software.\nToday's date: 2026-11-23\n{_RULES}\n", **_MARK},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs a command.", "input_schema": _SCHEMA},
        {"name": "Read", "description": "Reads a file.", "input_schema": {**_SCHEMA, "required": []}},
    ],
    "metadata": {"user_id": '{"device_id":"a3f2"}'},
    "thinking": {"type": "adaptive"},
    "max_tokens": 32000,
}
_LONG = "The test test_parser fails since the last change of the grammar, in line 41 of parser.py. " * 2
_CHAT = {
    "messages": [
        {"role": "system", "content": f"You are an interactive tool for the command line.\n{_RULES}"},
        {"role": "user", "content": f"Why does the build fail? {_LONG}"},
        {"role": "assistant", "content": "", "tool_calls": [call_of("read", path="parser.py")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "import re\n" * 20},
        {"role": "assistant", "content": f"The grammar lacks a rule for strings. {_LONG}"},
        {"role": "user", "content": f"Then add it, please, {'with a test for each kind of quotation mark, ' * 4}"},
    ],
    "tools": [tool("read", path="string", offset="integer"), tool("bash", command="string")],
    "max_tokens": 5,
}


class CachingEngine(ScriptedEngine):
    """Reuses whole pages of the longest prompt before, as a cache without limits does."""

    def _outputs(self, request: GenerateRequest) -> Sequence[RequestOutput]:
        prompt = list(request.prompt)
        known = max((shared(prompt, list(other.prompt)) for other in self.requests[:-1]), default=0)
        self.reuse = {"cached_tokens": min(known, len(prompt) - 1) // PAGE * PAGE, "miss": Miss.NEVER_SEEN}
        return super()._outputs(request)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


def replaced(*path: str | int, old: str, new: str) -> Change:
    """Puts other text into a text of a body."""

    def change(body: Body) -> None:
        inside: Any = body
        for step in path[:-1]:
            inside = inside[step]
        assert old in inside[path[-1]], f"{old!r} is not in the request"
        inside[path[-1]] = inside[path[-1]].replace(old, new)

    return change


def turned(*path: str | int) -> Change:
    """Turns the order of a list, or of an object's keys."""

    def change(body: Body) -> None:
        inside: Any = body
        for step in path[:-1]:
            inside = inside[step]
        found = inside[path[-1]]
        inside[path[-1]] = found[::-1] if isinstance(found, list) else dict(reversed(found.items()))

    return change


def cut(begin: int, end: int, *instead: Body) -> Change:
    """Puts other messages in the place of some."""

    def change(body: Body) -> None:
        body["messages"][begin:end] = instead

    return change


_MESSAGES, _RESPONSES, _COMPLETIONS = "/v1/messages", "/v1/responses", "/v1/chat/completions"
_SUMMARY = {"role": "user", "content": "This session is being continued. Summary: the grammar lacks a rule."}
_HEADER = "line 1 of the system message, x-anthropic-billing-header"
_CODEX_TEXT = ("input", 2, "content", 0, "text")

PLANTED = {
    "billing header": (
        _MESSAGES,
        _CLAUDE_CODE,
        replaced("system", 0, "text", old="36ee5", new="9a0f1"),
        ("volatile", "header", _HEADER),
    ),
    "date in the system prompt": (
        _MESSAGES,
        _CLAUDE_CODE,
        replaced("system", 2, "text", old="2026-11-23", new="2026-11-24"),
        ("volatile", "date", "of the system message"),
    ),
    "id in a reminder": (
        _MESSAGES,
        _CLAUDE_CODE,
        replaced("messages", 0, "content", 0, "text", old="8f14e45f-ceea", new="c9f0f895-fb98"),
        ("volatile", "id", "line 2 of message 1 (user), session"),
    ),
    "order of tools": (_MESSAGES, _CLAUDE_CODE, turned("tools"), ("order", "tools", "tool Read")),
    "order of keys": (
        _MESSAGES,
        _CLAUDE_CODE,
        turned("tools", 0, "input_schema", "properties"),
        ("order", "keys", "tool Bash, parameters.properties"),
    ),
    "description of a tool": (
        _MESSAGES,
        _CLAUDE_CODE,
        replaced("tools", 0, "description", old="Runs a command.", new="Executes commands."),
        ("changed", "tools", "tool Bash, description"),
    ),
    "clock in the environment": (
        _RESPONSES,
        _CODEX,
        replaced(*_CODEX_TEXT, old="10:15:02", new="11:48:59"),
        ("volatile", "time", "line 2 of message 1 (user), clock"),
    ),
    "counter in the instructions": (
        _RESPONSES,
        _CODEX,
        replaced("input", 1, "content", 1, "text", old="Turn: 17", new="Turn: 18"),
        ("volatile", "number", "Turn"),
    ),
    "order of functions": (_RESPONSES, _CODEX, turned("tools"), ("order", "tools", "tool ")),
    "result of a tool cleared": (
        _COMPLETIONS,
        _CHAT,
        replaced("messages", 3, "content", old="import re\n" * 20, new="[Old tool result cleared]"),
        ("history", "edited", "a later message (tool)"),
    ),
    "turns cut off from the front": (
        _COMPLETIONS,
        _CHAT,
        cut(1, 5),
        ("history", "truncated", "line 1 of message 1 (user)"),
    ),
    "turns summed up": (_COMPLETIONS, _CHAT, cut(1, 5, _SUMMARY), ("history", "summary", "line 1 of message 1 (user)")),
}


def planted(body: Body, path: str) -> Body:
    """A request with the lines that a client of it may have, and a long end behind them."""
    sent = {"model": "tiny", **copy.deepcopy(body), "stream": False}
    if path == _RESPONSES:
        environment = sent["input"][2]["content"][0]
        environment["text"] = environment["text"].replace("<shell>", "clock: 10:15:02\n  <shell>") + _RULES
        sent["input"][1]["content"][1]["text"] += f"\nTurn: 17\n{_RULES}"
        sent["max_output_tokens"] = 5
    return sent


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_cause_is_found_with_its_place(tokenizer: Tokenizer, name: str) -> None:
    path, body, change, (cause, kind, place) = PLANTED[name]
    engine = CachingEngine(tokenizer, context=60_000)

    async def scenario() -> None:
        settings = {"chat_template": str(TEMPLATE), "drop_attribution": False}
        async with over_asgi(engine, tokenizer, **settings) as client:
            first, second = planted(body, path), planted(body, path)
            change(second)
            for sent in (first, second):
                answer = await client.post(path, json=sent)
                assert answer.status_code == 200, answer.text
            sums = (await client.get("/cache/why")).json()["tenants"][""]
        (row,) = sums["causes"]
        assert (row["cause"], row["kind"], row["requests"]) == (cause, kind, 1)
        assert place in row["place"]
        before, now = (list(request.prompt) for request in engine.requests)
        behind = shared(before[::-1], now[::-1])
        parted = shared(before, now)
        assert behind / 2 <= row["lost_tokens"] <= len(now) - parted, "what both share behind the place is lost"

    run(scenario())


@pytest.mark.parametrize("path", [_MESSAGES, _RESPONSES, _COMPLETIONS])
def test_a_conversation_that_goes_on_loses_nothing(tokenizer: Tokenizer, path: str) -> None:
    engine = CachingEngine(tokenizer, context=60_000)
    body = {_MESSAGES: _CLAUDE_CODE, _RESPONSES: _CODEX, _COMPLETIONS: _CHAT}[path]

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, chat_template=str(TEMPLATE)) as client:
            sent = planted(body, path)
            for turn in range(4):
                assert (await client.post(path, json=sent)).status_code == 200
                turns = sent["input" if path == _RESPONSES else "messages"]
                turns += [
                    {"role": "assistant", "content": f"Done {turn}."},
                    {"role": "user", "content": f"And {turn}?"},
                ]
            rows = (await client.get("/cache/why")).json()["tenants"][""]["causes"]
        assert sum(row["lost_tokens"] for row in rows if row["cause"] != "granularity") == 0, rows

    run(scenario())
