"""Gated delta net: linear attention with a delta rule and one decay per head (arXiv 2412.06464).

Families store the projections in two layouts; a rank reads its rows in the order queries, keys, values, gates, b, a:

    qwen3_next    in_proj_qkvz  [ q k v..v z..z | q k v..v z..z | ... ]   per key head, with its value heads
                  in_proj_ba    [ b..b a..a | b..b a..a | ... ]
    qwen3_5       in_proj_qkv   [ all q | all k | all v ],  in_proj_z,  in_proj_b,  in_proj_a
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from raycache.attention.delta_rule import DeltaRule
from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.norm import GatedHeadNorm
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component, recurrent
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit

# Shapes in this file: T_local new tokens of this rank, C hidden size, Hk key heads of Dk features and Hv value heads of
# Dv, of this tp rank (of the whole model in DeltaNetConfig), K taps. Value head h uses key head h // (Hv / Hk).


@dataclass(frozen=True)
class DeltaNetConfig:
    """The gated delta nets of a model.

    Attributes:
        key_heads, key_dim: Hk and Dk.
        value_heads, value_dim: Hv and Dv.
        kernel: K.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Features of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Features of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.key_heads

    def components(self, layers: Sequence[int], fmt: CacheFormat) -> tuple[Component, ...]:
        """Recurrent states of `layers`, and the last inputs of the convolutions of q, k and v."""
        if not layers:
            return ()
        of_keys = (self.key_heads, self.key_dim)
        states = recurrent(
            layers,
            heads=self.value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            fmt=fmt,
            conv=[("q", *of_keys), ("k", *of_keys), ("v", self.value_heads, self.value_dim)],
            conv_kernel=self.kernel,
        )
        return (states,)

    @property
    def head_counts(self) -> tuple[HeadCount, ...]:
        """Head counts to be split. Ranks share key heads like KV heads."""
        return (
            HeadCount("linear_num_value_heads", self.value_heads, over_cp=True),
            HeadCount("linear_num_key_heads", self.key_heads, is_shared=True),
            HeadCount("linear_num_key_heads", self.key_heads, is_shared=True, over_cp=True),
        )


Packing = Callable[[DeltaNetConfig, range, range], Sequence[Columns]]
"""(sizes, key heads, value heads) -> rows of their queries, keys, values, gates, b and a, in this order."""


def read_delta_net(file: ConfigFile) -> DeltaNetConfig:
    """Read the `linear_*` keys.

    Raises:
        CheckpointError: a key is missing, invalid, or contradicts another.
    """
    net = DeltaNetConfig(
        key_heads=file.integer("linear_num_key_heads"),
        key_dim=file.integer("linear_key_head_dim"),
        value_heads=file.integer("linear_num_value_heads"),
        value_dim=file.integer("linear_value_head_dim"),
        kernel=file.integer("linear_conv_kernel_dim"),
    )
    if net.value_heads % net.key_heads:
        raise CheckpointError(
            f"{file.path}: linear_num_key_heads={net.key_heads} does not divide linear_num_value_heads="
            f"{net.value_heads}"
        )
    if net.kernel < 2:
        raise CheckpointError(f"{file.path}: linear_conv_kernel_dim={net.kernel} is not supported; use 2 or more")
    return net


class GatedDeltaNet:
    """Projections and norm on this rank's tokens; convolutions, gates and the scan on its share of the heads.

    Args:
        layer: index in the whole model.
        inputs: projection to queries, keys, values, output gate, beta and decay: 2 Hk Dk + 2 Hv Dv + 2 Hv features.
        norm: applies the output gate.
        key_shape, value_shape: (Hk, Dk) and (Hv, Dv).
    """

    is_position_wise = False

    def __init__(
        self,
        layer: int,
        inputs: ColumnLinear,
        out: RowLinear,
        *,
        weights: DeltaRule,
        norm: GatedHeadNorm,
        key_shape: tuple[int, int],
        value_shape: tuple[int, int],
    ) -> None:
        self._layer = layer
        self._inputs = inputs
        self._out = out
        self._weights = weights
        self._norm = norm
        self._key_shape, self._value_shape = key_shape, value_shape
        keys, values = key_shape[0] * key_shape[1], value_shape[0] * value_shape[1]
        self._sizes = (keys, keys, values, values, value_shape[0], value_shape[0])

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T_local, C] -> new [T_local, C]."""
        q, k, v, gate, beta, decay = self._inputs(x).split(self._sizes, dim=-1)
        # Two exchanges: one per key head and one per value head, since ranks may share key heads.
        q, k = run.step.exchange.to_heads(q.unflatten(1, self._key_shape), k.unflatten(1, self._key_shape))
        v, decay, beta = run.step.exchange.to_heads(
            v.unflatten(1, self._value_shape), decay[..., None], beta[..., None]
        )
        out = run.step.recurrent.delta_rule(
            run.pool.state(self._layer), self._weights, q=q, k=k, v=v, decay=decay, beta=beta[..., 0]
        )
        out = run.step.exchange.to_tokens(out)
        return self._out(self._norm(out, gate.unflatten(1, self._value_shape)).flatten(1))

    def over_cp(self, split: CpSplit) -> GatedDeltaNet:
        """The same with the weights of its projections split over cp, as its states are."""
        own = copy(self)
        own._inputs, own._out = self._inputs.over_cp(split), self._out.over_cp(split, is_input_split=False)
        return own


def load_delta_net(
    net: DeltaNetConfig, weights: ShardedWeights, *, layer: int, size: int, eps: float, packing: Packing
) -> GatedDeltaNet:
    """Read this rank's heads; `size` is C."""
    keys, values = weights.heads(net.key_heads, is_shared=True), weights.heads(net.value_heads)
    norm = weights.whole("norm.weight", net.value_dim, dtype=weights.precise)
    return GatedDeltaNet(
        layer,
        weights.column(packing(net, keys, values), inputs=size, has_bias=False),
        weights.row("out_proj", outputs=size, inputs=net.values, taken=features(values, net.value_dim), has_bias=False),
        weights=_load_rule(net, weights),
        norm=GatedHeadNorm(norm, eps, activation="silu"),
        key_shape=(len(keys), net.key_dim),
        value_shape=(len(values), net.value_dim),
    )


def packed_per_key_head(net: DeltaNetConfig, keys: range, values: range) -> list[Columns]:
    """The layout of qwen3_next."""
    of_values = net.group * net.value_dim
    stride = 2 * net.key_dim + 2 * of_values
    qkvz, ba = ("in_proj_qkvz", net.key_heads * stride), ("in_proj_ba", 2 * net.value_heads)

    def rows(name: str, size: int, start: int, length: int) -> Columns:
        return Columns(name, size, range(start, start + length))

    starts = [head * stride for head in keys]
    groups = [divmod(head, net.group) for head in values]  # (key head, index among its value heads)
    first_v, first_z = 2 * net.key_dim, 2 * net.key_dim + of_values
    return [
        *(rows(*qkvz, start, net.key_dim) for start in starts),
        *(rows(*qkvz, start + net.key_dim, net.key_dim) for start in starts),
        *(rows(*qkvz, key * stride + first_v + i * net.value_dim, net.value_dim) for key, i in groups),
        *(rows(*qkvz, key * stride + first_z + i * net.value_dim, net.value_dim) for key, i in groups),
        *(rows(*ba, 2 * key * net.group + i, 1) for key, i in groups),
        *(rows(*ba, (2 * key + 1) * net.group + i, 1) for key, i in groups),
    ]


def packed_by_kind(net: DeltaNetConfig, keys: range, values: range) -> list[Columns]:
    """The layout of qwen3_5."""
    of_values = features(values, net.value_dim)
    qkv = ("in_proj_qkv", 2 * net.keys + net.values)
    return [
        *(Columns(*qkv, run) for run in _conv_runs(net, keys, values).values()),
        Columns("in_proj_z", net.values, of_values),
        Columns("in_proj_b", net.value_heads, values),
        Columns("in_proj_a", net.value_heads, values),
    ]


def _conv_runs(net: DeltaNetConfig, keys: range, values: range) -> Mapping[str, range]:
    """Channels of the convolution, which has all queries first, then all keys, then all values."""
    of_keys, of_values = features(keys, net.key_dim), features(values, net.value_dim)
    return {
        "q": of_keys,
        "k": range(net.keys + of_keys.start, net.keys + of_keys.stop),
        "v": range(2 * net.keys + of_values.start, 2 * net.keys + of_values.stop),
    }


def _load_rule(net: DeltaNetConfig, weights: ShardedWeights) -> DeltaRule:
    """Read the weights of this rank's recurrent heads."""
    keys = weights.heads(net.key_heads, is_shared=True, over_cp=True)
    values = weights.heads(net.value_heads, over_cp=True)
    shape = (2 * net.keys + net.values, 1, net.kernel)
    runs = _conv_runs(net, keys, values)

    def taps(kind: str, dim: int) -> Tensor:
        rows = weights.cut("conv1d.weight", shape, axis=0, taken=runs[kind], dtype=weights.precise)
        return rows.view(-1, dim, net.kernel)

    a_log, dt_bias = (
        weights.cut(name, (net.value_heads,), axis=0, taken=values, dtype=weights.precise)[:, None]
        for name in ("A_log", "dt_bias")
    )
    return DeltaRule(
        taps("q", net.key_dim),
        taps("k", net.key_dim),
        taps("v", net.value_dim),
        rate=a_log.exp(),
        dt_bias=dt_bias,
    )
