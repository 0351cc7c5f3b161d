"""Decides which tokens of which requests the ranks compute next, and on which pages.

One step, in order: end cancelled and late requests (queues.py); decode rows of running requests; next chunks of
prompts in progress (rows.py); new requests, while the token budget lasts (admission.py). When pages run out,
cached ones are evicted, then the running request that is last in order releases its pages and waits again; what it
computed stays in the tree, so it resumes from there unless that is evicted too.

Models with windows or recurrent states can resume only from restore points. Chunks end where one is worth keeping
(restore_points.py): at the last page boundary of a prompt, where prompts branch, and at intervals. A step may have
several chunks of a prompt, as rows that follow each other.

With one pipeline stage a step can be planned while the previous one runs (ahead.py). cache/sequences.py decides where
sequences live. Reads no clock: callers pass `now_s`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from raycache.cache.keys import PackedDigests
from raycache.cache.sequences import SequenceCache
from raycache.decider.admin import CommandResult, carry_out
from raycache.decider.admission import Admission
from raycache.decider.ahead import PlanAhead
from raycache.decider.batch import Batch
from raycache.decider.budget import MAX_PARTS, StepBudget, least_chunk, longest_chunk
from raycache.decider.drafted_rows import DraftedRows
from raycache.decider.drafts import Drafts, DraftStep
from raycache.decider.grammar import Grammars
from raycache.decider.queues import Clock, RequestQueues
from raycache.decider.request import Phase, Request, RequestSpec, Run
from raycache.decider.restore_points import RestorePointPlanner
from raycache.decider.results import Results
from raycache.decider.rows import RowPlanner
from raycache.errors import RequestError
from raycache.parallel.board import Acks
from raycache.types import CacheCommand, EngineStats, FinishReason, PackedTokens, RequestOutput
from raycache.wire.plan import Masks, StepPlan
from raycache.wire.results import RowResult

_MAX_LOSSES = 3
"""A request in flight during this many successive gang losses fails; below the engine's limit of restarts."""

_CLOSE_S = 1.0
"""Timeout of outstanding storage calls at shutdown."""


class Scheduler:
    """Plans steps and applies their results.

    Args:
        micro_batches: pipeline stages; running requests are spread over as many plans. With one, a step requested while
            another is in flight is planned ahead.
        restore_interval: tokens between restore points inside a prompt; 0 for none inside.
        grammars: None refuses requests with a grammar.
    Attributes:
        queues: waiting and running requests.
        ahead: rules for planning a step while another is in flight.
    """

    def __init__(
        self,
        *,
        cache: SequenceCache,
        budget: StepBudget,
        max_running: int,
        micro_batches: int,
        eos_token_ids: tuple[int, ...],
        restore_interval: int,
        drafts: Drafts,
        grammars: Grammars | None = None,
    ) -> None:
        self.cache, self.drafts, self._grammars = cache, drafts, grammars
        self._compiling: list[Request] = []
        self._clock = clock = Clock()
        self.queues = queues = RequestQueues(cache, clock, max_running=max_running)
        self.ahead = PlanAhead(cache, num_stages=micro_batches)
        self._budget, self._micro_batches = budget, micro_batches
        self._num_computed = self._num_decodes = 0
        self._drafting = DraftStep(drafts)
        drafted = DraftedRows(drafts, cache, eos_token_ids=eos_token_ids)
        points = RestorePointPlanner(cache, interval=restore_interval)
        self._rows = RowPlanner(cache, queues, clock, self.ahead, drafted, points)
        self._admission = Admission(cache, queues, clock, self.ahead, self._rows, points)
        self._results = Results(cache, queues, clock, drafted, points)

    def add(self, spec: RequestSpec, tokens: PackedTokens, *, now_s: float, digests: PackedDigests = b"") -> None:
        """Queue a request that fits the pool, look up its prefix in storage, and compile its grammar.

        Args:
            tokens: prompt and output so far.
            now_s: current time, on the clock of the deadlines.
            digests: of the prompt's first pages, as many as are known already.
        Raises:
            RequestError: its grammar is known to be wrong.
        """
        self._clock.now_s = now_s
        request = Request(spec, bytearray(tokens), self.drafts.new_state(), digests=digests)
        if spec.sampling.grammar:
            self._begin_grammar(request)
        self._admission.queue(request)

    def _begin_grammar(self, request: Request) -> None:
        if self._grammars is None:
            raise RequestError("this engine has no grammars", field="grammar")
        spec = request.spec
        request.grammar = self._grammars.begin(spec.sampling.grammar, prompt_len=spec.prompt_len)
        if request.grammar.error:
            raise RequestError(f"the grammar cannot be compiled: {request.grammar.error}", field="grammar")
        if not request.grammar.is_ready:
            self._compiling.append(request)

    def restart(self, acks: Acks) -> None:
        """Requeue all requests and forget all pages: the ranks that held them are gone.

        Move numbers continue from the new ranks' acknowledgements, zero unless the old ranks are reused. A request
        that was in flight at too many losses may be their cause, so it fails.
        """
        self.cache.transfers.lose()
        for run in list(self.queues.running):
            request = run.request
            request.num_losses += request.is_in_flight
            run.num_in_flight = 0
            if request.phase is Phase.FINISHED:
                self.queues.release(run)
                continue
            if request.num_losses >= _MAX_LOSSES:
                self.queues.end(request.spec.request_id, FinishReason.ERROR)
            self.queues.requeue(run)
        self.cache.clear()
        self.cache.transfers.resume(acks)

    def schedule(self, now_s: float) -> tuple[list[RequestOutput], Batch | None]:
        """Plan the next step.

        Args:
            now_s: current time, on the clock of the deadlines.
        Returns:
            Final increments of cancelled and late requests that are not in flight, and the plan; None if nothing can
            run now.
        """
        for request in self._compiling:
            self._fail_on_error(request, "the grammar cannot be compiled")
        self._compiling = [each for each in self._compiling if each.grammar is not None and not each.grammar.is_ready]
        return self.queues.take_ended(now_s), self._plan()

    def _fail_on_error(self, request: Request, what: str) -> None:
        if request.grammar is not None and (error := request.grammar.error):
            self.queues.fail(request, f"{what}: {error}")

    def _plan(self) -> Batch | None:
        queues = self.queues
        if self.ahead.holds_up(queues.running, self._drafting):
            return None
        max_rows = max(1, -(-queues.num_busy // self._micro_batches))
        if queues.running:
            self._drafting = self.drafts.step(min(len(queues.running), max_rows), num_decodes=self._num_decodes)
        batch = Batch(budget=self._budget.tokens, max_rows=max_rows, drafting=self._drafting)
        if not self._admission.make_way(batch):
            return None
        decodes, prompts = self._rows.ready()
        self._bound_prompts(batch, decodes, prompts)
        self._rows.continue_running(batch, decodes, prompts)
        self._admission.admit(batch)
        self._rows.follow_up(batch)
        saves, loads, is_saved_first = self.cache.transfers.take_moves()
        if not batch.rows and not saves:
            return None
        self._clock.step += 1
        self._num_computed += batch.num_tokens
        batch.plan = StepPlan(
            self._clock.step,
            batch.rows,
            batch.admits,
            num_top=max((top for i in batch.rows.others for top in batch.runs[i].request.wanted_tops), default=None),
            saves=saves,
            loads=loads,
            is_saved_first=is_saved_first,
            mask_len=self._mask_len(batch),
        )
        batch.needs_masks = batch.plan.mask_len > 0
        self._num_decodes += batch.is_decode
        return batch

    def _bound_prompts(self, batch: Batch, decodes: list[Run], prompts: list[Run]) -> None:
        """Leave prompts their share of the step, if others generate."""
        if not self._budget.is_bounded or not (prompts or len(self.queues.waiting)):
            return
        # With several stages, those that generate may be in flight.
        if not (decodes or any(run.wants_row and run.num_next == 1 for run in self.queues.running)):
            return
        wanted, num_prompts, num_running = [run.num_next for run in prompts], len(prompts), len(self.queues.running)
        if waiting_len := self._admission.next_len():
            # Of those that wait for a grammar or the storage, none can start; there is at least the first one.
            ready = max(1, len(self.queues.waiting) - len(self._compiling) - self.cache.storage.num_open)
            num_prompts += min(ready, self.queues.num_busy - num_running)
            if 0 < len(wanted) < MAX_PARTS:
                wanted.append(waiting_len)
        tokens = self._budget.prompt_tokens(
            self.cache.page_size, num_prompts=num_prompts, num_others=num_running - len(prompts)
        )
        least = min(least_chunk(tokens), self.cache.page_size)
        batch.bound_prompts(tokens, longest_chunk=longest_chunk(wanted, tokens), least_chunk=least)

    def _mask_len(self, batch: Batch) -> int:
        if self._grammars is None or not any(row.is_masked for row in batch.rows.others.values()):
            return 0
        return self._grammars.mask_len

    def masks(self, batch: Batch) -> Masks:
        """Make the masks of a plan; the tokens before those that it samples must be known. The result of a row whose
        grammar fails is ignored: its request ends."""
        assert self._grammars is not None, "a plan has masks, and the engine has no grammars"
        masked = [(run.request, row) for run, row in zip(batch.runs, batch.rows, strict=True) if row.is_masked]
        matchers = [request.allowed_next() for request, _ in masked]
        masks = self._grammars.masks([row for _, row in masked], matchers)
        for (request, _), matcher in zip(masked, matchers, strict=True):
            if matcher is not None:
                self._fail_on_error(request, "the grammar cannot be followed any further")
        return masks

    def heartbeat(self, *, is_last: bool = False) -> StepPlan:
        """An empty step that tells the ranks that the decider is alive or, with `is_last`, that they may exit."""
        self._clock.step += 1
        return StepPlan(self._clock.step, is_last=is_last)

    def acknowledge(self, acks: Acks, *, now_s: float) -> None:
        """Apply the ranks' progress of page moves, and pages fetched from storage."""
        self._clock.now_s = now_s
        self.cache.acknowledge(acks, now=self._clock.step, now_s=now_s)

    @property
    def step(self) -> int:
        """Number of the last step, the LRU clock."""
        return self._clock.step

    def close(self) -> None:
        """Stop using storage, publishing events, and compiling grammars."""
        self.cache.storage.close(_CLOSE_S)
        self.cache.events.close()
        if self._grammars is not None:
            self._grammars.close()

    def wait_for_grammars(self, timeout_s: float) -> None:
        """Wait for a grammar that is being compiled, if there is one."""
        if self._compiling and self._grammars is not None:
            self._grammars.wait(timeout_s)

    def wait_for_moves(self, timeout_s: float) -> None:
        """Wait for page moves, when nothing can run before they are done."""
        if self.cache.storage.num_open:
            self.cache.storage.wait(timeout_s)
        else:
            time.sleep(timeout_s)

    def complete(self, batch: Batch, results: Sequence[RowResult], acks: Acks) -> list[RequestOutput]:
        """Apply the results of a plan from `schedule`; returns one increment per request that got a token."""
        return self._results.take(batch, results, acks)

    def admin(self, command: CacheCommand, *, root: bytes) -> CommandResult:
        """Start an operator's command for the tenant whose root digest is `root`."""
        return carry_out(command, self.cache, stats=self.stats(), root=root, now=self._clock.step)

    def stats(self) -> EngineStats:
        """Current counters and gauges."""
        hits, tiers = self._results.hits, self.cache.tiers()
        return EngineStats(
            steps=self._clock.step,
            running=len(self.queues.running),
            waiting=len(self.queues.waiting),
            finished=dict(self.queues.finished),
            spaces=self.cache.shared_counts(),
            components=self.cache.components(),
            cached_by_tier=dict(hits.tokens),
            misses=dict(hits.misses),
            tiers=tiers,
            cache_info=self.cache.info(),
            warnings=hits.warnings(tiers),
            replicas={},
            rebuild_s={},
            drafted=dict(self.drafts.drafted_at),
            accepted=dict(self.drafts.accepted_at),
            computed_tokens=self._num_computed,
            preemptions=self.queues.num_preemptions,
            **self.cache.counts(),
            **self._results.counts,
        )

    def check(self) -> None:
        """Assert that every page is in exactly one place and every slot and lock has one owner."""
        self.queues.check()
