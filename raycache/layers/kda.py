"""Kimi delta attention (KDA): a gated delta net with a decay per key feature (arXiv 2510.26692)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from raycache.attention.delta_rule import DeltaRule
from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, Projection, RowLinear
from raycache.layers.norm import GatedHeadNorm
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component, recurrent

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit

# Shapes in this file: T_local new tokens of this rank, T of all cp ranks, C hidden size, H heads of this tp rank, D
# features of a head, K taps.


@dataclass(frozen=True)
class KdaConfig:
    """The Kimi delta attention of a model's layers.

    Attributes:
        num_heads, head_dim: H of the whole model, and D.
        kernel: K.
        bound: smallest log decay, or None.
        low_rank: which projections are products of two matrices: "f" of the forget gate, "g" of the output gate.
        rate_shape: shape of A_log; () for [H].
        rate_axis: axis of A_log with at least H entries, of which the first H are used.
    """

    num_heads: int
    head_dim: int
    kernel: int
    bound: float | None = None
    low_rank: str = ""
    rate_shape: tuple[int, ...] = ()
    rate_axis: int = 0

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_dim

    def components(self, layers: Sequence[int], fmt: CacheFormat) -> tuple[Component, ...]:
        """Recurrent states of `layers`, and the last inputs of their three convolutions."""
        if not layers:
            return ()
        per_head = (self.num_heads, self.head_dim)
        states = recurrent(
            layers,
            heads=self.num_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            fmt=fmt,
            conv=[("q", *per_head), ("k", *per_head), ("v", *per_head)],
            conv_kernel=self.kernel,
        )
        return (states,)


def require_kda(file: ConfigFile, kda: KdaConfig) -> KdaConfig:
    """Return `kda` if its values are valid.

    Raises:
        CheckpointError: the convolution has one tap, or the bound is not negative.
    """
    if kda.kernel < 2:
        raise CheckpointError(f"{file.path}: a convolution with {kda.kernel} tap is not supported; use 2 or more")
    if kda.bound is not None and not kda.bound < 0:
        raise CheckpointError(f"{file.path}: kda_lower_bound={kda.bound} must be below zero")
    return kda


class KimiDeltaAttention:
    """Projections and norm on this rank's tokens; convolutions, gates and the scan on its share of the heads.

    Args:
        layer: index in the whole model.
        inputs: projection to queries, keys, values and beta before its sigmoid: 3 H D + H features.
        decay: projection to the decay before its gate, H D features.
        gate: projection to the output gate, H D features, which `norm` applies.
        shape: H and D.
    """

    def __init__(
        self,
        layer: int,
        inputs: ColumnLinear,
        out: RowLinear,
        *,
        decay: Projection,
        gate: Projection,
        weights: DeltaRule,
        norm: GatedHeadNorm,
        shape: tuple[int, int],
    ) -> None:
        self._layer = layer
        self._inputs = inputs
        self._out = out
        self._decay = decay
        self._gate = gate
        self._weights = weights
        self._norm = norm
        self._shape = shape
        inner = shape[0] * shape[1]
        self._sizes = (inner, inner, inner, shape[0])

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T_local, C] -> new [T_local, C]."""
        *qkv, beta = self._inputs(x).split(self._sizes, dim=-1)
        q, k, v, decay, beta = run.step.exchange.to_heads(
            *(part.unflatten(1, self._shape) for part in (*qkv, self._decay(x))), beta[..., None]
        )
        out = run.step.recurrent.delta_rule(
            run.pool.state(self._layer), self._weights, q=q, k=k, v=v, decay=decay, beta=beta[..., 0]
        )
        out = run.step.exchange.to_tokens(out)
        return self._out(self._norm(out, self._gate(x).unflatten(1, self._shape)).flatten(1))

    def over_cp(self, split: CpSplit) -> KimiDeltaAttention:
        """The same with the weights of its projections split over cp, as its states are."""
        own = copy(self)
        own._inputs, own._out = self._inputs.over_cp(split), self._out.over_cp(split, is_input_split=False)
        own._decay, own._gate = self._decay.over_cp(split), self._gate.over_cp(split)
        return own


class LowRank:
    """Low-rank projection up(down x); `down` is [R, C], whole on every rank."""

    def __init__(self, down: Tensor, up: ColumnLinear) -> None:
        self._down = down
        self._up = up

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] -> [T, O / tp]."""
        return self._up(F.linear(x, self._down))

    def over_cp(self, split: CpSplit) -> LowRank:
        """Each cp rank computes all of the low-rank features: they are few."""
        return LowRank(self._down, self._up.over_cp(split))


def load_kda(
    kda: KdaConfig, weights: ShardedWeights, *, layer: int, size: int, eps: float, out: str = "o_proj"
) -> KimiDeltaAttention:
    """Read this rank's heads; `size` is C, `out` the name of the output projection."""
    heads = weights.heads(kda.num_heads)
    taken = features(heads, kda.head_dim)
    inputs = [*(Columns(name, kda.inner, taken) for name in ("q_proj", "k_proj", "v_proj"))]
    inputs.append(Columns("b_proj", kda.num_heads, heads))
    norm = weights.whole("o_norm.weight", kda.head_dim, dtype=weights.precise)
    return KimiDeltaAttention(
        layer,
        weights.column(inputs, inputs=size, has_bias=False),
        weights.row(out, outputs=size, inputs=kda.inner, taken=taken, has_bias=False),
        decay=_load_projection("f", kda, weights, taken, size=size),
        gate=_load_projection("g", kda, weights, taken, size=size),
        weights=_load_rule(kda, weights),
        norm=GatedHeadNorm(norm, eps, activation="sigmoid"),
        shape=(len(heads), kda.head_dim),
    )


def _load_projection(kind: str, kda: KdaConfig, weights: ShardedWeights, taken: range, *, size: int) -> Projection:
    if kind not in kda.low_rank:
        return weights.column([Columns(f"{kind}_proj", kda.inner, taken)], inputs=size, has_bias=False)
    up = [Columns(f"{kind}_b_proj", kda.inner, taken)]
    return LowRank(
        weights.whole(f"{kind}_a_proj.weight", kda.head_dim, size),
        weights.column(up, inputs=kda.head_dim, has_bias=False),
    )


def _load_rule(kda: KdaConfig, weights: ShardedWeights) -> DeltaRule:
    """Read the weights of this rank's recurrent heads."""
    heads = weights.heads(kda.num_heads, over_cp=True)
    shape, taken = (kda.inner, 1, kda.kernel), features(heads, kda.head_dim)

    def taps(kind: str) -> Tensor:
        rows = weights.cut(f"{kind}_conv1d.weight", shape, axis=0, taken=taken, dtype=weights.precise)
        return rows.view(-1, kda.head_dim, kda.kernel)

    rate_shape = kda.rate_shape or (kda.num_heads,)
    a_log = weights.cut("A_log", rate_shape, axis=kda.rate_axis, taken=heads, dtype=weights.precise)
    dt_bias = weights.cut("dt_bias", (kda.inner,), axis=0, taken=taken, dtype=weights.precise)
    return DeltaRule(
        taps("q"),
        taps("k"),
        taps("v"),
        rate=a_log.exp().view(-1, 1),
        dt_bias=dt_bias.view(-1, kda.head_dim),
        bound=kda.bound,
    )
