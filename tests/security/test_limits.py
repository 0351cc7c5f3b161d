"""Slow, greedy and malformed clients get an answer or an end, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import httpx
import openai
import pytest

from launch.http import connection as bounds
from launch.http.wire import Bodies
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from tests.security.raw import GET, answer, connection, error_of, is_ended, post
from tests.unit.scripted import TEXT, ScriptedEngine, over_port, run

_ASK = {"model": "tiny", "prompt": "x", "max_tokens": 100}
_SLOW = {"header_timeout_s": 1.0}


@contextlib.asynccontextmanager
async def crowd(endpoint: str, count: int, *, says: bytes) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Clients that say something and then nothing."""
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(count):
            reader, writer = await stack.enter_async_context(connection(endpoint))
            writer.write(says)
            readers.append(reader)
        yield readers


@pytest.mark.parametrize("says", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nX: y\r\n", b"\r\n"])
def test_headers_must_come_in_time(engine: ScriptedEngine, tokenizer: Tokenizer, says: bytes) -> None:
    async def scenario() -> None:
        async with over_port(engine, tokenizer, **_SLOW) as endpoint, connection(endpoint) as (reader, writer):
            began_s = time.monotonic()
            writer.write(says)
            status, _ = await answer(reader)
            assert status == (408 if says else 0)
            assert await is_ended(reader, within_s=30)
            assert 0.9 < time.monotonic() - began_s < 30

    run(scenario())


def test_headers_that_drip_do_not_buy_time(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_port(engine, tokenizer, **_SLOW) as endpoint, connection(endpoint) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\n")
            dripping = asyncio.create_task(drip(writer, b"X: y\r\n"))
            assert (await answer(reader))[0] == 408
            dripping.cancel()

    run(scenario())


def test_a_connection_serves_many_requests_and_ends_when_idle(
    engine: ScriptedEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "KEEP_ALIVE_S", 3.0)

    async def scenario() -> None:
        async with over_port(engine, tokenizer, **_SLOW) as endpoint, connection(endpoint) as (reader, writer):
            for _ in range(5):
                writer.write(GET)
                assert (await answer(reader))[0] == 200
            writer.write(GET + GET + post(_ASK))  # at once
            for _ in range(3):
                assert (await answer(reader))[0] == 200
            assert not await is_ended(reader, within_s=2.0)  # longer than headers may take
            assert await is_ended(reader, within_s=30)

    run(scenario())


@pytest.mark.parametrize("says", [b"GET /health HTTP/1.1\r\nX: ", post(_ASK)[:-9]])
def test_slow_clients_give_way_to_one_that_asks(engine: ScriptedEngine, tokenizer: Tokenizer, says: bytes) -> None:
    async def scenario() -> None:
        async with (
            over_port(engine, tokenizer, max_connections=8, header_timeout_s=60.0) as endpoint,
            crowd(endpoint, 30, says=says) as readers,
            openai.AsyncOpenAI(base_url=f"{endpoint}/v1", api_key="none", max_retries=0) as client,
        ):
            whole = await client.completions.create(**_ASK)
            assert whole.choices[0].text == TEXT
            # Those that came first; of the eight places one is the client's, and one may be free for the next.
            assert all([await is_ended(reader, within_s=30) for reader in readers[:23]])
            assert sum([await is_ended(reader, within_s=0.05) for reader in readers[23:]]) <= 1

    run(scenario())


def test_who_finds_all_places_taken_by_requests_is_told_so(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, delay_s=0.02)

    async def scenario() -> None:
        async with over_port(engine, tokenizer, max_connections=4) as endpoint:
            long = post({**_ASK, "ignore_eos": True, "max_tokens": 190, "stream": True})
            async with crowd(endpoint, 4, says=long):
                while len(engine.running) < 4:
                    await asyncio.sleep(0.01)
                async with connection(endpoint) as (reader, _):
                    status, body = await answer(reader)
                    assert (status, error_of(body)["code"]) == (503, "busy")
                    assert await is_ended(reader, within_s=30)
                assert len(engine.running) == 4
            async with asyncio.timeout(60):
                while engine.running:
                    await asyncio.sleep(0.01)
            async with connection(endpoint) as (reader, writer):
                writer.write(GET)
                assert (await answer(reader))[0] == 200

    run(scenario())


@pytest.mark.parametrize(
    ("says", "status"),
    [
        (b"GET /health HTTP/1.1\r\n" + b"X: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 8000 + b"\r\n", 431),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nX" + b"a" * 200_000, 431),
        (b"hello\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # the begin of a TLS handshake
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /health HTTP/9.9\r\n\r\n", 400),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
def test_what_is_no_good_http_is_refused(
    engine: ScriptedEngine, tokenizer: Tokenizer, says: bytes, status: int
) -> None:
    async def scenario() -> None:
        async with over_port(engine, tokenizer, **_SLOW) as endpoint:
            async with connection(endpoint) as (reader, writer):
                writer.write(says)
                found, body = await answer(reader)
                if status:
                    assert found == status, body
                    assert set(error_of(body)) == {"message", "type", "param", "code"}
                assert await is_ended(reader, within_s=30)
            async with connection(endpoint) as (reader, writer):
                writer.write(GET)
                assert (await answer(reader))[0] == 200

    run(scenario())


_CHUNKED = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("says", "statuses"),
    [
        (b"1;" + b"x" * 1_000_000, {431}),  # an extension of a chunk that does not end
        (b"0\r\n" + b"X: " + b"x" * 1_000_000, {400, 431}),  # a trailer that does not end; the empty body came first
        (b"0\r\n" + b"X: y\r\n" * 10_000, {400, 431}),
    ],
)
def test_what_goes_with_a_body_is_bounded_too(
    engine: ScriptedEngine, tokenizer: Tokenizer, says: bytes, statuses: set[int]
) -> None:
    async def scenario() -> None:
        async with over_port(engine, tokenizer, **_SLOW) as endpoint, connection(endpoint) as (reader, writer):
            writer.write(_CHUNKED + says)
            status, _ = await answer(reader)
            assert status in statuses
            assert await is_ended(reader, within_s=30)

    run(scenario())


def test_a_trailer_changes_no_header(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_port(engine, tokenizer, api_key="good") as endpoint, connection(endpoint) as (reader, writer):
            body = json.dumps(_ASK).encode()
            chunk = b"%x\r\n%s\r\n0\r\nAuthorization: Bearer good\r\n\r\n" % (len(body), body)
            writer.write(_CHUNKED + chunk)
            assert (await answer(reader))[0] == 401

    run(scenario())


async def drip(writer: asyncio.StreamWriter, piece: bytes) -> None:
    while True:
        writer.write(piece)
        await asyncio.sleep(0.05)


def test_bodies_are_bounded_whatever_they_announce(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    json_type = {"Content-Type": "application/json"}

    async def scenario() -> None:
        async with over_port(engine, tokenizer, max_body="64KB", **_SLOW) as endpoint, httpx.AsyncClient() as client:
            url = f"{endpoint}/v1/completions"
            found = await client.post(url, content=b"x" * 65_000, headers=json_type)
            assert (found.status_code, found.json()["error"]["code"]) == (413, "body_too_large")
            async with connection(endpoint) as (reader, writer):
                writer.write(_CHUNKED + b"3e8\r\n%s\r\n" % (b"x" * 1000) * 66)
                status, text = await answer(reader)
                assert (status, error_of(text)["code"]) == (413, "body_too_large")
                writer.write(b"3e8\r\n%s\r\n" % (b"x" * 1000) * 66)
                assert await is_ended(reader, within_s=30)
            async with connection(endpoint) as (reader, writer):
                writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: 99999999999999999999\r\n\r\n{")
                assert (await answer(reader))[0] in (400, 413)
                assert await is_ended(reader, within_s=30)
            async with connection(endpoint) as (reader, writer):
                writer.write(_CHUNKED)
                dripping = asyncio.create_task(drip(writer, b"1\r\n \r\n"))
                status, text = await answer(reader)
                assert (status, error_of(text)["code"]) == (408, "body_too_slow")
                dripping.cancel()

    run(scenario())


def test_what_nobody_reads_ends_the_connection(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_port(engine, tokenizer, api_key="good") as endpoint, connection(endpoint) as (reader, writer):
            writer.write(_CHUNKED + b"5\r\nhello\r\n")
            assert (await answer(reader))[0] == 401
            dripping = asyncio.create_task(drip(writer, b"5\r\nhello\r\n"))
            began_s = time.monotonic()
            assert await is_ended(reader, within_s=30)
            assert time.monotonic() - began_s < bounds.LINGER_S + 30
            dripping.cancel()

    run(scenario())


def test_a_body_that_comes_late_does_not_cost_a_refused_client_its_connection(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    async def scenario() -> None:
        async with over_port(engine, tokenizer, api_key="good") as endpoint, connection(endpoint) as (reader, writer):
            body = post(_ASK)
            writer.write(body[:-10])
            assert (await answer(reader))[0] == 401
            writer.write(body[-10:])
            writer.write(GET)
            assert (await answer(reader))[0] == 200

    run(scenario())


def test_all_bodies_together_are_bounded() -> None:
    class Sent:
        headers: ClassVar = {"content-type": "application/json"}

        async def stream(self) -> AsyncIterator[bytes]:
            yield b"x" * 600
            yield b"x" * 100

    async def scenario() -> None:
        bodies = Bodies(Config(max_body="1KB"), capacity=1000)
        sent: Any = Sent()
        async with bodies.read(sent) as first:
            assert len(first) == 700
            with pytest.raises(Exception, match="reached their limit"):
                async with bodies.read(sent):
                    pass
        async with bodies.read(sent) as again:
            assert len(again) == 700

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_takes_nothing_is_let_go(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(bounds, "STALL_S", 0.5)
    engine = ScriptedEngine(tokenizer)

    async def scenario() -> None:
        async with over_port(engine, tokenizer, header_timeout_s=2.0) as endpoint, connection(endpoint) as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            # The log-probabilities of many long answers fill any buffer of the kernel's.
            body = {**_ASK, "n": 8, "max_tokens": 190, "ignore_eos": True, "logprobs": 20, "stream": stream}
            writer.write(post(body) * 40)
            async with asyncio.timeout(60):
                while len(engine.requests) < 16:
                    await asyncio.sleep(0.01)
                seen = -1
                while seen != len(engine.requests) or engine.running:
                    seen = len(engine.requests)
                    await asyncio.sleep(1.0)
            assert len(engine.requests) < 8 * 40

    run(scenario())


def test_streams_that_clients_reset_leave_nothing_running(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, delay_s=0.001)

    async def one(endpoint: str) -> None:
        async with connection(endpoint) as (reader, writer):
            writer.write(post({**_ASK, "stream": True, "ignore_eos": True, "max_tokens": 190}))
            await reader.readuntil(b"data: ")
            writer.write(b"\0\1\2 no HTTP in the middle of an answer")

    async def scenario() -> None:
        async with over_port(engine, tokenizer) as endpoint:
            await asyncio.gather(*(one(endpoint) for _ in range(64)))
            async with asyncio.timeout(60):
                while engine.running:
                    await asyncio.sleep(0.01)
            async with connection(endpoint) as (reader, writer):
                writer.write(GET)
                assert (await answer(reader))[0] == 200

    run(scenario())
