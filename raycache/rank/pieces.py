"""Layers of short steps as pieces of CUDA graphs, with attention launched between them.

    ids -> [ embed, norm, qkv ] -> attention -> [ out, feed-forward, norm, qkv ] -> attention -> ... -> hidden states
              first piece           launched                second piece            launched

A step of few tokens takes longer to launch than to run. Decode batches are graphs as a whole (graphs.py), and so are
short steps where attention needs no plan (short_steps.py). For all others, with latents, recurrent layers, wide heads,
several cp ranks, or pages that are being loaded, there are pieces: between two calls of attention, layers depend on
nothing but the number of tokens, so they are recorded for some numbers, and a step is padded to the next of them. What
attention does is launched as in any step, so rows may be of any kind.

Padding tokens have the token id 0, and attention gives zeros for them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raycache.attention.base import AttentionBackend, AttentionStep, Selection
from raycache.layers.forward_pass import ForwardPass
from raycache.memory.component import STATE
from raycache.memory.device import DevicePool
from raycache.models.base import Model, for_warm_up
from raycache.parallel.context import ParallelContext
from raycache.rank.calls import CallingStep, Calls, Launch, LayerPool
from raycache.rank.recorder import Recorder, Replay
from raycache.step.inputs import StepInputs, build_inputs
from raycache.wire.plan import Row, StepPlan

# 2,176 are the default share of prompts, a quarter of 8,192, and 128 rows that generate.
_SIZES = (
    1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384,
    *range(512, 1024, 128), *range(1024, 2304, 256), 2176, 2304, 2560, 3072,
)  # fmt: skip
_MOST_BUSY = 1.25
"""Steps that take longer than this multiple of the time to launch them are not recorded: padding would cost more."""

LONGEST = _SIZES[-1]
"""Most tokens of a step that is recorded."""

# Shapes in this file: S recorded tokens, T of a step, C hidden size.


class PieceSizes(NamedTuple):
    """Numbers of tokens to record.

    Attributes:
        is_measured: whether steps of all of them are known to take hardly longer than to launch them; else this is
            measured, and longer ones are left out.
    """

    tokens: Sequence[int]
    is_measured: bool = False


def piece_sizes(most: int, *, least: int, longest: int | None = None) -> PieceSizes:
    """Numbers of tokens to record.

    Args:
        most: tokens of a step.
        least: fewer are run in another way.
        longest: `RecordedPieces.longest` of ranks like these; None if it is not known.
    """
    last = most if longest is None else min(most, longest)
    return PieceSizes([size for size in _SIZES if least <= size <= last], is_measured=longest is not None)


def trial_step(num_tokens: int, pool: DevicePool, ctx: ParallelContext) -> StepInputs:
    """A step of one row of so many tokens per cp rank, whose pages and states are scratch units."""
    num_tokens *= ctx.cp.size
    pages = {space: np.full(-(-num_tokens // pool.page_size), pool.sizes[space], np.int32) for space in pool.windows}
    row = Row(0, 0, bytes(4 * num_tokens), output_position=0, write_state=pool.sizes.get(STATE, -1))
    return build_inputs(StepPlan(0, [row]), {0: pages}, page_size=pool.page_size, windows=pool.windows, ctx=ctx)


@dataclass(frozen=True)
class _Call:
    """Attention between two pieces.

    Attributes:
        layer: whose cache it reads.
        rows: its arguments, [S, ...] each.
        out: where its result goes, [S, ...]; None for a selection.
    """

    layer: int
    launch: Launch
    rows: Sequence[Tensor | None]
    out: Tensor | None


@dataclass(frozen=True)
class _Piece:
    """A graph, and the call after it; None after the last one."""

    replay: Replay
    call: _Call | None


@dataclass(frozen=True)
class _Inputs:
    """What the first piece reads.

    Attributes:
        ids, positions: int64 [S].
        hidden: [S, C], from the stage before; None on the first.
    """

    ids: Tensor
    positions: Tensor
    hidden: Tensor | None

    def fill(self, inputs: StepInputs, hidden: Tensor | None) -> None:
        count = len(inputs.ids)
        for mine, given in ((self.ids, inputs.ids), (self.positions, inputs.positions), (self.hidden, hidden)):
            if mine is not None and given is not None:
                mine[:count].copy_(given)
                mine[count:].zero_()


_Result = tuple[Sequence[int], torch.dtype] | None
"""Shape of a token's row, and dtype, of the result of a call; None for a selection."""


@dataclass(frozen=True)
class _Tried:
    """A step that ran once."""

    trial: StepInputs
    inputs: _Inputs


@dataclass(frozen=True)
class _Recorded:
    """All pieces of one number of tokens.

    Attributes:
        hidden: [S, C], the output.
        features: recorded for a draft model, [S, C] each.
    """

    inputs: _Inputs
    pieces: Sequence[_Piece]
    hidden: Tensor
    features: Sequence[Tensor]


class RecordedPieces:
    """The pieces of one stage on one rank. Recording is collective over tp and cp.

    Args:
        sizes: to record.
        pool: must have scratch units.
        hidden: empty tensor [0, C] like the input of a stage after the first; None on the first.
        records: layers to record for a draft model (see `ForwardPass`).
    Attributes:
        num_graphs: recorded ones.
    Raises:
        NotRecordableError: the layers cannot be recorded.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Model,
        *,
        sizes: PieceSizes,
        pool: DevicePool,
        backend: AttentionBackend,
        ctx: ParallelContext,
        recorder: Recorder,
        hidden: Tensor | None = None,
        records: Sequence[int] = (),
    ) -> None:
        self._model, self._pool, self._backend = model, pool, backend
        self._hidden, self._records = hidden, records
        self._recorder, self._ctx = recorder, ctx
        self._zeros: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        self._results: Sequence[_Result] = ()  # of the calls of any step
        self._warm_up_layers: Collection[int] = ()
        self._skips_others = False
        trials = [trial_step(size, pool, ctx) for size in sorted(sizes.tokens)]
        tried = self._tried(trials, is_measured=sizes.is_measured)
        # Largest first, so that the others fit into its memory.
        self._recorded = {len(one.trial.ids): self._record(one) for one in reversed(tried)}
        self.num_graphs = sum(len(recorded.pieces) for recorded in self._recorded.values())

    @property
    def sizes(self) -> list[int]:
        """Recorded numbers of tokens."""
        return list(self._recorded)

    @property
    def longest(self) -> int:
        """The largest of `sizes`; 0 if there are none."""
        return max(self._recorded, default=0)

    def for_warm_up(self) -> RecordedPieces:
        """The same pieces without calls that launch the same kernels as earlier ones; these give zeros."""
        own = copy(self)
        own._skips_others = True
        return own

    def can_run(self, inputs: StepInputs) -> bool:
        """Whether a step's tokens on this rank fit."""
        return 0 < len(inputs.ids) <= self.longest

    def forward(self, inputs: StepInputs, hidden: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Run a step.

        Args:
            hidden: [T, C], from the stage before; None on the first.
        Returns:
            Hidden states [T, C], and what was recorded for a draft model, [T, C] each; valid until the next step.
        """
        count = len(inputs.ids)
        recorded = self._recorded[min(size for size in self._recorded if size >= count)]
        recorded.inputs.fill(inputs, hidden)
        step, selections = self._backend.plan(inputs), list[Selection]()
        for piece in recorded.pieces:
            piece.replay()
            if (call := piece.call) is None:
                continue
            if self._skips_others and call.layer not in self._warm_up_layers:
                if call.out is not None:
                    call.out.zero_()
            else:
                self._pool.gate(call.layer)
                found = call.launch(step, selections, *(None if row is None else row[:count] for row in call.rows))
                if call.out is not None and found is not None:
                    self._put(found, call.out)
        return recorded.hidden[:count], [part[:count] for part in recorded.features]

    def _put(self, found: Tensor, out: Tensor) -> None:
        """Copy a result [T, ...] into [S, ...], with zeros behind it."""
        if len(found) == len(out):
            out.copy_(found)
            return
        key = out.shape[1:], out.dtype
        if key not in self._zeros:
            self._zeros[key] = out.new_zeros((max(self._recorded), *out.shape[1:]))
        torch.cat([found, self._zeros[key][: len(out) - len(found)]], out=out)

    def _tried(self, trials: Sequence[StepInputs], *, is_measured: bool) -> list[_Tried]:
        """Run all steps to record, and those that bisection tries where it is not known which these are."""
        tried: dict[int, _Tried] = {}

        def run(number: int) -> _Tried:
            tried[number], seen = self._try(trials[number], self._model)
            self._results = seen.results
            return tried[number]

        low, high = 0, len(trials)  # those before `low` are bound by launches, those from `high` on are not
        if is_measured and trials:
            run(0)  # one with all layers, to see the results of their calls
            low = high
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._is_bound_by_launches(run(middle)) else (low, middle)
        short = for_warm_up(self._model, self._ctx)
        for number in range(low):
            if number not in tried or not self._warm_up_layers:  # once at least, to see which layers call
                tried[number], seen = self._try(trials[number], short)
                self._warm_up_layers = seen.layers
        return [tried[number] for number in range(low)]

    def _try(self, trial: StepInputs, model: Model) -> tuple[_Tried, _Seen]:
        hidden = None if self._hidden is None else self._hidden.new_zeros(len(trial.ids), self._hidden.shape[1])
        inputs = _Inputs(torch.zeros_like(trial.ids), torch.zeros_like(trial.positions), hidden)
        seen = _Seen(self._backend.plan(trial))
        with self._recorder.trying():
            self._run(model, inputs, seen, trial)
        return _Tried(trial, inputs), seen

    def _is_bound_by_launches(self, tried: _Tried) -> bool:
        """Whether a step takes hardly longer than to launch it. Ranks wait for each other: the slowest one counts."""

        def run() -> None:
            self._run(self._model, tried.inputs, _Seen(self._backend.plan(tried.trial)), tried.trial)

        times = torch.tensor(self._recorder.times(run), device=self._pool.device)
        launched, ended = self._ctx.stage.all_gather(times).amax(0).unbind(1)
        return bool(ended.min() < _MOST_BUSY * launched.min())

    def _record(self, tried: _Tried) -> _Recorded:
        cuts = _Cuts(self._results, self._recorder)
        with self._recorder.recording():
            found, features = self._run(self._model, tried.inputs, cuts, tried.trial)
        borrow = self._recorder.borrow
        pieces = (*cuts.pieces, _Piece(self._recorder.last(), None))
        return _Recorded(tried.inputs, pieces, borrow(found), [borrow(part) for part in features])

    def _run(self, model: Model, inputs: _Inputs, calls: Calls, trial: StepInputs) -> tuple[Tensor, list[Tensor]]:
        pool = LayerPool(self._pool)
        step = CallingStep(calls, pool, trial)
        run = ForwardPass(step, pool, inputs.positions, self._records)
        hidden = model.embed(inputs.ids) if inputs.hidden is None else inputs.hidden
        return model.forward(hidden, run), run.recorded


@dataclass
class _Seen:
    """Makes the calls.

    Attributes:
        results: of each.
        layers: that make them.
    """

    step: AttentionStep
    results: list[_Result] = field(default_factory=list)
    layers: set[int] = field(default_factory=set)
    _selections: list[Selection] = field(default_factory=list)

    def call(self, layer: int, launch: Launch, rows: Sequence[Tensor | None]) -> Tensor | None:
        found = launch(self.step, self._selections, *rows)
        self.results.append(None if found is None else (found.shape[1:], found.dtype))
        self.layers.add(layer)
        return found


class _Cuts:
    """Ends a graph at each call, and begins the next.

    Tensors of a graph may share memory with those that are used after them, so calls keep only addresses.

    Args:
        results: of each call.
    """

    def __init__(self, results: Sequence[_Result], recorder: Recorder) -> None:
        self.pieces: list[_Piece] = []
        self._results, self._recorder = iter(results), recorder

    def call(self, layer: int, launch: Launch, rows: Sequence[Tensor | None]) -> Tensor | None:
        result, borrow = next(self._results), self._recorder.borrow
        replay = self._recorder.cut()
        first = next(row for row in rows if row is not None)
        out = None if result is None else first.new_empty((len(first), *result[0]), dtype=result[1])
        kept = [None if row is None else borrow(row) for row in rows]
        self.pieces.append(_Piece(replay, _Call(layer, launch, kept, None if out is None else borrow(out))))
        return out
