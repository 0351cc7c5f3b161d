"""Decode steps as CUDA graphs, recorded at startup, one per batch size.

A decode step launches about ten small kernels per layer, which take longer to launch than to run. A graph launches them
all at once. It reads and writes fixed addresses: its inputs (decode_batch.py), its attention plan (StaticStep), the
pool, and its outputs, which the next replay overwrites. With several pipeline stages, each has graphs of its layers:

    first stage    ids -> [ embedding, layers ] -> hidden states
    others                     hidden states -> [ layers ] -> hidden states
    last stage                 hidden states -> [ layers, norm, head ] -> logits

A row with draft tokens runs as one row per token: each is written to the cache before attention and attends only up to
itself. Recurrent layers take it as one row and keep a state behind each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raycache.attention.base import AttentionBackend, StaticStep
from raycache.layers.forward_pass import ForwardPass, LayerViews
from raycache.memory.device import DevicePool
from raycache.models.base import Model, head_of
from raycache.parallel.context import ParallelContext
from raycache.rank.decode_batch import DecodeBatch
from raycache.rank.last_tokens import LastTokens
from raycache.rank.recorder import Recorder, Replay
from raycache.rank.stage_link import split_rows
from raycache.step.inputs import StepInputs
from raycache.step.page_tables import PageTables
from raycache.wire.plan import Row, StepPlan

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


Layers = Callable[[Tensor, Tensor | None, ForwardPass], tuple[Tensor, ...]]
"""The recorded function: token ids [L], and hidden states [L, F] if it takes any -> outputs."""


@dataclass(frozen=True)
class GraphLayers:
    """The layers that a graph runs: those of a stage, or a draft model.

    Attributes:
        views: cache of these layers.
        records: layers to record for a draft model (see `ForwardPass`).
        hidden: empty tensor [0, F] like the hidden states that the layers take: what the stage before sends, or the
            target's features; None if they take token ids only.
        has_all_tokens: whether every cp rank computes all rows, see `build_inputs`.
        has_states: whether the layers are recurrent.
        longest: most tokens of a row.
        trial: run before they are recorded, with the same kernels; None for the layers themselves.
    """

    forward: Layers
    views: LayerViews
    records: Sequence[int] = ()
    hidden: Tensor | None = None
    has_all_tokens: bool = False
    has_states: bool = False
    longest: int = 1
    trial: Layers | None = None


def stage_layers(model: Model, *, widths: Sequence[int], is_last: bool) -> Layers:
    """The layers of a stage. The last one outputs this rank's part of the logits, [L, R] (see `VocabHead`), and
    features for a draft model; what ranks exchange of logits depends on the step. The others output what they send.

    Args:
        widths: see `received_widths`.
    """

    def forward(ids: Tensor, received: Tensor | None, run: ForwardPass) -> tuple[Tensor, ...]:
        hidden, *before = [model.embed(ids)] if received is None else split_rows(received, widths)
        hidden = model.forward(hidden, run)
        recorded = [*before, *run.recorded]
        if not is_last:
            return hidden, *recorded
        return head_of(model).part(model.normed(hidden)), for_draft(hidden, recorded)

    return forward


def for_draft(hidden: Tensor, recorded: Sequence[Tensor]) -> Tensor:
    """Features for a draft model: the recorded hidden states if there are any, else the last one."""
    return torch.cat(tuple(recorded), dim=-1) if recorded else hidden


def batch_sizes(most: int, *, multiple_of: int) -> list[int]:
    """Batch sizes to record, in rows, up to `most`; larger batches run without graphs."""
    sizes = {-(-min(size, most) // multiple_of) * multiple_of for size in _SIZES}
    return sorted(sizes)


@dataclass(frozen=True)
class _Recorded:
    """The graph of one batch size, and the buffers that it reads and writes.

    Attributes:
        step: attention plan.
        hidden: [L, F], or None.
        outputs: [L, ...] each.
    """

    batch: DecodeBatch
    step: StaticStep
    hidden: Tensor | None
    replay: Replay
    outputs: tuple[Tensor, ...]


class DecodeGraphs:
    """CUDA graphs of decode steps on one rank. Recording is collective over tp and cp.

    Args:
        sizes: batch sizes to record, in rows.
        pool: must have scratch units.
        backend: must support graph capture.
        last: last sampled tokens, for rows that take their token from the device; or None.
        target: graphs of the same sizes that share their inputs with these and are always replayed before.
        recorder: of these graphs only: others would overwrite their outputs.
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
        recorder: Recorder,
        last: LastTokens | None = None,
        target: DecodeGraphs | None = None,
    ) -> None:
        self._layers, self._pool, self._backend, self.ctx = layers, pool, backend, ctx
        self._last = last
        self._next: _Recorded | None = None
        # Largest first, so that the others fit into its memory.
        self._recorded = {size: self._record(size, recorder, target) for size in sorted(sizes, reverse=True)}

    @property
    def has_all_tokens(self) -> bool:
        """Whether outputs are those of all tokens, on every cp rank."""
        return self._layers.has_all_tokens

    @property
    def slots(self) -> Tensor:
        """Slots of the prepared rows of this cp rank, int64 [rows]."""
        assert self._next is not None, "call prepare first"
        return self._next.batch.slots[: self._next.batch.num_local]

    @property
    def num_rows(self) -> int:
        """Number of the prepared rows of this cp rank."""
        assert self._next is not None, "call prepare first"
        return self._next.batch.num_local

    @property
    def sizes(self) -> list[int]:
        """Recorded batch sizes, in rows."""
        return list(self._recorded)

    def can_run(self, plan: StepPlan) -> bool:
        """Whether a plan can be replayed."""
        if plan.loads or sum(row.num_tokens for row in plan.rows) > max(self._recorded, default=0):
            return False
        return all(self._is_plain(row) for row in plan.rows)

    def prepare(self, plan: StepPlan, tables: Mapping[str, PageTables]) -> None:
        """Set the inputs of the next replay."""
        num_tokens = sum(row.num_tokens for row in plan.rows)
        self._next = self._recorded[min(size for size in self._recorded if size >= num_tokens)]
        self._next.batch.fill(plan, tables)
        self._next.step.replan(self._next.batch.inputs)

    def prepare_behind(self, other: DecodeGraphs) -> None:
        """Prepare to replay with the inputs of `other`, its target."""
        assert other._next is not None, "`other` must be prepared first"
        self._next = next(mine for mine in self._recorded.values() if mine.batch is other._next.batch)

    def replay(self, *, ids: Tensor | None = None, hidden: Tensor | None = None) -> tuple[Tensor, ...]:
        """Replay the prepared graph.

        Args:
            ids: int64 [rows of this cp rank]; None for the token ids of the plan.
            hidden: [rows of this cp rank, F], if the layers take them.
        Returns:
            Outputs, [rows of this cp rank, ...] each, valid until the next replay; of all rows with `has_all_tokens`.
        """
        assert self._next is not None, "call prepare first"
        count = self._next.batch.num_local
        if ids is not None:
            self._next.batch.inputs.ids[:count].copy_(ids)
        if hidden is not None and self._next.hidden is not None:
            self._next.hidden[:count].copy_(hidden)
            # Rows of an earlier step may be no numbers, if its pages could not be loaded.
            self._next.hidden[count:].zero_()
        self._next.replay()
        return tuple(part[:count] for part in self._next.outputs)

    def _is_plain(self, row: Row) -> bool:
        if row.first_sampled or row.output_position < 0 or row.targets:
            return False
        if self._layers.has_states and row.read_state < 0:
            return False
        if row.num_tokens == 1 or self.ctx.cp.size == 1:
            return True
        # Splitting a row changes which cp rank computes which token, unless each computes all of them. Launched steps
        # do so without recurrent layers only, and another stage may have no graphs.
        return self.has_all_tokens and not (self._layers.has_states and self.ctx.pp.size > 1)

    def _new_batch(self, size: int) -> DecodeBatch:
        longest, has_all = self._layers.longest, self._layers.has_all_tokens
        return DecodeBatch(size, self._pool, self.ctx, longest=longest, has_all_tokens=has_all)

    def _plan_static(self, inputs: StepInputs) -> StaticStep:
        return self._backend.plan_static(inputs)

    def _record(self, size: int, recorder: Recorder, target: DecodeGraphs | None) -> _Recorded:
        if target is None:
            batch = self._new_batch(size)
            step = self._plan_static(batch.inputs)
        else:
            batch, step = target._recorded[size].batch, target._recorded[size].step
        hidden = None
        if (empty := self._layers.hidden) is not None:
            hidden = empty.new_zeros(len(batch.inputs.ids), empty.shape[1])
        step.replan(batch.inputs)
        with recorder.trying():  # allocation and compilation at first use must not be recorded
            self._run(self._layers.trial or self._layers.forward, batch, step, hidden)
        with recorder.recording():
            outputs = self._run(self._layers.forward, batch, step, hidden)
        return _Recorded(batch, step, hidden, recorder.last(), outputs)

    def _run(self, layers: Layers, batch: DecodeBatch, step: StaticStep, hidden: Tensor | None) -> tuple[Tensor, ...]:
        ids = batch.inputs.ids
        if self._last is not None:
            # Written in place: the draft's graph reads the same inputs.
            ids.copy_(self._last.filled(ids, batch.slots))
        run = ForwardPass(step, self._layers.views, batch.inputs.positions, self._layers.records)
        return layers(ids, hidden, run)
