"""Speaks the OpenAI API with one server, within a budget of requests."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2

from raycache.cachecheck.answers import Answer, read_answer
from raycache.errors import RayCacheError

_BUSY = (429, 503)
_RETRIES = 4
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class CannotTestError(RayCacheError):
    """The server cannot be tested; the message says why."""


class RefusedError(RayCacheError):
    """The server refused one request; the message has its status and reason."""


class BudgetSpentError(RayCacheError):
    """No request of the budget is left."""


@dataclass(frozen=True)
class Connection:
    """How a server is reached.

    Attributes:
        url: with or without /v1.
        key: API key; empty: none.
        timeout_s: for one answer.
        trusted: for https; None: certificates that this machine trusts.
        transport: None: over the network.
        clock: seconds, to time answers.
        sleep: waits for a busy server.
    """

    url: str
    key: str = ""
    timeout_s: float = 300.0
    trusted: ssl.SSLContext | None = None
    transport: httpx2.AsyncBaseTransport | None = None
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], Any] = field(default=asyncio.sleep)


class Client:
    """Sends requests and counts those that generate tokens.

    Args:
        budget: most requests that generate tokens.
    Attributes:
        sent: requests that generate tokens, so far.
    """

    def __init__(self, connection: Connection, *, budget: int) -> None:
        self._connection = connection
        self._root = connection.url.rstrip("/").removesuffix("/v1")
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {connection.key}"} if connection.key else {},
            timeout=connection.timeout_s,
            transport=connection.transport,
            verify=connection.trusted or True,
            # A proxy from the environment cannot reach this machine's loopback.
            trust_env=urlsplit(connection.url).hostname not in _LOOPBACK,
            limits=httpx2.Limits(max_connections=None),
        )
        self.budget = budget
        self.sent = 0

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    @property
    def left(self) -> int:
        """Requests left of the budget."""
        return self.budget - self.sent

    async def get(self, path: str) -> Any:
        """JSON of a path, or None where the server has none. A busy server is asked again.

        Raises:
            CannotTestError: the server does not respond, or stays busy, as one does that loads its model.
        """
        try:
            response = await self._patiently(lambda: self._http.get(self._root + path))
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as cause:
            raise CannotTestError(f"{self._root} does not respond: {cause or type(cause).__name__}") from cause
        if response.status_code in _BUSY:
            raise CannotTestError(f"{path} is refused with HTTP {response.status_code}: {_reason(response)}")
        try:
            return response.json() if response.is_success else None
        except ValueError:
            return None

    async def command(self, path: str) -> bool:
        """POST an empty object; whether the server carried it out."""
        try:
            return (await self._http.post(self._root + path, json={})).is_success
        except httpx2.HTTPError:
            return False

    async def ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Send a request and wait for the whole answer. A busy server is asked again.

        Raises:
            BudgetSpentError: no request is left.
            RefusedError: the server returned an error, or what is no answer.
            CannotTestError: the connection failed.
        """
        number = self._count()
        start = self._connection.clock()

        async def post() -> httpx2.Response:
            nonlocal start
            start = self._connection.clock()
            return await self._http.post(self._root + path, json=body)

        try:
            response = await self._patiently(post)
        except httpx2.HTTPError as cause:
            raise CannotTestError(f"request {number} failed: {cause or type(cause).__name__}") from cause
        seconds = self._connection.clock() - start
        if not response.is_success:
            raise RefusedError(f"HTTP {response.status_code}: {_reason(response)}")
        try:
            return read_answer(response.json(), number=number, seconds=seconds)
        except ValueError as cause:
            raise RefusedError(str(cause)) from cause

    async def cut(self, path: str, body: Mapping[str, Any], *, after: int) -> None:
        """Begin a stream and close the connection.

        Args:
            after: events to read before.
        Raises:
            BudgetSpentError: no request is left.
            RefusedError: the server returned an error.
            CannotTestError: the connection failed.
        """
        number = self._count()
        try:
            async with self._http.stream("POST", self._root + path, json={**body, "stream": True}) as response:
                if not response.is_success:
                    await response.aread()
                    raise RefusedError(f"HTTP {response.status_code}: {_reason(response)}")
                seen = 0
                async for line in response.aiter_lines():
                    seen += line.startswith("data:")
                    if seen >= after:
                        return
        except httpx2.HTTPError as cause:
            raise CannotTestError(f"request {number} failed: {cause or type(cause).__name__}") from cause

    async def _patiently(self, send: Callable[[], Awaitable[httpx2.Response]]) -> httpx2.Response:
        """Send a request, and again after a while as long as the server is busy."""
        for retry in range(_RETRIES):
            response = await send()
            if response.status_code not in _BUSY:
                return response
            await self._connection.sleep(2.0**retry)
        return await send()

    def _count(self) -> int:
        if self.left <= 0:
            raise BudgetSpentError(f"all {self.budget} requests are spent")
        self.sent += 1
        return self.sent


def _reason(response: httpx2.Response) -> str:
    """Message of an error in one line."""
    try:
        error = response.json()["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (json.JSONDecodeError, LookupError, TypeError, UnicodeDecodeError):
        text = response.text
    return " ".join(str(text).split())[:300]
