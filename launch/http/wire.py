"""JSON over HTTP: reads request bodies within limits, and builds responses."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import psutil
from starlette._utils import get_route_path
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from raycache.api.completions_form import to_json
from raycache.api.messages_form import error_body
from raycache.api.problem import Problem
from raycache.config import Config, parse_bytes
from raycache.errors import RequestError
from raycache.observe.logs import REQUEST_ID

BODY_TIMEOUT_S = 10.0
LEAST_BYTES_PER_S = 64 * 1024
"""Minimum rate of a body: each byte received extends the timeout by the inverse, so trickling clients are cut off."""
PART_BYTES = 256 * 1024
"""Maximum that is passed on at once: what asyncio receives at once."""
MESSAGES_PATH = "/v1/messages"
_THREAD_BYTES = 32 * 1024
_LEAST_BODIES, _SHARE_OF_MEMORY = 64, 1 / 16

T = TypeVar("T")


class ProblemError(Exception):
    """Ends a request with an error response."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class Bodies:
    """Reads request bodies, each limited in size and time, and all bodies in memory together in size.

    Args:
        capacity: bytes of all bodies; 0: a sixteenth of this machine's memory, but at least 64 bodies of maximum size.
    """

    def __init__(self, config: Config, *, capacity: int = 0) -> None:
        self._limit = parse_bytes("max_body", config.max_body)
        self._timeout_s = config.header_timeout_s
        share = int(psutil.virtual_memory().total * _SHARE_OF_MEMORY)
        self._capacity = capacity or max(_LEAST_BODIES * self._limit, share)
        self._used = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Read a request's body, which counts as in memory during the `with` block.

        Raises:
            ProblemError: as in `read_body`, or the bodies in memory exceed their limit.
        """
        parts: list[bytes] = []
        async with self.receive(request, parts.append):
            yield b"".join(parts)

    @asynccontextmanager
    async def receive(self, request: Request, take: Callable[[bytes], None]) -> AsyncIterator[None]:
        """Like `read`, but pass the body on in parts while it arrives; `take` is called as by `receive_body`."""
        held = 0

        def count(part: bytes) -> None:
            nonlocal held
            if self._used + len(part) > self._capacity:
                text = "the request bodies in memory have reached their limit; try again"
                raise ProblemError(Problem(503, text, code="busy", headers={"Retry-After": "1"}))
            held += len(part)
            self._used += len(part)
            take(part)

        try:
            await receive_body(request, count, limit=self._limit, timeout_s=self._timeout_s)
            yield
        finally:
            self._used -= held


async def read_body(request: Request, *, limit: int, may_be_empty: bool = False) -> bytes:
    """Read a request's body as `receive_body` does."""
    parts: list[bytes] = []
    await receive_body(request, parts.append, limit=limit, may_be_empty=may_be_empty)
    return b"".join(parts)


async def receive_body(
    request: Request,
    take: Callable[[bytes], None],
    *,
    limit: int,
    timeout_s: float = BODY_TIMEOUT_S,
    may_be_empty: bool = False,
) -> None:
    """Receive a request's body in parts.

    Args:
        take: called with each part, of at most `PART_BYTES`; between two of them, streams have their turn.
        limit: maximum size in bytes.
        may_be_empty: a request without a body needs no Content-Type; only for paths that refuse web pages.
        timeout_s: time limit; each LEAST_BYTES_PER_S received extend it by a second.
    Raises:
        ProblemError: the Content-Type is not JSON, or the body is too large or too slow.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if may_be_empty and not kind and _has_no_body(request):
        return
    if kind != "application/json":
        # Also blocks web pages: browsers send this type cross-origin only if the server allows it.
        raise ProblemError(Problem(415, f"send the header Content-Type: application/json, got {kind or 'none'!r}"))
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > limit:
        raise _too_large(limit)
    size = 0
    begin_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(begin_s + timeout_s) as deadline:
            async for received in request.stream():
                size += len(received)
                if size > limit:
                    raise _too_large(limit)
                for start in range(0, len(received), PART_BYTES):
                    if start:
                        await asyncio.sleep(0)
                    take(received[start : start + PART_BYTES])
                deadline.reschedule(begin_s + timeout_s + size / LEAST_BYTES_PER_S)
    except TimeoutError as error:
        text = f"only {size} bytes of the body arrived within {timeout_s:g} s; send it faster"
        raise ProblemError(Problem(408, text, code="body_too_slow")) from error


def _has_no_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers


def number(params: QueryParams, name: str, *, default: int, most: int) -> int:
    """Read a query parameter.

    Raises:
        RequestError: it is not a number from 1 to `most`.
    """
    text = params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= most):
        raise RequestError(f"{name} must be a number from 1 to {most}, got {text!r}", field=name)
    return int(text)


def json_response(value: dict[str, Any]) -> Response:
    """A response with status 200."""
    return Response(to_json(value), media_type="application/json")


def problem_response(problem: Problem, scope: Scope) -> Response:
    """An error response, in the shape of the API that the path belongs to."""
    body, headers = problem.body, dict(problem.headers)
    path = get_route_path(scope)
    if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/"):
        request_id = REQUEST_ID.get() or f"req_{uuid.uuid4().hex}"
        body = error_body(problem, request_id=request_id)
        headers["request-id"] = request_id
    return Response(to_json(body), problem.status, headers, "application/json")


async def compute(work: Callable[[], T], *, size: int) -> T:
    """Do the work that a body of `size` bytes makes; that of a large one in a thread, so as not to delay streams."""
    return work() if size < _THREAD_BYTES else await asyncio.to_thread(work)


def _too_large(limit: int) -> ProblemError:
    message = f"the body is larger than {limit} bytes; the server's setting is --max-body"
    return ProblemError(Problem(413, message, code="body_too_large"))
