"""Accepts connections up to a limit.

    accept -> (TLS handshake) -> connection
              `-- may be closed for a new client, as may a connection without a complete request

At the limit, a new client replaces the one that has waited longest without a complete request. So thousands of slow or
idle connections do not lock out others; a new client gets a 503 only if requests are running on all connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from launch.http.connection import LINGER_S, MAX_HEAD_BYTES, Connection, Waiting, whole_response
from raycache.api.problem import Problem
from raycache.config import Config

_OTHER_FILES = 512  # file descriptors reserved for everything else
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FULL = Problem(503, "all connections of this server are in use; try again", code="busy", headers={"Retry-After": "1"})
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Limits of connections.

    Attributes:
        max_connections: open at the same time.
        header_timeout_s: for a TLS handshake, and for the headers of a request.
    """

    max_connections: int
    header_timeout_s: float

    @classmethod
    def of(cls, config: Config) -> Limits:
        """The configured limits; raises the limit of open files if necessary, or allows fewer connections."""
        wanted = config.max_connections + _OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        most = config.max_connections if soft == resource.RLIM_INFINITY else max(1, soft - _OTHER_FILES)
        if most < config.max_connections:
            _log.warning(
                "max_connections=%d exceeds the limit of open files; using %d (see `ulimit -Hn`)",
                config.max_connections,
                most,
            )
        return cls(min(most, config.max_connections), config.header_timeout_s)

    @property
    def tick_s(self) -> float:
        """Interval between checks of time limits."""
        return min(1.0, self.header_timeout_s / 10)


class Listener:
    """Accepts connections within the limits.

    Args:
        sock: bound, not yet listening.
        tls: None: plain HTTP.
        state: of the server, with all open connections.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        limits: Limits,
        tls: ssl.SSLContext | None,
        config: uvicorn.Config,
        state: ServerState,
    ) -> None:
        self._sock, self._limits, self._tls, self._config, self._state = sock, limits, tls, config, state
        self._waiting = Waiting()
        self._entering: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, *, backlog: int) -> None:
        """Start listening.

        Raises:
            OSError: another process listens on the port.
        """
        self._sock.setblocking(False)
        self._sock.listen(backlog)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._accept()), loop.create_task(self._watch())]

    def close(self) -> None:
        """Stop accepting; open connections stay."""
        self._tasks[0].cancel()
        for task in self._entering:
            task.cancel()

    async def wait_closed(self) -> None:
        """Stop the tasks; call it when all connections have closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._entering, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                if error.errno in _NO_FILES:
                    self._waiting.end_longest()
                    await asyncio.sleep(0.05)
                continue  # otherwise the client disconnected before it was accepted
            num_open = len(self._entering) + len(self._state.connections)
            if num_open >= self._limits.max_connections and not self._waiting.end_longest():
                _reject(client, is_plain=self._tls is None)
            else:
                task = loop.create_task(self._enter(client))
                self._entering.add(task)
                self._waiting.add(task, task.cancel)
                task.add_done_callback(self._entered)
            await asyncio.sleep(0)  # many new clients at once must not starve the others

    async def _enter(self, client: socket.socket) -> None:
        """Turn a socket into a connection, after the handshake for https."""
        loop = asyncio.get_running_loop()
        times: dict[str, Any] = {}
        if self._tls is not None:
            times = {"ssl_handshake_timeout": self._limits.header_timeout_s, "ssl_shutdown_timeout": LINGER_S}
        await loop.connect_accepted_socket(self._connection, client, ssl=self._tls, **times)

    def _connection(self) -> Connection:
        timeout_s = self._limits.header_timeout_s
        return Connection(self._waiting, config=self._config, state=self._state, header_timeout_s=timeout_s)

    def _entered(self, task: asyncio.Task[None]) -> None:
        self._entering.discard(task)
        self._waiting.remove(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, OSError):
            raise error  # an OSError is a failed or slow handshake

    async def _watch(self) -> None:
        """Check all connections periodically, which is cheaper than setting timers for every message."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._limits.tick_s)
            for connection in list(self._state.connections):
                assert isinstance(connection, Connection)
                connection.check(loop.time())


def _reject(client: socket.socket, *, is_plain: bool) -> None:
    """Close a new connection, with a 503 if that does not block."""
    with contextlib.suppress(OSError), client:
        client.setblocking(False)
        if is_plain:
            with contextlib.suppress(BlockingIOError):
                client.recv(MAX_HEAD_BYTES)  # closing with unread data would reset the connection and lose the response
            client.send(whole_response(_FULL))
            client.shutdown(socket.SHUT_WR)
