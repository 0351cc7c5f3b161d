"""What pipeline stages send to each other: the hidden states of a step's tokens, and those recorded for a draft model.

    [ hidden states | recorded at layer 2 | recorded at layer 5 ]      a row per token, in one message

Shapes in this file: T tokens of this rank, W width of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raycache.models.base import ModelConfig
from raycache.parallel.context import ParallelContext


def received_widths(config: ModelConfig, ctx: ParallelContext) -> tuple[int, ...]:
    """Widths of the parts of a row that a stage receives; none on the first stage."""
    if ctx.is_first_stage:
        return ()
    first = ctx.layers(config.num_layers).start
    records = () if config.draft is None else config.draft.recorded
    return (config.stream_width(first), *(config.hidden_size for layer in records if layer < first))


def split_rows(rows: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """The parts of received rows, [T, W] -> [T, width] each."""
    return [part.contiguous() for part in rows.split(tuple(widths), dim=1)]


class StageLink:
    """Connects a rank to its neighbours in the pipeline.

    Attributes:
        widths: see `received_widths`.
    """

    def __init__(self, config: ModelConfig, ctx: ParallelContext, dtype: torch.dtype) -> None:
        self.widths = received_widths(config, ctx)
        self._ctx, self._dtype = ctx, dtype
        self._unsent: Callable[[], None] = lambda: None

    def receive(self, num_tokens: int) -> Tensor | None:
        """What the stage before sends of a step with so many tokens on this rank, [T, W]; None on the first stage."""
        if self._ctx.is_first_stage:
            return None
        rows = torch.empty((num_tokens, sum(self.widths)), dtype=self._dtype, device=self._ctx.device)
        if num_tokens:
            self._ctx.pp.recv(rows, source=self._ctx.pp.rank - 1)
        return rows

    def send(self, parts: Sequence[Tensor]) -> None:
        """Send the parts of a step's rows to the next stage, [T, width] each; they may be overwritten after it."""
        if not len(parts[0]):
            return
        # One send may stay in flight, so that this stage starts its next step while the next stage is busy. It has a
        # copy: the next step overwrites the hidden states of a graph.
        self.settle()
        self._unsent = self._ctx.pp.isend(torch.cat(tuple(parts), dim=1), to=self._ctx.pp.rank + 1)

    def settle(self) -> None:
        """Wait until the next stage has what was sent to it."""
        self._unsent()
        self._unsent = lambda: None
