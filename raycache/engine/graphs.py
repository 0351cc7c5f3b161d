"""Decode steps as CUDA graphs: recorded once per batch size at start, replayed with other rows.

A decode step launches some ten small kernels per layer; given one by one, they take longer to give than to run. A
graph gives them all at once. What a recorded step reads and writes lies at fixed places: its inputs (decode_batch.py),
the plan of its attention (StaticStep), the pool, and the logits, which the next replay overwrites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raycache.attention.base import AttentionBackend, StaticStep
from raycache.engine.decode_batch import DecodeBatch
from raycache.engine.last_tokens import LastTokens
from raycache.engine.page_tables import PageTables
from raycache.engine.plan import Row, StepPlan
from raycache.layers.forward_pass import ForwardPass
from raycache.memory.device import DevicePool
from raycache.models.base import Model
from raycache.parallel.context import ParallelContext

WARM_UPS = 2
"""Runs before a recording: what is allocated or built at first use must not be part of it."""

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def batch_sizes(max_running: int, *, cp: int) -> list[int]:
    """Sizes to record: a larger batch runs step by step. All are multiples of cp, so that ranks are alike."""
    sizes = {-(-min(size, max_running) // cp) * cp for size in _SIZES}
    return sorted(sizes)


@dataclass(frozen=True)
class _Recorded:
    """One size.

    Attributes:
        batch: its inputs.
        step: its attention.
        graph: to replay.
        logits: [L, vocab] float32, where the graph leaves them.
    """

    batch: DecodeBatch
    step: StaticStep
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class DecodeGraphs:
    """Recorded decode steps of one rank that has the whole depth of the model.

    Args:
        model: of the rank.
        pool: with scratch units.
        backend: that can capture.
        ctx: of the rank.
        last: for rows that are fed, or None.
    Attributes:
        num_bytes: of device memory that the graphs keep, once recorded.
    """

    def __init__(
        self,
        model: Model,
        *,
        pool: DevicePool,
        backend: AttentionBackend,
        ctx: ParallelContext,
        last: LastTokens | None,
    ) -> None:
        self._model, self._pool, self._backend, self._ctx, self._last = model, pool, backend, ctx, last
        self._has_states = any(space not in pool.windows for space in pool.sizes)
        self._recorded: dict[int, _Recorded] = {}
        self._next: _Recorded | None = None
        self.num_bytes = 0

    @torch.inference_mode()
    def record(self, sizes: Sequence[int]) -> None:
        """Record batches of these sizes; collective over tp and cp."""
        before, _ = torch.cuda.mem_get_info(self._ctx.device)
        memory = torch.cuda.graph_pool_handle()
        # The largest first: the others fit into its memory.
        for size in sorted(sizes, reverse=True):
            self._recorded[size] = self._record(size, memory)
        after, _ = torch.cuda.mem_get_info(self._ctx.device)
        self.num_bytes = before - after

    def can_run(self, plan: StepPlan) -> bool:
        """Whether a plan is a batch that was recorded."""
        if plan.loads or not self._recorded or len(plan.rows) > max(self._recorded):
            return False
        return all(self._is_plain(row) for row in plan.rows)

    def prepare(self, plan: StepPlan, tables: Mapping[str, PageTables]) -> None:
        """Copy what the next replay reads."""
        self._next = self._recorded[min(size for size in self._recorded if size >= len(plan.rows))]
        self._next.batch.fill(plan, tables)
        self._next.step.replan(self._next.batch.inputs)

    def replay(self) -> Tensor:
        """Run what was prepared.

        Returns:
            Logits [rows of this cp rank, vocab]; the next replay overwrites them.
        """
        assert self._next is not None, "prepare comes first"
        self._next.graph.replay()
        return self._next.logits[: self._next.batch.num_local]

    def _is_plain(self, row: Row) -> bool:
        has_state = row.read_state >= 0 or not self._has_states
        return len(row.tokens) == 4 and row.output_position >= 0 and not row.targets and has_state

    def _record(self, size: int, memory: Any) -> _Recorded:
        batch = DecodeBatch(size, self._pool, self._ctx)
        step = self._backend.plan_static(batch.inputs)
        step.replan(batch.inputs)
        stream = torch.cuda.Stream(self._ctx.device)
        stream.wait_stream(torch.cuda.current_stream(self._ctx.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._run(batch, step)
        torch.cuda.current_stream(self._ctx.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            logits = self._run(batch, step)
        return _Recorded(batch, step, graph, logits)

    def _run(self, batch: DecodeBatch, step: StaticStep) -> Tensor:
        ids = batch.inputs.ids
        if self._last is not None:
            # A token that the host does not know yet is -1.
            ids = torch.where(ids < 0, self._last.tokens[batch.slots], ids)
        run = ForwardPass(step, self._pool, batch.inputs.positions)
        hidden = self._model.forward(self._model.embed(ids), run)
        return self._model.logits(hidden)
