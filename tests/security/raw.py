"""Clients that speak HTTP by hand, as badly as a test wants."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def connection(
    endpoint: str, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = urlsplit(endpoint)
    reader, writer = await asyncio.open_connection(url.hostname, url.port, ssl=tls)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def post(body: object, *, path: str = "/v1/completions", headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return f"{head}{headers}\r\n".encode() + data


async def answer(reader: asyncio.StreamReader, *, within_s: float = 30.0) -> tuple[int, bytes]:
    """Status and body of one answer that has a length; status 0 when the connection ended before."""
    async with asyncio.timeout(within_s):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, b""
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        length = int(fields.get(b"content-length", b"0"))
        return int(head.split()[1]), await reader.readexactly(length)


async def is_ended(reader: asyncio.StreamReader, *, within_s: float) -> bool:
    """Whether the server ends the connection in time, whatever it says before."""
    try:
        async with asyncio.timeout(within_s):
            while await reader.read(65536):
                pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def error_of(body: bytes) -> dict[str, Any]:
    return json.loads(body)["error"]
