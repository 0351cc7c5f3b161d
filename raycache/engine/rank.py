"""A rank: executes plans and decides nothing.

Holds its part of the weights, its part of every page, and a table of slots that plans refer to. A plain class: an
actor, a process or the caller itself runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.attention.base import AttentionBackend
from raycache.engine.inputs import StepInputs, build_inputs
from raycache.engine.plan import Admit, Row, StepPlan, answer_width, emissions
from raycache.engine.sampler import SampleRow, TokenCounts, logprobs, sample
from raycache.layers.forward_pass import ForwardPass
from raycache.memory.device import DevicePool
from raycache.memory.mover import Mover
from raycache.models.base import Model, ModelConfig
from raycache.parallel.context import ParallelContext
from raycache.types import SamplingParams


@dataclass(slots=True)
class PageTable:
    """Page ids of a sequence in one component space, grown by doubling."""

    ids: NDArray[np.int32]
    num_pages: int

    @classmethod
    def of(cls, ids: Sequence[int]) -> PageTable:
        """With these pages."""
        return cls(np.asarray(ids, np.int32), len(ids))

    @property
    def valid(self) -> NDArray[np.int32]:
        """The ids, a view."""
        return self.ids[: self.num_pages]

    def append(self, ids: Sequence[int]) -> None:
        """Add pages at the end."""
        wanted = self.num_pages + len(ids)
        if wanted > len(self.ids):
            self.ids = np.concatenate([self.valid, np.empty(max(wanted, 8), np.int32)])
        self.ids[self.num_pages : wanted] = ids
        self.num_pages = wanted


@dataclass(slots=True)
class Slot:
    """What a rank remembers of a running request.

    Attributes:
        tables: component space -> its pages.
        sampling, seed: how to choose its tokens.
        counts: of tokens so far, if penalties need them.
        num_counted: tokens of the sequence that `counts` knows.
    """

    tables: dict[str, PageTable]
    sampling: SamplingParams
    seed: int
    counts: TokenCounts | None = None
    num_counted: int = 0

    def count(self, row: Row) -> None:
        """Learn the output tokens that come back as input. Under cp another rank may have sampled them."""
        if self.counts is not None:
            tokens = np.frombuffer(row.tokens, np.int32)[max(self.num_counted - row.start, 0) :].tolist()
            for token in tokens:
                self.counts.add(token)
            self.num_counted += len(tokens)


@dataclass
class Rank:
    """Executor of one rank.

    Attributes:
        ctx: coordinates and groups.
        config: of the model.
        model: this stage and shard of it.
        pool: this rank's part of the pages.
        backend: attention.
        dtype: of activations.
        mover: between the pool and the host, None without a host tier.
    """

    ctx: ParallelContext
    config: ModelConfig
    model: Model
    pool: DevicePool
    backend: AttentionBackend
    dtype: torch.dtype
    mover: Mover | None = None
    _slots: dict[int, Slot] = field(default_factory=dict)
    _unsent: Callable[[], None] = lambda: None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> NDArray[np.int64]:
        """Run one step.

        Returns:
            The answer, [emitted_count, answer_width]; empty on ranks that are not of the last stage.
        """
        logits = self.forward(plan)
        if logits is None:
            return np.empty((0, answer_width(plan)), np.int64)
        return self._answer(plan, logits)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Tensor | None:
        """Run the model.

        Returns:
            Logits [N, vocab] in float32 of the positions that this cp rank emits; None before the last stage.
        """
        self._move(plan)
        for admit in plan.admits:
            self._slots[admit.slot] = _new_slot(admit, self.pool.windows)
        for row in plan.rows:
            slot = self._slots[row.slot]
            for space, ids in row.new_pages.items():
                slot.tables[space].append(ids)
            slot.count(row)
        if not plan.rows:
            return None
        tables = {
            row.slot: {space: table.valid for space, table in self._slots[row.slot].tables.items()} for row in plan.rows
        }
        inputs = build_inputs(plan, tables, page_size=self.pool.page_size, windows=self.pool.windows, ctx=self.ctx)
        hidden = self._run_stage(inputs)
        return self.model.logits(hidden[inputs.logits]) if self.ctx.is_last_stage else None

    def _move(self, plan: StepPlan) -> None:
        """Start the plan's page moves. Views wait for the loads of their layer."""
        if not (plan.saves or plan.loads):
            return
        assert self.mover is not None, "moves are planned only with a host tier"
        for moves in plan.saves:
            self.mover.save(moves)
        if plan.is_saved_first:
            self.mover.wait_saved(plan.saves[-1].number)
        for moves in plan.loads:
            self.mover.load(moves)

    def _run_stage(self, inputs: StepInputs) -> Tensor:
        run = ForwardPass(self.backend.plan(inputs), self.pool, inputs.positions)
        if self.ctx.is_first_stage:
            hidden = self.model.embed(inputs.ids)
        else:
            hidden = torch.empty((len(inputs.ids), self.config.hidden_size), dtype=self.dtype, device=self.ctx.device)
            if len(inputs.ids):
                self.ctx.pp.recv(hidden, source=self.ctx.pp.rank - 1)
        hidden = self.model.forward(hidden, run)
        if not self.ctx.is_last_stage and len(inputs.ids):
            # One send stays in flight, so that this stage takes the next micro-batch while the next stage is still
            # busy.
            self._unsent()
            self._unsent = self.ctx.pp.isend(hidden, to=self.ctx.pp.rank + 1)
        return hidden

    def _answer(self, plan: StepPlan, logits: Tensor) -> NDArray[np.int64]:
        targets, sampled, rows = self._emissions(plan)
        if plan.loads:
            # A load that failed leaves whatever was there. The decider throws such rows away; sampling must bear them.
            logits = logits.nan_to_num()
        tokens = torch.tensor(targets, dtype=torch.int64, device=logits.device)
        if rows:
            tokens[sampled] = sample(logits if len(rows) == len(targets) else logits[sampled], rows)
        answer = np.empty((len(targets), answer_width(plan)), np.int64)
        answer[:, 0] = tokens.cpu().numpy()
        if plan.num_top is not None:
            chosen_logprob, top_ids, top = logprobs(logits, tokens, num_top=plan.num_top)
            answer[:, 1] = chosen_logprob.double().cpu().numpy().view(np.int64)
            answer[:, 2 : 2 + plan.num_top] = top_ids.cpu().numpy()
            answer[:, 2 + plan.num_top :] = top.double().cpu().numpy().view(np.int64)
        return answer

    def _emissions(self, plan: StepPlan) -> tuple[list[int], list[int], list[SampleRow]]:
        """Per emitted position its target (0: to be sampled); which positions are sampled, and how."""
        targets: list[int] = []
        sampled: list[int] = []
        rows: list[SampleRow] = []
        for i, positions in emissions(plan, cp_size=self.ctx.cp.size)[self.ctx.cp.rank]:
            row = plan.rows[i]
            wanted = np.frombuffer(row.targets, np.int32)
            for position in positions.tolist():
                if position < len(wanted):
                    targets.append(int(wanted[position]))
                    continue
                slot = self._slots[row.slot]
                sampled.append(len(targets))
                targets.append(0)
                rows.append(
                    SampleRow(slot.sampling, seed=slot.seed, position=row.output_position, token_counts=slot.counts)
                )
        return targets, sampled, rows


def _new_slot(admit: Admit, spaces: Iterable[str]) -> Slot:
    counts = None
    if admit.sampling.has_penalties:
        counts = TokenCounts(
            prompt=np.frombuffer(admit.prompt, np.int32).tolist(), output=np.frombuffer(admit.output, np.int32).tolist()
        )
    return Slot(
        tables={space: PageTable.of(admit.pages.get(space, ())) for space in spaces},
        sampling=admit.sampling,
        seed=admit.seed,
        counts=counts,
        num_counted=(len(admit.prompt) + len(admit.output)) // 4,
    )
