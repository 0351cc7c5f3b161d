"""Lightning attention: linear attention with a fixed decay per head (arXiv 2401.04658)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.layers import fused
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.norm import HeadNorm
from raycache.layers.precision import precise
from raycache.layers.rope import Rotary
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component, recurrent
from raycache.parallel.collectives import Group

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit

# Shapes in this file: T_local new tokens of this rank, T of all cp ranks, C hidden size, H heads of this tp rank, D
# features of a head.


ACTIVATED_NORM_EPS = 1e-6
"""Epsilon of the output norm in MiniMax's layers, independent of `rms_norm_eps`."""


@dataclass(frozen=True)
class LightningConfig:
    """The lightning attention of a model's layers.

    Attributes:
        num_heads, head_dim: H of the whole model, and D.
        num_layers: of the whole model; decay rates depend on it.
        num_groups: groups of the output norm; above 1 only in models with rotary embedding.
    """

    num_heads: int
    head_dim: int
    num_layers: int
    num_groups: int = 1

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_dim

    def components(self, layers: Sequence[int], fmt: CacheFormat) -> tuple[Component, ...]:
        """States of `layers`."""
        dim = self.head_dim
        return (recurrent(layers, heads=self.num_heads, key_dim=dim, value_dim=dim, fmt=fmt),) if layers else ()


def slope_rates(layer: int, *, num_layers: int, num_heads: int) -> Tensor:
    """Decay rate of each head, [num_heads] float32: log decay per token, negated.

    The rates of ALiBi (arXiv 2108.12409), smaller in later layers ("TransNormerLLM", arXiv 2307.14995). All arguments
    refer to the whole model.
    """
    base = 1 / 2 ** (8 / num_heads)
    rates: Tensor = base ** torch.arange(1, num_heads + 1)
    return rates * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)


def alibi_rates(num_heads: int) -> Tensor:
    """Slopes of ALiBi for any number of heads, [num_heads] float64.

    Heads beyond the largest power of two have every second slope of the next power of two.
    """
    power = 1 << (num_heads.bit_length() - 1)
    first = torch.arange(1, power + 1, dtype=torch.float64)
    between = torch.arange(num_heads - power, dtype=torch.float64) + 0.5
    return (-8 / power * torch.cat((first, between))).exp2()


class LightningAttention:
    """Projections on this rank's tokens, the scan on its share of the heads, a norm, an output gate.

    Args:
        layer: index in the whole model.
        inputs: projection to queries, keys and values, in the order that `heads` expects, then the output gate: 4 H D
            features.
        norm: (scan's output, output gate) -> gated and normalised.
        slopes: [H / cp], decay rates of this rank's recurrent heads, at least float32.
    """

    is_position_wise = False

    def __init__(
        self,
        layer: int,
        inputs: ColumnLinear,
        out: RowLinear,
        *,
        heads: Heads,
        norm: Callable[[Tensor, Tensor], Tensor],
        slopes: Tensor,
    ) -> None:
        self._layer = layer
        self._inputs = inputs
        self._out = out
        self._heads = heads
        self._norm = norm
        self._log_decay = -slopes[None, :, None]
        inner = inputs.weight.shape[0] // 4
        self._sizes = (3 * inner, inner)

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T_local, C] -> new [T_local, C]."""
        qkv, gate = self._inputs(x).split(self._sizes, dim=-1)
        q, k, v = run.step.exchange.to_heads(*self._heads(qkv, run).unbind(2))
        g = self._log_decay.expand(q.shape[0], -1, -1)
        out = run.step.recurrent.scan(run.pool.state(self._layer), q, k, v, g, None)
        return self._out(self._norm(run.step.exchange.to_tokens(out).flatten(1), gate))

    def over_cp(self, split: CpSplit) -> LightningAttention:
        """The same with the weights of its projections split over cp, as its states are."""
        own = copy(self)
        own._inputs, own._out = self._inputs.over_cp(split), self._out.over_cp(split, is_input_split=False)
        return own


Heads = Callable[[Tensor, ForwardPass], Tensor]
"""Queries, keys and values [T_local, 3 H D] -> [T_local, H, 3, D], by head, since cp ranks exchange heads.

May overwrite its argument."""


class ActivatedHeads:
    """silu of queries, keys and values, which are stored by head (MiniMax)."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        self._shape = (num_heads, 3, head_dim)

    def __call__(self, qkv: Tensor, run: ForwardPass) -> Tensor:
        heads: Tensor = F.silu(qkv).unflatten(1, self._shape)
        return heads


class RotatedHeads:
    """Norm and rotation of queries and keys; all queries are stored first, then all keys, then all values (Ling 2.5).

    Args:
        norm: of query and key heads, 2 H of them.
        rotary: rotates the first features of each head.
    """

    def __init__(self, norm: HeadNorm, rotary: Rotary, *, num_heads: int, head_dim: int) -> None:
        self._norm = norm
        self._rotary = rotary
        self._num_heads, self._head_dim = num_heads, head_dim

    def __call__(self, qkv: Tensor, run: ForwardPass) -> Tensor:
        rows = qkv.unflatten(1, (3 * self._num_heads, self._head_dim))
        qk = rows[:, : 2 * self._num_heads]
        run.rotation(self._rotary, qk.dtype)(qk, norm=self._norm, out=qk)
        heads: Tensor = rows.unflatten(1, (3, self._num_heads)).transpose(1, 2)
        return heads


class GroupNorm:
    """RMSNorm of each group of features, times sigmoid(gate): [T, N] -> new [T, N]. Groups are not split over ranks.

    Args:
        weight: [N].
        num_groups: groups of the N features.
    """

    def __init__(self, weight: Tensor, num_groups: int, eps: float) -> None:
        self._weight = weight
        self._shape = (num_groups, len(weight) // num_groups)
        self._eps = eps

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Compute in at least float32."""
        x, gate = x.unflatten(1, self._shape), gate.unflatten(1, self._shape)
        return fused.gated_norm(x, gate, self._weight, self._eps, activation="sigmoid").flatten(1)


class SplitNorm:
    """RMSNorm over features that are split over tp, times sigmoid(gate): [T, N / tp] -> new [T, N / tp].

    Args:
        weight: [N / tp].
        size: N.
        group: the tp group.
    """

    def __init__(self, weight: Tensor, size: int, eps: float, group: Group) -> None:
        self._weight = weight
        self._size = size
        self._eps = eps
        self._group = group
        self._whole = GroupNorm(weight, 1, eps)

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Compute in at least float32."""
        if self._group.size == 1:
            return self._whole(x, gate)
        numbers = precise(x)
        squares = self._group.all_reduce(numbers.square().sum(-1, keepdim=True))
        normed = numbers * torch.rsqrt(squares / self._size + self._eps) * self._weight
        return normed.mul_(precise(gate).sigmoid()).to(x.dtype)


def load_activated_lightning(
    config: LightningConfig, weights: ShardedWeights, *, layer: int, size: int
) -> LightningAttention:
    """Read this rank's heads of a MiniMax layer; `size` is C."""
    heads, own = weights.heads(config.num_heads), weights.heads(config.num_heads, over_cp=True)
    taken = features(heads, config.head_dim)
    parts = (
        Columns("qkv_proj", 3 * config.inner, features(heads, 3 * config.head_dim)),
        Columns("output_gate", config.inner, taken),
    )
    slopes = slope_rates(layer, num_layers=config.num_layers, num_heads=config.num_heads)[own.start : own.stop]
    norm = weights.cut("norm.weight", (config.inner,), axis=0, taken=taken)
    return LightningAttention(
        layer,
        weights.column(parts, inputs=size, has_bias=False),
        weights.row("out_proj", outputs=size, inputs=config.inner, taken=taken, has_bias=False),
        heads=ActivatedHeads(len(heads), config.head_dim),
        norm=SplitNorm(norm, config.inner, ACTIVATED_NORM_EPS, weights.ctx.tp),
        slopes=slopes.to(weights.ctx.device),
    )


def load_rotated_lightning(
    config: LightningConfig, weights: ShardedWeights, *, layer: int, size: int, eps: float, rotary: Rotary
) -> LightningAttention:
    """Read this rank's heads of a Ling 2.5 layer; `size` is C."""
    inner, heads = config.inner, weights.heads(config.num_heads)
    taken = features(heads, config.head_dim)
    shifts = (range(start + taken.start, start + taken.stop) for start in (0, inner, 2 * inner))
    parts = [*(Columns("query_key_value", 3 * inner, run) for run in shifts), Columns("g_proj", inner, taken)]
    return LightningAttention(
        layer,
        weights.column(parts, inputs=size, has_bias=False),
        weights.row("dense", outputs=size, inputs=inner, taken=taken, has_bias=False),
        heads=RotatedHeads(
            HeadNorm(_load_qk_weight(config, weights, num_heads=len(heads)), eps),
            rotary,
            num_heads=len(heads),
            head_dim=config.head_dim,
        ),
        norm=_load_norm(config, weights, taken, eps=eps),
        slopes=_load_slopes(config, weights, layer=layer),
    )


def _load_qk_weight(config: LightningConfig, weights: ShardedWeights, *, num_heads: int) -> Tensor:
    """Norm weights of query and key heads, [2 H, D]; those of queries include the scale D ** -0.5."""
    dim = config.head_dim
    query, key = (weights.whole(f"{kind}_layernorm.weight", dim, dtype=weights.precise) for kind in ("query", "key"))
    return torch.cat(((query * dim**-0.5).expand(num_heads, dim), key.expand(num_heads, dim)))


def _load_norm(config: LightningConfig, weights: ShardedWeights, taken: range, *, eps: float) -> GroupNorm | SplitNorm:
    weight, tp = weights.cut("g_norm.weight", (config.inner,), axis=0, taken=taken), weights.ctx.tp
    if config.num_groups == 1:
        return SplitNorm(weight, config.inner, eps, tp)
    return GroupNorm(weight, config.num_groups // tp.size, eps)


def _load_slopes(config: LightningConfig, weights: ShardedWeights, *, layer: int) -> Tensor:
    """Decay rates, [H / (tp cp)]: those of the checkpoint, of either sign; if it has none, ALiBi's slopes, smaller in
    later layers."""
    own = weights.heads(config.num_heads, over_cp=True)
    if weights.has("slope"):
        return weights.cut("slope", (config.num_heads,), axis=0, taken=own, dtype=weights.precise).abs()
    share = 1 - layer / max(config.num_layers - 1, 1) + 1e-5
    return (alibi_rates(config.num_heads) * share)[own.start : own.stop].to(weights.ctx.device, weights.precise)
