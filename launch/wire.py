"""JSON over HTTP: reading request bodies within bounds, and writing answers."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from raycache.server.problem import Problem
from raycache.server.responses import to_json

_BODY_TIMEOUT_S = 60.0
_CLOSE = {"Connection": "close"}  # the rest of the body is not read


class ProblemError(Exception):
    """Ends a request with an error answer."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


async def read_body(request: Request, *, limit: int) -> bytes:
    """Read the body, and never more than `limit` bytes of it.

    Raises:
        ProblemError: it is not JSON by its type, too large or too slow.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also keeps web pages out: a browser sends this type to another site only if that site agrees.
        raise ProblemError(Problem(415, f"send the header Content-Type: application/json, got {kind or 'none'!r}"))
    announced = request.headers.get("content-length", "0")
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            if announced.isdigit() and int(announced) > limit:
                raise _too_large(limit)
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError as error:
        problem = Problem(408, f"the body did not arrive within {_BODY_TIMEOUT_S:.0f} s", headers=_CLOSE)
        raise ProblemError(problem) from error
    return b"".join(parts)


def json_response(value: dict[str, Any]) -> Response:
    """200 with an object."""
    return Response(to_json(value), media_type="application/json")


def problem_response(problem: Problem) -> Response:
    """An error."""
    return Response(to_json(problem.body), problem.status, dict(problem.headers), "application/json")


def _too_large(limit: int) -> ProblemError:
    message = f"the body is larger than {limit} bytes; the server's setting is --max-body"
    return ProblemError(Problem(413, message, code="body_too_large", headers=_CLOSE))
