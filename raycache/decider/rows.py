"""Plans the next rows of running requests: token counts, pages, loads and draft tokens."""

from __future__ import annotations

from dataclasses import dataclass

from raycache.cache.held_units import Capacity
from raycache.cache.holding import Holding
from raycache.cache.sequences import SequenceCache
from raycache.decider.ahead import PlanAhead
from raycache.decider.batch import Batch
from raycache.decider.drafted_rows import DraftedRows
from raycache.decider.queues import Clock, RequestQueues
from raycache.decider.request import Run, Steady
from raycache.decider.restore_points import RestorePointPlanner
from raycache.memory.component import window_pages
from raycache.wire.plan import Row


@dataclass(frozen=True, slots=True)
class RowPlanner:
    """Adds rows to a plan, preempting requests that come later in order when pages run out."""

    cache: SequenceCache
    queues: RequestQueues
    clock: Clock
    ahead: PlanAhead
    drafted: DraftedRows
    points: RestorePointPlanner

    def ready(self) -> tuple[list[Run], list[Run]]:
        """Running requests that can get a row: those that decode, and prompts."""
        ready = self.ahead.ready(self.queues.running)
        prompts = [run for run in ready if run.steady is None and run.num_next > 1]
        return ([run for run in ready if run.num_next == 1] if prompts else ready), prompts

    def continue_running(self, batch: Batch, decodes: list[Run], prompts: list[Run]) -> None:
        """Add rows for running requests: decode first, then prompt chunks."""
        ready = decodes + prompts
        batch.draft_budget = max(0, batch.budget - len(ready)) // 2  # the rest is for waiting requests
        batch.next_draft_budget = batch.draft_budget
        is_short = False
        for number, run in enumerate(ready):
            if batch.is_full:
                break
            if number >= len(decodes) and not batch.chunk_room(run):
                continue
            # A request planned earlier may have taken its pages. When pages are short, rows in flight must complete
            # first: only then can their pages be taken.
            if run.request.run is not run or (is_short and run.num_in_flight):
                continue
            if run.steady is None or not self._continue_steady(run, run.steady, batch):
                is_short |= not self._continue(run, batch)

    def follow_up(self, batch: Batch) -> None:
        """Add the rows behind those that end at a restore point, as far as tokens, pages and states are left.

        They take nothing that other running requests may still need, preempt nobody, and wait for the next step where
        something is missing.
        """
        if not self.cache.has_points:
            return
        cut = [(run, row) for run, row in zip(batch.runs, batch.rows, strict=True) if self._may_follow(run, row, batch)]
        if not cut:
            return
        spare = self._spare_units()
        for run, row in cut:
            behind: Row | None = row
            while behind is not None and self._may_follow(run, behind, batch) and self._fits(run, batch, spare):
                behind = self.next_row(run, batch, may_preempt=False)
                if behind is not None:
                    batch.add(run, behind)

    def next_row(self, run: Run, batch: Batch, *, may_preempt: bool = True) -> Row | None:
        """Plan a run's next tokens and drafts. None if there are no pages; the run itself may have been preempted."""
        count, start = self._chunk_len(run, batch), run.next_start
        drafted = self.drafted.draft(run, count, batch)
        if drafted is not None:
            return run.next_row(
                count,
                drafted.capacity,
                drafted.drafts,
                num_next_drafts=drafted.num_next_drafts,
                stops_at_page=drafted.stops_at_page,
            )
        if run.num_open:
            return None  # nobody is preempted for tokens that may not come
        capacity = self._reserve(run, count, batch) if may_preempt else run.holding.reserve(start, start + count)
        return None if capacity is None else run.next_row(count, capacity)

    def _may_follow(self, run: Run, row: Row, batch: Batch) -> bool:
        """Whether a step may have another row behind this one, which then reads the states that this one writes; only
        for models with restore points."""
        is_cut = row.output_position < 0 and row.num_tokens > 1  # steps of single tokens are decode steps
        if not (is_cut and run.wants_row):
            return False
        if run.holding.load is not None or run.request.is_scored:
            return False
        # Behind a page boundary a row writes another state than it reads, so the one before it keeps its own.
        is_whole = run.next_start % self.cache.page_size == 0
        return is_whole and batch.chunk_room(run) >= min(run.num_next, self.cache.page_size)

    def _spare_units(self) -> dict[str, int]:
        """Units of each space beyond those that running requests hold or may claim."""
        guaranteed = self._guaranteed
        spare = self.cache.num_units()
        for run in self.queues.running:
            for space, count in _num_units(run.holding).items():
                spare[space] -= max(count, guaranteed[space])
        return spare

    def _fits(self, run: Run, batch: Batch, spare: dict[str, int]) -> bool:
        """Whether a run's next row needs no more than is spare, which is lowered by that."""
        stop = run.next_start + self._chunk_len(run, batch)
        held, needed = _num_units(run.holding), run.holding.units.missing(stop, stop, num_drafts=0)
        claims = {
            space: max(held[space] + count, self._guaranteed[space]) - max(held[space], self._guaranteed[space])
            for space, count in needed.items()
        }
        if any(count > spare[space] for space, count in claims.items()):
            return False
        for space, count in claims.items():
            spare[space] -= count
        return True

    @property
    def _guaranteed(self) -> dict[str, int]:
        """Units of each space that every running request may have, see `Deployment.pool_sizes`."""
        device, page_size = self.cache.device, self.cache.page_size
        return {
            space: 2 * window_pages(device.windows[space], page_size)
            if space in device.windows
            else 2 + self.drafted.most
            for space in device.units
        }

    def plan_load(self, run: Run, batch: Batch) -> None:
        """Plan the host-to-device moves that a row needs, if any."""
        if (load := run.holding.plan_load()) is not None:
            batch.loads.append(load.number)
            batch.num_loaded += load.position - load.first * self.cache.page_size

    def _continue(self, run: Run, batch: Batch) -> bool:
        """Add a running request's next tokens; may preempt it, or requests behind it.

        Pages that storage has fetched meanwhile are loaded instead of computed, so that a long prefix is filled from
        both sides.

        Returns:
            Whether there were enough pages.
        """
        before = run.num_computed
        if run.request.prefetch is not None:
            self._load_more(run)
        row = self.next_row(run, batch)
        if row is not None:
            if run.holding.load is not None:
                self.plan_load(run, batch)
            if run.num_computed > before:
                self._report_fetched(run, run.num_computed - before)
            batch.add(run, row)
        elif run.holding.load is not None:
            run.holding.drop_load()
            run.num_computed = before
        return row is not None

    def _continue_steady(self, run: Run, steady: Steady, batch: Batch) -> bool:
        """Add a steady run's next row, if its token fits the last page."""
        start = run.num_planned if run.num_in_flight else run.num_computed
        if start >= len(run.holding.pages) * self.cache.page_size:
            return False
        batch.add_token(run, start, start + 1 - steady.prompt_len)
        return True

    def _load_more(self, run: Run) -> None:
        request, start = run.request, run.num_computed
        if run.num_in_flight or not run.has_more_to_load:
            return
        assert request.prefetch is not None, "there are tokens to load, but no prefetch"
        if self.cache.costs.is_load_worth(request.prefetch.end - start):
            run.num_computed = run.holding.load_more(request.tokens, start, now=self.clock.step)

    def _report_fetched(self, run: Run, num_tokens: int) -> None:
        request = run.request
        if request.num_output == 0:
            is_all = run.num_computed >= self.cache.reusable_len(request.num_tokens)
            request.report = request.report.with_fetched(num_tokens, is_all=is_all)

    def _chunk_len(self, run: Run, batch: Batch) -> int:
        """Number of tokens in the next row."""
        wanted, start = run.num_next, run.next_start
        if wanted == 1:
            return 1
        count = min(wanted, batch.chunk_room(run), max(batch.scored_budget, 1) if run.request.is_scored else wanted)
        return count if count == 1 else self.points.end(run, reach=start + count) - start

    def _reserve(self, run: Run, count: int, batch: Batch) -> Capacity | None:
        """Reserve pages for `count` more tokens; None if the request has to wait."""
        start, queues = run.next_start, self.queues
        while (capacity := run.holding.reserve(start, start + count)) is None:
            victim = queues.victim(behind=run.request)
            if victim is None:
                if not batch.rows and not any(other.num_in_flight for other in queues.running):
                    queues.preempt(run)
                return None
            queues.preempt(victim)
        return capacity


def _num_units(holding: Holding) -> dict[str, int]:
    """Space -> units that a sequence holds, those of its restore points included."""
    found = {space: len(ids) for space, ids in holding.units.all().items()}
    for point in holding.points:
        for space, ids in point.parts.items():
            found[space] += len(ids)
    return found
