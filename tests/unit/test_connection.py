"""The connection between a front end and its engine: what arrives, who is refused, and what happens if one goes."""

from __future__ import annotations

import asyncio
import queue
import secrets
import socket
import threading
import time
from array import array
from dataclasses import replace
from typing import Any

import pytest

from actors.connection import Address, Connection, Listener
from raycache.errors import PromptTooLongError, QueueFullError
from raycache.types import GenerateRequest, RequestOutput, SamplingParams

_WAIT_S = 20.0


class Engine:
    """An engine's side that keeps what it receives."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.received = queue.Queue[Any]()
        self.listener = Listener(host, self.received.put)

    def next(self) -> Any:
        return self.received.get(timeout=_WAIT_S)


async def connected(engine: Engine) -> Connection:
    connection = Connection()
    await connection.open(engine.listener.address)
    return connection


def test_requests_and_outputs_arrive_whole_and_in_order() -> None:
    engine = Engine()
    # Several times what a socket's buffers hold.
    prompt = array("i", range(3_000_000))
    requests = [GenerateRequest(str(at), prompt[: 10**at], SamplingParams(seed=at)) for at in range(1, 7)]
    outputs = [("1", RequestOutput("1", token_ids=(at,))) for at in range(100)]
    errors = [
        ("2", PromptTooLongError("too long", num_tokens=9, limit=8)),
        ("3", QueueFullError("full", retry_after_s=3.0)),
    ]

    async def run() -> None:
        connection = Connection()
        connection.send(requests[0])  # before it is open
        await connection.open(engine.listener.address)
        for request in requests[1:]:
            connection.send(request)
        connection.send("5")
        assert [await asyncio.to_thread(engine.next) for _ in range(7)] == [*requests, "5"]
        for at in range(0, 100, 10):
            engine.listener.send(outputs[at : at + 10])
        engine.listener.send(errors)
        assert [await connection.receive(timeout_s=_WAIT_S) for _ in range(10)] == [
            outputs[at : at + 10] for at in range(0, 100, 10)
        ]
        (_, first), (_, second) = await connection.receive(timeout_s=_WAIT_S)
        assert (first.num_tokens, first.limit, second.retry_after_s) == (9, 8, 3.0)
        connection.close()

    asyncio.run(run())


def test_what_is_sent_before_a_front_end_comes_waits_for_it() -> None:
    engine = Engine()
    sending = threading.Thread(target=engine.listener.send, args=("hello",), daemon=True)
    sending.start()

    async def run() -> Any:
        return await (await connected(engine)).receive(timeout_s=_WAIT_S)

    assert asyncio.run(run()) == "hello"
    sending.join(_WAIT_S)


@pytest.mark.parametrize("sent", [b"", b"x", b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(64), bytes(range(256)) * 9])
def test_who_does_not_know_the_key_is_not_heard_and_delays_nobody(sent: bytes) -> None:
    engine = Engine()
    with socket.create_connection((engine.listener.address.host, engine.listener.address.port)) as stranger:
        stranger.sendall(sent)

        async def run() -> Any:
            connection = await connected(engine)
            connection.send("from a friend")
            return await asyncio.to_thread(engine.next)

        assert asyncio.run(run()) == "from a friend" and engine.received.empty()
        stranger.settimeout(_WAIT_S)
        if len(sent) >= 64:
            with pytest.raises((ConnectionResetError, StopIteration)):
                while stranger.recv(4096):
                    pass
                raise StopIteration


def test_the_right_answer_of_another_connection_is_of_no_use() -> None:
    engine = Engine()
    address = engine.listener.address

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the front end with its own kind of proof, as one would who wants to be taken for the engine."""
        writer.write(secrets.token_bytes(32))
        nonce_and_proof = await reader.readexactly(64)
        writer.write(nonce_and_proof[32:])

    async def run() -> None:
        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionError, match="does not know the key"):
            await Connection().open(replace(address, port=port))
        server.close()

    asyncio.run(run())


def test_a_wrong_key_is_refused() -> None:
    engine = Engine()
    wrong = replace(engine.listener.address, key=bytes(32))
    with pytest.raises(ConnectionError, match="closed before the handshake"):
        asyncio.run(Connection().open(wrong))


def test_a_front_end_that_comes_back_is_served_and_its_former_connection_closed() -> None:
    engine = Engine()

    async def run() -> None:
        former, connection = await connected(engine), Connection()
        former.send("a")
        assert await asyncio.to_thread(engine.next) == "a"
        await connection.open(engine.listener.address)
        with pytest.raises(ConnectionError):
            await former.receive(timeout_s=_WAIT_S)
        connection.send("b")
        assert await asyncio.to_thread(engine.next) == "b"
        await asyncio.to_thread(engine.listener.send, "c")
        assert await connection.receive(timeout_s=_WAIT_S) == "c"
        connection.close()
        await connection.open(engine.listener.address)
        connection.send("d")
        assert await asyncio.to_thread(engine.next) == "d"

    asyncio.run(run())


def test_outputs_for_a_front_end_that_has_gone_hold_nobody_up() -> None:
    engine = Engine()

    async def leave() -> None:
        connection = await connected(engine)
        connection.send("here")
        await asyncio.to_thread(engine.next)
        connection.close()

    asyncio.run(leave())
    big = bytes(2**20)
    sending = threading.Thread(target=lambda: [engine.listener.send(big) for _ in range(64)], daemon=True)
    sending.start()

    async def come() -> Any:
        return await (await connected(engine)).receive(timeout_s=_WAIT_S)

    assert asyncio.run(come()) == big


def test_silence_and_what_the_watch_finds_end_the_wait() -> None:
    engine = Engine()

    async def run() -> None:
        connection = await connected(engine)
        with pytest.raises(TimeoutError):
            await connection.receive(timeout_s=0.05)
        waiting = asyncio.create_task(connection.receive(timeout_s=600))
        await asyncio.sleep(0)
        start_s = time.monotonic()
        connection.fail(RuntimeError("the node is lost"))
        with pytest.raises(RuntimeError, match="the node is lost"):
            await waiting
        assert time.monotonic() - start_s < _WAIT_S

    asyncio.run(run())


def test_an_address_does_not_show_its_key() -> None:
    assert repr(Address("::1", 5, b"secret")) == "Address(host='::1', port=5)"
