"""Which tokens of which requests the ranks compute next, and on which pages.

One step in order: end what is cancelled or late; decode rows of running requests; next chunks of prompts that are
under way; new requests, while the token budget lasts. When pages run out, cached ones are evicted, then the running
request that is last in order gives its pages back and waits again; what it computed stays in the tree, so it resumes
from there unless that is evicted too.

Models with windows or recurrent states can be continued only from restore points. Chunks end where one is worth keeping
(restore_points.py): at the last page boundary of a prompt, where prompts branch, and at intervals.

With one pipeline stage a step can be planned ahead, while the one before runs: for the same requests, each a chunk
further, or fed with the token that is still being sampled. If that token ends the request, the row is thrown away:

    planned    17: samples token 42      18: fed with token 42         19: without it       20: others get its slot
    back                                 17: token 42 is the end       18: thrown away      19

What is planned ahead makes nothing known, computed or free:
 - The tree gets whole pages of known tokens when the row that computes them is back. Rows in flight write only behind
   what is back of their request, so never into a page of the tree; a save or another request may read that at any time.
 - A request keeps its slot, pages and locks until its last row is back, also when it has ended before (`_finish`). So
   no plan in flight touches what is free, and a load or another request may write there at any time.

Where sequences live is decided in cache/sequences.py. Knows no clock: `now_s` is handed in.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter

import numpy as np

from raycache.cache.holding import Room
from raycache.cache.sequences import SequenceCache
from raycache.decider.admin import CommandResult, carry_out
from raycache.decider.batch import Batch
from raycache.decider.drafted_rows import DraftedRows
from raycache.decider.drafts import Drafts
from raycache.decider.hits import Hits, count_more, note_hit
from raycache.decider.request import Phase, Request
from raycache.decider.restore_points import Cuts
from raycache.decider.waiting import WaitingQueue
from raycache.parallel.board import Acks
from raycache.types import CacheCommand, EngineStats, FinishReason, RequestOutput, TokenLogprob
from raycache.wire.plan import Admit, Row, RowResult, StepPlan

_MAX_LOSSES = 3
"""Gangs that a request may be in flight on when they are lost; fewer than an engine rebuilds one after another."""

_CLOSE_S = 1.0
"""How long calls to a storage may take to end."""

_MAX_SET_ASIDE = 32
"""Waiting requests that one step looks past because another request is computing their next page."""


class Scheduler:
    """Decides steps.

    Args:
        cache: where sequences live.
        max_step_tokens: token budget of a step.
        max_running: most rows of a batch.
        micro_batches: stages of the pipeline; running requests are spread over so many plans. With one, a step that is
            asked for while another is in flight is planned ahead.
        eos_token_ids: tokens that end an output.
        restore_interval: tokens between restore points inside a prompt; 0 for none inside.
        drafts: guesses at next tokens.
    """

    def __init__(
        self,
        *,
        cache: SequenceCache,
        max_step_tokens: int,
        max_running: int,
        micro_batches: int,
        eos_token_ids: tuple[int, ...],
        restore_interval: int,
        drafts: Drafts,
    ) -> None:
        self.page_size = cache.page_size
        self._cache = cache
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._micro_batches = micro_batches
        self._storage = cache.storage
        self.costs = cache.costs
        self.drafts = drafts
        self._drafted = DraftedRows(drafts, cache, eos_token_ids=eos_token_ids)
        self._hits = Hits()
        self._now_s = 0.0
        self._cuts = Cuts(cache, interval=restore_interval)
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._ending: list[Request] = []
        self._deadlines: list[tuple[float, str]] = []
        self._free_slots = list(range(max_running))[::-1]
        self._step = 0
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    # --- requests in and out ------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first or next admission."""
        return len(self._waiting)

    @property
    def has_requests(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._requests)

    @property
    def has_moves(self) -> bool:
        """Whether pages are on their way between tiers."""
        return self._cache.has_moves

    @property
    def plans_ahead(self) -> bool:
        """Whether requests in flight may be given a further row."""
        return self._micro_batches == 1

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Request, *, now_s: float) -> None:
        """Queue a request whose tokens fit the pool, and look for its prefix in storage."""
        self._now_s = now_s
        if self._storage is not None and not request.is_scored and not self._has_on_device(request):
            request.prefetch = self._storage.start(
                request.request_id, request.tokens, root=request.use.root, now=self._step, now_s=self._now_s
            )
        self._requests[request.request_id] = request
        request.luck = self.drafts.new_luck()
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.request_id))
        self._waiting.push(request)
        self._cuts.ask(request, self._running)

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End a request before its next step; unknown ids are of requests that ended already."""
        request = self._requests.get(request_id)
        if request is not None and request.ending is None:
            request.ending = reason
            self._ending.append(request)

    def restart(self, acks: Acks) -> None:
        """Take all requests back to the queue and forget all pages: the ranks that held them are gone.

        Page moves are numbered on from what the new ranks have acknowledged, which is nothing unless they are the old.
        One that was in flight at too many losses may be their cause and ends with an error.
        """
        if self._cache.host is not None:
            self._cache.host.lose()
        for request in list(self._running):
            request.num_losses += request.is_in_flight
            request.num_in_flight = 0
            if request.phase is Phase.FINISHED:
                self._release(request)
                continue
            if request.num_losses >= _MAX_LOSSES:
                self.end(request.request_id, FinishReason.ERROR)
            self._requeue(request)
        self._cache.clear()
        if self._cache.host is not None:
            self._cache.host.resume(acks)

    # --- one step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """Plan the next step; None when nothing can run now. Call `take_ended` first."""
        if self._is_held_up():
            return None
        batch = Batch(budget=self._max_step_tokens, max_rows=self._rows_per_plan())
        self._running.sort(key=lambda request: request.order)
        self.drafts.begin_step(min(len(self._running), batch.max_rows))
        if not self._make_way(batch):
            return None
        self._continue_running(batch)
        self._admit(batch)
        saves, loads, is_saved_first = self._cache.take_moves()
        if not batch.rows and not saves:
            return None
        self._step += 1
        self._counts["computed_tokens"] += sum(row.num_tokens for row in batch.rows)
        wanted = [top for request in batch.requests for top in request.wanted_tops]
        batch.plan = StepPlan(
            self._step,
            batch.rows,
            batch.admits,
            num_top=max(wanted, default=None),
            saves=saves,
            loads=loads,
            is_saved_first=is_saved_first,
        )
        for request in batch.requests:
            request.num_in_flight += 1
        if batch.is_decode:
            self.drafts.end_step()
        return batch

    def heartbeat(self, *, is_last: bool = False) -> StepPlan:
        """An empty step, that tells the ranks that the decider lives, or that they may end."""
        self._step += 1
        return StepPlan(self._step, is_last=is_last)

    def acknowledge(self, acks: Acks, *, now_s: float) -> None:
        """Take in how far the ranks are with page moves, and what storage has brought."""
        self._now_s = now_s
        self._cache.tick(now_s)
        if self._cache.host is not None:
            self._cache.host.acknowledge(acks, now=self._step)
        if self._storage is not None:
            self._storage.poll(now=self._step, now_s=now_s)

    def close(self) -> None:
        """Ask no storage any more."""
        if self._storage is not None:
            self._storage.close(_CLOSE_S)

    def wait_for_moves(self, timeout_s: float) -> None:
        """Wait a little: nothing can run before pages have moved."""
        if self._storage is not None and self._storage.num_open:
            self._storage.wait(timeout_s)
        else:
            time.sleep(timeout_s)

    def complete(self, batch: Batch, results: list[RowResult], acks: Acks) -> list[RequestOutput]:
        """Take in what came of a plan.

        Args:
            batch: as made by `schedule`.
            results: of its rows.
            acks: of the ranks, its loads included.
        Returns:
            One increment per request that got a token.
        """
        outputs = []
        is_whole = not batch.loads or acks.bad_load < batch.loads[0]
        for request, row, result in zip(batch.requests, batch.rows, results, strict=True):
            request.num_in_flight, request.num_losses = request.num_in_flight - 1, 0
            if request.phase is Phase.FINISHED:
                self._release(request)
                continue
            # One that is told to end is not planned ahead any more, so what a row is fed with is never thrown away.
            end = row.start + row.num_tokens - row.num_drafts
            assert end <= request.num_tokens, "a row of tokens that nobody knows"
            if not self._take_load(request, is_whole=is_whole, bad_load=acks.bad_load):
                continue
            tokens, reason = self._drafted.take(request, row, result)
            request.next_drafts = np.array(result.next_drafts, np.int32).tobytes()
            request.num_computed = end + max(len(tokens) - 1, 0)
            if result.scores:
                request.prompt_scores += [
                    _trim(score, request.sampling.prompt_logprobs or 0) for score in result.scores
                ]
            if tokens[:-1]:
                request.accept(row, len(tokens) - 1)
            self._advance(request)
            if tokens:
                outputs.append(self._add_tokens(request, tokens, result.logprobs, reason))
        return outputs

    def take_ended(self, now_s: float) -> list[RequestOutput]:
        """End what is cancelled or late and not in flight; the last increments of those requests.

        Args:
            now_s: clock of the deadlines, seconds.
        """
        while self._deadlines and self._deadlines[0][0] <= now_s:
            request = self._requests.get(heapq.heappop(self._deadlines)[1])
            # The id may be of a later request by now: ids are unique only among those in flight.
            if request is not None and request.deadline is not None and request.deadline <= now_s:
                self.end(request.request_id, FinishReason.TIMEOUT)
        ready = [request for request in self._ending if not request.is_in_flight]
        self._ending = [request for request in self._ending if request.is_in_flight]
        return [
            self._finish(request, request.ending)
            for request in ready
            if request.phase is not Phase.FINISHED and request.ending is not None
        ]

    def evict(self, space: str) -> bool:
        """See `SequenceCache.evict`."""
        return self._cache.evict(space)

    def admin(self, command: CacheCommand, *, root: bytes) -> CommandResult:
        """See `Engine.admin`."""
        return carry_out(command, self._cache, stats=self.stats(), root=root, now=self._step)

    def stats(self) -> EngineStats:
        """Counters and balances."""
        return EngineStats(
            steps=self._step,
            running=len(self._running),
            waiting=self.num_waiting,
            finished=dict(self._finished),
            spaces=self._cache.shared_counts(),
            components=self._cache.components(),
            cached_by_tier=dict(self._hits.tokens),
            misses=dict(self._hits.misses),
            tiers=self._cache.tiers(),
            warnings=self._hits.warnings(self._cache.tiers()),
            replicas={},
            drafted=dict(self.drafts.made_at),
            accepted=dict(self.drafts.right_at),
            **self._cache.counts(),
            **self._counts,
        )

    def check(self) -> None:
        """Assert that every page is in exactly one place and every slot and lock has one owner."""
        self._cache.check([request.holding for request in self._running if request.holding is not None])
        self._waiting.check()
        slots = [request.slot for request in self._running]
        assert sorted(slots + self._free_slots) == list(range(self._max_running)), "a slot is lost or given twice"
        for request in self._running:
            assert request.holding is not None, "running requests hold something of the cache"
            num_pages, reach = len(request.holding.pages), max(request.num_computed, request.next_start)
            assert num_pages * self.page_size >= reach, "tokens without a page"
            assert request.holding.handle.length <= request.num_computed, "the tree has what is not computed"
            assert request.is_in_flight or request.phase is Phase.RUNNING, "an ended request holds something"

    def _rows_per_plan(self) -> int:
        busy = len(self._running) + min(self.num_waiting, self._max_running - len(self._running))
        return max(1, -(-busy // self._micro_batches))

    # --- running requests ---------------------------------------------------------------------------------------------

    def _is_held_up(self) -> bool:
        """Whether a request in flight has to be back before its next row is planned.

        The others wait for it then: with a plan of their own they would run in turn with it from now on.
        """
        return self.plans_ahead and any(
            request.wants_row and not self._can_run_ahead(request) for request in self._running if request.is_in_flight
        )

    def _can_run_ahead(self, request: Request) -> bool:
        """Whether a request in flight can be given a further row. Not when it might have to go back to an earlier
        place, when what comes out of this row decides about the next, or when restore points may be made."""
        assert request.holding is not None, "running requests hold something of the cache"
        return not (
            self._cache.has_points
            or request.holding.load is not None
            or (request.is_fed and (request.sampling.has_penalties or not request.sampling.is_greedy))
            or request.num_drafts > 0
            or request.num_next_drafts > 0
            or (request.is_fed and self.drafts.wanted(request.luck) > 0)
            or self._is_more_loadable(request)
        )

    def _continue_running(self, batch: Batch) -> None:
        """Decode rows, then chunks."""
        ready = [r for r in self._running if r.wants_row and (self.plans_ahead or not r.is_in_flight)]
        ready.sort(key=lambda request: request.num_next > 1)
        batch.draft_budget = max(0, batch.budget - len(ready)) // 2  # the rest is for those that wait
        batch.guess_budget = batch.draft_budget
        is_short = False
        for request in ready:
            if batch.is_full:
                break
            # One that was planned before it may have taken its pages. When pages are short, those in flight come back:
            # only then can they give theirs.
            if request.phase is Phase.RUNNING and not (is_short and request.is_in_flight):
                is_short |= not self._continue(request, batch)

    def _continue(self, request: Request, batch: Batch) -> bool:
        """Give a running request its next tokens; it may lose its pages, or take those of requests behind it.

        What storage has brought in the meantime is loaded, not computed: a long prefix comes from both sides.

        Returns:
            Whether there was room.
        """
        before = request.num_computed
        self._load_more(request)
        row = self._next_row(request, batch)
        if row is not None:
            self._plan_load(request, batch)
            count_more(request, request.num_computed - before, page_size=self.page_size)
            batch.add(request, row)
        elif request.holding is not None and request.holding.load is not None:
            self._cache.drop_load(request.holding)
            request.num_computed = before
        return row is not None

    def _next_row(self, request: Request, batch: Batch) -> Row | None:
        """Its next tokens, and what is guessed at those behind them; None without room."""
        count = self._chunk_len(request, batch)
        guessed = self._drafted.guess(request, count, batch)
        if guessed is not None:
            return request.next_row(count, guessed.room, guessed.drafts, num_next_drafts=guessed.num_next_drafts)
        room = self._reserve(request, count, batch)
        return None if room is None else request.next_row(count, room)

    def _is_more_loadable(self, request: Request) -> bool:
        prefetch, start = request.prefetch, request.next_start
        return prefetch is not None and prefetch.end > start and request.num_next > 1 and request.may_load

    def _load_more(self, request: Request) -> None:
        if request.is_in_flight or not self._is_more_loadable(request):
            return
        assert request.holding is not None and request.prefetch is not None, "there is something to load"
        start = request.num_computed
        if self.costs.is_load_worth(request.prefetch.end - start):
            request.num_computed = self._cache.load_more(request.holding, request.tokens, start, now=self._step)

    def _plan_load(self, request: Request, batch: Batch) -> None:
        """Plan the moves that a row with room needs, if any."""
        assert request.holding is not None, "running requests hold something of the cache"
        if (load := request.holding.load) is not None:
            batch.loads.append(self._cache.plan_load(request.holding))
            batch.num_loaded += load.position - load.first * self.page_size

    def _chunk_len(self, request: Request, batch: Batch) -> int:
        """Tokens of a request's next row."""
        wanted, start = request.num_next, request.next_start
        if wanted == 1:
            return 1
        count = min(wanted, batch.budget, max(batch.scored_budget, 1) if request.is_scored else wanted)
        return count if count == 1 else self._cuts.end(request, reach=start + count) - start

    def _reserve(self, request: Request, count: int, batch: Batch) -> Room | None:
        """Room for `count` more tokens; None if the request has to wait."""
        assert request.holding is not None, "running requests hold something of the cache"
        start = request.next_start
        while (room := self._cache.make_room(request.holding, start, start + count)) is None:
            victim = self._victim(batch, behind=request)
            if victim is None:
                if not batch.rows and not any(other.is_in_flight for other in self._running):
                    self._preempt(request)
                return None
            self._preempt(victim)
        return room

    def _victim(self, batch: Batch, *, behind: Request) -> Request | None:
        """The last in order of the running requests that neither run in this plan nor in one in flight."""
        free = [r for r in self._running if not r.is_in_flight and r not in batch.requests and r.order > behind.order]
        return max(free, key=lambda r: r.order, default=None)

    def _preempt(self, request: Request) -> None:
        self._counts["preemptions"] += 1
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        self._release(request)
        if request.is_scored:
            request.prompt_scores.clear()
        request.num_computed, request.next_drafts = 0, b""
        self._waiting.push(request)

    # --- admission ----------------------------------------------------------------------------------------------------

    def _make_way(self, batch: Batch) -> bool:
        """Preempt requests of lower priority for the first that waits. Comes before they are planned in this step.

        Returns:
            Whether to go on with this step; not if those that would make way have to be back first.
        """
        request = self._waiting.first()
        if request is None or not self._running or self._awaits_prefetch(request):
            return True
        priority = request.order[0]
        while any(other.order[0] > priority and other.wants_row for other in self._running):
            victim = self._victim(batch, behind=request)
            can_preempt = victim is not None and victim.order[0] > priority
            if not (can_preempt or self.plans_ahead):
                return True
            if self._is_ready(request):
                return True
            if victim is None or not can_preempt:
                return False
            self._preempt(victim)
        return True

    def _is_ready(self, request: Request) -> bool:
        """Whether a waiting request could start now."""
        self._lock_prefix(request)
        is_ready = bool(self._free_slots) and self._fits(request)
        self._unlock(request)
        return is_ready

    def _admit(self, batch: Batch) -> None:
        set_aside: list[Request] = []
        fetching: list[Request] = []
        computing = self._pages_being_computed()
        while not batch.is_full and self._free_slots and len(set_aside) < _MAX_SET_ASIDE:
            request = self._waiting.first()
            if request is None:
                break
            if self._awaits_prefetch(request):
                fetching.append(self._waiting.set_aside())
                continue
            self._lock_prefix(request)
            if self._next_page(request) in computing or self._cuts.is_worth_waiting(request, self._running):
                # Another request computes what this one needs: a little later it can be reused, not computed twice.
                self._unlock(request)
                set_aside.append(self._waiting.set_aside())
                continue
            if not self._fits(request):
                self._unlock(request)
                break
            self._waiting.pop()
            if not self._start(request, batch):
                break
            if (page := self._next_page(request)) is not None:
                computing.add(page)
        self._waiting.put_back(set_aside + fetching)

    def _has_on_device(self, request: Request) -> bool:
        """Whether nothing of its prompt would be fetched."""
        wanted = (request.num_tokens - 1) // self.page_size * self.page_size
        return self._cache.device_len(request.tokens, use=request.use, now=self._step) >= wanted

    def _awaits_prefetch(self, request: Request) -> bool:
        prefetch = request.prefetch
        return (
            self._storage is not None and prefetch is not None and self._storage.is_awaited(prefetch, now_s=self._now_s)
        )

    def _lock_prefix(self, request: Request) -> None:
        holding = self._cache.begin(request.tokens, is_matched=not request.is_scored, now=self._step, use=request.use)
        request.holding, request.num_computed = holding, holding.handle.length

    def _unlock(self, request: Request) -> None:
        assert request.holding is not None, "only locked requests are unlocked"
        self._cache.end(request.holding, request.tokens, now=self._step)
        request.holding, request.num_computed = None, 0

    def _fits(self, request: Request) -> bool:
        """Whether all its tokens find pages next to what the running requests will want in their next steps."""
        if not self._running and not self._cache.has_moves:
            return True  # alone, it fits the pool: checked when it arrived
        assert request.holding is not None, "only locked requests are asked about"
        needed = -(-(request.num_tokens + 1) // self.page_size) - len(request.holding.pages)
        return self._cache.num_obtainable >= needed + len(self._running)

    def _take_load(self, request: Request, *, is_whole: bool, bad_load: int) -> bool:
        """What was loaded for a row is the tree's now. After a failure its requests begin again: only the last that
        failed is known, and loses what it loaded from; another one that failed will be known when it fails again."""
        if request.holding is None or request.holding.load is None:
            return True
        is_bad = request.holding.load.number == bad_load
        self._cache.finish_load(request.holding, request.tokens, is_whole=is_whole, is_bad=is_bad, now=self._step)
        if not is_whole:
            request.may_load &= not is_bad
            request.num_admissions -= 1
            self._requeue(request)
        return is_whole

    def _start(self, request: Request, batch: Batch) -> bool:
        """Run a request that fits; False if it has to wait on, for what saves on their way still hold."""
        holding = request.holding
        assert holding is not None, "only locked requests start"
        request.phase = Phase.RUNNING
        request.slot = self._free_slots.pop()
        if self._storage is not None and request.prefetch is not None and self._cache.has_points:
            self._storage.abandon(request.prefetch)  # others take what comes while they run
        is_worth = self.costs.is_load_worth(self._cache.num_loadable(holding))
        request.num_computed = self._cache.start(
            holding, request.tokens, may_load=request.may_load and is_worth, now=self._step
        )
        if request.num_admissions == 0:
            request.queued_s = max(0.0, self._now_s - request.arrival_s)
            note_hit(request, is_load_worth=is_worth, page_size=self.page_size)
        request.num_admissions += 1
        request.cuts, request.num_planned, request.uncounted = self._cuts.plan(request), request.num_computed, b""
        self._running.append(request)
        for other in self._waiting.peek(_MAX_SET_ASIDE):
            self._cuts.ask(other, [request])
        tables = holding.tables()
        row = self._next_row(request, batch)
        if row is None:
            request.num_admissions -= 1
            if request.phase is Phase.RUNNING:
                self._requeue(request)
            return False
        self._cache.use(holding, request.tokens, now=self._step)
        self._plan_load(request, batch)
        has_penalties = request.sampling.has_penalties
        batch.admits.append(
            Admit(
                slot=request.slot,
                pages=tables,
                sampling=request.sampling,
                seed=request.seed,
                prompt=request.packed(0, request.prompt_len) if has_penalties else b"",
                output=request.packed(request.prompt_len, request.num_tokens) if has_penalties else b"",
            )
        )
        batch.add(request, row)
        return True

    def _pages_being_computed(self) -> set[tuple[object, bytes]]:
        pages = (self._next_page(request) for request in self._running if request.remaining > 1)
        return {page for page in pages if page is not None}

    def _next_page(self, request: Request) -> tuple[object, bytes] | None:
        """Identity of the first whole page behind a request's locked prefix: (place in the tree, its tokens)."""
        assert request.holding is not None, "running and locked requests hold something of the cache"
        handle = request.holding.handle
        start, stop = handle.length, handle.length + self.page_size
        if not self._cache.is_kept or self._cache.has_points or stop > request.num_tokens - 1:
            return None
        return handle.key, request.packed(start, stop)

    # --- after a step -------------------------------------------------------------------------------------------------

    def _advance(self, request: Request) -> None:
        assert request.holding is not None, "running requests hold something of the cache"
        # A prompt that is scored is computed again even where it is cached. With the cached pages locked beside the new
        # ones it would take twice the pages, and a prompt of more than half the pool would never end.
        is_again = request.is_scored and request.num_computed < request.prompt_len
        self._cache.advance(
            request.holding,
            request.tokens,
            request.num_computed,
            is_kept=not is_again,
            is_point=self._cuts.is_point(request),
            now=self._step,
        )

    def _add_tokens(
        self, request: Request, tokens: list[int], logprobs: list[TokenLogprob], reason: FinishReason | None
    ) -> RequestOutput:
        """Take the last of a row's tokens in; the others are already."""
        if request.num_output == 0:
            if self._storage is not None and request.prefetch is not None:
                self._storage.abandon(request.prefetch)
            self._counts["prompt_tokens"] += request.prompt_len
            self._counts["cached_tokens"] += request.cached_len
            self._hits.count(request)
        request.append(tokens[-1])
        self._counts["output_tokens"] += len(tokens)
        if request.sampling.prompt_logprobs is not None and request.num_output == 1:
            request.prompt_scores.insert(0, None)
        wanted = request.sampling.logprobs
        entries = [] if wanted is None else [_trim(entry, wanted) for entry in logprobs[: len(tokens)]]
        output = request.output(*tokens, logprobs=entries, reason=reason)
        if reason is not None:
            self._finish(request, reason)
        return output

    def _finish(self, request: Request, reason: FinishReason) -> RequestOutput:
        was_running = request.phase is Phase.RUNNING
        request.phase = Phase.FINISHED
        if not was_running:
            self._waiting.drop()
        elif not request.is_in_flight:
            self._release(request)  # else when the row that was planned ahead is back
        if self._storage is not None and request.prefetch is not None:
            self._storage.abandon(request.prefetch)
        del self._requests[request.request_id]
        self._finished[reason] += 1
        return request.output(reason=reason)

    def _release(self, request: Request) -> None:
        """Give back the slot and all pages of a running request."""
        assert request.holding is not None, "running requests hold something of the cache"
        assert not request.is_in_flight, "what a plan in flight uses is given back"
        self._cache.end(request.holding, request.tokens, now=self._step)
        request.holding = None
        self._free_slots.append(request.slot)
        self._running.remove(request)


def _trim(entry: TokenLogprob, count: int) -> TokenLogprob:
    """Only the alternatives that this request asked for; another row of the batch may have wanted more."""
    return entry if len(entry.top) <= count else TokenLogprob(entry.token_id, entry.logprob, entry.top[:count])
