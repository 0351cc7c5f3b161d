"""Waiting and running requests, and every change from one to the other.

    push -> WAITING -- start --> RUNNING -- finish --> FINISHED
                  <-- requeue --

A run keeps its slot, pages and locks while a row of it is in flight, also when its request has ended: no plan in flight
touches what is free.
"""

from __future__ import annotations

from dataclasses import dataclass

from raycache.cache.holding import Holding
from raycache.cache.sequences import SequenceCache
from raycache.decider.batch import Batch
from raycache.decider.request import Phase, Request
from raycache.decider.run import Run
from raycache.decider.waiting import WaitingQueue


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
    """Owns phases and slots, and gives back what runs hold.

    Args:
        cache: where sequences live.
        clock: of the scheduler.
        max_running: slots.
    Attributes:
        waiting: in order of priority and arrival.
        running: with what they hold; those that have ended until their last row is back.
        num_preemptions: runs that gave their pages to others.
    """

    def __init__(self, cache: SequenceCache, clock: Clock, *, max_running: int) -> None:
        self.waiting = WaitingQueue()
        self.running: list[Run] = []
        self.num_preemptions = 0
        self._cache, self._clock = cache, clock
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

    def push(self, request: Request) -> None:
        """Let a request wait."""
        request.phase = Phase.WAITING
        self.waiting.push(request)

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
        self.push(request)

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

    def finish(self, request: Request) -> None:
        """End a request; one in flight holds what it has until its last row is back."""
        was_waiting = request.phase is Phase.WAITING
        request.phase = Phase.FINISHED
        if was_waiting:
            self.waiting.drop()
        elif request.run is not None and not request.run.num_in_flight:
            self.release(request.run)

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
