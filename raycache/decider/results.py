"""Applies the results of a step: appends tokens, inserts pages into the tree, ends requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from raycache.cache.sequences import SequenceCache
from raycache.cache.transfers import PlannedLoad
from raycache.decider.batch import Batch
from raycache.decider.drafted_rows import DraftedRows
from raycache.decider.hits import Hits
from raycache.decider.queues import Clock, RequestQueues
from raycache.decider.request import Phase, Request, Run, Steady
from raycache.decider.restore_points import RestorePointPlanner
from raycache.parallel.board import Acks
from raycache.types import FinishReason, RequestOutput, TokenLogprob
from raycache.wire.plan import Row
from raycache.wire.results import RowResult, sampled_tokens


@dataclass(slots=True)
class Results:
    """Applies the results of plans; `counts` are token counts by field name of EngineStats."""

    cache: SequenceCache
    queues: RequestQueues
    clock: Clock
    drafted: DraftedRows
    points: RestorePointPlanner
    counts: Counter[str] = field(default_factory=Counter)
    hits: Hits = field(default_factory=Hits)

    def take(self, batch: Batch, results: Sequence[RowResult], acks: Acks) -> list[RequestOutput]:
        """Apply a plan's results; returns one increment per request that got a token."""
        is_whole = not batch.loads or acks.bad_load < batch.loads[0]
        outputs = []
        others, tokens = batch.rows.others, sampled_tokens(results)
        for i, (run, row, token) in enumerate(zip(batch.runs, batch.rows.tokens, tokens, strict=True)):
            run.num_in_flight -= 1
            run.request.num_losses = 0
            if run.request.phase is Phase.FINISHED:
                self.queues.release(run)
                continue
            if i not in others:
                assert row[1] == run.num_computed, "a gap between rows"
                output = self._take_token(run, token)
            elif run.holding.load is None or self._take_load(run, is_whole=is_whole, bad_load=acks.bad_load):
                output = self._take_row(run, others[i], results[i])
            else:
                output = None
            if output is not None:
                outputs.append(output)
        return outputs

    def _take_token(self, run: Run, token: int) -> RequestOutput | None:
        """Like `_take_row`, of a steady run's row of one token."""
        request, steady = run.request, run.steady
        assert steady is not None, "other runs have rows of their own"
        run.num_computed += 1
        if run.num_computed % self.cache.page_size == 0:
            self._advance(run)
        if request.ending is not None:
            return None
        reason = None
        request.tokens += token.to_bytes(4, "little", signed=True)
        if token in steady.stops:
            reason = FinishReason.STOP
        elif len(request.tokens) >= steady.max_bytes:
            reason = FinishReason.LENGTH
        self.counts["output_tokens"] += 1
        output = RequestOutput(steady.request_id, (token,), None, None, reason, *steady.told)
        if reason is not None:
            self.queues.finish(request, reason)
        return output

    def _take_load(self, run: Run, *, is_whole: bool, bad_load: int) -> bool:
        """Hand loaded pages to the tree. After a failed load, requests restart: only the last failure is reported, and
        its host pages are dropped; an earlier one is found when it fails again."""
        request, load = run.request, run.holding.load
        assert isinstance(load, PlannedLoad), "a completed row was planned with its load"
        if is_whole:
            run.holding.finish_load(load, request.tokens, now=self.clock.step)
            return True
        is_bad = load.number == bad_load
        run.holding.fail_load(load, request.tokens, is_bad=is_bad)
        request.may_load &= not is_bad
        request.num_admissions -= 1
        self.queues.requeue(run)
        return False

    def _take_row(self, run: Run, row: Row, result: RowResult) -> RequestOutput | None:
        request = run.request
        # A request that is told to end is no longer planned ahead, so a token fed to a row is never discarded.
        # A fed row begins later than planned if the one before it accepted draft tokens.
        assert row.start == run.num_computed or (row.is_fed and row.start < run.num_computed), "a gap between rows"
        end = run.num_computed + row.num_tokens - row.num_drafts
        assert end <= request.num_tokens, "a row reaches beyond the known tokens"
        tokens, reason = self.drafted.take(run, row, result)
        num_accepted = max(len(tokens) - 1, 0)
        run.num_computed = end + num_accepted
        run.num_planned += num_accepted  # of the row behind it, if one is in flight
        if result.scores:
            most = request.spec.sampling.prompt_logprobs or 0
            request.prompt_scores += [_trim(score, most) for score in result.scores]
        self._advance(run)
        return self._add_tokens(run, tokens, result.logprobs, reason) if tokens else None

    def _advance(self, run: Run) -> None:
        request = run.request
        is_kept = run.is_kept or run.num_computed >= request.spec.prompt_len
        run.holding.advance(
            request.tokens,
            run.num_computed,
            is_kept=is_kept,
            is_point=self.points.is_point(run),
            now=self.clock.step,
        )

    def _add_tokens(
        self, run: Run, tokens: list[int], logprobs: list[TokenLogprob], reason: FinishReason | None
    ) -> RequestOutput:
        """Append the last of a row's tokens; the earlier ones already are."""
        request = run.request
        spec = request.spec
        if request.num_output == 0:
            self.queues.settle_prefetch(request)
            self.counts["prompt_tokens"] += spec.prompt_len
            request.report = request.report.at_first_token(request.prefetch)
            self.counts["cached_tokens"] += request.report.cached_len
            self.hits.count(request.report)
        request.append(tokens[-1])
        self.counts["output_tokens"] += len(tokens)
        if spec.sampling.prompt_logprobs is not None and request.num_output == 1:
            request.prompt_scores.insert(0, None)
        wanted = spec.sampling.logprobs
        entries = [] if wanted is None else [_trim(entry, wanted) for entry in logprobs[: len(tokens)]]
        output = request.output(*tokens, logprobs=entries, reason=reason)
        if reason is not None:
            self.queues.finish(request, reason)
        elif run.steady is None and self._is_steady(request):
            run.steady = Steady.of(request, stops=self.drafted.stops(request))
        return output

    def _is_steady(self, request: Request) -> bool:
        """Whether every further row of a request is a token in and a token out."""
        has_more = request.grammar is not None or bool(request.wanted_tops)
        return not (has_more or self.drafted.most or self.cache.has_points)


def _trim(entry: TokenLogprob, count: int) -> TokenLogprob:
    """Keep only the alternatives that this request asked for; other rows of the batch may have asked for more."""
    return entry if len(entry.top) <= count else TokenLogprob(entry.token_id, entry.logprob, entry.top[:count])
