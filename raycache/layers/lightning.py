"""Lightning attention: linear attention whose heads forget at fixed rates (arXiv 2401.04658)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.precision import precise

if TYPE_CHECKING:
    from raycache.parallel.collectives import Group

# Shapes in this file: T_local new tokens of this rank, T of all cp ranks, C hidden size, H heads of this tp rank, D
# features of a head.


def slope_rates(layer: int, *, num_layers: int, num_heads: int) -> Tensor:
    """What each head's log decay falls by per token, [num_heads] float32.

    The rates of ALiBi (arXiv 2108.12409), smaller in later layers ("TransNormerLLM", arXiv 2307.14995).

    Args:
        layer: its number in the whole model.
        num_layers, num_heads: of the whole model.
    """
    base = 1 / 2 ** (8 / num_heads)
    rates: Tensor = base ** torch.arange(1, num_heads + 1)
    return rates * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)


class LightningAttention:
    """Projections on this rank's tokens, the scan on its share of the heads, a norm over all heads, an output gate.

    Args:
        layer: its number in the whole model.
        inputs: query, key and value of each head together, head after head, then the output gate: 4 H D features.
        out: back to the hidden size, summed over tp.
        norm: of the scan's output.
        slopes: [H / cp], rates of this rank's recurrent heads.
        num_heads, head_dim: H and D.
    """

    def __init__(
        self,
        layer: int,
        inputs: ColumnLinear,
        out: RowLinear,
        *,
        norm: SplitNorm,
        slopes: Tensor,
        num_heads: int,
        head_dim: int,
    ) -> None:
        self._layer = layer
        self._inputs = inputs
        self._out = out
        self._norm = norm
        self._log_decay = -slopes[None, :, None]
        self._shape = (num_heads, 3 * head_dim)
        self._sizes = (3 * num_heads * head_dim, num_heads * head_dim)

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T_local, C] -> new [T_local, C]."""
        qkv, gate = self._inputs(x).split(self._sizes, dim=-1)
        q, k, v = run.step.to_heads(F.silu(qkv).unflatten(1, self._shape)).chunk(3, dim=-1)
        g = self._log_decay.expand(q.shape[0], -1, -1)
        out = run.step.scan(run.pool.state(self._layer), q, k, v, g, None)
        return self._out(self._norm(run.step.to_tokens(out).flatten(1)) * gate.sigmoid())


class SplitNorm:
    """RMSNorm over features that are split over tp: [T, N / tp] -> new [T, N / tp].

    Args:
        weight: [N / tp].
        size: N.
        eps: keeps zeros finite.
        group: the tp group, which sums the squares.
    """

    def __init__(self, weight: Tensor, size: int, eps: float, group: Group) -> None:
        self._weight = weight
        self._size = size
        self._eps = eps
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        """The mean is taken in float32 at least."""
        numbers = precise(x)
        squares = self._group.all_reduce(numbers.square().sum(-1, keepdim=True))
        return (numbers * torch.rsqrt(squares / self._size + self._eps)).to(x.dtype) * self._weight
