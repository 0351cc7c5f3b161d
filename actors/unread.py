"""What the client of a request has not read yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeGuard

from raycache.errors import RayCacheError
from raycache.types import RequestOutput


class Unread:
    """Increments of a request, and the error that ended it, until they are read. For one reader.

    Increments that have come since the last one was read are read as one: when there are more tokens than the server
    can send one by one, it sends several at a time.
    """

    def __init__(self) -> None:
        self._messages = deque[RequestOutput | RayCacheError]()
        self._reader: asyncio.Future[None] | None = None

    def put(self, message: RequestOutput | RayCacheError) -> None:
        """Add a message."""
        self._messages.append(message)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> RequestOutput | RayCacheError:
        """Wait for a message, and take it."""
        while not self._messages:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        message = self._messages.popleft()
        if not isinstance(message, RequestOutput):
            return message
        outputs = [message]
        while self._messages and _has_tokens(following := self._messages[0]):
            outputs.append(following)
            self._messages.popleft()
        return _join(outputs)


def _has_tokens(message: RequestOutput | RayCacheError) -> TypeGuard[RequestOutput]:
    """Whether it is an increment with tokens; those of failed requests have none."""
    return isinstance(message, RequestOutput) and bool(message.token_ids)


def _join(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Consecutive increments as one."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return first
    drafted = max(outputs, key=lambda output: output.drafted_tokens)  # another engine begins at 0 again
    logprobs = tuple(chain.from_iterable(output.logprobs or () for output in outputs))
    return replace(
        last,
        token_ids=tuple(chain.from_iterable(output.token_ids for output in outputs)),
        logprobs=logprobs or None,
        prompt_logprobs=first.prompt_logprobs,
        queued_s=first.queued_s,
        drafted_tokens=drafted.drafted_tokens,
        accepted_tokens=drafted.accepted_tokens,
    )
