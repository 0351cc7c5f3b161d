"""Recurrent layers of one step: which state each row goes on from, and where the new one is kept.

    row of one token     all of them together, one `step`
    row of more          one `scan` each, chunk-parallel inside

A state is read from the row's read slot and written to its write slot, so that a restore point stays as it was. At the
beginning of a sequence the state is zero, whatever the slot holds.

Shapes in this file: T new tokens of all cp ranks, N rows of one token, H heads, D features of a head, K taps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raycache.attention.layout import StepLayout
from raycache.attention.recurrence import causal_conv, causal_conv_step, scan, step
from raycache.memory.views import StateView


class Recurrence:
    """Plan of all recurrent layers.

    Args:
        layout: of the step.
    """

    def __init__(self, layout: StepLayout) -> None:
        rows = layout.inputs.rows
        singles = [rows[i] for i in layout.singles]
        self._chunks = [
            (chunk.tokens, rows[chunk.row].read_state, rows[chunk.row].write_state) for chunk in layout.chunks
        ]
        self._tokens = layout.single_tokens
        self._has_singles = bool(singles)
        self._reads = layout.on_device([max(row.read_state, 0) for row in singles])
        self._writes = layout.on_device([row.write_state for row in singles])
        self._fresh = layout.on_device([i for i, row in enumerate(singles) if row.read_state < 0])
        self._has_fresh = any(row.read_state < 0 for row in singles)

    def convolve(self, view: StateView, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See AttentionStep.convolve."""
        states = view.conv[name].flatten(1, 2)
        taps, offset = weight.flatten(0, 1), None if bias is None else bias.flatten()
        inputs = x.flatten(1)
        out = torch.empty_like(inputs)
        if self._has_singles:
            out[self._tokens], new = causal_conv_step(inputs[self._tokens], self._read(states), taps, offset)
            states.index_copy_(0, self._writes, new)
        for tokens, read, write in self._chunks:
            out[tokens], states[write] = causal_conv(inputs[tokens], _state(states, read), taps, offset)
        return out.view(x.shape)

    def scan(self, view: StateView, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        """See AttentionStep.scan."""
        out = torch.empty_like(v)
        if self._has_singles:
            new_q, new_k, new_v, new_g = (x[self._tokens] for x in (q, k, v, g))
            new_beta = None if beta is None else beta[self._tokens]
            out[self._tokens], new = step(new_q, new_k, new_v, new_g, new_beta, self._read(view.state))
            view.state.index_copy_(0, self._writes, new)
        for tokens, read, write in self._chunks:
            chunk_beta = None if beta is None else beta[tokens]
            out[tokens], view.state[write] = scan(
                q[tokens], k[tokens], v[tokens], g[tokens], chunk_beta, _state(view.state, read)
            )
        return out

    def _read(self, states: Tensor) -> Tensor:
        """States [N, ...] of the single tokens."""
        found = states[self._reads]
        if self._has_fresh:
            found.index_fill_(0, self._fresh, 0)
        return found


def _state(states: Tensor, slot: int) -> Tensor:
    """One state; zeros where there is none yet."""
    return states[slot] if slot >= 0 else torch.zeros_like(states[0])
