"""The connection between a front end and its engine actor: requests go one way, their outputs the other.

A call of a Ray actor takes one to three milliseconds, a message of a connection a few tenths of one (ADR 0025). All
that is not sent per request or step goes through Ray, and so does the address of the connection with its key.

    Connection.send    -- requests, cancels -->  Listener: on_message
    Connection.receive <------- outputs -------  Listener.send

Frame: [length: 8 bytes, little endian | message (messages.py)]. The first one comes once both sides have proved that
they know the key:

    engine    -> nonce
    front end -> its own nonce, HMAC(key, "front" + the engine's)
    engine    -> HMAC(key, "engine" + the front end's nonce)
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from actors.messages import pack, unpack

_log = logging.getLogger(__name__)
_KEY_BYTES = 32
"""Of the key, of a nonce, and of a digest."""
_LENGTH_BYTES = 8
_HANDSHAKE_S = 10.0
_MOST_STRANGERS = 64
"""Connections that may be in their handshake; others wait until one has ended."""
_RETRY_S = 0.05


@dataclass(frozen=True)
class Address:
    """Where an engine listens.

    Attributes:
        key: secret of both sides.
    """

    host: str
    port: int
    key: bytes = field(repr=False)


class Listener:
    """The engine's side. It has one front end; one that connects later takes its place.

    Args:
        host: address of this node to listen on.
        on_message: called with each message of the front end, in a thread of the connection.
    Attributes:
        address: for `Connection.open`.
    """

    def __init__(self, host: str, on_message: Callable[[Any], None]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family)
        self.address = Address(host, self._server.getsockname()[1], secrets.token_bytes(_KEY_BYTES))
        self._on_message = on_message
        self._changed = threading.Condition()  # of `_front`
        self._front: socket.socket | None = None
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message to the front end, or to the first one to come; lost if the front end is."""
        with self._changed:
            self._changed.wait_for(lambda: self._front is not None)
            front = self._front
        assert front is not None
        try:
            front.sendall(_frame(message))
        except OSError:
            self._drop(front)

    def _accept(self) -> None:
        while True:
            # A thread per connection, so that one that says nothing delays no other.
            self._strangers.acquire()
            try:
                front, (peer, *_) = self._server.accept()
            except OSError as cause:  # such as too many open files
                self._strangers.release()
                _log.warning("cannot accept a connection: %s", cause)
                time.sleep(_RETRY_S)
                continue
            threading.Thread(target=self._serve, args=(front, peer), name="front end", daemon=True).start()

    def _serve(self, front: socket.socket, peer: str) -> None:
        try:
            with front.makefile("rb") as received:
                try:
                    is_ours = self._is_ours(front, received)
                finally:
                    self._strangers.release()
                if not is_ours:
                    _log.warning("refused a connection from %s, which does not know the key", peer)
                    return
                self._take(front)
                while True:
                    length = int.from_bytes(_exactly(received, _LENGTH_BYTES), "little")
                    self._on_message(unpack(_exactly(received, length)))
        except OSError as cause:  # EOF, too
            _log.info("the connection from %s has ended: %s", peer, cause)
        except Exception:  # a message that this version cannot read; the front end is told by the end of the connection
            _log.exception("cannot read what came from %s", peer)
        finally:
            self._drop(front)

    def _take(self, front: socket.socket) -> None:
        with self._changed:
            former, self._front = self._front, front
            self._changed.notify_all()
        if former is not None:
            _close(former)

    def _is_ours(self, front: socket.socket, received: BinaryIO) -> bool:
        """Shake hands, within a time limit; returns whether the other side knows the key."""
        front.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ending = threading.Timer(_HANDSHAKE_S, _shut, args=(front,))
        ending.start()
        try:
            return self._knows_key(front, received)
        finally:
            ending.cancel()

    def _knows_key(self, front: socket.socket, received: BinaryIO) -> bool:
        mine = secrets.token_bytes(_KEY_BYTES)
        front.sendall(mine)
        theirs = _exactly(received, _KEY_BYTES)
        if not hmac.compare_digest(_exactly(received, _KEY_BYTES), _digest(self.address.key, b"front", mine)):
            return False
        front.sendall(_digest(self.address.key, b"engine", theirs))
        return True

    def _drop(self, front: socket.socket) -> None:
        with self._changed:
            if front is self._front:
                self._front = None
        _close(front)


class Connection:
    """The front end's side; belongs to one event loop. Messages sent before it is open are sent once it is."""

    def __init__(self) -> None:
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[bytes] = []

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    async def open(self, address: Address) -> None:
        """Connect to a `Listener`.

        Raises:
            OSError: nobody listens there, or somebody who does not know the key.
        """
        async with asyncio.timeout(_HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                await _shake_hands(reader, writer, address.key)
            except BaseException:
                writer.close()
                raise
        self._reader, self._writer = reader, writer
        for frame in self._unsent:
            writer.write(frame)
        self._unsent.clear()

    def send(self, message: Any) -> None:
        """Send a message, without waiting until it is received."""
        if self._writer is None:
            self._unsent.append(_frame(message))
        else:
            self._writer.write(_frame(message))

    async def receive(self, *, timeout_s: float) -> Any:
        """Return the next message.

        Raises:
            OSError: the engine is gone, or has sent nothing for `timeout_s`.
            Exception: whatever `fail` was given.
        """
        assert self._reader is not None, "it is open"
        try:
            async with asyncio.timeout(timeout_s):
                length = await self._reader.readexactly(_LENGTH_BYTES)
                return unpack(await self._reader.readexactly(int.from_bytes(length, "little")))
        except asyncio.IncompleteReadError as cause:
            raise ConnectionResetError("it was closed") from cause

    def fail(self, error: Exception) -> None:
        """Let `receive` raise an error, now and from now on."""
        if self._reader is not None:
            self._reader.set_exception(error)

    def close(self) -> None:
        """Close the connection; `open` may open it again."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def _shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> None:
    mine = secrets.token_bytes(_KEY_BYTES)
    try:
        theirs = await reader.readexactly(_KEY_BYTES)
        writer.write(mine + _digest(key, b"front", theirs))
        proof = await reader.readexactly(_KEY_BYTES)
    except asyncio.IncompleteReadError as cause:
        raise ConnectionResetError("it was closed before the handshake had ended") from cause
    if not hmac.compare_digest(proof, _digest(key, b"engine", mine)):
        raise ConnectionError("the other side does not know the key")


def _digest(key: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, side + nonce, "sha256")


def _frame(message: Any) -> bytes:
    packed = pack(message)
    return len(packed).to_bytes(_LENGTH_BYTES, "little") + packed


def _exactly(received: BinaryIO, size: int) -> bytes:
    found = received.read(size)
    if len(found) < size:
        raise ConnectionResetError("it was closed")
    return found


def _close(front: socket.socket) -> None:
    _shut(front)  # ends a `recv` in another thread, which `close` does not
    front.close()


def _shut(front: socket.socket) -> None:
    with contextlib.suppress(OSError):
        front.shutdown(socket.SHUT_RDWR)
