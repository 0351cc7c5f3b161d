"""Exceptions of RayCache.

RayCacheError
  x ConfigError          a setting, a flag or a checkpoint cannot work; says what would (also a ValueError)
    x CheckpointError    a model directory is missing something, or a file in it is damaged
  x RequestError         one request is wrong (HTTP 400, also a ValueError); names the field
    x PromptTooLongError the prompt or the pages it needs can never fit
  x QueueFullError       too many requests wait (HTTP 429); retry_after_s says when to come back
  x RequestTimeoutError  a request's deadline passed (HTTP 408)
  x RequestFailedError   the engine failed while running a request (HTTP 500)
  x RankLostError        a rank died or missed a deadline; the ranks have to be restarted
  x EngineStoppedError   the engine has stopped or failed and accepts no requests

Messages say what is wrong, what there is and what to do.
"""

from __future__ import annotations


class RayCacheError(Exception):
    """Base class of RayCache's own errors."""


class ConfigError(RayCacheError, ValueError):
    """A setting is invalid; the message names it and the values that would work."""


class CheckpointError(ConfigError):
    """A model directory cannot be served: a file is missing, damaged or of an unknown format."""


class RequestError(RayCacheError, ValueError):
    """One request cannot be served as asked.

    Args:
        field: name of the offending request field, or None.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    @classmethod
    def id_in_use(cls, request_id: str) -> RequestError:
        """The error for a second request with the id of one in progress."""
        return cls(f"request_id {request_id!r} is already in use by a request in progress", field="request_id")

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword arguments do not survive the default pickling between processes.
        return (_rebuild_request_error, (type(self), self.message, self.field))


def _rebuild_request_error(kind: type[RequestError], message: str, field: str | None) -> RequestError:
    return kind(message, field=field)


class PromptTooLongError(RequestError):
    """The prompt can never fit the model's context or the device pool.

    Args:
        num_tokens: length of the prompt, if that alone is too much; otherwise 0.
        limit: longest prompt.
    """

    def __init__(self, message: str, *, field: str | None = None, num_tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message, field=field)
        self.num_tokens = num_tokens
        self.limit = limit

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_too_long, (self.message, self.field, self.num_tokens, self.limit))


def _rebuild_too_long(message: str, field: str | None, num_tokens: int, limit: int) -> PromptTooLongError:
    return PromptTooLongError(message, field=field, num_tokens=num_tokens, limit=limit)


class QueueFullError(RayCacheError):
    """The waiting queue is full.

    Args:
        limit: maximum number of waiting requests.
        retry_after_s: seconds after which a retry is likely to succeed.
    """

    def __init__(self, limit: int, retry_after_s: float) -> None:
        super().__init__(f"{limit} requests are already waiting (max_queue={limit}); retry in {retry_after_s:.0f} s")
        self.limit = limit
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (QueueFullError, (self.limit, self.retry_after_s))


class RequestTimeoutError(RayCacheError):
    """A request's deadline passed before it finished."""


class RequestFailedError(RayCacheError):
    """The engine failed while running a request; the message says how."""


class RankLostError(RayCacheError):
    """A rank died or missed a deadline.

    Args:
        rank: world rank, or -1 if unknown.
        coords: its coordinates as text, such as "pp=0 cp=1 tp=1", or "".
        step: number of the step that did not complete.
        cause: the observed failure, as text.
    """

    def __init__(self, rank: int, coords: str, step: int, cause: str) -> None:
        where = f" ({coords})" if coords else ""
        super().__init__(f"rank {rank}{where} lost at step {step}: {cause}")
        self.rank, self.coords, self.step, self.cause = rank, coords, step, cause

    def __reduce__(self) -> tuple[object, ...]:
        return (RankLostError, (self.rank, self.coords, self.step, self.cause))


class EngineStoppedError(RayCacheError):
    """The engine has stopped or failed; the message says why."""
