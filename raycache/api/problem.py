"""Errors in the shape of the OpenAI API.

400 a field is wrong    401 API key    403 not from here    404 model or path    405 method    408 deadline
413 body too large      415 not JSON   429 queue full (Retry-After)       500 failed    503 engine stopped
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raycache.errors import (
    EngineStoppedError,
    PromptTooLongError,
    QueueFullError,
    RankLostError,
    RayCacheError,
    RequestError,
    RequestTimeoutError,
)


@dataclass(frozen=True)
class Problem:
    """One error answer.

    Attributes:
        status: HTTP status.
        message: for people: what is wrong and what to do.
        param: the request field to blame.
        code: for programs.
        headers: more response headers.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON answer."""
        return {"error": {"message": self.message, "type": _type(self.status), "param": self.param, "code": self.code}}


def problem_of(error: RayCacheError) -> Problem:
    """The answer that an error is given."""
    match error:
        case PromptTooLongError():
            return Problem(400, error.message, param=error.field, code="context_length_exceeded")
        case RequestError():
            return Problem(400, error.message, param=error.field)
        case QueueFullError():
            retry_after = str(max(1, math.ceil(error.retry_after_s)))
            return Problem(429, str(error), code="queue_full", headers={"Retry-After": retry_after})
        case RequestTimeoutError():
            return Problem(408, str(error), code="timeout")
        case EngineStoppedError() | RankLostError():
            return Problem(503, str(error), code="engine_stopped")
    return Problem(500, str(error), code="request_failed")


def unknown_model(asked: str, served: str) -> Problem:
    """404 for a model that is not served."""
    return Problem(
        404, f"the model {asked!r} is not served here; use {served!r}", param="model", code="model_not_found"
    )


def _type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 404:
            return "not_found_error"
        case 408:
            return "timeout_error"
        case 429:
            return "rate_limit_error"
        case 503:
            return "service_unavailable_error"
    return "invalid_request_error" if status < 500 else "server_error"
