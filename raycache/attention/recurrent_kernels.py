"""Recurrent layers of one step on CUDA: the same as attention/states.py, in few launches.

    decode step                 all that a layer does before its scan in one launch, in float32
    convolution                 all rows in one launch, in float32, with what follows it
    scan of short rows          all in one launch, token by token, in float32; includes rows with drafts
    scan of longer rows         all in one run of chunk-parallel kernels, in half precision with float32 sums

Rows that read what others of the step write are in the same launch as these where that is possible, see
attention/row_order.py; else they are in one of their own behind it.

Where there is no kernel, attention/states.py is used, which is logged once. A step that is captured in a CUDA graph has
only short rows, and reads their spans and slots from tensors (`StepInputs.state_rows`), so a replay can have others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from raycache.attention.delta_rule import L2_EPS, DeltaRule
from raycache.attention.layout import StepLayout
from raycache.attention.recurrent_chunks import DeltaRows, has_library
from raycache.attention.recurrent_decode import prepare_delta_rule, prepare_state_space
from raycache.attention.recurrent_plain import MAX_KEY_DIM, scan_plain
from raycache.attention.recurrent_triton import BLOCK_TOKENS, Activation, Blocks, Scanned, convolve, step
from raycache.attention.row_order import Chain, stages
from raycache.attention.state_space import StateSpace
from raycache.attention.states import Recurrence
from raycache.memory.views import StateView
from raycache.parallel.uploads import Uploads
from raycache.step.inputs import RowInputs, StateRows, StepInputs

_log = logging.getLogger(__name__)

_Slots = Callable[[tuple[int, ...]], StateRows]
"""States of some rows of the step, given their indices."""

SHORT = 32
"""Rows up to this length are processed token by token, in full precision. On an H200, 16 rows of this length take
0.16 ms; chunks of a delta rule, half of them empty, take 1 ms to launch."""


class KernelRecurrence:
    """Plan of all recurrent layers, with the methods of `Recurrence`.

    Args:
        layout: may be that of a static step.
    """

    def __init__(self, layout: StepLayout) -> None:
        inputs = layout.inputs
        uploads = Uploads(inputs.ctx.device, room=64 * inputs.num_tokens + 4096)
        slots = cache(lambda indices: _slots([inputs.rows[i] for i in indices], inputs, uploads))
        self._layout = layout
        self._convolutions = [
            _Convolutions(chains, inputs, uploads, slots) for chains in stages(inputs, can_follow=_is_beside)
        ]
        self._scans = [_Scans(chains, inputs, uploads, slots) for chains in stages(inputs, can_follow=_are_long)]
        uploads.send()
        self._has_long = any(scans.chains for scans in self._scans)
        self._long: DeltaRows | None = None
        self._readable: Recurrence | None = None

    def convolve(self, view: StateView, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype == torch.float64:
            return self._read("float64").convolve(view, name, x, weight, bias)
        return self._convolve(view, name, x, weight, bias)

    def scan(self, view: StateView, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        if view.state.dtype == torch.float64:
            return self._read("float64").scan(view, q, k, v, g, beta)
        half = _half(q, k, v)
        if self._has_long and (reason := _refusal(half, q, g, beta)):
            return self._read(reason).scan(view, q, k, v, g, beta)
        ready = None
        if half is not None and beta is not None and self._has_long:
            ready = self._delta.prepare(q, k, v, g, beta, half=half)
        out, scanned = torch.empty(v.shape, dtype=v.dtype, device=v.device), Scanned(q, k, v, g, beta)
        for number, stage in enumerate(self._scans):
            if stage.short is not None:
                step(view.state, stage.short, scanned, out=out)
            if ready is not None:
                self._delta.pass_states(number, view.state, ready)
            elif half is not None and stage.long is not None:
                scan_plain(view.state, stage.long, stage.bounds, scanned, half=half, out=out)
        if ready is None:
            return out
        found = self._delta.finish(ready).to(v.dtype)
        tokens = self._delta.tokens
        return found if tokens is None else out.index_copy_(0, tokens, found)

    def state_space(
        self, view: StateView, weights: StateSpace, *, x: Tensor, b: Tensor, c: Tensor, dt: Tensor
    ) -> Tensor:
        if torch.float64 in (x.dtype, view.state.dtype):
            return weights.run(self, view, x=x, b=b, c=c, dt=dt)
        if not self._is_fused(view):
            x, b, c = (
                self._convolve(view, name, inputs, taps.weight, taps.bias, activation=Activation())
                for name, inputs, taps in (("x", x, weights.x), ("b", b, weights.b), ("c", c, weights.c))
            )
            return weights.scan(self, view, x=x, b=b, c=c, dt=dt)
        rows = self._convolutions[0].rows
        ready = prepare_state_space(view, rows, weights, x=x, b=b, c=c, dt=dt)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        step(view.state, rows, ready, out=out)
        return out

    def delta_rule(
        self, view: StateView, weights: DeltaRule, *, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        if torch.float64 in (q.dtype, view.state.dtype):
            return weights.run(self, view, q=q, k=k, v=v, decay=decay, beta=beta)
        if not self._is_fused(view):
            return self._prefilled(view, weights, q, k, v, decay, beta)
        rows = self._convolutions[0].rows
        ready = prepare_delta_rule(view, rows, weights, q=q, k=k, v=v, decay=decay, beta=beta)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        step(view.state, rows, ready, out=out)
        return out

    def _prefilled(
        self, view: StateView, weights: DeltaRule, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        """`delta_rule` of a step with rows of more than one token."""
        half = _half(q, k, v)
        is_long = self._has_long and not any(scans.short for scans in self._scans)
        is_long = is_long and _refusal(half, q, decay, beta) is None
        dtype = half if is_long and half is not None else torch.float32
        unit = Activation(1.0, L2_EPS)
        q = self._convolve(
            view, "q", q, weights.q, None, activation=Activation(q.shape[-1] ** -0.5, L2_EPS), dtype=dtype
        )
        k = self._convolve(view, "k", k, weights.k, None, activation=unit, dtype=dtype)
        v = self._convolve(view, "v", v, weights.v, None, activation=Activation())
        if not is_long or half is None:
            return self.scan(view, q, k, v, weights.log_decay(decay), beta.to(weights.rate.dtype).sigmoid())
        ready = self._delta.prepare(q, k, v, decay, beta, half=half, gates=weights)
        for number in range(len(self._scans)):
            self._delta.pass_states(number, view.state, ready)
        return self._delta.finish(ready).to(v.dtype)

    def _convolve(
        self,
        view: StateView,
        name: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        activation: Activation | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
        for stage in self._convolutions:
            convolve(view.conv[name], stage.rows, stage.blocks, x, weight, bias, out=out, activation=activation)
        return out

    @property
    def _delta(self) -> DeltaRows:
        """Long rows of a layer with a delta rule; the tables are only copied for models that have such layers."""
        if self._long is None:
            self._long = DeltaRows(self._layout.inputs, [scans.chains for scans in self._scans])
        return self._long

    def _is_fused(self, view: StateView) -> bool:
        """Whether there is one launch for all that a layer does before its scan."""
        return self._layout.inputs.is_decode and view.state.dtype == torch.float32

    def _read(self, reason: str) -> Recurrence:
        """The plan in plain torch."""
        _warn_once(reason)
        if self._readable is None:
            self._readable = Recurrence(self._layout)
        return self._readable


class _Convolutions:
    """Convolutions of the rows of a stage. What precedes a row that is not the first of its chain is in the input.

    Attributes:
        rows: all of them.
        blocks: their tokens.
    """

    def __init__(self, chains: Sequence[Chain], inputs: StepInputs, uploads: Uploads, slots: _Slots) -> None:
        all_rows = inputs.rows
        behind = {i: len(all_rows[before].tokens) for chain in chains for before, i in pairwise(chain)}
        indices = sorted(i for chain in chains for i in chain)
        self.rows = slots(tuple(indices))
        static = inputs.state_rows
        lengths = [len(all_rows[i].tokens) if static is None else static.longest for i in indices]
        size = 1 if inputs.is_decode and max(lengths) == 1 else BLOCK_TOKENS
        firsts = [(n, first) for n, length in enumerate(lengths) for first in range(0, length, size)]
        self.blocks = Blocks(
            _pairs(firsts, uploads),
            size,
            # Not only where rows go on: the warm-up, which compiles all kernels, has no such rows.
            behind=None if inputs.is_decode else uploads.integers([behind.get(i, 0) for i in indices]),
        )


class _Scans:
    """Scans of the rows of a stage.

    Attributes:
        short: rows that are processed token by token, or None.
        chains: the others.
        long: the others in the order of `chains`, or None.
        bounds: int64 [M, 2], the first row of each chain and their number.
    """

    def __init__(self, chains: Sequence[Chain], inputs: StepInputs, uploads: Uploads, slots: _Slots) -> None:
        rows = inputs.rows
        short = [i for chain in chains for i in chain if _is_short(rows[i])]
        self.chains = [chain for chain in chains if not _is_short(rows[chain[0]])]
        self.short = slots(tuple(short)) if short else None
        self.long = slots(tuple(i for chain in self.chains for i in chain)) if self.chains else None
        counts = [len(chain) for chain in self.chains]
        self.bounds = _pairs(list(zip(accumulate(counts, initial=0), counts, strict=False)), uploads)


def _are_long(before: RowInputs, row: RowInputs) -> bool:
    """Whether one launch can process a row and the one that it follows."""
    return not _is_short(before) and not _is_short(row)


def _is_beside(before: RowInputs, row: RowInputs) -> bool:
    """Whether the inputs that precede a row are those of the row that it follows."""
    return before.tokens.stop == row.tokens.start and len(before.tokens) >= BLOCK_TOKENS and not before.draft_states


def _is_short(row: RowInputs) -> bool:
    """Whether a row is processed token by token; with drafts it must be, since the state after each token is kept."""
    return len(row.tokens) <= SHORT or len(row.draft_states) > 0


def _slots(rows: Sequence[RowInputs], inputs: StepInputs, uploads: Uploads) -> StateRows:
    if inputs.state_rows is not None:
        return inputs.state_rows
    spans = _pairs([(row.tokens.start, len(row.tokens)) for row in rows], uploads)
    kept, longest = uploads.integers([1 + len(row.draft_states) for row in rows]), max(len(row.tokens) for row in rows)
    if inputs.is_decode and all(row.read_state >= 0 for row in rows):
        return StateRows(spans, inputs.read_states, inputs.write_states, kept, longest)
    writes = np.full(inputs.num_tokens, -1)
    for row in rows:
        after = (row.write_state, *row.draft_states)
        writes[row.tokens.stop - len(after) : row.tokens.stop] = after
    reads = uploads.integers([row.read_state for row in rows])
    return StateRows(spans, reads, uploads.integers(writes), kept, longest)


def _pairs(pairs: Sequence[tuple[int, int]], uploads: Uploads) -> Tensor:
    """int64 [N, 2]."""
    return uploads.integers([number for pair in pairs for number in pair]).view(len(pairs), 2)


def _half(*tensors: Tensor) -> torch.dtype | None:
    """The half-precision dtype of these tensors, used for long rows; None unless there is exactly one."""
    halves = {x.dtype for x in tensors if x.dtype in (torch.bfloat16, torch.float16)}
    return halves.pop() if len(halves) == 1 else None


def _refusal(half: torch.dtype | None, q: Tensor, g: Tensor, beta: Tensor | None) -> str | None:
    """Why there is no kernel for long rows, or None."""
    if half is None:
        return f"rows of more than {SHORT} tokens in {q.dtype}"
    if q.shape[-1] > MAX_KEY_DIM:
        return f"keys of {q.shape[-1]} features, more than {MAX_KEY_DIM}"
    if beta is None:
        return "decays per channel without a delta rule" if g.shape[-1] > 1 else None
    return None if has_library() else "a delta rule without flash-linear-attention (pip install fla-core einops)"


@cache
def _warn_once(reason: str) -> None:
    _log.warning("recurrent layers: no kernel for %s; using torch, which is much slower", reason)
