"""Runs the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from launch.http.bind import endpoint_of
from launch.http.connection import KEEP_ALIVE_S
from launch.http.listener import Limits, Listener
from launch.http.tls import Certificate, certificate_of
from raycache.config import Config
from raycache.errors import ConfigError

_BACKLOG = 2048
_CANCELLED_S = 1.0
_REFRESH_TICKS = 100  # of 0.1 s each


async def serve(
    app: ASGIApp,
    *,
    sock: socket.socket,
    stop: asyncio.Event,
    on_started: Callable[[str], None],
    config: Config,
    grace_s: float = 5.0,
) -> None:
    """Serve until `stop` is set, then let running requests end. The caller handles signals.

    Args:
        sock: from `bind`; closed at the end.
        on_started: called with the endpoint once clients can connect.
        grace_s: time that running requests have to end after `stop`, before they are cancelled.
    Raises:
        ConfigError: another process now listens on the port, or the certificate cannot be used.
    """
    certificate = certificate_of(config)
    settings = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        http="httptools",
        log_config=None,
        log_level="error",  # otherwise every malformed request is logged
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a client must not be able to claim a local address
        backlog=_BACKLOG,
        timeout_keep_alive=round(KEEP_ALIVE_S),
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )
    endpoint = endpoint_of(sock, scheme="https" if certificate else "http")
    server = _Server(
        settings, limits=Limits.of(config), certificate=certificate, on_started=lambda: on_started(endpoint)
    )
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await running
        if cancelled := set(server.server_state.tasks):
            await asyncio.wait(cancelled, timeout=_CANCELLED_S)  # they still respond
    except OSError as error:
        raise ConfigError(f"cannot listen on {endpoint}: {error.strerror}; choose another --port") from error
    finally:
        running.cancel()
        stopping.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)
        sock.close()


class _Server(uvicorn.Server):
    """A uvicorn server with our own `Listener`, a startup callback and no signal handling."""

    def __init__(
        self, config: uvicorn.Config, *, limits: Limits, certificate: Certificate | None, on_started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._limits, self._certificate, self._on_started = limits, certificate, on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then call `on_started`."""
        assert sockets is not None
        listeners = [
            Listener(
                sock,
                limits=self._limits,
                tls=self._certificate.context if self._certificate else None,
                config=self.config,
                state=self.server_state,
            )
            for sock in sockets
        ]
        # uvicorn calls only close and wait_closed of these.
        self.servers = cast("list[asyncio.base_events.Server]", listeners)
        for listener in listeners:
            listener.open(backlog=self.config.backlog)
        self.started = True
        self._on_started()

    async def on_tick(self, counter: int) -> bool:
        """Called every 0.1 s."""
        if self._certificate is not None and counter % _REFRESH_TICKS == 0:
            self._certificate.refresh()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the caller handles signals."""
        yield
