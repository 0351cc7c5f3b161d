"""Open requests and their output so far: everything that another engine needs to continue them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from actors.unread import Unread
from raycache.errors import QueueFullError, RayCacheError, RequestError
from raycache.types import FinishReason, GenerateRequest, RequestOutput

_LEAST_S = 0.001
"""Minimum remaining time of a request: engines reject a timeout of 0."""


@dataclass(eq=False)
class Stream:
    """One request.

    Attributes:
        request: as sent by the client, plus a seed, so that another engine draws the same random numbers.
        deadline: in seconds on the monotonic clock; None: none.
        tokens: generated so far.
        first: increment with the first token; None before.
        is_ended: whether no more messages follow.
        is_resumed: whether an engine was lost since it was opened.
        unread: what its client has not read.
    """

    request: GenerateRequest
    deadline: float | None
    tokens: list[int] = field(default_factory=list)
    first: RequestOutput | None = None
    is_ended: bool = False
    is_resumed: bool = False
    unread: Unread = field(default_factory=Unread)

    def take(self, output: RequestOutput) -> None:
        """Add an increment."""
        self.unread.put(self.note(output))

    def note(self, output: RequestOutput) -> RequestOutput:
        """Note an increment; returns it as the client gets it."""
        if self.first is None:
            self.first = output
        elif self.is_resumed:
            # The new engine reports cache hits of prompt and output together, not of the prompt alone.
            output = replace(
                output,
                cached_tokens=self.first.cached_tokens,
                cached_by_tier=self.first.cached_by_tier,
                cut_by=self.first.cut_by,
                miss=self.first.miss,
            )
        self.tokens += output.token_ids
        self.is_ended = output.finish_reason is not None
        return output

    def end(self, error: RayCacheError) -> None:
        """End the request with an error."""
        self.is_ended = True
        self.unread.put(error)

    def rest(self, now_s: float) -> GenerateRequest:
        """Return a request for the remaining output."""
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
        """Register a request.

        Raises:
            RequestError: its id is in use.
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
        """Deliver messages to clients that are still connected.

        Returns:
            Requests to submit again. A new engine's queue can be too short for all requests of the lost one, which
            were partly running; refused ones are retried as others end.
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
        """Return the requests for another engine to continue, in order of arrival."""
        self.expire()
        self._refused.clear()
        rest = []
        for stream in self._by_id.values():
            if not stream.is_ended:
                stream.is_resumed = True
                rest.append(stream.rest(time.monotonic()))
        return rest

    def expire(self) -> None:
        """End requests whose deadline has passed; needed while no engine does."""
        for stream in self._by_id.values():
            self._is_late(stream)

    def fail(self, error: RayCacheError) -> None:
        """End all requests with an error."""
        for stream in self._by_id.values():
            if not stream.is_ended:
                stream.end(error)

    def _is_late(self, stream: Stream) -> bool:
        if not stream.is_ended and stream.deadline is not None and stream.deadline <= time.monotonic():
            stream.take(RequestOutput(stream.request.request_id, finish_reason=FinishReason.TIMEOUT))
        return stream.is_ended
