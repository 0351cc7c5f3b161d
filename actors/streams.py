"""Requests that clients wait for, with what each has got so far: all that another engine needs to go on with them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from raycache.errors import QueueFullError, RayCacheError, RequestError
from raycache.types import FinishReason, GenerateRequest, RequestOutput

_LEAST_S = 0.001
"""An engine takes no request without any time."""


@dataclass(eq=False)
class Stream:
    """One request.

    Attributes:
        request: as the client sent it, with a seed, so that another engine draws the same random numbers.
        deadline: on the monotonic clock, seconds; None for none.
        messages: what the client has not read yet: increments, or why there are no more.
        tokens: generated so far.
        first: increment of the first token; None before.
        is_ended: nothing comes any more.
        is_resumed: an engine was lost since it was opened.
    """

    request: GenerateRequest
    deadline: float | None
    messages: asyncio.Queue[RequestOutput | RayCacheError] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    first: RequestOutput | None = None
    is_ended: bool = False
    is_resumed: bool = False

    def take(self, output: RequestOutput) -> None:
        """Add an increment."""
        if self.first is None:
            self.first = output
        elif self.is_resumed:
            # What an engine finds of prompt and output together does not say what was reused of the prompt.
            output = replace(
                output,
                cached_tokens=self.first.cached_tokens,
                cached_by_tier=self.first.cached_by_tier,
                cut_by=self.first.cut_by,
                miss=self.first.miss,
            )
        self.tokens += output.token_ids
        self.is_ended = output.finish_reason is not None
        self.messages.put_nowait(output)

    def end(self, error: RayCacheError) -> None:
        """End it with an error."""
        self.is_ended = True
        self.messages.put_nowait(error)

    def rest(self, now_s: float) -> GenerateRequest:
        """What is left to do of it."""
        left_s = None if self.deadline is None else max(self.deadline - now_s, _LEAST_S)
        return replace(self.request, output=tuple(self.tokens), timeout_s=left_s)


class Streams:
    """All open requests. Belongs to one event loop."""

    def __init__(self) -> None:
        self._by_id: dict[str, Stream] = {}
        self._refused: list[Stream] = []
        self._random = random.SystemRandom()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._by_id.values())

    def open(self, request: GenerateRequest) -> Stream:
        """Take a request in.

        Raises:
            RequestError: another one has its id.
        """
        if request.request_id in self._by_id:
            raise RequestError.id_in_use(request.request_id)
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=self._random.getrandbits(62)))
        deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        stream = self._by_id[request.request_id] = Stream(request, deadline)
        return stream

    def close(self, stream: Stream) -> None:
        """Forget a request."""
        del self._by_id[stream.request.request_id]
        if stream in self._refused:
            self._refused.remove(stream)

    def take(self, messages: Iterable[tuple[str, RequestOutput | RayCacheError]]) -> list[GenerateRequest]:
        """Hand messages to the clients that are still there.

        Returns:
            Requests to submit now. A new engine may refuse some at first that the lost one had taken: what waits in a
            queue and what runs are more than a queue takes. As many come again as others end.
        """
        num_ended = 0
        for request_id, message in messages:
            num_ended += isinstance(message, RequestOutput) and message.finish_reason is not None
            stream = self._by_id.get(request_id)
            if stream is None or stream.is_ended:
                continue
            if isinstance(message, RequestOutput):
                stream.take(message)
            elif isinstance(message, QueueFullError) and stream.is_resumed:
                self._refused.append(stream)
            else:
                stream.end(message)
        again, self._refused = self._refused[:num_ended], self._refused[num_ended:]
        return [stream.rest(time.monotonic()) for stream in again if not self._is_late(stream)]

    def resume(self) -> list[GenerateRequest]:
        """What another engine goes on with, in the order of arrival."""
        self.expire()
        self._refused.clear()
        rest = []
        for stream in self._by_id.values():
            if not stream.is_ended:
                stream.is_resumed = True
                rest.append(stream.rest(time.monotonic()))
        return rest

    def expire(self) -> None:
        """End what is late, while no engine does it."""
        for stream in self._by_id.values():
            self._is_late(stream)

    def fail(self, error: RayCacheError) -> None:
        """End all."""
        for stream in self._by_id.values():
            if not stream.is_ended:
                stream.end(error)

    def _is_late(self, stream: Stream) -> bool:
        if not stream.is_ended and stream.deadline is not None and stream.deadline <= time.monotonic():
            stream.take(RequestOutput(stream.request.request_id, finish_reason=FinishReason.TIMEOUT))
        return stream.is_ended
