"""Holds all unfinished requests and makes every change of their phases.

    add -> WAITING -- start --> RUNNING -- finish --> FINISHED
                  <-- requeue --

A run keeps its slot, pages and locks while a row of it is in flight, even if its request has ended, so that no plan in
flight touches free pages.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from raycache.cache.holding import Holding
from raycache.cache.sequences import SequenceCache
from raycache.decider.request import Phase, Request, Run
from raycache.decider.waiting import WaitingQueue
from raycache.types import FinishReason, RequestOutput, StreamState


@dataclass(slots=True)
class Clock:
    """Time as passed in by the caller.

    Attributes:
        step: number of the last plan; the LRU clock of the cache.
        now_s: seconds.
    """

    step: int = 0
    now_s: float = 0.0


class RequestQueues:
    """Owns phases and slots, and releases runs. An ended request with a row in flight remains in `running`.

    Args:
        max_running: number of slots.
    Attributes:
        running: admitted requests, with their pages and slots, in order.
        num_preemptions: runs that lost their pages to other requests.
        finished: number of finished requests by reason.
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
        """Whether a slot is free."""
        return bool(self._free_slots)

    @property
    def num_busy(self) -> int:
        """Number of running requests, plus waiting ones for which there is a slot."""
        return len(self.running) + min(len(self.waiting), self._max_running - len(self.running))

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def states(self, request_ids: Iterable[str]) -> dict[str, StreamState]:
        """States of those of the requests that are here; may be called by another thread than the engine's."""
        found = ((request_id, self._by_id.get(request_id)) for request_id in request_ids)
        return {request_id: request.state() for request_id, request in found if request is not None}

    def add(self, request: Request) -> None:
        """Queue a request; its id must not be in use."""
        spec = request.spec
        self._by_id[spec.request_id] = request
        if spec.deadline_s is not None:
            heapq.heappush(self._deadlines, (spec.deadline_s, spec.request_id))
        self.waiting.push(request)

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End a request before the next step; unknown ids are ignored, as the request may have ended."""
        request = self._by_id.get(request_id)
        if request is not None and request.ending is None:
            request.ending = reason
            self._ending.append(request)

    def fail(self, request: Request, error: str) -> None:
        """End a request before the next step because of an error of its own."""
        request.error = request.error or error
        self.end(request.spec.request_id, FinishReason.ERROR)

    def take_ended(self, now_s: float) -> list[RequestOutput]:
        """End cancelled and late requests that are not in flight; return their final increments.

        Args:
            now_s: current time in seconds, on the clock of the deadlines.
        """
        while self._deadlines and self._deadlines[0][0] <= now_s:
            request = self._by_id.get(heapq.heappop(self._deadlines)[1])
            # The id may belong to a later request by now: ids are unique only among requests in progress.
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

    def start(
        self, request: Request, holding: Holding, *, num_computed: int, restore_at: list[int], is_kept: bool
    ) -> Run:
        """Start a request that was popped from `waiting`."""
        request.phase = Phase.RUNNING
        run = Run(request, self._free_slots.pop(), holding, num_computed, num_computed, restore_at, is_kept)
        request.run = run
        bisect.insort(self.running, run, key=_order)
        return run

    def requeue(self, run: Run) -> None:
        """Return a request that is not in flight to `waiting`; its computed pages stay in the tree."""
        request = run.request
        self.release(run)
        if request.is_scored:
            request.prompt_scores.clear()
        request.drafts.forget_rows()
        request.phase = Phase.WAITING
        self.waiting.push(request)

    def preempt(self, run: Run) -> None:
        """Requeue a run so that other requests get its pages."""
        self.num_preemptions += 1
        self.requeue(run)

    def victim(self, *, behind: Request) -> Run | None:
        """Return the last run in order that has no row in flight or in the plan that is being made."""
        order = behind.spec.order
        free = [run for run in self.running if not run.num_in_flight and run.request.spec.order > order]
        return free[-1] if free else None

    def finish(self, request: Request, reason: FinishReason) -> RequestOutput:
        """End a request; one in flight keeps its pages until its last row completes.

        Returns:
            Its final increment, without tokens.
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
        """Stop prefetching a prompt from storage."""
        if request.prefetch is not None:
            self._storage.abandon(request.prefetch)

    def settle_prefetch(self, request: Request) -> None:
        """Stop prefetching a prompt that has been computed, and take what the storage has replied while it was."""
        prefetch = request.prefetch
        if prefetch is not None:
            self._storage.abandon(prefetch)
            if not prefetch.is_known:
                self._storage.take_results(now=self._clock.step)

    def release(self, run: Run) -> None:
        """Release the slot and all pages of a run."""
        assert not run.num_in_flight, "a run with rows in flight is released"
        run.holding.end(run.request.tokens, now=self._clock.step)
        run.request.run = None
        self._free_slots.append(run.slot)
        self.running.remove(run)

    def check(self) -> None:
        """Assert that every page is in exactly one place and every slot and lock has one owner."""
        self._cache.check([run.holding for run in self.running])
        self.waiting.check()
        slots = [run.slot for run in self.running]
        assert self.running == sorted(self.running, key=_order), "running requests are out of order"
        assert sorted(slots + self._free_slots) == list(range(self._max_running)), "a slot is lost or used twice"
        for run in self.running:
            assert run.request.run is run, "two runs of one request"
            num_pages, reach = len(run.holding.pages), max(run.num_computed, run.next_start)
            assert num_pages * self._cache.page_size >= reach, "tokens without a page"
            assert run.holding.handle.length <= run.num_computed, "the tree holds tokens that are not computed"
            assert run.num_in_flight or run.request.phase is Phase.RUNNING, "an ended request still holds pages"


def _order(run: Run) -> tuple[int, int]:
    return run.request.spec.order
