"""What one client, or many, can take of the server: connections, time and memory, each with a bound.

    accept -> (TLS handshake) -> waiting for a request -> its headers -> its body -> the answer -> waiting ...
              `------------------ may be closed for a newcomer -----------------'   `- is not'

When all places are taken, the connection that has waited longest without a whole request gives way to a newcomer. So
thousands of slow or idle connections do not keep a client out that just asks; only when all places are held by requests
that run is a newcomer sent away, with 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from raycache.api.problem import Problem
from raycache.api.responses import to_json
from raycache.config import Config

MAX_HEAD_BYTES = 32 * 1024
"""Of a request's target, headers and trailers."""
STALL_S = 30.0
"""A client that takes nothing of its answer for so long is gone."""
LEAST_TAKEN_BYTES = 32 * 1024
"""Of an answer, in STALL_S."""
LINGER_S = 3.0
"""For what is left when a connection closes: the rest of a body that nobody reads, an answer that is not taken."""
_OTHER_FILES = 512  # descriptors that this process needs for anything else
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Bounds of the connections.

    Attributes:
        max_connections: open at a time.
        header_timeout_s: for a TLS handshake, and for the headers of a request.
    """

    max_connections: int
    header_timeout_s: float

    @classmethod
    def of(cls, config: Config) -> Limits:
        """As set, or as many as this process may have files; raises that bound where it can."""
        wanted = config.max_connections + _OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        most = config.max_connections if soft == resource.RLIM_INFINITY else max(1, soft - _OTHER_FILES)
        if most < config.max_connections:
            _log.warning(
                "max_connections=%d is more than this process may open; it takes %d (see `ulimit -Hn`)",
                config.max_connections,
                most,
            )
        return cls(min(most, config.max_connections), config.header_timeout_s)

    @property
    def tick_s(self) -> float:
        """How often times are looked at."""
        return min(1.0, self.header_timeout_s / 10)


class Door:
    """Lets connections in, keeps them within the limits, and counts them.

    Args:
        sock: bound; listens from `open` on.
        limits: see there.
        tls: for https, else None.
        connection: makes the protocol of a connection that came through a door.
        state: of the server, with all connections that are open.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        limits: Limits,
        tls: ssl.SSLContext | None,
        connection: Callable[[Door], Connection],
        state: ServerState,
    ) -> None:
        self.limits = limits
        self._sock, self._tls, self._connection, self._state = sock, tls, connection, state
        self._entering: set[asyncio.Task[None]] = set()
        # Who waits without a whole request, longest first, and how to end it; that can refuse.
        self._waiting: dict[object, Callable[[], bool]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, *, backlog: int) -> None:
        """Begin to listen.

        Raises:
            OSError: another process listens there.
        """
        self._sock.setblocking(False)
        self._sock.listen(backlog)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._accept()), loop.create_task(self._watch())]

    def close(self) -> None:
        """Let nobody in any more; those inside stay."""
        self._tasks[0].cancel()
        for task in self._entering:
            task.cancel()

    async def wait_closed(self) -> None:
        """End it, after everybody has left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._entering, return_exceptions=True)

    def wait(self, who: object, end: Callable[[], bool]) -> None:
        """`who` waits from now on; `end` ends it, or says that it does not."""
        self._waiting.pop(who, None)
        self._waiting[who] = end

    def work(self, who: object) -> None:
        """`who` has a request, or is gone: it does not wait any more."""
        self._waiting.pop(who, None)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                if error.errno in _NO_FILES:
                    self._give_way()
                    await asyncio.sleep(0.05)
                continue  # else: the client left before it was let in
            num_open = len(self._entering) + len(self._state.connections)
            if num_open >= self.limits.max_connections and not self._give_way():
                _send_away(client, is_plain=self._tls is None)
            else:
                task = loop.create_task(self._enter(client))
                self._entering.add(task)
                self.wait(task, task.cancel)
                task.add_done_callback(self._entered)
            await asyncio.sleep(0)  # a crowd at the door must not stop those inside

    async def _enter(self, client: socket.socket) -> None:
        """Make a connection of a socket; for https that is the handshake."""
        loop = asyncio.get_running_loop()
        times: dict[str, Any] = {}
        if self._tls is not None:
            times = {"ssl_handshake_timeout": self.limits.header_timeout_s, "ssl_shutdown_timeout": LINGER_S}
        await loop.connect_accepted_socket(lambda: self._connection(self), client, ssl=self._tls, **times)

    def _entered(self, task: asyncio.Task[None]) -> None:
        self._entering.discard(task)
        self.work(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, OSError):
            raise error  # others are handshakes that failed or took too long

    def _give_way(self) -> bool:
        """End who has waited longest; says whether anybody could be ended."""
        for who, end in self._waiting.items():
            if end():
                del self._waiting[who]
                return True
        return False

    async def _watch(self) -> None:
        """Look at all connections now and then: cheaper than timers that are set and cancelled with every message."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.limits.tick_s)
            for connection in list(self._state.connections):
                assert isinstance(connection, Connection)
                connection.check(loop.time())


class Connection(HttpToolsProtocol):
    """One client's connection, with bounds on the size and the time of everything that the client sends or takes."""

    def __init__(self, door: Door, *, config: uvicorn.Config, state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config=config, server_state=state, app_state=app_state)
        self._door = door
        self._head_bytes = 0  # of the request that is being read
        self._silent_bytes = 0  # since the parser told anything
        self._is_in_body = self._is_refused = False
        self._refusal = Problem(400, "this is not HTTP/1.1")
        # In seconds of the loop: when the client began to wait for, or to send, the headers of a request; when it
        # stopped taking an answer; when it got its answer before all of its request was there.
        self._since_s = self._stalled_s = self._left_s = 0.0
        self._closing: tuple[float, int] | None = None  # when it closed, or was looked at then, and bytes not sent

    # --- what the transport tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.work(self)
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
        self._door.wait(self, self._give_way)

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
            self._door.work(self)

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
        self.transport.write(_response(self._refusal))
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
        elif self._is_idle and not self._is_in_body and now_s - self._since_s > self._door.limits.header_timeout_s:
            if self._head_bytes or self._silent_bytes:
                self.transport.write(_response(_HEAD_TOO_SLOW))
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
        self._door.wait(self, self._give_way)

    def _count(self, *parts: bytes) -> None:
        self._silent_bytes = 0
        self._head_bytes += sum(map(len, parts)) + 4  # what parts them
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = _HEAD_TOO_LARGE
            raise ValueError("the headers are too large")  # ends the parsing; uvicorn then calls send_400_response


_HEAD_TOO_LARGE = Problem(431, f"a request's target and headers may have {MAX_HEAD_BYTES} bytes together")
_HEAD_TOO_SLOW = Problem(408, "the headers did not come in time")
_FULL = Problem(503, "all connections of this server are in use; try again", code="busy", headers={"Retry-After": "1"})


def _response(problem: Problem) -> bytes:
    """A whole answer that closes the connection."""
    body = to_json(problem.body)
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **problem.headers,
    }
    lines = [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items()]
    return b"".join([STATUS_LINE[problem.status], *lines, b"\r\n", body])


def _send_away(client: socket.socket, *, is_plain: bool) -> None:
    """Close at once; say why where that takes no waiting."""
    with contextlib.suppress(OSError), client:
        client.setblocking(False)
        if is_plain:
            with contextlib.suppress(BlockingIOError):
                client.recv(MAX_HEAD_BYTES)  # a socket that closes with something unread resets, and the answer is lost
            client.send(_response(_FULL))
            client.shutdown(socket.SHUT_WR)
