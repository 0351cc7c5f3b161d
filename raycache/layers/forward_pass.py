"""What a layer gets besides its input: the step's attention, the rows of the cache, and where its tokens stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.layers.rope import Rotary, Rotation

if TYPE_CHECKING:
    from raycache.attention.base import AttentionStep, Selection
    from raycache.memory.device import DevicePool


class ForwardPass:
    """One step through the layers of a stage.

    Attributes:
        step: attention.
        pool: views of the layers' rows.
        positions: int64 [T_local], of this rank's new tokens in their sequences.
        selections: layer -> what its indexer chose in this pass, for the layers that share it.
    """

    def __init__(self, step: AttentionStep, pool: DevicePool, positions: Tensor) -> None:
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
