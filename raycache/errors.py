"""Every error that RayCache raises on purpose.

RayCacheError
  x ConfigError          a setting, a flag or a checkpoint cannot work; says what would (also a ValueError)
    x CheckpointError    a model directory is missing something, or a file in it is damaged
  x RequestError         one request is wrong (HTTP 400, also a ValueError); names the field
    x PromptTooLongError the prompt or the pages it needs can never fit
  x QueueFullError       too many requests wait (HTTP 429); retry_after_s says when to come back
  x RequestTimeoutError  a request's deadline passed (HTTP 408)
  x RequestFailedError   the engine failed while it ran a request (HTTP 500)
  x RankLostError        a rank died or missed a deadline; the ranks have to be restarted
  x EngineStoppedError   the engine is stopped or has failed and takes no work

Messages say who, what was wanted, what there is and what to do.
"""

from __future__ import annotations


class RayCacheError(Exception):
    """Root of all errors that RayCache raises on purpose."""


class ConfigError(RayCacheError, ValueError):
    """A setting cannot work; the message names it and the values that would."""


class CheckpointError(ConfigError):
    """A model directory cannot be served: a file is missing, damaged or of an unknown kind."""


class RequestError(RayCacheError, ValueError):
    """One request cannot be served as asked.

    Args:
        message: what is wrong, and the limit.
        field: the request field to blame, or None.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword arguments do not survive the default pickling between processes.
        return (_rebuild_request_error, (type(self), self.message, self.field))


def _rebuild_request_error(kind: type[RequestError], message: str, field: str | None) -> RequestError:
    return kind(message, field=field)


class PromptTooLongError(RequestError):
    """The prompt can never fit the model's context or the device pool."""


class QueueFullError(RayCacheError):
    """The waiting queue is full.

    Args:
        limit: how many requests may wait.
        retry_after_s: seconds after which a retry is likely to be taken.
    """

    def __init__(self, limit: int, retry_after_s: float) -> None:
        super().__init__(f"{limit} requests are waiting already (max_queue={limit}); retry in {retry_after_s:.0f} s")
        self.limit = limit
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (QueueFullError, (self.limit, self.retry_after_s))


class RequestTimeoutError(RayCacheError):
    """A request's deadline passed before it ended."""


class RequestFailedError(RayCacheError):
    """The engine failed while it ran a request; the message says what failed."""


class RankLostError(RayCacheError):
    """A rank died or missed a deadline.

    Args:
        rank: world rank, or -1 when it is not known which.
        coords: its coordinates as text, such as "pp=0 cp=1 tp=1".
        step: the step that did not complete.
        cause: what was seen.
    """

    def __init__(self, rank: int, coords: str, step: int, cause: str) -> None:
        super().__init__(f"rank {rank} ({coords}) lost at step {step}: {cause}")
        self.rank, self.coords, self.step, self.cause = rank, coords, step, cause

    def __reduce__(self) -> tuple[object, ...]:
        return (RankLostError, (self.rank, self.coords, self.step, self.cause))


class EngineStoppedError(RayCacheError):
    """The engine is stopped, or failed; the message says why."""
