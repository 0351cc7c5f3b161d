"""Recurrent layers of one step on CUDA: the same as attention/states.py, in few launches.

    decode step                 all that a layer does before its scan in one launch, in float32
    convolution                 all rows in one launch, in float32
    scan of short rows          all in one launch, token by token, in float32; includes rows with drafts
    scan of longer rows         all in one call of chunk-parallel kernels, in half precision with float32 sums

Each of these once per turn, see attention/states.py; nearly all steps have one turn.

Where there is no kernel, attention/states.py is used, which is logged once. A decode batch whose rows all have a state
has only short rows and reads its slots from the tensors of the step's inputs, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from raycache.attention.delta_rule import DeltaRule
from raycache.attention.layout import StepLayout
from raycache.attention.recurrent_chunks import DeltaRows, has_library
from raycache.attention.recurrent_decode import prepare_delta_rule, prepare_state_space
from raycache.attention.recurrent_plain import MAX_KEY_DIM, scan_plain
from raycache.attention.recurrent_triton import BLOCK_TOKENS, Scanned, Slots, convolve, step
from raycache.attention.state_space import StateSpace
from raycache.attention.states import Recurrence, turns
from raycache.memory.views import StateView
from raycache.step.inputs import RowInputs

_log = logging.getLogger(__name__)

SHORT = 32
"""Rows up to this length are processed token by token, in full precision. On an H200, 16 rows of this length take
0.16 ms; chunks of a delta rule, half of them empty, take 1 ms to launch."""


class KernelRecurrence:
    """Plan of all recurrent layers, with the methods of `Recurrence`.

    Args:
        layout: may be that of a static step whose rows all have a state.
    """

    def __init__(self, layout: StepLayout) -> None:
        rows = layout.inputs.rows
        self._layout = layout
        self._turns = [_Turn([rows[i] for i in indices], layout) for indices in turns(layout.inputs)]
        self._has_long = any(turn.long_rows for turn in self._turns)
        self._readable: Recurrence | None = None

    def convolve(self, view: StateView, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype == torch.float64:
            return self._read("float64").convolve(view, name, x, weight, bias)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for turn in self._turns:
            turn.convolve(view.conv[name], x, weight, bias, out=out)
        return out

    def scan(self, view: StateView, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        if view.state.dtype == torch.float64:
            return self._read("float64").scan(view, q, k, v, g, beta)
        half = _half(q, k, v)
        if self._has_long and (reason := _refusal(half, q, g, beta)):
            return self._read(reason).scan(view, q, k, v, g, beta)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        for turn in self._turns:
            turn.scan(view.state, q, k, v, g, beta, half=half, out=out)
        return out

    def state_space(
        self, view: StateView, weights: StateSpace, *, x: Tensor, b: Tensor, c: Tensor, dt: Tensor
    ) -> Tensor:
        if not self._is_fused(view):
            return weights.run(self, view, x=x, b=b, c=c, dt=dt)
        (turn,) = self._turns
        ready = prepare_state_space(view, turn.rows, weights, x=x, b=b, c=c, dt=dt)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        step(view.state, turn.rows, ready, out=out)
        return out

    def delta_rule(
        self, view: StateView, weights: DeltaRule, *, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        if not self._is_fused(view):
            return weights.run(self, view, q=q, k=k, v=v, decay=decay, beta=beta)
        (turn,) = self._turns
        ready = prepare_delta_rule(view, turn.rows, weights, q=q, k=k, v=v, decay=decay, beta=beta)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        step(view.state, turn.rows, ready, out=out)
        return out

    def _is_fused(self, view: StateView) -> bool:
        """Whether there is one launch for all that a layer does before its scan."""
        return self._layout.inputs.is_decode and view.state.dtype == torch.float32

    def _read(self, reason: str) -> Recurrence:
        """The plan in plain torch."""
        _warn_once(reason)
        if self._readable is None:
            self._readable = Recurrence(self._layout)
        return self._readable


class _Turn:
    """Rows that do not depend on each other.

    Attributes:
        rows: all of them.
        long_rows: those that are not processed token by token.
    """

    def __init__(self, rows: Sequence[RowInputs], layout: StepLayout) -> None:
        short = [row for row in rows if _is_short(row)]
        self.long_rows = [row for row in rows if not _is_short(row)]
        self._layout = layout
        self.rows = _slots(rows, layout)
        self._block_tokens = 1 if layout.inputs.is_decode else BLOCK_TOKENS
        firsts = [(i, first) for i, row in enumerate(rows) for first in range(0, len(row.tokens), self._block_tokens)]
        self._blocks = _pairs(firsts, layout)
        self._short, self._long = self.rows, self.rows
        if short and self.long_rows:
            self._short, self._long = _slots(short, layout), _slots(self.long_rows, layout)
        self._has_short = bool(short)
        self._delta: DeltaRows | None = None

    def convolve(self, states: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
        convolve(states, self.rows, self._blocks, x, weight, bias, block_tokens=self._block_tokens, out=out)

    def scan(
        self,
        states: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        *,
        half: torch.dtype | None,
        out: Tensor,
    ) -> None:
        if self._has_short:
            step(states, self._short, Scanned(q, k, v, g, beta), out=out)
        if half is None or not self.long_rows:
            return
        if beta is None:
            scan_plain(states, self._long, q, k, v, g, half=half, out=out)
            return
        if self._delta is None:
            self._delta = DeltaRows(self.long_rows, self._layout)
        found = self._delta.scan(states, q, k, v, g, beta, half=half)
        if self._delta.tokens is None:
            out.copy_(found)
        else:
            out.index_copy_(0, self._delta.tokens, found)


def _is_short(row: RowInputs) -> bool:
    """Whether a row is processed token by token; with drafts it must be, since the state after each token is kept."""
    return len(row.tokens) <= SHORT or len(row.draft_states) > 0


def _slots(rows: Sequence[RowInputs], layout: StepLayout) -> Slots:
    spans = _pairs([(row.tokens.start, len(row.tokens)) for row in rows], layout)
    inputs = layout.inputs
    kept = layout.on_device([1 + len(row.draft_states) for row in rows])
    if inputs.is_decode and all(row.read_state >= 0 for row in rows):
        # In a static step these change between replays; its spans do not, since token i belongs to row i.
        return Slots(spans, inputs.read_states, inputs.write_states, kept)
    writes = [-1] * inputs.num_tokens
    for row in rows:
        after = (row.write_state, *row.draft_states)
        writes[row.tokens.stop - len(after) : row.tokens.stop] = after
    return Slots(spans, layout.on_device([row.read_state for row in rows]), layout.on_device(writes), kept)


def _pairs(pairs: Sequence[tuple[int, int]], layout: StepLayout) -> Tensor:
    """int64 [N, 2]."""
    return layout.on_device([number for pair in pairs for number in pair]).view(-1, 2)


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
