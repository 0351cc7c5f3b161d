"""Requests that have not ended, by id, and how they end: done, cancelled, late or in error."""

from __future__ import annotations

import heapq
from collections import Counter

from raycache.cache.sequences import SequenceCache
from raycache.decider.queues import RequestQueues
from raycache.decider.request import Phase, Request
from raycache.types import FinishReason, RequestOutput


class OpenRequests:
    """Knows every request from its arrival to its last increment.

    Args:
        cache: whose storage may look for their prefixes.
        queues: where they wait or run.
    Attributes:
        finished: requests by reason.
    """

    def __init__(self, cache: SequenceCache, queues: RequestQueues) -> None:
        self.finished: Counter[str] = Counter()
        self._storage = cache.storage
        self._queues = queues
        self._by_id: dict[str, Request] = {}
        self._ending: list[Request] = []
        self._deadlines: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, request: Request) -> None:
        """Take in a request, whose id no other one has."""
        spec = request.spec
        self._by_id[spec.request_id] = request
        if spec.deadline_s is not None:
            heapq.heappush(self._deadlines, (spec.deadline_s, spec.request_id))

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End a request before its next step; unknown ids are of requests that ended already."""
        request = self._by_id.get(request_id)
        if request is not None and request.ending is None:
            request.ending = reason
            self._ending.append(request)

    def take_ended(self, now_s: float) -> list[RequestOutput]:
        """End what is cancelled or late and not in flight; the last increments of those requests.

        Args:
            now_s: clock of the deadlines, seconds.
        """
        while self._deadlines and self._deadlines[0][0] <= now_s:
            request = self._by_id.get(heapq.heappop(self._deadlines)[1])
            # The id may be of a later request by now: ids are unique only among those in flight.
            if request is not None and request.spec.deadline_s is not None and request.spec.deadline_s <= now_s:
                self.end(request.spec.request_id, FinishReason.TIMEOUT)
        if not self._ending:
            return []
        ready = [request for request in self._ending if not request.is_in_flight]
        self._ending = [request for request in self._ending if request.is_in_flight]
        return [
            self.finish(request, request.ending)
            for request in ready
            if request.phase is not Phase.FINISHED and request.ending is not None
        ]

    def finish(self, request: Request, reason: FinishReason) -> RequestOutput:
        """End a request now; its last increment, without tokens."""
        self._queues.finish(request)
        self.abandon_prefetch(request)
        del self._by_id[request.spec.request_id]
        self.finished[reason] += 1
        return request.output(reason=reason)

    def abandon_prefetch(self, request: Request) -> None:
        """Ask storage for no more of a prompt."""
        if request.prefetch is not None:
            self._storage.abandon(request.prefetch)
