"""Causes that were planted into requests such as real clients send: each is found, with its place and what it cost."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raycache.divergence import place
from raycache.divergence.cause import Cause
from raycache.divergence.history import PromptHistory
from raycache.divergence.place import Asked
from raycache.divergence.sums import Sums
from raycache.types import Miss, RequestOutput
from tests.unit.divergence import PAGE, Client, call_of, shared, tool

SYSTEM = (
    "You are a coding agent that works in a terminal.\n"
    "Answer in few words. Read files before you change them, and run the tests afterwards.\n"
    "Never delete what you did not write. Ask before you install packages.\n"
)
HEADER = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch={};"
TOOLS = [
    tool("read_file", path="string", limit="integer"),
    tool("run_command", command="string", timeout_s="number"),
    tool("search", pattern="string", path="string"),
]


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path)


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


LONG = "The test test_parser fails since the last change of the grammar, in line 41 of parser.py. "
HISTORY = [
    user("Why does the build fail?\n" + LONG * 2),
    assistant("I read the log first. " + LONG),
    user("Good. " + "What did you find in it? " * 3),
    assistant("The grammar lacks a rule for strings. " + LONG),
    user("Then add it, please. " + LONG),
]


def test_a_conversation_that_goes_on_is_no_divergence(client: Client) -> None:
    first = [system(SYSTEM), user("Say hi")]
    assert client.chat(first, answer="Hi!<|im_end|>") is None
    found = client.chat([*first, assistant("Hi!"), user("Thanks")])
    assert found is None or (found.cause, found.kind) == (Cause.GRANULARITY, "page")


def test_another_question_behind_the_same_beginning_is_new(client: Client) -> None:
    client.chat([system(SYSTEM), user("Why is the sky blue? Explain it to a child.")])
    found = client.chat([system(SYSTEM), user("How do planes fly, and how do they land again?")])
    assert found is not None and found.place is not None
    assert (found.cause, found.lost_tokens) == (Cause.NEW, 0)
    assert (found.place.message, found.place.role, found.place.line) == (1, "user", 1)


@pytest.mark.parametrize(
    ("line", "values", "kind", "key"),
    [
        (HEADER, ("36ee5", "9a0f1"), "header", "x-anthropic-billing-header"),
        ("Current time: {}", ("2026-11-23T10:15:02Z", "2026-11-23T10:15:41Z"), "time", "Current time"),
        ("Today is {}.", ("Monday, 23 November 2026", "Tuesday, 24 November 2026"), "date", ""),
        (
            "Session: {}",
            ("8f14e45f-ceea-467f-a3c1-0d2f7a6b9c01", "c9f0f895-fb98-4b91-99d3-5a7c1e2d3f40"),
            "uuid",
            "Session",
        ),
        ("Request number {} of this session", ("17", "18"), "number", ""),
    ],
)
def test_a_line_that_changes_with_each_request_is_volatile(
    client: Client, line: str, values: tuple[str, str], kind: str, key: str
) -> None:
    one, two = (line.format(value) for value in values)
    client.chat([system(f"{one}\n{SYSTEM}"), user("Say hi")], tools=())
    found = client.chat([system(f"{two}\n{SYSTEM}"), user("Say hi")])
    assert found is not None and found.place is not None
    assert (found.cause, found.kind) == (Cause.VOLATILE, kind)
    assert (found.place.message, found.place.role, found.place.line, found.place.key) == (0, "system", 1, key)
    before, now = (tokens for _, tokens in client.cached)
    assert found.lost_tokens == shared(before[::-1], now[::-1]) - 1  # the output's token is no part of the prompt
    assert found.examined is not None and found.examined.this[0] != found.examined.other[0]


def test_a_volatile_line_in_the_middle_of_a_later_message_is_placed(client: Client) -> None:
    def messages(at: str) -> list[dict[str, Any]]:
        return [system(SYSTEM), user(f"<environment>\nshell: bash\nclock: {at}\n</environment>\n" + LONG * 2)]

    client.chat(messages("10:15:02"))
    found = client.chat(messages("11:48:59"))
    assert found is not None and found.place is not None
    assert (found.cause, found.kind) == (Cause.VOLATILE, "time")
    assert (found.place.message, found.place.line, found.place.key) == (1, 3, "clock")


def test_tools_in_another_order(client: Client) -> None:
    client.chat([system(SYSTEM), user("Say hi")], tools=TOOLS)
    found = client.chat([system(SYSTEM), user("Say hi")], tools=[TOOLS[1], TOOLS[0], TOOLS[2]])
    assert found is not None and found.place is not None
    assert (found.cause, found.kind, found.place.tool) == (Cause.ORDER, "tools", "run_command")
    assert found.lost_tokens > 100


def test_keys_of_a_tool_in_another_order(client: Client) -> None:
    client.chat([system(SYSTEM), user("Say hi")], tools=TOOLS)
    turned = tool("run_command", timeout_s="number", command="string")
    found = client.chat([system(SYSTEM), user("Say hi")], tools=[TOOLS[0], turned, TOOLS[2]])
    assert found is not None and found.place is not None
    assert (found.cause, found.kind, found.place.tool) == (Cause.ORDER, "keys", "run_command")
    assert found.place.path == "parameters.properties"


def test_another_description_of_a_tool(client: Client) -> None:
    client.chat([system(SYSTEM), user("Say hi")], tools=TOOLS)
    changed = tool("run_command", command="string", timeout_s="number")
    changed["function"]["description"] = "Runs it in a shell."
    found = client.chat([system(SYSTEM), user("Say hi")], tools=[TOOLS[0], changed, TOOLS[2]])
    assert found is not None and found.place is not None
    assert (found.cause, found.place.tool, found.place.path) == (Cause.CHANGED, "run_command", "description")


def test_reasoning_that_the_client_drops(client: Client) -> None:
    thought = "The user asks for the reason. " * 3
    first = [system(SYSTEM), user("Why does it fail?")]
    client.chat(first, answer=f"<think>\n{thought}\n</think>\n\n{LONG}<|im_end|>\n")
    found = client.chat([*first, assistant(LONG.strip()), user("And now?" + LONG)])
    assert found is not None and found.place is not None
    assert (found.cause, found.kind) == (Cause.HISTORY, "reasoning_dropped")
    assert (found.place.message, found.place.role) == (2, "assistant")


_LAST_TURN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content and loop.index0 > messages|length - 3 %}"
    "<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def test_reasoning_that_the_template_drops_from_earlier_turns(tmp_path: Path) -> None:
    client = Client(tmp_path, template=_LAST_TURN)
    thought = assistant(LONG.strip(), reasoning_content="The user asks for the reason. " * 3)
    first = [system(SYSTEM), user("Why does it fail?"), thought, user("Go on. " + LONG)]
    client.chat(first)
    found = client.chat([*first, assistant("Done."), user("Thanks")])
    assert found is not None
    assert (found.cause, found.kind) == (Cause.TEMPLATE, "reasoning")


def test_a_date_that_the_template_inserts(tmp_path: Path) -> None:
    dated = "<|im_start|>system\nCutting knowledge: 2025\nToday: {{ today }}\n\n{{ messages[0].content }}<|im_end|>\n"
    client = Client(tmp_path, template=dated)
    client.chat([system(SYSTEM)], variables={"today": "23 Nov 2026"})
    found = client.chat([system(SYSTEM)], variables={"today": "24 Nov 2026"})
    assert found is not None and found.place is not None
    assert (found.cause, found.kind, found.place.is_of_template) == (Cause.TEMPLATE, "date", True)


def test_a_marker_of_the_last_turn(tmp_path: Path) -> None:
    marked = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if loop.last %}[CURRENT TURN] {% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    )
    client = Client(tmp_path, template=marked)
    client.chat([system(SYSTEM), user(LONG * 2)])
    found = client.chat([system(SYSTEM), user(LONG * 2), assistant("Yes."), user("Go on")])
    assert found is not None
    assert (found.cause, found.kind) == (Cause.TEMPLATE, "marker")


def test_a_history_cut_off_from_the_front(client: Client) -> None:
    client.chat([system(SYSTEM), *HISTORY])
    found = client.chat([system(SYSTEM), *HISTORY[2:], assistant("Done."), user("Thanks")])
    assert found is not None and found.place is not None
    assert (found.cause, found.kind, found.place.message) == (Cause.HISTORY, "truncated", 1)


def test_a_history_that_becomes_a_summary(client: Client) -> None:
    client.chat([system(SYSTEM), *HISTORY])
    summary = user("This session is being continued from a previous conversation. Summary: the grammar lacks a rule.")
    found = client.chat([system(SYSTEM), summary, HISTORY[-1]])
    assert found is not None and found.place is not None
    assert (found.cause, found.kind, found.place.message) == (Cause.HISTORY, "summary", 1)


def test_a_result_of_a_tool_that_the_client_clears(client: Client) -> None:
    def messages(result: str) -> list[dict[str, Any]]:
        asks = assistant("", tool_calls=[call_of("read_file", path="a.py")])
        return [system(SYSTEM), user("Read it."), asks, {"role": "tool", "content": result}, *HISTORY]

    client.chat(messages("import os\n" * 30), tools=TOOLS)
    found = client.chat(messages("[Old tool result cleared]"), tools=TOOLS)
    assert found is not None and found.place is not None
    assert (found.cause, found.kind) == (Cause.HISTORY, "edited")
    assert (found.place.message, found.place.role) == (3, "tool")


def test_documents_before_the_same_instructions(client: Client) -> None:
    client.send("Document: whales are mammals of the sea.\n\n" + SYSTEM * 2)
    found = client.send("Document: bees live in hives and dance.\n\n" + SYSTEM * 2)
    assert found is not None and found.place is not None
    assert (found.cause, found.place.line, found.place.message) == (Cause.CHANGED, 1, None)
    assert found.lost_tokens >= len(client.encode(SYSTEM * 2)) - 5


@pytest.mark.parametrize(
    ("miss", "options", "cause"),
    [
        (Miss.EVICTED_DEVICE, {}, Cause.CAPACITY),
        (Miss.EVICTED_STORAGE, {}, Cause.CAPACITY),
        (Miss.NO_CAPACITY, {}, Cause.CAPACITY),
        (Miss.STATE_MISSING, {"cut_by": "state"}, Cause.GRANULARITY),
        (Miss.IDENTITY, {}, Cause.FORMAT),
        (Miss.SLOWER, {}, Cause.UNAVAILABLE),
        (Miss.NEVER_SEEN, {}, Cause.GONE),
    ],
)
def test_what_the_engine_did_not_reuse_is_told_by_its_reason(
    client: Client, miss: Miss, options: dict[str, Any], cause: Cause
) -> None:
    client.send(SYSTEM)
    found = client.send(SYSTEM, cached=PAGE, miss=miss, **options)
    assert found is not None
    size = len(client.encode(SYSTEM)) - 1
    assert (found.cause, found.token, found.lost_tokens) == (cause, PAGE, size // PAGE * PAGE - PAGE)
    assert found.kind == (options.get("cut_by") or miss)


def test_an_evicted_prompt_whose_time_to_live_is_over_has_expired(client: Client) -> None:
    for later, cause in ((1.0, Cause.CAPACITY), (100.0, Cause.EXPIRED)):
        client.send(SYSTEM, ttl_s=60.0)
        client.now += later
        found = client.send(SYSTEM, cached=0, miss=Miss.EVICTED_HOST)
        assert found is not None and found.cause is cause


def test_a_prompt_that_is_sent_again_loses_the_last_page(client: Client) -> None:
    client.send(SYSTEM)
    found = client.send(SYSTEM)
    assert found is not None
    assert (found.cause, found.kind) == (Cause.GRANULARITY, "page")
    assert 0 < found.lost_tokens < PAGE


def test_the_cost_is_the_share_of_the_time_to_the_first_token(client: Client) -> None:
    client.send(SYSTEM)
    found = client.send(SYSTEM, cached=0, miss=Miss.EVICTED_DEVICE)  # a request takes a second of the client's clock
    size = len(client.encode(SYSTEM))
    assert found is not None and found.lost_s == pytest.approx(found.lost_tokens / size)
    sums = client.history.sums.facts()[""]
    assert (sums["requests"], sums["computed_tokens"], sums["computed_s"]) == (2, 2 * size, 2.0)
    assert sums["causes"][0]["lost_share"] == pytest.approx(found.lost_tokens / (2 * size), abs=1e-4)


def test_memory_stays_below_the_bound_with_all_that_is_noted(client: Client) -> None:
    max_bytes = 2**19
    gc.collect()
    tracemalloc.start()
    history = PromptHistory(client.text, page_size=PAGE, max_bytes=max_bytes)
    for number in range(400):
        messages = [system(f"{'x' * (number % 40)}\nid: {number * 7919}\n{SYSTEM}"), user("y" * (number % 23))]
        text = client.template.render(messages)
        tokens = client.encode(text)
        with history.begin(tokens, salt=str(number % 3), tenant=str(number), asked=Asked(messages, (), text)) as watch:
            watch.take(RequestOutput("r", (1, 2, 3)))
    del messages, text, tokens, watch
    history.sums = Sums()  # bounded by its own counts
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert history.seen.num_bytes > max_bytes / 2, "the bound is not reached, so this shows nothing"
    tables = 12 * client.tokenizer.vocab_size + 2**14
    assert taken <= max_bytes + tables, (taken, history.seen.num_bytes)


def test_contents_that_the_template_does_not_show_do_not_hide_the_place(tmp_path: Path) -> None:
    shown = "{% for message in messages if message.role != 'tool' %}[{{ message.content | trim }}]{% endfor %}"
    client = Client(tmp_path, template=shown)

    def messages(line: str) -> list[dict[str, Any]]:
        hidden = [{"role": "tool", "content": f"{number} " + "z" * 500} for number in range(50)]
        return [user(LONG), *hidden, user(f"  Good.\nid: {line}\n{SYSTEM}  ")]

    client.chat(messages("12345"))
    found = client.chat(messages("67890"))
    assert found is not None and found.place is not None
    assert (found.cause, found.place.message, found.place.line, found.place.key) == (Cause.VOLATILE, 51, 2, "id")


def test_what_takes_long_to_find_has_its_line_in_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_MOST_IN_VAIN", 1000)
    client = Client(tmp_path, template="{% for message in messages[1:] %}[{{ message.content }}]{% endfor %}")
    for number in (12345, 67890):
        found = client.chat([user("never shown"), user(f"Good.\nid: {number}\n{SYSTEM}")])
    assert found is not None and found.place is not None
    assert (found.cause, found.place.message, found.place.line) == (Cause.VOLATILE, None, 2)


def test_salts_share_nothing(client: Client) -> None:
    client.send(SYSTEM, salt="one")
    assert client.send(SYSTEM, salt="two", cached=0) is None


def test_another_salt_of_a_named_tenant_counts_in_the_sums_only(client: Client) -> None:
    for tenant, salts in (("alice", ("one", "two")), ("", ("three", "four"))):
        for salt in salts:
            assert client.send(SYSTEM, salt=salt, tenant=tenant, cached=0) is None
    client.send(SYSTEM, salt="five", tenant="bob", cached=0)  # others' salts do not count
    sums = client.history.sums.facts()
    (cause,) = sums["alice"]["causes"]
    size = len(client.encode(SYSTEM)) // PAGE * PAGE
    assert (cause["cause"], cause["lost_tokens"], cause["requests"]) == (Cause.SALT, size, 1)
    assert sums[""]["causes"] == sums["bob"]["causes"] == []


def test_a_prompt_that_is_still_computed_is_known_but_not_cached(client: Client) -> None:
    tokens, asked = client.encode(SYSTEM), Asked(text=SYSTEM)
    with client.history.begin(tokens, salt="", tenant="", asked=asked):
        found = client.send(SYSTEM, cached=0)
        assert found is not None and found.cause is Cause.CONCURRENT
    found = client.send(SYSTEM, cached=0)
    assert found is not None and found.cause is Cause.GONE


@pytest.mark.parametrize("make", [lambda: "", lambda: "Zürich 東京 🎉 " * 9], ids=["ascii", "wide"])
def test_the_place_is_right_behind_characters_of_several_bytes(client: Client, make: Callable[[], str]) -> None:
    client.chat([system(make() + "\nid: 12345\n" + SYSTEM)])
    found = client.chat([system(make() + "\nid: 67890\n" + SYSTEM)])
    assert found is not None and found.place is not None
    assert (found.place.line, found.place.key, found.cause) == (2 if make() else 1, "id", Cause.VOLATILE)


def test_many_places_are_examined_in_part_and_their_sums_stay_right(client: Client) -> None:
    history = PromptHistory(client.text, page_size=PAGE, max_bytes=2**25, draw=random.Random(4).random)
    draw = random.Random(5)

    def send(prompt: list[int], salt: str) -> None:
        with history.begin(prompt, salt=salt, tenant="", asked=Asked()) as watch:
            watch.take(RequestOutput("r", (1,), cached_tokens=PAGE))  # so nothing else is lost

    def leave(count: int) -> int:
        """Pairs of prompts, each of which part at a place of their own, by one token; returns what that costs."""
        lost = 0
        for number in range(count):
            begin, end = draw.choices(range(300), k=PAGE), draw.choices(range(300), k=draw.randint(100, 200))
            for token in (301, 302):
                send([*begin, token, *end], f"{count} {number}")
            lost += len(end)
        return lost

    def found() -> tuple[int, int]:
        rows = history.sums.facts()[""]["causes"]
        return sum(row["requests"] for row in rows), sum(row["lost_tokens"] for row in rows)

    few = leave(64)
    assert found() == (64, few)
    many = leave(1200)
    requests, lost = found()
    assert requests % 8 == 0
    assert abs(requests - 1264) < 4 * (7 * 1200) ** 0.5
    assert lost == pytest.approx(few + many, rel=0.3)
    for number in range(100):
        send([*range(PAGE), number + 100, *range(200)], "one place")
    assert found()[0] - requests in (97, 98, 99, 106)  # the first time may be left out, or count eight times
    assert history.sums.facts()[""]["requests"] == 2 * 1264 + 100
