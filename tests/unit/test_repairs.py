"""Repairs of chats: what matches changes, all else stays to the letter, and the answer names what was done."""

from __future__ import annotations

import copy
import json
import random
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycache.api.repairs import Repairs, sorted_tools, without_clock
from raycache.api.schema import ChatBody, parse_body
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import ConfigError
from raycache.types import Miss
from tests.oracle import tiny_tokenizers
from tests.unit.divergence import tool
from tests.unit.scripted import ScriptedEngine, over_asgi, run

_RULES = "Answer in few words. Read files before you change them, and run the tests afterwards. " * 2
_TOOLS = [tool("search", pattern="string", path="string"), tool("read_file", path="string", limit="integer")]
_DROPPED = r"x-session: \w+|Request \d+ of .*"


def chat(messages: list[dict[str, Any]], **fields: Any) -> ChatBody:
    return parse_body(ChatBody, {"model": "tiny", "messages": messages, **fields})


def repaired(messages: list[dict[str, Any]], **settings: Any) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    body, names = Repairs(**settings).applied(chat(messages))
    return list(body.messages), names


# --- lines

_LINES = st.sampled_from(
    ["x-session: 8f14", "  x-session: a\t", "Request 17 of 20", "Request many of", "a x-session: b", "x-session: 8f14!"]
)
_TEXTS = st.lists(_LINES | st.text(max_size=20), max_size=5).map("\n".join)
_PARTS = st.lists(_TEXTS.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3)
_MESSAGES = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
        _TEXTS | _PARTS,
    ),
    min_size=1,
    max_size=4,
)


def kept_lines(text: str) -> str:
    """The lines that stay, by Python's regular expressions."""
    return "\n".join(line for line in text.split("\n") if not re.fullmatch(rf"[ \t]*(?:{_DROPPED})[ \t\r]*", line))


@given(_MESSAGES)
def test_lines_that_match_are_left_out_and_nothing_else_changes(messages: list[dict[str, Any]]) -> None:
    sent = copy.deepcopy(messages)
    found, names = repaired(messages, drop_lines=_DROPPED)
    assert messages == sent, "the request itself was changed"
    expected = []
    for message in sent:
        content = message["content"]
        if message["role"] in ("assistant", "tool"):
            expected.append(message)
            continue
        if isinstance(content, str):
            kept: Any = kept_lines(content)
        else:
            texts = [(part, kept_lines(part["text"])) for part in content]
            kept = [{**part, "text": text} for part, text in texts if text or text == part["text"]]
        if kept == content:
            expected.append(message)
        elif kept or message["role"] == "user":
            expected.append({**message, "content": kept or ""})
    assert found == expected
    assert names == (("drop_lines",) if expected != sent else ())


def test_a_long_line_is_left_as_it_is_and_takes_no_long_time() -> None:
    # Python's own expressions would not end: each of them has exponentially many ways to fail.
    for pattern in ("(a+)+b", "(a|a)*b", "(a*)*(a*)*b", "(.*)(.*)(.*)(.*)(.*)b"):
        for size in (4000, 10**6):
            messages = [{"role": "user", "content": "a" * size}]
            assert repaired(messages, drop_lines=pattern, date_lines=pattern) == (messages, ())


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(x-session", "unclosed group"),
        ("x)|(y", "unopened group"),
        ("(?=x)x", "look-around"),
        (r"(x)\1", "backreferences"),
        ("(x{1000}){1000}{1000}", "size limit"),
        (".*", "every empty line"),
        (" *|x", "every empty line"),
    ],
)
@pytest.mark.parametrize("setting", ["drop_lines", "date_lines"])
def test_an_expression_that_cannot_be_used_is_refused_at_the_start(pattern: str, reason: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting}=.*{reason}"):
        Repairs.of(replace(Config(), **{setting: pattern}))  # type: ignore[arg-type]


# --- dates

_FORMATS = (
    "%Y-%m-%dT%H:%M:%SZ",
    "%Y-%m-%dT%H:%M:%S.%f+00:00",
    "%Y-%m-%d %H:%M",
    "%a %b %d %H:%M:%S UTC %Y",
    "%A, %B %d, %Y at %I:%M %p",
    "%d.%m.%Y, %H:%M:%S",
    "%m/%d/%Y %I:%M:%S %p (UTC)",
    "%a %b %d %Y %H:%M:%S GMT+0100 (CET)",
    "%s",
    "%s000",
    "%s.123456",
)


@pytest.mark.parametrize("form", _FORMATS)
def test_times_of_a_day_become_one_text_and_those_of_other_days_others(form: str) -> None:
    draw = random.Random(0)
    day = datetime(2026, 11, 23, tzinfo=UTC)
    texts: dict[str, str] = {}
    for number in range(40):
        today = day + timedelta(days=number)
        spelled = form.replace("%s", str(int(today.timestamp())))
        for _ in range(10):
            now = today + timedelta(seconds=draw.randrange(86_400), microseconds=draw.randrange(10**6))
            written = now.strftime(form.replace("%s", str(int(now.timestamp()))))
            texts.setdefault(without_clock(f"Current time: {written}"), spelled)
            assert texts[without_clock(f"Current time: {written}")] == spelled, written
    assert len(texts) == 40


@pytest.mark.parametrize(
    "line",
    ["10.0.0.1:8080", "parser.py:41:7", "version 2:1", "id 1234567890123", "+491732356902", "2026-11-23", "12:345"],
)
def test_what_is_no_time_stays(line: str) -> None:
    assert without_clock(line) == line


def test_only_lines_that_match_lose_their_times() -> None:
    log = "Current time: 2026-11-23T10:15:02Z\n10:15:02 error in parser.py\n"
    messages = [{"role": role, "content": log} for role in ("user", "tool", "assistant")]
    found, names = repaired(messages, date_lines="Current time: .*")
    assert [one["content"] for one in found] == ["Current time: 2026-11-23\n10:15:02 error in parser.py\n", log, log]
    assert names == ("date_lines",)


# --- tools


def shuffled(value: Any, draw: random.Random) -> Any:
    """The same JSON with the keys of its objects in another order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key], draw) for key in draw.sample(list(value), len(value))}
    return [shuffled(item, draw) for item in value] if isinstance(value, list) else value


def test_tools_in_any_order_are_the_same_text() -> None:
    texts = set()
    for seed in range(50):
        draw = random.Random(seed)
        tools = draw.sample([shuffled(one, draw) for one in _TOOLS], len(_TOOLS))
        found = sorted_tools(tools)
        assert sorted(map(json.dumps, map(_canonical, found))) == sorted(map(json.dumps, map(_canonical, _TOOLS)))
        assert sorted_tools(found) is found
        texts.add(json.dumps(found))
    assert len(texts) == 1
    ((first, second),) = map(json.loads, texts)
    assert (first["function"]["name"], second["function"]["name"]) == ("read_file", "search")
    assert list(first) == ["type", "function"]
    assert list(first["function"]) == ["name", "description", "parameters"]
    assert second["function"]["parameters"]["required"] == ["pattern", "path"]  # the order of a list has a meaning


def _canonical(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True))


# --- over HTTP


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    engine = ScriptedEngine(tokenizer, context=4000)
    engine.reuse = {"cached_tokens": 0, "miss": Miss.NEVER_SEEN}
    return engine


_SETTINGS = {"drop_lines": r"x-session: \w+", "date_lines": "Current time: .*", "sort_tools": True}
_HEADER = "X-RayCache-Repairs"
_SYSTEMS = [f"x-session: {one}\nCurrent time: 2026-11-23T10:15:0{one}Z\n{_RULES}" for one in (1, 2)]


def _chat(turn: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": _SYSTEMS[turn]}, {"role": "user", "content": "Say hi"}]
    return {"messages": messages, "tools": _TOOLS[:: -1 if turn else 1], "return_cache_info": True}


def _messages(turn: int) -> dict[str, Any]:
    functions = [one["function"] for one in _TOOLS[:: -1 if turn else 1]]
    tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
    return {"system": _SYSTEMS[turn], "messages": [{"role": "user", "content": "Say hi"}], "tools": tools}


def _responses(turn: int) -> dict[str, Any]:
    tools = [{"type": "function", **one["function"]} for one in _TOOLS[:: -1 if turn else 1]]
    return {"instructions": _SYSTEMS[turn], "input": "Say hi", "tools": tools, "store": False}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", _chat), ("/v1/messages", _messages), ("/v1/responses", _responses)],
)
def test_prompts_are_the_same_and_the_answer_names_what_was_done(
    engine: ScriptedEngine, tokenizer: Tokenizer, path: str, body: Any
) -> None:
    async def scenario() -> None:
        limit = {} if "responses" in path else {"max_tokens": 5}
        async with over_asgi(engine, tokenizer, **_SETTINGS) as client:
            answers = [await client.post(path, json={"model": "tiny", **limit, **body(turn)}) for turn in (0, 1)]
            streamed = await client.post(path, json={"model": "tiny", "stream": True, **limit, **body(0)})
            plain = {"model": "tiny", "prompt": _SYSTEMS[0], "max_tokens": 5, "return_cache_info": True}
            untouched = await client.post("/v1/completions", json=plain)
            (row,) = (await client.get("/cache/why")).json()["tenants"][""]["causes"]
            if path == "/v1/messages":
                counted = await client.post(f"{path}/count_tokens", json={"model": "tiny", **body(1)})
                assert counted.json()["input_tokens"] == len(engine.requests[0].prompt)
        names = [set(answer.headers[_HEADER].split(", ")) for answer in (*answers, streamed)]
        # One of two orders of the tools is the sorted one.
        assert names[0] | names[1] == set(_SETTINGS) and names[0] == names[2]
        assert _HEADER not in untouched.headers and "repairs" not in untouched.json()["raycache"]
        if path == "/v1/chat/completions":
            assert [set(answer.json()["raycache"]["repairs"]) for answer in answers] == names[:2]
        assert (row["cause"], row["requests"]) == ("gone", 2)  # the engine here never reuses; no cause in the text

    run(scenario())
    assert len({tuple(request.prompt) for request in engine.requests}) == 2
    prompt = tokenizer.decode(engine.requests[0].prompt)
    assert "x-session" not in prompt and "Current time: 2026-11-23\n" in prompt


def test_a_request_can_be_left_as_it_is(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, **_SETTINGS) as client:
            sent = {"model": "tiny", **_chat(0), "cache_repairs": False}
            answer = await client.post("/v1/chat/completions", json=sent)
            assert answer.status_code == 200, answer.text
            assert _HEADER not in answer.headers and "repairs" not in answer.json()["raycache"]
            shown = {name: sent[name] for name in ("messages", "tools")}
            counted = (await client.post("/tokenize", json=shown)).json()["count"]
            assert counted < len(engine.requests[0].prompt)

    run(scenario())
    assert "x-session: 1\nCurrent time: 2026-11-23T10:15:01Z" in tokenizer.decode(engine.requests[0].prompt)


def test_without_settings_only_the_attribution_line_is_left_out(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            sent = {"model": "tiny", **_chat(1)}
            answer = await client.post("/v1/chat/completions", json=sent)
            assert _HEADER not in answer.headers
            line = "x-anthropic-billing-header: cch=36ee5;"
            sent["messages"] = [{"role": "system", "content": f"{line}\n{_SYSTEMS[1]}"}, sent["messages"][1]]
            answer = await client.post("/v1/chat/completions", json=sent)
            assert answer.headers[_HEADER] == "drop_attribution"

    run(scenario())
    first, second = (request.prompt for request in engine.requests)
    assert first == second
    assert "x-session: 2\nCurrent time: 2026-11-23T10:15:02Z" in tokenizer.decode(first)
