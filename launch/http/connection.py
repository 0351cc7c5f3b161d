"""An HTTP connection with limits on sizes and on the time that a client may take.

    waiting for a request -> headers -> body -> response -> waiting ...
    `- may be closed for a new client ------'   `- never closed for one

Extends uvicorn's protocol class, whose internals are not a stable API: tests/security/test_uvicorn.py checks everything
that this file relies on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from http import HTTPStatus

import uvicorn
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from raycache.api.completions_form import to_json
from raycache.api.problem import Problem

MAX_HEAD_BYTES = 32 * 1024
"""Maximum size of a request's target, headers and trailers."""
KEEP_ALIVE_S = 75.0
"""An idle connection is kept this long for a next request: longer than the usual pools of clients keep theirs, which
could otherwise send a request to a connection that is being closed."""
STALL_S = 30.0
"""A client that reads nothing of its response for this long is disconnected."""
LEAST_TAKEN_BYTES = 32 * 1024
"""Minimum that a client must read in STALL_S while its connection closes."""
LINGER_S = 3.0
"""Grace period of a closing connection, to receive the rest of an unread body or to finish the TLS shutdown."""


class Waiting:
    """Connections without a complete request, the longest waiting first; closed if a new client needs one."""

    def __init__(self) -> None:
        self._ends: dict[object, Callable[[], bool]] = {}

    def add(self, who: object, end: Callable[[], bool]) -> None:
        """Add a connection; `end` closes it, or returns False."""
        self._ends.pop(who, None)
        self._ends[who] = end

    def remove(self, who: object) -> None:
        """Remove a connection that has a complete request or has closed."""
        self._ends.pop(who, None)

    def end_longest(self) -> bool:
        """Close the connection that has waited longest and can be closed; returns whether there was one."""
        for who, end in self._ends.items():
            if end():
                del self._ends[who]
                return True
        return False


class Connection(HttpToolsProtocol):
    """An HTTP connection.

    Args:
        waiting: holds it while it has no complete request.
        state: of the server, with all open connections.
    """

    def __init__(
        self, waiting: Waiting, *, config: uvicorn.Config, state: ServerState, header_timeout_s: float
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._waiting, self._header_timeout_s = waiting, header_timeout_s
        self._head_bytes = 0  # of the request being read
        self._silent_bytes = 0  # received since the parser's last callback
        self._is_in_body = self._is_refused = False
        self._refusal = Problem(400, "this is not a valid HTTP/1.1 request")
        # In loop time: when the client started to wait or to send headers; when it stopped reading a response; when a
        # response was complete before its request.
        self._since_s = self._stalled_s = self._left_s = 0.0
        self._closing: tuple[float, int] | None = None  # start of the current grace period, and bytes unsent then

    # --- transport callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._silent_bytes += len(data)  # reset by the parser's callbacks below
        super().data_received(data)
        if self._silent_bytes > MAX_HEAD_BYTES:
            self._refusal = _HEAD_TOO_LARGE
            self.send_400_response("")

    def pause_writing(self) -> None:
        self._stalled_s = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalled_s = 0.0
        super().resume_writing()

    # --- parser callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._silent_bytes = 0
        self._since_s = self.loop.time()

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name, value)
        if not self._is_in_body:  # else a trailer, which must not change what was decided from the headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._silent_bytes = 0
        super().on_headers_complete()
        self._is_in_body = True
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _unchunked(self.cycle)  # type: ignore[assignment,method-assign]
        self._waiting.add(self, self._give_way)

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._silent_bytes = 0
        super().on_message_complete()
        self._is_in_body = False
        self._left_s = 0.0
        if self._is_idle:  # the response was complete first
            self._wait()
        else:
            self._waiting.remove(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or not self.cycle.response_complete:
            return
        if self._is_in_body:
            self._left_s = self.loop.time()
        else:
            self._wait()

    def send_400_response(self, msg: str) -> None:
        """Respond to a request that cannot be parsed, in the format of all errors."""
        if self._is_refused:
            return
        self._is_refused = True
        if not self._is_idle:
            if self.cycle.response_started:
                self.transport.close()
                return
            self.cycle.disconnected = True  # for the application, the client has disconnected
            self.cycle.message_event.set()
        self.transport.write(whole_response(self._refusal))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        # Keep reading: closing a socket with unread data resets the connection, and the client may lose the response.
        self._left_s = self.loop.time()

    # --- limits

    def check(self, now_s: float) -> None:
        """Close the connection if it has exceeded a time limit.

        Args:
            now_s: loop time.
        """
        if self.transport.is_closing():
            self._check_closing(now_s, unsent=self.transport.get_write_buffer_size())
        elif self._stalled_s and now_s - self._stalled_s > STALL_S:
            self.transport.abort()
        elif self._left_s:
            if now_s - self._left_s > LINGER_S:
                self.transport.close()
        elif self._is_idle and not self._is_in_body:
            has_begun = bool(self._head_bytes or self._silent_bytes)
            is_between = self.cycle is not None and not has_begun
            if now_s - self._since_s > (KEEP_ALIVE_S if is_between else self._header_timeout_s):
                if has_begun:
                    self.transport.write(whole_response(_HEAD_TOO_SLOW))
                self.transport.close()

    def _check_closing(self, now_s: float, *, unsent: int) -> None:
        """Let a closing connection send its remaining data while the client reads it."""
        begin_s, unsent_then = self._closing = self._closing or (now_s, unsent)
        if now_s - begin_s <= (STALL_S if unsent else LINGER_S):
            return
        if unsent and unsent <= unsent_then - LEAST_TAKEN_BYTES:
            self._closing = (now_s, unsent)
        else:
            self.transport.abort()

    def _give_way(self) -> bool:
        """Close it for a new client, unless a response is still being sent."""
        if self.transport.get_write_buffer_size():
            return False
        self.transport.abort()
        return True

    @property
    def _is_idle(self) -> bool:
        """Whether no request is running or pending."""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        self._head_bytes = self._silent_bytes = 0
        self._since_s = self.loop.time()
        self._waiting.add(self, self._give_way)

    def _count(self, *parts: bytes) -> None:
        self._silent_bytes = 0
        self._head_bytes += sum(map(len, parts)) + 4  # separators
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = _HEAD_TOO_LARGE
            raise ValueError("the headers are too large")  # stops the parser; uvicorn then calls send_400_response


_HEAD_TOO_LARGE = Problem(431, f"request target and headers exceed {MAX_HEAD_BYTES} bytes in total")
_HEAD_TOO_SLOW = Problem(408, "the request headers did not arrive in time")


def _unchunked(cycle: RequestResponseCycle) -> Send:
    """Send a response to an HTTP/1.0 client, which knows no chunks: without a length it ends with the connection."""
    send, is_endless = cycle.send, False

    async def unchunked(message: Message) -> None:
        nonlocal is_endless
        match message:
            case {"type": "http.response.start", "headers": headers}:
                if is_endless := all(name.lower() != b"content-length" for name, _ in headers):
                    cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
            case {"type": "http.response.body"} if is_endless and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))
        await send(message)  # type: ignore[arg-type]

    return unchunked


def whole_response(problem: Problem) -> bytes:
    """A complete error response that closes the connection."""
    body = to_json(problem.body)
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **problem.headers,
    }
    status = f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}"
    lines = [status, *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
