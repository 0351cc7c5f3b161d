"""What a layer gets besides its input: the step's attention, the rows of the cache, and where its tokens stand."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.layers.rope import Rotary, Rotation

if TYPE_CHECKING:
    from raycache.attention.base import AttentionStep, Selection
    from raycache.memory.device import DevicePool, DraftLayers


class ForwardPass:
    """One step through the layers of a stage.

    Attributes:
        step: attention.
        pool: views of the layers' rows.
        positions: int64 [T_local], of this rank's new tokens in their sequences.
        records: layers whose inputs are kept, for a draft model.
        recorded: those inputs, [T_local, C] each.
        selections: layer -> what its indexer chose in this pass, for the layers that share it.
    """

    def __init__(
        self, step: AttentionStep, pool: DevicePool | DraftLayers, positions: Tensor, records: Collection[int] = ()
    ) -> None:
        self.records = records
        self.recorded: list[Tensor] = []
        self.step = step
        self.pool = pool
        self.positions = positions
        self.selections: dict[int, Selection] = {}
        self._rotations: dict[tuple[Rotary, torch.dtype], Rotation] = {}

    def rotation(self, rotary: Rotary, dtype: torch.dtype) -> Rotation:
        """The turns of the new tokens; computed once for all layers that share `rotary`."""
        key = (rotary, dtype)
        if key not in self._rotations:
            self._rotations[key] = rotary(self.positions, dtype)
        return self._rotations[key]


Mixer = Callable[[Tensor, ForwardPass], Tensor]
"""A layer's part between two residual additions: [T_local, C] -> new [T_local, C]."""
