"""All requests that have not ended, and every change of their phases.

    add -> WAITING -- start --> RUNNING -- finish --> FINISHED
                  <-- requeue --

A run keeps its slot, pages and locks while a row of it is in flight, also when its request has ended: no plan in flight
touches what is free.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

from raycache.cache.holding import Holding
from raycache.cache.sequences import SequenceCache
from raycache.decider.batch import Batch
from raycache.decider.request import Phase, Request
from raycache.decider.run import Run
from raycache.decider.waiting import WaitingQueue
from raycache.types import FinishReason, RequestOutput


@dataclass(slots=True)
class Clock:
    """Time as the scheduler is told it.

    Attributes:
        step: number of the last plan; the LRU clock of the cache.
        now_s: seconds.
    """

    step: int = 0
    now_s: float = 0.0


class RequestQueues:
    """Owns phases and slots, and gives back what runs hold. An ended request whose row is in flight is `running` still.

    Args:
        max_running: slots.
    Attributes:
        waiting: in order of priority and arrival.
        running: with what they hold.
        num_preemptions: runs that gave their pages to others.
        finished: requests by reason.
    """

    def __init__(self, cache: SequenceCache, clock: Clock, *, max_running: int) -> None:
        self.waiting = WaitingQueue()
        self.running: list[Run] = []
        self.num_preemptions = 0
        self.finished: Counter[str] = Counter()
        self._cache, self._storage, self._clock = cache, cache.storage, clock
        self._by_id: dict[str, Request] = {}
        self._ending: list[Request] = []
        self._deadlines: list[tuple[float, str]] = []
        self._max_running = max_running
        self._free_slots = list(range(max_running))[::-1]

    @property
    def has_slot(self) -> bool:
        """Whether another request can run."""
        return bool(self._free_slots)

    @property
    def num_busy(self) -> int:
        """Requests that run or could."""
        return len(self.running) + min(len(self.waiting), self._max_running - len(self.running))

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
        self.waiting.push(request)

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

    def start(self, request: Request, holding: Holding, *, num_computed: int, restore_at: list[int]) -> Run:
        """Run a request that was taken from those that wait."""
        request.phase = Phase.RUNNING
        run = Run(request, self._free_slots.pop(), holding, num_computed, num_computed, restore_at)
        request.run = run
        self.running.append(run)
        return run

    def requeue(self, run: Run) -> None:
        """Take a request that is not in flight back to those that wait; what it computed stays in the tree."""
        request = run.request
        self.release(run)
        if request.is_scored:
            request.prompt_scores.clear()
        request.drafts.forget_rows()
        request.phase = Phase.WAITING
        self.waiting.push(request)

    def preempt(self, run: Run) -> None:
        """Take a request back for others."""
        self.num_preemptions += 1
        self.requeue(run)

    def victim(self, batch: Batch, *, behind: Request) -> Run | None:
        """The last in order of the runs that have a row neither in this plan nor in one in flight."""
        order = behind.spec.order
        free = [
            run
            for run in self.running
            if not run.num_in_flight and run not in batch.runs and run.request.spec.order > order
        ]
        return max(free, key=lambda run: run.request.spec.order, default=None)

    def finish(self, request: Request, reason: FinishReason) -> RequestOutput:
        """End a request now, although one in flight holds what it has until its last row is back.

        Returns:
            Its last increment, without tokens.
        """
        was_waiting = request.phase is Phase.WAITING
        request.phase = Phase.FINISHED
        if was_waiting:
            self.waiting.drop()
        elif request.run is not None and not request.run.num_in_flight:
            self.release(request.run)
        self.abandon_prefetch(request)
        del self._by_id[request.spec.request_id]
        self.finished[reason] += 1
        return request.output(reason=reason)

    def abandon_prefetch(self, request: Request) -> None:
        """Ask storage for no more of a prompt."""
        if request.prefetch is not None:
            self._storage.abandon(request.prefetch)

    def release(self, run: Run) -> None:
        """Give back the slot and all pages of a run."""
        assert not run.num_in_flight, "what a plan in flight uses is given back"
        run.holding.end(run.request.tokens, now=self._clock.step)
        run.request.run = None
        self._free_slots.append(run.slot)
        self.running.remove(run)

    def check(self) -> None:
        """Assert that every page is in exactly one place and every slot and lock has one owner."""
        self._cache.check([run.holding for run in self.running])
        self.waiting.check()
        slots = [run.slot for run in self.running]
        assert sorted(slots + self._free_slots) == list(range(self._max_running)), "a slot is lost or given twice"
        for run in self.running:
            assert run.request.run is run, "two runs of one request"
            num_pages, reach = len(run.holding.pages), max(run.num_computed, run.next_start)
            assert num_pages * self._cache.page_size >= reach, "tokens without a page"
            assert run.holding.handle.length <= run.num_computed, "the tree has what is not computed"
            assert run.num_in_flight or run.request.phase is Phase.RUNNING, "an ended request holds something"
