"""Binding the port and running the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from raycache.config import Config
from raycache.errors import ConfigError

_BACKLOG = 2048


def bind(config: Config) -> socket.socket:
    """Take the port, before the model is loaded. It does not listen yet, so clients are refused until it serves.

    Returns:
        The socket; hand it to `serve`, or close it.
    Raises:
        ConfigError: the port is in use or the address is not of this machine.
    """
    where = f"{config.host}:{config.port}"
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host={config.host!r} is not an address of this machine: {error}") from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # Connections of an earlier server that are not quite closed must not stop this one ...
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # ... but another server that also binds and does not listen yet must be told that the port is taken.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{where} is in use; choose another --port, or --port 0 for a free one") from error
        raise ConfigError(f"cannot bind to {where}: {error.strerror}; choose another --host or --port") from error
    sock.set_inheritable(False)
    return sock


def endpoint_of(sock: socket.socket) -> str:
    """URL of a bound socket, as a client on this machine writes it, such as "http://127.0.0.1:8000"."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    app: ASGIApp, *, sock: socket.socket, stop: asyncio.Event, on_started: Callable[[str], None], grace_s: float = 5.0
) -> None:
    """Serve until `stop` is set, then let running requests end. Signals are the caller's.

    Args:
        app: see http.build_app.
        sock: from `bind`; closed at the end.
        stop: set it to end.
        on_started: called with the endpoint when clients can connect.
        grace_s: seconds that running requests have to end after `stop`; then they are cancelled.
    Raises:
        ConfigError: another process has taken the port meanwhile.
    """
    settings = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # whose address a client claims to have must not make it one of this machine
        backlog=_BACKLOG,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )
    endpoint = endpoint_of(sock)
    server = _Server(settings, on_started=lambda: on_started(endpoint))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await running
    except OSError as error:
        raise ConfigError(f"cannot listen on {endpoint}: {error.strerror}; choose another --port") from error
    finally:
        running.cancel()
        stopping.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)
        sock.close()


class _Server(uvicorn.Server):
    """Tells when it serves, and leaves signals alone."""

    def __init__(self, config: uvicorn.Config, *, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then tell."""
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the caller decides what a signal means."""
        yield
