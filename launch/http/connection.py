"""One client's connection, with a bound on everything that the client sends, takes or waits for.

    waiting for a request -> its headers -> its body -> the answer -> waiting ...
    `----------- may be closed for a newcomer ------'   `- is not'

Stands on uvicorn's own protocol class, whose inner calls are no promise: tests/security/test_uvicorn.py says what this
file relies on, and fails with a version of uvicorn that is different.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from raycache.api.problem import Problem
from raycache.api.responses import to_json

MAX_HEAD_BYTES = 32 * 1024
"""Of a request's target, headers and trailers."""
STALL_S = 30.0
"""A client that takes nothing of its answer for so long is gone."""
LEAST_TAKEN_BYTES = 32 * 1024
"""Of an answer, in STALL_S."""
LINGER_S = 3.0
"""For what is left when a connection closes: the rest of a body that nobody reads, an answer that is not taken."""


class Waiting:
    """Clients without a whole request, those that have waited longest first: who of them gives way to a newcomer."""

    def __init__(self) -> None:
        self._ends: dict[object, Callable[[], bool]] = {}

    def add(self, who: object, end: Callable[[], bool]) -> None:
        """`who` waits from now on; `end` ends it, or says that it does not."""
        self._ends.pop(who, None)
        self._ends[who] = end

    def remove(self, who: object) -> None:
        """`who` has a request, or is gone."""
        self._ends.pop(who, None)

    def end_longest(self) -> bool:
        """End who has waited longest of those that can be ended; whether there was one."""
        for who, end in self._ends.items():
            if end():
                del self._ends[who]
                return True
        return False


class Connection(HttpToolsProtocol):
    """An HTTP connection.

    Args:
        waiting: where it stands while it has no whole request.
        state: of the server, with all connections that are open.
    """

    def __init__(
        self, waiting: Waiting, *, config: uvicorn.Config, state: ServerState, header_timeout_s: float
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._waiting, self._header_timeout_s = waiting, header_timeout_s
        self._head_bytes = 0  # of the request that is being read
        self._silent_bytes = 0  # since the parser told anything
        self._is_in_body = self._is_refused = False
        self._refusal = Problem(400, "this is not a valid HTTP/1.1 request")
        # In seconds of the loop: when the client began to wait for, or to send, the headers of a request; when it
        # stopped taking an answer; when it got its answer before all of its request was there.
        self._since_s = self._stalled_s = self._left_s = 0.0
        self._closing: tuple[float, int] | None = None  # when it closed, or was looked at then, and bytes not sent

    # --- what the transport tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._silent_bytes += len(data)  # the parser's calls below set it back
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

    # --- what the parser tells

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._silent_bytes = 0
        self._since_s = self.loop.time()

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name, value)
        if not self._is_in_body:  # else it is a trailer, which must not change what was decided from the headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._silent_bytes = 0
        super().on_headers_complete()
        self._is_in_body = True
        self._waiting.add(self, self._give_way)

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._silent_bytes = 0
        super().on_message_complete()
        self._is_in_body = False
        self._left_s = 0.0
        if self._is_idle:  # the answer came first
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
        """Refuse what cannot be parsed, in the shape of all errors."""
        if self._is_refused:
            return
        self._is_refused = True
        if not self._is_idle:
            if self.cycle.response_started:
                self.transport.close()
                return
            self.cycle.disconnected = True  # for the application this client is gone
            self.cycle.message_event.set()
        self.transport.write(whole_response(self._refusal))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        # What the client still sends is taken: a socket that closes with something unread resets the connection, and
        # the client may never see the answer.
        self._left_s = self.loop.time()

    # --- bounds

    def check(self, now_s: float) -> None:
        """End the connection if it has overstayed.

        Args:
            now_s: the loop's time.
        """
        if self.transport.is_closing():
            self._check_closing(now_s, unsent=self.transport.get_write_buffer_size())
        elif self._stalled_s and now_s - self._stalled_s > STALL_S:
            self.transport.abort()
        elif self._left_s:
            if now_s - self._left_s > LINGER_S:
                self.transport.close()
        elif self._is_idle and not self._is_in_body and now_s - self._since_s > self._header_timeout_s:
            if self._head_bytes or self._silent_bytes:
                self.transport.write(whole_response(_HEAD_TOO_SLOW))
            self.transport.close()

    def _check_closing(self, now_s: float, *, unsent: int) -> None:
        """A connection that closes still sends what was written, if the client takes it."""
        begin_s, unsent_then = self._closing = self._closing or (now_s, unsent)
        if now_s - begin_s <= (STALL_S if unsent else LINGER_S):
            return
        if unsent and unsent <= unsent_then - LEAST_TAKEN_BYTES:
            self._closing = (now_s, unsent)
        else:
            self.transport.abort()

    def _give_way(self) -> bool:
        """End it for a newcomer, unless the client still reads."""
        if self.transport.get_write_buffer_size():
            return False
        self.transport.abort()
        return True

    @property
    def _is_idle(self) -> bool:
        """Whether no request runs or is to be run."""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        self._head_bytes = self._silent_bytes = 0
        self._since_s = self.loop.time()
        self._waiting.add(self, self._give_way)

    def _count(self, *parts: bytes) -> None:
        self._silent_bytes = 0
        self._head_bytes += sum(map(len, parts)) + 4  # what parts them
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = _HEAD_TOO_LARGE
            raise ValueError("the headers are too large")  # ends the parsing; uvicorn then calls send_400_response


_HEAD_TOO_LARGE = Problem(431, f"request target and headers exceed {MAX_HEAD_BYTES} bytes in total")
_HEAD_TOO_SLOW = Problem(408, "the request headers did not arrive in time")


def whole_response(problem: Problem) -> bytes:
    """A whole answer that closes the connection."""
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
