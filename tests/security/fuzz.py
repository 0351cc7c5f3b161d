"""Requests that nobody meant: drawn from the description of the API, and bytes that are nearly JSON."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from raycache.api.tokenizer import Tokenizer
from tests.unit.scripted import ScriptedEngine, over_port

_CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
_MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
_CHATS = ("/v1/chat/completions", "/v1/responses", *_MESSAGES)
_ENDPOINTS = ("/v1/completions", *_CHATS, "/cache/inspect", "/cache/clear", "/cache/attach")
_REFUSALS = {200, 400, 404, 413, 415, 422}


@contextmanager
def served(tokenizer: Tokenizer, **given_settings: Any) -> Iterator[str]:
    """A server over a scripted engine in a thread of its own; the value is its endpoint."""
    found: list[str] = []
    ready, stop = threading.Event(), threading.Event()

    async def run() -> None:
        engine = ScriptedEngine(tokenizer)
        async with over_port(engine, tokenizer, **given_settings) as endpoint:
            found.append(endpoint)
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.05)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield found[0]
    finally:
        stop.set()
        thread.join(30)


def fuzz_described(endpoint: str, *, examples: int, headers: dict[str, str] | None = None) -> Counter[tuple[str, int]]:
    """Send what the description of the API allows, and what it nearly allows; check every answer against it.

    Args:
        endpoint: of a running server.
        examples: for each operation and kind.
        headers: to send.
    Returns:
        How many answers of which status each operation gave.
    Raises:
        Exception: schemathesis' own, for an answer that is a server error or is not described.
    """
    schema = schemathesis.openapi.from_url(f"{endpoint}/openapi.json")
    counts: Counter[tuple[str, int]] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue

            @_hypothesis(examples)
            @given(case=operation.as_strategy(mode))
            def send(case: schemathesis.Case) -> None:
                answer = case.call_and_validate(base_url=endpoint, checks=_CHECKS, headers=headers, timeout=20)
                counts[case.operation.label, answer.status_code] += 1

            send()
    return counts


def fuzz_bytes(endpoint: str, *, examples: int, headers: dict[str, str] | None = None) -> Counter[tuple[str, int]]:
    """Send bytes that are JSON, or were before somebody dropped them."""
    counts: Counter[tuple[str, int]] = Counter()
    with httpx.Client(timeout=20, headers={"Content-Type": "application/json", **(headers or {})}) as client:

        @_hypothesis(examples)
        @given(path=st.sampled_from(_ENDPOINTS), body=_bodies())
        def send(path: str, body: bytes) -> None:
            answer = client.post(endpoint + path, content=body)
            assert answer.status_code in _REFUSALS, (path, body, answer.status_code, answer.text)
            if answer.status_code != 200:
                fields = {"message", "type"} if path in _MESSAGES else {"message", "type", "param", "code"}
                assert set(answer.json()["error"]) == fields
            counts[path, answer.status_code] += 1

        send()
    return counts


def _hypothesis(examples: int) -> Callable[..., Any]:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


_FIELDS = (
    *("model", "prompt", "messages", "n", "stop", "seed", "logit_bias", "max_tokens", "logprobs", "top_logprobs"),
    *("stream", "stream_options", "tools", "tool_choice", "chat_template_kwargs", "response_format", "cache_salt"),
    *("tiers", "url", "size", "echo", "timeout_s", "temperature", "priority", "continue_final_message", "x"),
    *("system", "thinking", "output_config", "stop_sequences", "cache_control"),
    *("input", "instructions", "text", "reasoning", "include", "metadata", "max_output_tokens", "store"),
)


@st.composite
def _bodies(draw: st.DrawFn) -> bytes:
    numbers = st.integers() | st.floats(allow_nan=True) | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**400])
    plain = st.none() | st.booleans() | numbers | st.text(max_size=20)
    values = st.recursive(plain, lambda inner: st.lists(inner, max_size=4) | _objects(inner), max_leaves=12)
    message = st.fixed_dictionaries({"role": st.just("user"), "content": st.just("x") | values})
    body = draw(st.dictionaries(st.sampled_from(_FIELDS), values, max_size=6))
    body |= {"model": "tiny"} if draw(st.booleans()) else {}
    if draw(st.booleans()):
        body["prompt"] = draw(st.just("x") | values)
    else:
        body[draw(st.sampled_from(("messages", "input")))] = draw(st.lists(message, max_size=3))
    data = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    match draw(st.integers(0, 7)):
        case 0:
            place = draw(st.integers(0, len(data)))
            return data[:place] + draw(st.binary(max_size=8)) + data[place + draw(st.integers(0, 4)) :]
        case 1:
            depth = draw(st.sampled_from([50, 300, 900, 1100, 100_000]))
            field = draw(st.sampled_from(_FIELDS))
            nest = f"{'[' * depth}{']' * depth}" if draw(st.booleans()) else f'{{"a":{"[" * depth}'
            return data[:-1] + f', "{field}": {nest}}}'.encode()
        case 2:
            return draw(st.binary(max_size=64))
    return data


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.text(max_size=8), inner, max_size=4)
