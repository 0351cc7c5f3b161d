"""What layers share during a step: attention, the cache, and the positions of the tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from raycache.layers.rope import Rotary, Rotation

if TYPE_CHECKING:
    from raycache.attention.base import AttentionStep, Selection
    from raycache.layers.cp_split import CpSplit
    from raycache.memory.views import IndexView, KVView, LatentView, StateView


class LayerViews(Protocol):
    """Views of the cache, by layer; see DevicePool."""

    def kv(self, layer: int, /) -> KVView: ...

    def latent(self, layer: int, /) -> LatentView: ...

    def index(self, layer: int, /) -> IndexView: ...

    def state(self, layer: int, /) -> StateView: ...


class ForwardPass:
    """One step through the layers of a stage.

    Attributes:
        step: the step's attention.
        pool: views of the cache, by layer.
        positions: int64 [T_local], positions of this rank's new tokens in their sequences.
        records: layers whose inputs are recorded for a draft model.
        recorded: those inputs, [T_local, C] each.
        wanted: int64 [K], indices of the tokens whose hidden states are used behind the layers; None for all of them,
            which `records` need.
        selection: tokens that the last indexer has selected, for layers that share them.
    """

    def __init__(
        self,
        step: AttentionStep,
        pool: LayerViews,
        positions: Tensor,
        records: Collection[int] = (),
        *,
        wanted: Tensor | None = None,
    ) -> None:
        assert wanted is None or not records, "a draft model takes features of all tokens"
        self.records = records
        self.wanted = wanted
        self.recorded: list[Tensor] = []
        self.step = step
        self.pool = pool
        self.positions = positions
        self.selection: Selection | None = None
        self._rotations: dict[tuple[Rotary, torch.dtype], Rotation] = {}

    def rotation(self, rotary: Rotary, dtype: torch.dtype) -> Rotation:
        """Rotation of the new tokens, computed once for all layers that share `rotary`."""
        key = (rotary, dtype)
        if key not in self._rotations:
            self._rotations[key] = rotary(self.positions, dtype)
        return self._rotations[key]


class Mixer(Protocol):
    """Attention, feed-forward block or the like, between two residual additions."""

    @property
    def is_position_wise(self) -> bool:
        """Whether the result of a token depends on its own input only, and the cache is not used."""
        ...

    def __call__(self, x: Tensor, run: ForwardPass, /) -> Tensor:
        """[T_local, C] -> new [T_local, C]."""
        ...

    def over_cp(self, split: CpSplit) -> Mixer:
        """The same for decode steps, with its weights split over cp; raises NotSplitError."""
        ...
