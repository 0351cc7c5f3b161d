"""Waiting requests, ordered by priority, then arrival."""

from __future__ import annotations

import heapq

from raycache.decider.request import Phase, Request


class WaitingQueue:
    """A heap with lazy deletion: requests that end while waiting stay until they reach the top or are too many."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        """Add a request."""
        self._count += 1
        self._put(request)

    def first(self) -> Request | None:
        """The first request, or None."""
        while self._heap and self._heap[0][1].phase is not Phase.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def peek(self, count: int) -> list[Request]:
        """Up to `count` requests near the front, roughly in order."""
        return [request for _, request in self._heap[:count] if request.phase is Phase.WAITING]

    def set_aside(self) -> Request:
        """Remove the first request from the heap temporarily; it still counts as waiting."""
        request = self.first()
        assert request is not None, "nobody waits"
        heapq.heappop(self._heap)
        return request

    def put_back(self, requests: list[Request]) -> None:
        """Undo `set_aside` for requests that are still waiting."""
        for request in requests:
            self._put(request)

    def pop(self) -> Request:
        """Remove and return the first request."""
        self._count -= 1
        return self.set_aside()

    def drop(self) -> None:
        """Remove a request that ended while waiting."""
        self._count -= 1
        if len(self._heap) > 2 * self._count + 64:
            self._heap = [entry for entry in self._heap if entry[1].phase is Phase.WAITING]
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Assert that the count matches the heap."""
        waiting = sum(request.phase is Phase.WAITING for _, request in self._heap)
        assert waiting == self._count, f"{self._count} waiting requests counted, there are {waiting}"

    def _put(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.spec.order, request))
