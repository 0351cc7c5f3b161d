"""The last sampled token of each slot and its next draft tokens, kept on the device: the next step can start before the
host has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raycache.parallel.context import ParallelContext
from raycache.rank.outcome import gather_padded
from raycache.step.inputs import StepInputs
from raycache.wire.plan import Row, StepPlan
from raycache.wire.results import emissions

# Shapes in this file: M tokens that this cp rank sampled in a step.


class LastTokens:
    """Last sampled token of each slot, and its next draft tokens; identical on all ranks of a stage.

    But for the slot of a row with draft tokens, which has sampled several: its next row gets the first token from the
    host, and what is here may be any of them.

    Args:
        most_drafts: that ranks draft for a slot.
    Attributes:
        tokens: int64 [num_slots, 1 + most_drafts]; column i has the tokens with the placeholder -1 - i.
    """

    def __init__(self, num_slots: int, ctx: ParallelContext, *, most_drafts: int = 0) -> None:
        self._ctx = ctx
        self.tokens = torch.zeros((num_slots, 1 + most_drafts), dtype=torch.int64, device=ctx.device)

    def filled(self, ids: Tensor, slots: Tensor) -> Tensor:
        """Token ids [L] of these slots, with tokens in place of placeholders."""
        return torch.where(ids < 0, self.tokens[slots, (-1 - ids).clamp(min=0)], ids)

    def fill(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Write the tokens into the inputs of rows that take theirs from the device."""
        fed = [
            (index, row.slot)
            for row, mine in zip(plan.rows, inputs.rows, strict=True)
            if row.is_fed
            for index in mine.local
        ]
        if fed:
            where, slots = self._on_device([index for index, _ in fed]), self._on_device([slot for _, slot in fed])
            inputs.ids[where] = self.filled(inputs.ids[where], slots)

    def keep(self, plan: StepPlan, tokens: Tensor, *, slots: Tensor | None = None) -> None:
        """Record the tokens sampled in a step, int64 [M] in result order. Collective over cp.

        Args:
            slots: of the tokens, int64 [M] on the device, if they are there already; with cp=1.
        """
        if slots is not None:
            self.tokens[slots, 0] = tokens
            return
        of_rank = sampled_slots(plan, cp_size=self._ctx.cp.size)
        longest = max(map(len, of_rank))
        if not longest:
            return
        if self._ctx.cp.size > 1:
            parts = gather_padded(tokens, longest, self._ctx)
            tokens = torch.cat([part[: len(mine)] for part, mine in zip(parts, of_rank, strict=True)])
        self.tokens[self._on_device([slot for mine in of_rank for slot in mine]), 0] = tokens

    def keep_drafts(self, places: Sequence[tuple[int, int]], tokens: Tensor) -> None:
        """Record draft tokens, int64 [len(places)].

        Args:
            places: (slot, number from 0) of each.
        """
        slots, columns = zip(*((slot, 1 + number) for slot, number in places), strict=True)
        self.tokens[self._on_device(slots), self._on_device(columns)] = tokens

    def _on_device(self, numbers: Sequence[int]) -> Tensor:
        return self._ctx.on_device(np.array(numbers, np.int64))


def sampled_slots(plan: StepPlan, *, cp_size: int) -> list[list[int]]:
    """Slots of the tokens that each cp rank samples, in result order; a row with draft tokens samples several."""
    return [
        [plan.rows[i].slot for i, positions in of_rank for _ in range(_num_sampled(plan.rows[i], positions))]
        for of_rank in emissions(plan, cp_size=cp_size)
    ]


def _num_sampled(row: Row, positions: range) -> int:
    """How many of a row's positions emitted by one rank are sampled, not scored."""
    return len(positions) if row.output_position >= 0 and positions.start >= row.first_sampled else 0
