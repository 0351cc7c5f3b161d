"""Requests to an ASGI application from inside its process, with streamed answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.types import ASGIApp, Message

_OWN = frozenset({"content-length", "content-type", "transfer-encoding", "connection", "accept-encoding", "expect"})


async def post(
    app: ASGIApp, path: str, *, body: bytes, headers: Mapping[str, str]
) -> AsyncGenerator[int | bytes, None]:
    """Send a JSON body; yields the status, then the parts of the answer as they come.

    A generator that is closed early disconnects, which cancels the request.

    Args:
        headers: of the client; those that describe its own body are replaced.
    """
    kept = [
        (name.lower().encode(), text.encode("latin-1")) for name, text in headers.items() if name.lower() not in _OWN
    ]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*kept, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
    }
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    given = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if given:
            return given.pop()
        await asyncio.Event().wait()  # a disconnect cancels the task
        raise AssertionError("unreachable")

    async def run() -> None:
        try:
            await app(scope, receive, sent.put)
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                yield int(message["status"])
            elif part := message.get("body", b""):
                yield part
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
