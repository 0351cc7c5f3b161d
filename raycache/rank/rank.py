"""A rank: executes plans and makes no decisions.

It holds its share of the weights and of every page, and the slots that plans refer to. It runs in an actor, in a
process of its own, or in the caller's process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from raycache.attention.base import AttentionBackend
from raycache.layers.embedding import VocabHead
from raycache.layers.forward_pass import ForwardPass
from raycache.memory.component import STATE
from raycache.memory.device import DevicePool
from raycache.memory.mover import Mover
from raycache.models.base import Model, ModelConfig, head_of
from raycache.parallel.context import ParallelContext
from raycache.rank.drafter import Drafter, Followed
from raycache.rank.graphs import DecodeGraphs, for_draft
from raycache.rank.last_tokens import LastTokens
from raycache.rank.outcome import NextDrafts, Outcome, gather_sampled
from raycache.rank.pending_result import Pending, PendingResult, ResultInParts
from raycache.rank.pieces import RecordedPieces
from raycache.rank.sampler import SampleRow, TokenCounts, logprobs, sample
from raycache.rank.short_steps import ShortGraphs
from raycache.rank.stage_link import StageLink, split_rows
from raycache.step.inputs import StepInputs, step_inputs
from raycache.step.page_tables import PageTables
from raycache.step.single_rows import emitted_tokens, in_single_rows, is_decode
from raycache.types import SamplingParams
from raycache.wire.plan import NO_MASKS, Admit, Masks, Row, StepPlan
from raycache.wire.results import emissions, result_width


@dataclass(slots=True)
class Slot:
    """State of a request on a rank.

    Attributes:
        counts: None without penalties.
        num_counted: how many tokens of the sequence `counts` includes.
    """

    sampling: SamplingParams
    seed: int
    counts: TokenCounts | None = None
    num_counted: int = 0

    def count(self, row: Row) -> None:
        """Count output tokens as they come back as input: with cp, another rank may have sampled them."""
        if self.counts is not None:
            first = row.start - len(row.accepted) // 4
            known = np.frombuffer(row.accepted + row.tokens, np.int32)[: row.start - first + row.first_sampled + 1]
            tokens = known[max(self.num_counted - first, 0) :].tolist()
            for token in tokens:
                self.counts.add(token)
            self.num_counted += len(tokens)

    def counts_before(self, row: Row, num_drafts: int) -> TokenCounts | None:
        """Token counts for sampling after the first `num_drafts` draft tokens of a row that has been counted."""
        if self.counts is None or not num_drafts:
            return self.counts
        counts = self.counts.copy()
        for token in np.frombuffer(row.tokens, np.int32)[row.first_sampled + 1 :][:num_drafts].tolist():
            counts.add(token)
        return counts

    def is_plain(self, position: int) -> bool:
        """Whether sampling is greedy without bias, penalties or min_tokens, from an output position on (-1: none)."""
        sampling = self.sampling
        is_free = position < 0 or position >= sampling.min_tokens
        return is_free and sampling.is_greedy and not sampling.logit_bias and self.counts is None


@dataclass
class Rank:
    """Executes the steps of one rank.

    Attributes:
        ctx: coordinates and process groups.
        model: this rank's stage and shard.
        decode_model: the same with weights split over cp, for steps whose rows have one new token each; None if such
            steps are computed like others.
        pool: this rank's share of the pages.
        dtype: of activations.
        mover: moves pages between pool and host; None without a host tier.
        last: last sampled tokens; None unless the decider plans a step before it has the tokens of the last one.
        graphs: decode steps as CUDA graphs, or None.
        short_steps: short steps as CUDA graphs, or None.
        pieces: layers of other steps of few tokens as CUDA graphs, or None.
        drafter: only on the last stage, or None.
        at_close: called when the rank is closed.
    """

    ctx: ParallelContext
    config: ModelConfig
    model: Model
    pool: DevicePool
    backend: AttentionBackend
    dtype: torch.dtype
    mover: Mover | None = None
    last: LastTokens | None = None
    graphs: DecodeGraphs | None = None
    drafter: Drafter | None = None
    decode_model: Model | None = None
    short_steps: ShortGraphs | None = None
    pieces: RecordedPieces | None = None
    at_close: Callable[[], None] = lambda: None
    _slots: dict[int, Slot] = field(default_factory=dict)
    _outcome: Outcome | None = None  # of the last step, if rows have or request draft tokens
    _next_drafts: NextDrafts | None = None  # of the last step
    _unfinished: ResultInParts | None = None  # of the last step
    _tables: dict[str, PageTables] = field(init=False)
    _link: StageLink = field(init=False)

    def __post_init__(self) -> None:
        self._tables = {space: PageTables() for space in self.pool.windows}
        self._link = StageLink(self.config, self.ctx, self.dtype)

    def execute(self, plan: StepPlan, masks: Masks = NO_MASKS) -> NDArray[np.int64]:
        """Run one step and return its results, [result_len, result_width]; empty before the last stage."""
        return self.finish(self.launch(plan), masks).wait()

    def close(self) -> None:
        """Detach from the host tier."""
        self.at_close()
        if self.mover is not None:
            self.mover.close()

    def settle(self) -> None:
        """Wait until the next stage has what was sent to it."""
        self._link.settle()

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Tensor | None:
        """Run the model.

        Returns:
            Logits of the positions that this cp rank emits, [N, vocab] float32; None before the last stage.
        """
        return self.launch(plan, needs_logits=True).logits

    @torch.inference_mode()
    def finish(self, layers: LaunchedLayers, masks: Masks = NO_MASKS) -> Pending:
        """Launch the rest of a step: sampling and the draft model, whose passes begin where the accepted tokens end.
        They are launched when these have arrived: by the results' `is_ready`, or before the next step.

        Args:
            layers: as `launch` has returned them, which must be the last ones.
            masks: of the plan's rows, if it has any.
        """
        plan, drafts = layers.plan, self._next_drafts
        self._outcome = self._next_drafts = None
        if layers.is_empty:
            return PendingResult(torch.empty((0, result_width(plan)), dtype=torch.int64))
        if layers.logits is not None and plan.loads:
            # A failed load leaves arbitrary data in pages. The decider discards such rows; sampling must not raise.
            layers = replace(layers, logits=layers.logits.nan_to_num())
        tokens = self._tokens(plan, layers, masks)
        if self.drafter is None or layers.features is None:
            return PendingResult(self._lines(layers, tokens, tokens[:0]))
        return self._follow(self.drafter, layers, tokens, drafts)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, *, needs_logits: bool = False) -> LaunchedLayers:
        """Start page moves, apply the plan's changes to slots, and launch the layers on the device; on a CPU they have
        ended when this returns. Waits until it is known where the rows begin, and the last step's drafts are launched.

        Args:
            needs_logits: whether to return logits even if the step's results need the likeliest tokens only.
        """
        if self._unfinished is not None:
            self._unfinished.launch()
            self._unfinished = None
        if self._outcome is not None:
            plan = self._outcome.resume(plan)
        self._move(plan)
        for admit in plan.admits:
            self._slots[admit.slot] = _new_slot(admit)
            if self.drafter is not None:
                self.drafter.forget(admit.slot)
            for space, tables in self._tables.items():
                tables.begin(admit.slot, admit.pages.get(space, ()))
        for row in plan.rows:
            for space, ids in row.new_pages.items():
                self._tables[space].append(row.slot, ids)
            self._slots[row.slot].count(row)
        if not plan.rows:
            return LaunchedLayers(plan)
        # All ranks know the same of rows and slots, so all of them exchange the same.
        takes_likeliest = not needs_logits and plan.num_top is None and self._is_greedy(plan)
        for graphs in (self.graphs, self.short_steps):
            if graphs is not None and graphs.can_run(plan):
                return self._replay(graphs, plan, takes_likeliest=takes_likeliest)
        return self._run_layers(plan, takes_likeliest=takes_likeliest)

    def _is_greedy(self, plan: StepPlan) -> bool:
        """Whether the likeliest token is sampled at every emitted position."""
        return all(
            not row.targets and not row.is_masked and self._slots[row.slot].is_plain(row.output_position)
            for row in plan.rows
        )

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan, *, takes_likeliest: bool) -> LaunchedLayers:
        graphs.prepare(plan, self._tables)
        outputs = graphs.replay(hidden=self._link.receive(graphs.num_rows))
        if not self.ctx.is_last_stage:
            self._link.send(outputs)
            return LaunchedLayers(plan)
        part, features = outputs
        if graphs is self.short_steps:
            part = part[self.ctx.on_device(emitted_tokens(plan, cp_rank=0, cp_size=1))]
            return self._found(plan, head_of(self.model), part, takes_likeliest=takes_likeliest, has_all_tokens=False)
        head = head_of(self.decode_model or self.model)
        found = self._found(plan, head, part, takes_likeliest=takes_likeliest, has_all_tokens=graphs.has_all_tokens)
        return replace(found, features=features, recorded=graphs)

    def _run_layers(self, plan: StepPlan, *, takes_likeliest: bool) -> LaunchedLayers:
        model, rows, has_all_tokens = self.model, plan, False
        if self.decode_model is not None and is_decode(plan, has_states=STATE in self.pool.sizes):
            model, rows, has_all_tokens = self.decode_model, in_single_rows(plan), True
        inputs = step_inputs(
            rows,
            self._tables,
            self.pool.windows,
            page_size=self.pool.page_size,
            ctx=self.ctx,
            has_all_tokens=has_all_tokens,
        )
        if self.last is not None:
            self.last.fill(rows, inputs)
        emitted, features = self._run_stage(inputs, model)
        if emitted is None:
            return LaunchedLayers(plan)
        head = head_of(model)
        part = head.part(model.normed(emitted))
        found = self._found(plan, head, part, takes_likeliest=takes_likeliest, has_all_tokens=has_all_tokens)
        return replace(found, features=features, inputs=inputs)

    def _found(
        self, plan: StepPlan, head: VocabHead, part: Tensor, *, takes_likeliest: bool, has_all_tokens: bool
    ) -> LaunchedLayers:
        """Exchange the logits of a step, or only their likeliest tokens. Collective over the group of the head.

        Args:
            part: of the logits, by this head.
            has_all_tokens: whether it has a row for every token, not only for those that this cp rank emits.
        """
        found = head.likeliest(part) if takes_likeliest else head.gathered(part)
        if has_all_tokens:
            found = self._emitted(plan, found)
        return LaunchedLayers(plan, likeliest=found) if takes_likeliest else LaunchedLayers(plan, logits=found)

    def _emitted(self, plan: StepPlan, found: Tensor) -> Tensor:
        """Of the rows of all tokens, those that this cp rank emits."""
        cp = self.ctx.cp
        if all(row.num_tokens == 1 and row.output_position >= 0 for row in plan.rows):
            return found[cp.rank :: cp.size]
        return found[self.ctx.on_device(emitted_tokens(plan, cp_rank=cp.rank, cp_size=cp.size))]

    def _move(self, plan: StepPlan) -> None:
        """Start the plan's page moves; a layer's view of the pool waits until its pages are loaded."""
        if not (plan.saves or plan.loads):
            return
        assert self.mover is not None, "a plan has page moves, but there is no host tier"
        for moves in plan.saves:
            self.mover.save(moves)
        if plan.is_saved_first:
            self.mover.wait_saved(plan.saves[-1].number)
        for moves in plan.loads:
            self.mover.load(moves)

    def _run_stage(self, inputs: StepInputs, model: Model) -> tuple[Tensor | None, Tensor | None]:
        """Run this stage's layers.

        Returns:
            On the last stage, hidden states of the tokens whose logits are computed, and features for a draft model if
            there is one.
        """
        draft, wanted = self.config.draft, None
        received = self._link.receive(len(inputs.ids))
        hidden, *before = [None] if received is None else split_rows(received, self._link.widths)
        if self.pieces is not None and model is self.model and self.pieces.can_run(inputs):
            hidden, recorded = self.pieces.forward(inputs, hidden)
        else:
            wanted = inputs.wanted if self.ctx.is_last_stage and draft is None else None
            records = () if draft is None else draft.recorded
            run = ForwardPass(self.backend.plan(inputs), self.pool, inputs.positions, records, wanted=wanted)
            hidden, recorded = model.forward(model.embed(inputs.ids) if hidden is None else hidden, run), run.recorded
        recorded = [*before, *recorded]
        if not self.ctx.is_last_stage:
            self._link.send([hidden, *recorded])
            return None, None
        emitted = hidden[inputs.logits] if wanted is None else hidden[: len(inputs.logits)]
        return emitted, None if draft is None else for_draft(hidden, recorded)

    def _lines(self, layers: LaunchedLayers, tokens: Tensor, drafted: Tensor) -> Tensor:
        """Sampled, scored and drafted tokens: int64 [result_len, result_width]."""
        plan = layers.plan
        if plan.num_top is None:
            return torch.cat([tokens, drafted])[:, None]
        chosen_logprob, top_ids, top = logprobs(layers.all_logits, tokens, num_top=plan.num_top)
        bits = [values.double().view(torch.int64) for values in (chosen_logprob[:, None], top)]
        lines = torch.cat([tokens[:, None], bits[0], top_ids, bits[1]], dim=1)
        return torch.cat([lines, F.pad(drafted[:, None], (0, lines.shape[1] - 1))])

    def _follow(self, drafter: Drafter, layers: LaunchedLayers, tokens: Tensor, drafts: NextDrafts | None) -> Pending:
        """Run the draft model behind a step; returns the step's results.

        Args:
            tokens: as `_tokens` has returned them.
            drafts: draft tokens of fed rows.
        """
        plan, gathered, outcome = layers.plan, None, None
        has_next = any(row.num_next_drafts for row in plan.rows)
        if has_next or (self.last is not None and any(row.num_drafts for row in plan.rows)):
            gathered = gather_sampled(plan, tokens, self.ctx)
            # Copied to the host while the draft model follows.
            outcome = Outcome(plan, PendingResult(gathered), drafts, page_size=self.pool.page_size)
        assert layers.features is not None, "a step with a draft model behind it has features"
        step = Followed(plan, tokens, gathered, layers.features, layers.inputs, layers.recorded, self._tables)
        emitted, self._outcome = drafter.follow(step), outcome
        if outcome is None or not has_next:
            return PendingResult(self._lines(layers, tokens, tokens[:0]))

        @torch.inference_mode()
        def draft() -> PendingResult:
            drafted = drafter.draft(step, emitted, outcome, self._draft_row)
            if self.last is not None:
                self.last.keep_drafts(drafted.places, drafted.every)
                self._next_drafts = NextDrafts(drafted.places, PendingResult(drafted.every))
            return PendingResult(self._lines(layers, tokens, drafted.own))

        self._unfinished = ResultInParts(outcome.sampled, draft)
        return self._unfinished

    def _draft_row(self, row: Row, behind: int) -> SampleRow:
        slot = self._slots[row.slot]
        # Counts exclude the tokens of this step: draft tokens may be rejected.
        return SampleRow(slot.sampling, seed=slot.seed, position=row.output_position + behind, token_counts=slot.counts)

    def _tokens(self, plan: StepPlan, layers: LaunchedLayers, masks: Masks) -> Tensor:
        """The sampled token, or the target to be scored, of each emitted position: int64 [emitted]."""
        if layers.likeliest is not None:
            tokens = sampled_tokens = layers.likeliest
        elif self._is_greedy(plan):
            tokens = sampled_tokens = layers.all_logits.argmax(-1)
        else:
            targets, sampled, rows = self._emissions(plan, masks)
            tokens = self.ctx.on_device(np.array(targets, np.int64))
            sampled_tokens = tokens[:0]
            if rows:
                logits = layers.all_logits
                sampled_tokens = sample(logits if len(rows) == len(targets) else logits[sampled], rows)
                tokens[sampled] = sampled_tokens
        if self.last is not None:
            # Each row of a recorded step samples a token.
            slots = layers.recorded.slots if layers.recorded is not None and self.ctx.cp.size == 1 else None
            self.last.keep(plan, sampled_tokens, slots=slots)
        return tokens

    def _emissions(self, plan: StepPlan, masks: Masks) -> tuple[list[int], list[int], list[SampleRow]]:
        """Target of each emitted position (0 if it is sampled); indices and parameters of the sampled ones."""
        targets: list[int] = []
        sampled: list[int] = []
        rows: list[SampleRow] = []
        first_masks = plan.first_masks
        for i, positions in emissions(plan, cp_size=self.ctx.cp.size)[self.ctx.cp.rank]:
            row = plan.rows[i]
            given = np.frombuffer(row.targets, np.int32)
            for position in positions:
                if position < len(given):
                    targets.append(int(given[position]))
                    continue
                slot, num_drafts = self._slots[row.slot], position - row.first_sampled
                sampled.append(len(targets))
                targets.append(0)
                rows.append(
                    SampleRow(
                        slot.sampling,
                        seed=slot.seed,
                        position=row.output_position + num_drafts,
                        token_counts=slot.counts_before(row, num_drafts),
                        mask=masks[first_masks[i] + num_drafts].tobytes() if row.is_masked else b"",
                    )
                )
        return targets, sampled, rows


@dataclass(frozen=True, slots=True)
class LaunchedLayers:
    """Outputs of a step's layers, which the device may still be computing; empty for a step without rows, or before the
    last stage. All others have either logits or the likeliest tokens.

    Attributes:
        plan: its fed rows begin where those of the step before have ended.
        logits: [N, vocab].
        likeliest: int64 [N]; the step's tokens.
        features: for a draft model, [T_local, C] per recorded layer; of all tokens if every cp rank computes them.
        inputs: None if a graph was replayed.
        recorded: the graphs that were replayed, or None.
    """

    plan: StepPlan
    logits: Tensor | None = None
    likeliest: Tensor | None = None
    features: Tensor | None = None
    inputs: StepInputs | None = None
    recorded: DecodeGraphs | None = None

    @property
    def all_logits(self) -> Tensor:
        """The logits of a step that has them."""
        assert self.logits is not None, "the step has its likeliest tokens only"
        return self.logits

    @property
    def is_empty(self) -> bool:
        """Whether there are no results."""
        return self.logits is None and self.likeliest is None


def _new_slot(admit: Admit) -> Slot:
    counts = None
    if admit.sampling.has_penalties:
        counts = TokenCounts(
            prompt=np.frombuffer(admit.prompt, np.int32).tolist(), output=np.frombuffer(admit.output, np.int32).tolist()
        )
    return Slot(
        sampling=admit.sampling,
        seed=admit.seed,
        counts=counts,
        num_counted=(len(admit.prompt) + len(admit.output)) // 4,
    )
