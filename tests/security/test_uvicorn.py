"""What launch/http/connection.py and serve.py rely on in uvicorn beyond its documentation; a failure here says that
uvicorn has changed, and that the limits of connections may not hold with it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from launch.http.connection import Connection

_CHANGED = f"uvicorn {uvicorn.__version__} is not as launch/http/connection.py and serve.py expect it: "
_HOOKS = {
    *("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing"),
    *("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
    *("on_response_complete", "send_400_response"),
}
_PLAIN = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
_CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


class Pipe(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def noting(calls: list[str], refuses: bytes) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, which notes the calls of what a `Connection` overrides, and refuses one header."""

    def noted(name: str) -> Callable[..., Any]:
        def call(self: HttpToolsProtocol, *arguments: Any) -> Any:
            calls.append(name)
            if name == "on_header" and arguments[0] == refuses:
                raise ValueError
            return getattr(HttpToolsProtocol, name)(self, *arguments)

        return call

    return type("Noting", (HttpToolsProtocol,), {name: noted(name) for name in _HOOKS})


def told(*parts: bytes, refuses: bytes = b"") -> tuple[list[str], HttpToolsProtocol, Pipe]:
    """Calls while a server that answers at once, without reading the body, gets some parts of a stream."""
    calls: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def run() -> tuple[HttpToolsProtocol, Pipe]:
        settings = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None)
        protocol, pipe = noting(calls, refuses)(config=settings, server_state=ServerState(), app_state={}), Pipe()
        protocol.connection_made(pipe)
        assert protocol in protocol.server_state.connections, _CHANGED + "open connections"
        for part in parts:
            protocol.data_received(part)
            await asyncio.sleep(0.01)
        return protocol, pipe

    return calls, *asyncio.run(run())


def test_all_that_a_connection_overrides_is_there_and_called_by_its_name() -> None:
    overridden = {name for name in vars(Connection) if not name.startswith("__") and name in vars(HttpToolsProtocol)}
    assert overridden == _HOOKS, _CHANGED + "methods of the protocol"


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        (
            [_PLAIN + b"body"],
            "on_message_begin on_url on_header on_header on_headers_complete on_body on_message_complete "
            "on_response_complete",
        ),
        (
            [_PLAIN, b"body"],
            "on_message_begin on_url on_header on_header on_headers_complete on_response_complete data_received "
            "on_body on_message_complete",
        ),
        (  # a trailer is a header after the body
            [_CHUNKED + b"1\r\na\r\n0\r\nX: y\r\n\r\n"],
            "on_message_begin on_url on_header on_headers_complete on_body on_header on_message_complete "
            "on_response_complete",
        ),
        ([b"no HTTP\r\n\r\n"], "on_message_begin send_400_response"),
    ],
)
def test_calls_come_in_the_order_that_the_limits_need(parts: list[bytes], wanted: str) -> None:
    calls, _, _ = told(*parts)
    assert calls[:2] == ["connection_made", "data_received"] and calls[2:] == wanted.split(), (
        _CHANGED + "order of calls"
    )


def test_what_a_header_callback_raises_ends_the_parsing_with_a_refusal() -> None:
    calls, _, pipe = told(_PLAIN + b"body", refuses=b"Host")
    assert calls[2:] == ["on_message_begin", "on_url", "on_header", "send_400_response"], _CHANGED + "refusals"
    assert pipe.is_closed


def test_pipelined_requests_are_parsed_before_the_first_is_answered() -> None:
    calls, protocol, pipe = told(2 * (_PLAIN + b"body"))
    assert [name for name in calls if name.endswith("complete")] == 2 * [
        "on_headers_complete",
        "on_message_complete",
    ] + 2 * ["on_response_complete"], _CHANGED + "pipelining"
    assert pipe.written.count(b"HTTP/1.1 200 OK\r\n") == 2 and protocol.cycle.response_complete


def test_the_state_of_a_request_has_its_names() -> None:
    _, protocol, _ = told(_PLAIN)
    cycle = protocol.cycle
    assert (cycle.response_started, cycle.response_complete, cycle.disconnected) == (True, True, False), (
        _CHANGED + "state of a request"
    )
    assert (cycle.chunked_encoding, cycle.expected_content_length) == (False, 0), _CHANGED + "length of a response"
    assert cycle.message_event.is_set() and protocol.transport and protocol.loop


def test_the_server_calls_what_serve_overrides() -> None:
    source = inspect.getsource(uvicorn.Server)
    for call in ("self.startup(", "self.on_tick(", "self.capture_signals(", "server.close()", "server.wait_closed()"):
        assert call in source, _CHANGED + call
    server = uvicorn.Server(uvicorn.Config(lambda scope: None))
    assert isinstance(server.server_state, ServerState) and server.server_state.connections == set()
    assert (server.started, server.should_exit) == (False, False), _CHANGED + "state of the server"
