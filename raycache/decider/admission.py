"""Decides which waiting requests start in a step, and which running ones are preempted for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raycache.cache.holding import Holding
from raycache.cache.sequences import SequenceCache
from raycache.decider.ahead import PlanAhead
from raycache.decider.batch import Batch
from raycache.decider.hits import CacheReport
from raycache.decider.queues import Clock, RequestQueues
from raycache.decider.request import Request, Run
from raycache.decider.restore_points import RestorePointPlanner
from raycache.decider.rows import RowPlanner
from raycache.wire.plan import Admit, PageLists

_MAX_SET_ASIDE = 32
"""Waiting requests that one step may skip because a running request is computing their next page."""

_Page = tuple[object, bytes]
"""Identity of a page: (tree node of its prefix, its tokens)."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Starts waiting requests."""

    cache: SequenceCache
    queues: RequestQueues
    clock: Clock
    ahead: PlanAhead
    rows: RowPlanner
    points: RestorePointPlanner

    def queue(self, request: Request) -> None:
        """Queue a new request, and look up its prefix in storage."""
        if self.cache.storage.is_present and not request.is_scored and not self._has_on_device(request):
            spec, clock = request.spec, self.clock
            request.prefetch = prefetch = self.cache.storage.start(
                spec.request_id,
                request.tokens,
                root=spec.use.root,
                now=clock.step,
                now_s=clock.now_s,
                digests=request.digests,
            )
            if prefetch is not None and not request.digests:
                request.digests = prefetch.digests
        self.queues.add(request)
        self.points.ask(request, self.queues.running)

    def make_way(self, batch: Batch) -> bool:
        """Preempt requests of lower priority for the first waiting one.

        Returns:
            Whether to continue with this step; False if the requests to preempt are still in flight.
        """
        assert not batch.rows, "a request to preempt already has a row in this step"
        queues = self.queues
        request = queues.waiting.first()
        if request is None or not queues.running or self._is_awaited(request):
            return True
        priority = request.spec.order[0]
        while any(run.request.spec.order[0] > priority and run.wants_row for run in queues.running):
            victim = queues.victim(behind=request)
            can_preempt = victim is not None and victim.request.spec.order[0] > priority
            if not (can_preempt or self.ahead.is_on):
                return True
            holding = self._lock(request)
            is_ready = queues.has_slot and self._fits(request, holding)
            self._unlock(request, holding)
            if is_ready:
                return True
            if victim is None or not can_preempt:
                return False
            queues.preempt(victim)
        return True

    def admit(self, batch: Batch) -> None:
        """Start waiting requests in their order, while the plan has rows and tokens left."""
        waiting = self.queues.waiting
        if not len(waiting):
            return
        set_aside: list[Request] = []
        fetching: list[Request] = []
        computing = self._pages_being_computed()
        while not batch.is_full and batch.takes_prompts and self.queues.has_slot and len(set_aside) < _MAX_SET_ASIDE:
            request = waiting.first()
            if request is None:
                break
            if self._is_awaited(request):
                fetching.append(waiting.set_aside())
                continue
            holding = self._lock(request)
            if self._is_being_computed(request, holding, computing):
                self._unlock(request, holding)
                set_aside.append(waiting.set_aside())
                continue
            if not self._fits(request, holding):
                self._unlock(request, holding)
                break
            waiting.pop()
            if not self._start(request, holding, batch):
                break
            if (page := self._next_page(request, holding)) is not None:
                computing.add(page)
        waiting.put_back(set_aside + fetching)

    def next_len(self) -> int:
        """Tokens to compute of the first waiting request, if it can start in the next step; 0 if not."""
        request = self.queues.waiting.first()
        if request is None or not self.queues.has_slot or self._is_awaited(request):
            return 0
        holding = self._lock(request)
        is_ready = self._fits(request, holding)
        is_ready = is_ready and not self._is_being_computed(request, holding, self._pages_being_computed())
        length = request.num_tokens - holding.handle.length
        self._unlock(request, holding)
        return length if is_ready else 0

    def _is_being_computed(self, request: Request, holding: Holding, computing: set[_Page]) -> bool:
        """Whether a running request is computing what this one needs, which then waits to reuse it."""
        return self._next_page(request, holding) in computing or self.points.is_worth_waiting(
            request, holding.handle.length, self.queues.running
        )

    def _has_on_device(self, request: Request) -> bool:
        """Whether no part of its prompt would be fetched from a lower tier."""
        cached_len = self.cache.device_len(request.tokens, use=request.spec.use, now=self.clock.step)
        return cached_len >= self.cache.reusable_len(request.num_tokens)

    def _is_awaited(self, request: Request) -> bool:
        """Whether its grammar is being compiled, or its prefix fetched."""
        grammar, prefetch = request.grammar, request.prefetch
        if grammar is not None and not grammar.is_ready:
            return True
        return prefetch is not None and self.cache.storage.is_awaited(prefetch, now_s=self.clock.now_s)

    def _lock(self, request: Request) -> Holding:
        return self.cache.begin(
            request.tokens,
            is_matched=not request.is_scored,
            now=self.clock.step,
            use=request.spec.use,
            digests=request.digests,
        )

    def _unlock(self, request: Request, holding: Holding) -> None:
        holding.end(request.tokens, now=self.clock.step)

    def _fits(self, request: Request, holding: Holding) -> bool:
        """Whether there are pages for all its tokens and for the next steps of running requests."""
        num_running = len(self.queues.running)
        if not num_running and not self.cache.has_moves:
            return True  # alone, it fits the pool: checked when it arrived
        needed = -(-(request.num_tokens + 1) // self.cache.page_size) - len(holding.pages)
        return self.cache.num_obtainable >= needed + num_running

    def _start(self, request: Request, holding: Holding, batch: Batch) -> bool:
        """Start a request that fits; False if pages it needs are still held by saves in flight."""
        cache, queues, now = self.cache, self.queues, self.clock.step
        if cache.has_points:
            queues.abandon_prefetch(request)  # the others load fetched pages while they run
        is_worth = cache.costs.is_load_worth(holding.num_loadable)
        start = holding.start(request.tokens, may_load=request.may_load and is_worth, now=now)
        if request.num_admissions == 0:
            request.queued_s = max(0.0, self.clock.now_s - request.spec.arrival_s)
            request.report = CacheReport.of(
                holding,
                request.prefetch,
                wanted=cache.reusable_len(request.num_tokens),
                cached_len=start,
                may_load=request.may_load,
                is_load_worth=is_worth,
            )
        known_len, is_kept = holding.handle.known_length, True
        if request.is_scored and cache.has_points:
            # It is computed again even where it is cached, which takes other pages beside the locked ones; more than
            # the pool has would never end.
            known_len = cache.known_len(request.tokens, use=request.spec.use, now=now)
            is_kept = cache.has_pages_for(known_len + request.num_tokens + 1)
        elif request.is_scored:
            is_kept = False  # its pages suffice to resume, and enter the cache together at its end
        restore_at = self.points.plan(known_len, start, request.num_tokens)
        run = queues.start(request, holding, num_computed=start, restore_at=restore_at, is_kept=is_kept)
        for other in queues.waiting.peek(_MAX_SET_ASIDE):
            self.points.ask(other, [run])
        pages = holding.tables()
        row = self.rows.next_row(run, batch)
        if row is None:
            if request.run is run:
                queues.requeue(run)
            return False
        request.num_admissions += 1
        holding.use(request.tokens, now=now)
        self.rows.plan_load(run, batch)
        batch.admits.append(_admit(run, pages, stops=self.rows.drafted.stops(run.request)))
        batch.add(run, row)
        return True

    def _pages_being_computed(self) -> set[_Page]:
        runs = (run for run in self.queues.running if run.steady is None and run.remaining > 1)
        pages = (self._next_page(run.request, run.holding) for run in runs)
        return {page for page in pages if page is not None}

    def _next_page(self, request: Request, holding: Holding) -> _Page | None:
        """Identity of the first whole page after the locked prefix."""
        handle = holding.handle
        start, stop = handle.length, handle.length + self.cache.page_size
        if not self.cache.is_kept or self.cache.has_points or stop > request.num_tokens - 1:
            return None
        return handle.key, request.packed(start, stop)


def _admit(run: Run, pages: PageLists, *, stops: frozenset[int]) -> Admit:
    request, prompt_len, sampling = run.request, run.request.spec.prompt_len, run.request.spec.sampling
    has_penalties = sampling.has_penalties
    if sampling.min_tokens:
        sampling = replace(sampling, stop_token_ids=tuple(sorted(stops)))  # ranks know of no others
    return Admit(
        slot=run.slot,
        pages=pages,
        sampling=replace(sampling, grammar="") if sampling.grammar else sampling,  # ranks get masks
        seed=request.spec.seed,
        prompt=request.packed(0, prompt_len) if has_penalties else b"",
        output=request.packed(prompt_len, request.num_tokens) if has_penalties else b"",
    )
