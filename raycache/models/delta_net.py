"""Reading gated delta nets: their sizes, what they keep, how they are split, and their tensors.

One layer, two ways to pack its projections; a rank stacks what it takes as queries, keys, values, gates, b, a:

    qwen3_next    in_proj_qkvz  [ q k v..v z..z | q k v..v z..z | ... ]   per key head, with its value heads
                  in_proj_ba    [ b..b a..a | b..b a..a | ... ]
    qwen3_5       in_proj_qkv   [ all q | all k | all v ],  in_proj_z,  in_proj_b,  in_proj_a
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.layers.delta_rule import DeltaRule, GatedHeadNorm
from raycache.layers.gated_delta_net import GatedDeltaNet
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component, recurrent
from raycache.parallel.sharding import HeadCount, even_range, shared_head_range, state_part

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

# Shapes in this file: Hk key heads of Dk features, Hv value heads of Dv, K taps; of the whole model.


@dataclass(frozen=True)
class DeltaNetConfig:
    """The gated delta nets of a model.

    Attributes:
        key_heads, key_dim: Hk and Dk.
        value_heads, value_dim: Hv and Dv; value head h belongs to key head h // (Hv / Hk).
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
        """Value heads of a key head."""
        return self.value_heads // self.key_heads


Packing = Callable[[str, DeltaNetConfig, range, range], Sequence[Columns]]
"""(where, sizes, key heads, value heads) -> the rows of their queries, keys, values, gates, b and a, in this order."""


def read_delta_net(file: ConfigFile) -> DeltaNetConfig:
    """Read the `linear_*` keys.

    Raises:
        CheckpointError: a key is missing, has a wrong value, or does not go with the others.
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
        raise CheckpointError(f"{file.path}: linear_conv_kernel_dim={net.kernel} is not supported; at least 2 is")
    return net


def delta_net_component(net: DeltaNetConfig, layers: Sequence[int], fmt: CacheFormat) -> Component:
    """What `layers` carry on: the state, and the last inputs of the convolutions of q, k and v."""
    of_keys = (net.key_heads, net.key_dim)
    return recurrent(
        layers,
        heads=net.value_heads,
        key_dim=net.key_dim,
        value_dim=net.value_dim,
        fmt=fmt,
        conv=[("q", *of_keys), ("k", *of_keys), ("v", net.value_heads, net.value_dim)],
        conv_kernel=net.kernel,
    )


def delta_net_head_counts(net: DeltaNetConfig) -> tuple[HeadCount, ...]:
    """What tp x cp divides. Key heads are shared like KV heads, over tp and over tp x cp."""
    return (
        HeadCount("linear_num_value_heads", net.value_heads, over_cp=True),
        HeadCount("linear_num_key_heads", net.key_heads, is_shared=True),
        HeadCount("linear_num_key_heads", net.key_heads, is_shared=True, over_cp=True),
    )


def load_delta_net(
    layer: int,
    at: str,
    net: DeltaNetConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    size: int,
    eps: float,
    packing: Packing,
) -> GatedDeltaNet:
    """Read the layer whose tensors begin with `at`; `size` is the hidden size, `eps` of its norm."""
    keys = shared_head_range(net.key_heads, ctx.tp.rank, ctx.tp.size)
    values = even_range(net.value_heads, ctx.tp.rank, ctx.tp.size)

    def per_head(name: str) -> Tensor:
        return weights.cut(f"{at}.{name}", (net.value_heads,), axis=0, taken=values, dtype=weights.precise)

    norm = weights.whole(f"{at}.norm.weight", net.value_dim, dtype=weights.precise)
    return GatedDeltaNet(
        weights.column(packing(at, net, keys, values), inputs=size, has_bias=False),
        weights.row(
            f"{at}.out_proj", outputs=size, inputs=net.values, taken=features(values, net.value_dim), has_bias=False
        ),
        rule=DeltaRule(layer, _load_taps(f"{at}.conv1d.weight", net, weights, ctx)),
        norm=GatedHeadNorm(norm, eps, activation=F.silu),
        rate=per_head("A_log").exp(),
        dt_bias=per_head("dt_bias"),
        key_shape=(len(keys), net.key_dim),
        value_shape=(len(values), net.value_dim),
    )


def packed_per_key_head(at: str, net: DeltaNetConfig, keys: range, values: range) -> list[Columns]:
    """The rows of qwen3_next."""
    of_values = net.group * net.value_dim
    stride = 2 * net.key_dim + 2 * of_values
    qkvz, ba = (f"{at}.in_proj_qkvz", net.key_heads * stride), (f"{at}.in_proj_ba", 2 * net.value_heads)

    def rows(name: str, size: int, start: int, length: int) -> Columns:
        return Columns(name, size, range(start, start + length))

    starts = [head * stride for head in keys]
    groups = [divmod(head, net.group) for head in values]  # (key head, number among its value heads)
    first_v, first_z = 2 * net.key_dim, 2 * net.key_dim + of_values
    return [
        *(rows(*qkvz, start, net.key_dim) for start in starts),
        *(rows(*qkvz, start + net.key_dim, net.key_dim) for start in starts),
        *(rows(*qkvz, key * stride + first_v + i * net.value_dim, net.value_dim) for key, i in groups),
        *(rows(*qkvz, key * stride + first_z + i * net.value_dim, net.value_dim) for key, i in groups),
        *(rows(*ba, 2 * key * net.group + i, 1) for key, i in groups),
        *(rows(*ba, (2 * key + 1) * net.group + i, 1) for key, i in groups),
    ]


def packed_by_kind(at: str, net: DeltaNetConfig, keys: range, values: range) -> list[Columns]:
    """The rows of qwen3_5."""
    of_values = features(values, net.value_dim)
    qkv = (f"{at}.in_proj_qkv", 2 * net.keys + net.values)
    return [
        *(Columns(*qkv, run) for run in _conv_runs(net, keys, values).values()),
        Columns(f"{at}.in_proj_z", net.values, of_values),
        Columns(f"{at}.in_proj_b", net.value_heads, values),
        Columns(f"{at}.in_proj_a", net.value_heads, values),
    ]


def _conv_runs(net: DeltaNetConfig, keys: range, values: range) -> Mapping[str, range]:
    """Channels of the convolution: queries of all heads, then keys, then values."""
    of_keys, of_values = features(keys, net.key_dim), features(values, net.value_dim)
    return {
        "q": of_keys,
        "k": range(net.keys + of_keys.start, net.keys + of_keys.stop),
        "v": range(2 * net.keys + of_values.start, 2 * net.keys + of_values.stop),
    }


def _load_taps(name: str, net: DeltaNetConfig, weights: ShardedWeights, ctx: ParallelContext) -> dict[str, Tensor]:
    """[H, D, K] of q, k and v, for this rank's recurrent heads."""
    part = state_part(ctx.split, ctx.coords)
    keys, values = shared_head_range(net.key_heads, *part), even_range(net.value_heads, *part)
    shape = (2 * net.keys + net.values, 1, net.kernel)
    dims = {"q": net.key_dim, "k": net.key_dim, "v": net.value_dim}
    return {
        kind: weights.cut(name, shape, axis=0, taken=run, dtype=weights.precise).view(-1, dims[kind], net.kernel)
        for kind, run in _conv_runs(net, keys, values).items()
    }
