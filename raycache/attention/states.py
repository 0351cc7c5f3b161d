"""Recurrent layers of one step: reads the state of each row, runs the recurrence and writes the new state.

    rows of one token       all in one `step`
    rows of more tokens     a chunk-parallel `scan` each
    rows with drafts        a `step` per token, since the state after each token is kept: first tokens together with the
                            rows of one token, then the second tokens of all such rows, and so on

States are read from the row's read slot and written to its write slot, so that restore points stay unchanged. At the
beginning of a sequence the state is zero, whatever the slot holds.

A row may read what another row of the step writes: a prompt that leaves restore points has a row up to each of them.
Such a row has a later turn.

Shapes in this file: T new tokens of all cp ranks, N rows of one token, H heads, D features of a head, K taps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raycache.attention.delta_rule import DeltaRule
from raycache.attention.layout import StepLayout
from raycache.attention.recurrence import causal_conv, causal_conv_step, scan, step
from raycache.attention.state_space import StateSpace
from raycache.memory.views import StateView
from raycache.step.inputs import RowInputs, StepInputs


class Recurrence:
    """Plan of all recurrent layers of a step."""

    def __init__(self, layout: StepLayout) -> None:
        self._turns = [_Turn(layout, rows) for rows in turns(layout.inputs)]

    def convolve(self, view: StateView, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        states = view.conv[name].flatten(1, 2)
        taps, offset = weight.flatten(0, 1), None if bias is None else bias.flatten()
        inputs = x.flatten(1)
        out = torch.empty_like(inputs)
        for turn in self._turns:
            for wave in turn.waves:
                out[wave.tokens], new = causal_conv_step(inputs[wave.tokens], wave.read(states), taps, offset)
                states.index_copy_(0, wave.writes, new)
            for tokens, read, write in turn.chunks:
                out[tokens], states[write] = causal_conv(inputs[tokens], _state(states, read), taps, offset)
        return out.view(x.shape)

    def scan(self, view: StateView, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        out = torch.empty_like(v)
        for turn in self._turns:
            for wave in turn.waves:
                new_q, new_k, new_v, new_g = (x[wave.tokens] for x in (q, k, v, g))
                new_beta = None if beta is None else beta[wave.tokens]
                out[wave.tokens], new = step(new_q, new_k, new_v, new_g, new_beta, wave.read(view.state))
                view.state.index_copy_(0, wave.writes, new)
            for tokens, read, write in turn.chunks:
                chunk_beta = None if beta is None else beta[tokens]
                out[tokens], view.state[write] = scan(
                    q[tokens], k[tokens], v[tokens], g[tokens], chunk_beta, _state(view.state, read)
                )
        return out

    def state_space(
        self, view: StateView, weights: StateSpace, *, x: Tensor, b: Tensor, c: Tensor, dt: Tensor
    ) -> Tensor:
        return weights.run(self, view, x=x, b=b, c=c, dt=dt)

    def delta_rule(
        self, view: StateView, weights: DeltaRule, *, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        return weights.run(self, view, q=q, k=k, v=v, decay=decay, beta=beta)


def turns(inputs: StepInputs) -> list[list[int]]:
    """Indices of the rows of a step, by turn: a row comes after the one whose state it reads. Decode steps have one."""
    if inputs.is_decode:
        return [list(range(len(inputs.rows)))]
    found: list[list[int]] = []
    turn_of: dict[int, int] = {}
    for i, row in enumerate(inputs.rows):
        turn = turn_of.get(row.read_state, -1) + 1 if row.read_state >= 0 else 0
        if turn == len(found):
            found.append([])
        found[turn].append(i)
        turn_of.update(dict.fromkeys((row.write_state, *row.draft_states), turn))
    return found


class _Turn:
    """Rows that do not depend on each other.

    Attributes:
        waves: tokens that are processed alone.
        chunks: tokens of each other row, and the slots that it reads and writes.
    """

    def __init__(self, layout: StepLayout, indices: Sequence[int]) -> None:
        rows, mine = layout.inputs.rows, set(indices)
        self.chunks = [
            (chunk.tokens, rows[chunk.row].read_state, rows[chunk.row].write_state)
            for chunk in layout.chunks
            if chunk.row in mine and not rows[chunk.row].draft_states
        ]
        steps = [step for i in layout.singles if i in mine for step in _steps(rows[i])]
        steps += [step for i in indices if rows[i].draft_states for step in _steps(rows[i])]
        self.waves = [
            _Wave.of([s for s in steps if s.number == number], layout) for number in sorted({s.number for s in steps})
        ]


class _Step(NamedTuple):
    """A token of a row that is processed alone.

    Attributes:
        number: index among the tokens of its row.
        token: index among all T.
        read, write: slots of the states before and after it.
    """

    number: int
    token: int
    read: int
    write: int


def _steps(row: RowInputs) -> Iterator[_Step]:
    assert len(row.tokens) == 1 + len(row.draft_states), "a state is kept after each token of a row with drafts"
    read = row.read_state
    for number, (token, write) in enumerate(zip(row.tokens, (row.write_state, *row.draft_states), strict=True)):
        yield _Step(number, token, read, write)
        read = write


@dataclass(frozen=True, slots=True)
class _Wave:
    """Tokens of different rows that are processed together.

    Attributes:
        tokens: int64 [N]; indices among all T.
        reads, writes: int64 [N]; slots of states.
        fresh: int64; indices of those that begin a sequence, or None.
    """

    tokens: Tensor
    reads: Tensor
    writes: Tensor
    fresh: Tensor | None

    @classmethod
    def of(cls, steps: Sequence[_Step], layout: StepLayout) -> _Wave:
        fresh = [i for i, one in enumerate(steps) if one.read < 0]
        return cls(
            tokens=layout.on_device([one.token for one in steps]),
            reads=layout.on_device([max(one.read, 0) for one in steps]),
            writes=layout.on_device([one.write for one in steps]),
            fresh=layout.on_device(fresh) if fresh else None,
        )

    def read(self, states: Tensor) -> Tensor:
        """States [N, ...] before the tokens."""
        found = states[self.reads]
        return found if self.fresh is None else found.index_fill_(0, self.fresh, 0)


def _state(states: Tensor, slot: int) -> Tensor:
    """A state; zeros at the beginning of a sequence."""
    return states[slot] if slot >= 0 else torch.zeros_like(states[0])
