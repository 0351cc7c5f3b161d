"""Kimi delta attention (KDA): a gated delta net with a decay per key feature (arXiv 2510.26692)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.attention.delta_rule import DeltaRule
from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
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
        norm: applies the output gate.
        shape: H and D.
    """

    is_position_wise = False

    def __init__(
        self,
        layer: int,
        project: KdaProjection,
        out: RowLinear,
        *,
        weights: DeltaRule,
        norm: GatedHeadNorm,
        shape: tuple[int, int],
    ) -> None:
        self._layer = layer
        self._project = project
        self._out = out
        self._weights = weights
        self._norm = norm
        self._shape = shape

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T_local, C] -> new [T_local, C]."""
        *parts, beta, gate = self._project(x)
        q, k, v, decay, beta = run.step.exchange.to_heads(
            *(part.unflatten(1, self._shape) for part in parts), beta[..., None]
        )
        out = run.step.recurrent.delta_rule(
            run.pool.state(self._layer), self._weights, q=q, k=k, v=v, decay=decay, beta=beta[..., 0]
        )
        out = run.step.exchange.to_tokens(out)
        return self._out(self._norm(out, gate.unflatten(1, self._shape)).flatten(1))

    def over_cp(self, split: CpSplit) -> KimiDeltaAttention:
        """The same with the weights of its projections split over cp, as its states are."""
        own = copy(self)
        own._project, own._out = self._project.over_cp(split), self._out.over_cp(split, is_input_split=False)
        return own


class KdaProjection:
    """Projection to queries, keys, values, decay before its gate, beta before its sigmoid, and output gate.

    Low-rank projections are products of two matrices. Matrices that take the input are one product where possible.

    Args:
        inputs: projections of the input, each with the numbers of features that it is split into: together q, k, v,
            beta, and those of the decay and the gate, or the low-rank ones that `decay` and `gate` take.
        decay, gate: second matrices [H D, R], or None.
    """

    def __init__(
        self,
        inputs: Sequence[tuple[ColumnLinear, Sequence[int]]],
        *,
        decay: ColumnLinear | None,
        gate: ColumnLinear | None,
    ) -> None:
        self._inputs = _stacked(inputs)
        self._decay = decay
        self._gate = gate

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """[T, C] -> q, k, v and decay [T, H D], beta [T, H], gate [T, H D]."""
        parts = (part for linear, sizes in self._inputs for part in linear(x).split(list(sizes), dim=1))
        q, k, v, beta, decay, gate = parts
        decay = decay if self._decay is None else self._decay(decay)
        return q, k, v, decay, beta, gate if self._gate is None else self._gate(gate)

    def over_cp(self, split: CpSplit) -> KdaProjection:
        """Each cp rank computes its run of the features of each product."""
        inputs = [(linear.over_cp(split), sizes) for linear, sizes in self._inputs]
        own = copy(self)
        own._inputs = inputs
        own._decay, own._gate = (None if up is None else up.over_cp(split) for up in (self._decay, self._gate))
        return own


def _stacked(inputs: Sequence[tuple[ColumnLinear, Sequence[int]]]) -> Sequence[tuple[ColumnLinear, Sequence[int]]]:
    """The same with all weights in one tensor, unless one of them is quantised."""
    weights = [linear.weight for linear, _ in inputs if isinstance(linear.weight, Tensor)]
    if len(weights) < len(inputs):
        return inputs
    return [(ColumnLinear(torch.cat(weights), None), [size for _, sizes in inputs for size in sizes])]


def load_kda(
    kda: KdaConfig, weights: ShardedWeights, *, layer: int, size: int, eps: float, out: str = "o_proj"
) -> KimiDeltaAttention:
    """Read this rank's heads; `size` is C, `out` the name of the output projection."""
    heads = weights.heads(kda.num_heads)
    taken = features(heads, kda.head_dim)
    norm = weights.whole("o_norm.weight", kda.head_dim, dtype=weights.precise)
    return KimiDeltaAttention(
        layer,
        _load_projection(kda, weights, heads, taken, size=size),
        weights.row(out, outputs=size, inputs=kda.inner, taken=taken, has_bias=False),
        weights=_load_rule(kda, weights),
        norm=GatedHeadNorm(norm, eps, activation="sigmoid"),
        shape=(len(heads), kda.head_dim),
    )


def _load_projection(
    kda: KdaConfig, weights: ShardedWeights, heads: range, taken: range, *, size: int
) -> KdaProjection:
    parts = [*(Columns(name, kda.inner, taken) for name in ("q_proj", "k_proj", "v_proj"))]
    parts.append(Columns("b_proj", kda.num_heads, heads))
    linear = weights.column(parts, inputs=size, has_bias=False)
    inputs, ups = [(linear, [len(part.taken) for part in parts])], {}
    for kind in "fg":
        if kind in kda.low_rank:
            linear = ColumnLinear(weights.whole(f"{kind}_a_proj.weight", kda.head_dim, size), None)
            up = [Columns(f"{kind}_b_proj", kda.inner, taken)]
            ups[kind] = weights.column(up, inputs=kda.head_dim, has_bias=False)
        else:
            linear = weights.column([Columns(f"{kind}_proj", kda.inner, taken)], inputs=size, has_bias=False)
        inputs.append((linear, [linear.weight.shape[0]]))
    return KdaProjection(inputs, decay=ups.get("f"), gate=ups.get("g"))


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
