"""Feed-forward blocks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from raycache.layers.linear import ColumnLinear, RowLinear


class GatedMLP:
    """down(silu(gate(x)) * up(x)) ("GLU Variants Improve Transformer", arXiv 2002.05202).

    Args:
        gate_up: both matrices stacked, gate first, so that they are one product.
        down: back to the hidden size, summed over tp.
    """

    def __init__(self, gate_up: ColumnLinear, down: RowLinear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] -> new [T, C]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate, inplace=True).mul_(up))
