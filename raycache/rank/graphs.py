"""Decode steps as CUDA graphs: recorded once per batch size at start, replayed with other rows.

A decode step launches some ten small kernels per layer; given one by one, they take longer to give than to run. A
graph gives them all at once. What a recorded step reads and writes lies at fixed places: its inputs (decode_batch.py),
the plan of its attention (StaticStep), the pool, and what comes out, which the next replay overwrites.

A row with drafts runs as one row per token: each is written before it is attended to, and sees no further than itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from raycache.attention.base import AttentionBackend, StaticStep
from raycache.layers.forward_pass import ForwardPass
from raycache.memory.device import DevicePool, DraftLayers
from raycache.models.base import Model
from raycache.parallel.context import ParallelContext
from raycache.rank.decode_batch import DecodeBatch
from raycache.rank.last_tokens import LastTokens
from raycache.step.page_tables import PageTables
from raycache.wire.plan import Row, StepPlan

WARM_UPS = 2
"""Runs before a recording: what is allocated or built at first use must not be part of it."""

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


Layers = Callable[[Tensor, Tensor | None, ForwardPass], tuple[Tensor, ...]]
"""What is recorded: [L] token ids, and [L, F] features of a target for a draft that takes them, -> what comes out."""


@dataclass(frozen=True)
class GraphLayers:
    """What a graph runs: a model in its whole depth, or its draft.

    Attributes:
        forward: of the layers.
        views: of the pool, for these layers.
        records: see `ForwardPass`.
        features: an empty tensor [0, F] of those that the layers take of a target, or None.
    """

    forward: Layers
    views: DevicePool | DraftLayers
    records: Sequence[int] = ()
    features: Tensor | None = None


def whole_model(model: Model) -> Layers:
    """All of a model that has one stage: logits [T, vocab], and what a draft takes."""

    def forward(ids: Tensor, features: Tensor | None, run: ForwardPass) -> tuple[Tensor, Tensor]:
        hidden = model.forward(model.embed(ids), run)
        return model.logits(hidden), for_draft(hidden, run)

    return forward


def for_draft(hidden: Tensor, run: ForwardPass) -> Tensor:
    """What a draft takes of a pass: the layers that it records, or the last one."""
    return torch.cat(run.recorded, dim=-1) if run.recorded else hidden


def batch_sizes(most: int, *, cp: int) -> list[int]:
    """Sizes to record, up to `most` rows: a larger batch runs step by step. All are multiples of cp, so that ranks are
    alike."""
    sizes = {-(-min(size, most) // cp) * cp for size in _SIZES}
    return sorted(sizes)


def in_single_rows(plan: StepPlan) -> StepPlan:
    """The same tokens, a row for each; of a model without recurrent states."""
    if all(row.num_tokens == 1 for row in plan.rows):
        return plan
    rows = [
        Row(row.slot, row.start + i, row.tokens[4 * i : 4 * i + 4], output_position=row.output_position)
        for row in plan.rows
        for i in range(row.num_tokens)
    ]
    return replace(plan, rows=rows)


@dataclass(frozen=True)
class _Recorded:
    """One size.

    Attributes:
        batch: its inputs.
        step: its attention.
        graph: to replay.
        found: [L, ...] each, where the graph leaves what came out.
        features: [L, F], where it takes them from, or None.
    """

    batch: DecodeBatch
    step: StaticStep
    graph: torch.cuda.CUDAGraph
    found: tuple[Tensor, ...]
    features: Tensor | None


class DecodeGraphs:
    """Recorded decode steps of one rank. Recording them is collective over tp and cp.

    Args:
        layers: to run.
        sizes: rows of the batches to record.
        pool: with scratch units.
        backend: that can capture.
        ctx: of the rank.
        has_states: whether the layers are recurrent.
        last: for rows that are fed, or None.
        target: graphs of the same sizes that are always replayed before, so that their inputs serve both.
    Attributes:
        ctx: as given.
        num_bytes: of device memory that the graphs keep.
    Raises:
        NotRecordableError: the layers cannot be recorded.
    """

    @torch.inference_mode()
    def __init__(
        self,
        layers: GraphLayers,
        *,
        sizes: Sequence[int],
        pool: DevicePool,
        backend: AttentionBackend,
        ctx: ParallelContext,
        has_states: bool,
        last: LastTokens | None = None,
        target: DecodeGraphs | None = None,
    ) -> None:
        self._layers, self._pool, self._backend, self.ctx = layers, pool, backend, ctx
        self._last, self._has_states = last, has_states
        self._next: _Recorded | None = None
        before, _ = torch.cuda.mem_get_info(ctx.device)
        memory = torch.cuda.graph_pool_handle()
        # The largest first: the others fit into its memory.
        self._recorded = {size: self._record(size, memory, target) for size in sorted(sizes, reverse=True)}
        after, _ = torch.cuda.mem_get_info(ctx.device)
        self.num_bytes = before - after

    @property
    def sizes(self) -> list[int]:
        """Rows of the batches that are recorded."""
        return list(self._recorded)

    def can_run(self, plan: StepPlan) -> bool:
        """Whether a plan, in single rows, is a batch that was recorded."""
        if plan.loads or sum(row.num_tokens for row in plan.rows) > max(self._recorded, default=0):
            return False
        return all(self._is_plain(row) for row in plan.rows)

    def prepare(self, plan: StepPlan, tables: Mapping[str, PageTables]) -> None:
        """Copy what the next replay reads; of single rows."""
        self._next = self._recorded[min(size for size in self._recorded if size >= len(plan.rows))]
        self._next.batch.fill(plan, tables)
        self._next.step.replan(self._next.batch.inputs)

    def prepare_behind(self, other: DecodeGraphs) -> None:
        """Replay for the rows of the other next, which was prepared."""
        assert other._next is not None, "the other comes first"
        self._next = next(mine for mine in self._recorded.values() if mine.batch is other._next.batch)

    def replay(self, *, ids: Tensor | None = None, features: Tensor | None = None) -> tuple[Tensor, ...]:
        """Run what was prepared.

        Args:
            ids: int64 [rows of this cp rank], if they are not those of the plan.
            features: [rows of this cp rank, F], if the layers take some.
        Returns:
            What came out, [rows of this cp rank, ...] each; the next replay overwrites it.
        """
        assert self._next is not None, "prepare comes first"
        count = self._next.batch.num_local
        if ids is not None:
            self._next.batch.inputs.ids[:count].copy_(ids)
        if features is not None and self._next.features is not None:
            self._next.features[:count].copy_(features)
        self._next.graph.replay()
        return tuple(part[:count] for part in self._next.found)

    def _is_plain(self, row: Row) -> bool:
        if row.first_sampled or row.output_position < 0 or row.targets:
            return False
        # How several tokens lie on cp ranks, and states behind each of them, are not those of single rows.
        is_single = row.num_tokens == 1
        return (is_single or self.ctx.cp.size == 1) if not self._has_states else is_single and row.read_state >= 0

    def _record(self, size: int, memory: Any, target: DecodeGraphs | None) -> _Recorded:
        if target is None:
            batch = DecodeBatch(size, self._pool, self.ctx)
            step = self._backend.plan_static(batch.inputs)
        else:
            batch, step = target._recorded[size].batch, target._recorded[size].step
        features = None
        if (empty := self._layers.features) is not None:
            features = empty.new_zeros(len(batch.inputs.ids), empty.shape[1])
        step.replan(batch.inputs)
        stream = torch.cuda.Stream(self.ctx.device)
        stream.wait_stream(torch.cuda.current_stream(self.ctx.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._run(batch, step, features)
        torch.cuda.current_stream(self.ctx.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            found = self._run(batch, step, features)
        return _Recorded(batch, step, graph, found, features)

    def _run(self, batch: DecodeBatch, step: StaticStep, features: Tensor | None) -> tuple[Tensor, ...]:
        ids = batch.inputs.ids
        if self._last is not None:
            # A token that the host does not know yet is -1. What is replayed behind this reads it here, too.
            ids.copy_(torch.where(ids < 0, self._last.tokens[batch.slots], ids))
        run = ForwardPass(step, self._layers.views, batch.inputs.positions, self._layers.records)
        return self._layers.forward(ids, features, run)
