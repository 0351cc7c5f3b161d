r"""Multi-head latent attention ("DeepSeek-V2", arXiv 2405.04434, section 2.1).

    x --- q_a --- norm --- q_b ------- queries of all heads: a plain part and a rotary part
     |              `--- indexer ----- selects the tokens to attend to, in sparse models
     |`-- kv_a --- norm -------------- latent \
     |     `----------- rope --------- rotary /  cached, shared by all heads
     `--- gate ----------------------- of the heads' outputs, in some models

Keys and values are computed from the cached latents during attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.attention.base import LatentProjection
from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.rope_config import RopeConfig
from raycache.errors import CheckpointError
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.indexer import Selector
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.norm import RMSNorm
from raycache.layers.precision import precise
from raycache.layers.rope import Rotary
from raycache.layers.weights import Columns, ShardedWeights, features, whole_columns
from raycache.memory.component import CacheFormat, Component, latent
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit

# Shapes in this file: T packed tokens of this rank, C hidden size, H heads of this tp rank, Q rank of queries, R of
# latents, Dn and Dr sizes of a head's plain and rotary part, Dv of its values.

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of latents and low-rank queries, the same in all models, independent of their rms_norm_eps."""


@dataclass(frozen=True)
class LatentConfig:
    """The latent attention of a model's layers.

    Attributes:
        query_rank: Q; 0 if queries are projected from the input directly.
        rank: R.
        plain_dim, rope_dim: Dn and Dr, features of a head without and with rotary embedding.
        value_dim: Dv.
        has_bias: whether the input and output projections, except q_proj, have biases.
        rope: of the Dr features, or None for no rotary embedding.
        is_interleaved: which features the rope pairs (see `Rotary`).
        scale: of the scores.
    """

    num_heads: int
    query_rank: int
    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    has_bias: bool
    rope: RopeConfig | None
    is_interleaved: bool
    scale: float

    @property
    def head_count(self) -> HeadCount:
        """Head count to be split over tp."""
        return HeadCount("num_attention_heads", self.num_heads)

    def rotary(self, device: torch.device) -> Rotary | None:
        """Rotary embedding, to be shared by all layers."""
        if self.rope is None:
            return None
        return Rotary(self.rope, self.rope_dim, device, is_interleaved=self.is_interleaved)

    def components(self, layers: Sequence[int], fmt: CacheFormat) -> tuple[Component, ...]:
        """Latents of `layers`."""
        return (latent(layers, rank=self.rank, rope_dim=self.rope_dim, fmt=fmt),) if layers else ()


@dataclass(frozen=True)
class LatentNames:
    """Names of tensors that differ between families, without ".weight".

    Attributes:
        gate: of the outputs; empty for none.
        gate_dim: features of the gate per head.
    """

    out: str = "o_proj"
    gate: str = ""
    gate_dim: int = 1


def read_latent(file: ConfigFile, *, rope: RopeConfig | None, is_interleaved: bool = True) -> LatentConfig:
    """Read the sizes of latent attention; `rope` and `is_interleaved` depend on the family.

    Raises:
        CheckpointError: a key is missing or invalid.
    """
    num_heads = file.integer("num_attention_heads")
    # Every head has its own keys and values, computed from the shared latent.
    file.require("num_key_value_heads", num_heads)
    plain_dim, rope_dim = file.integer("qk_nope_head_dim"), file.integer("qk_rope_head_dim")
    if rope is not None and rope_dim % 2:
        raise CheckpointError(
            f"{file.path}: qk_rope_head_dim={rope_dim} must be even; rotary embedding rotates pairs of features"
        )
    return LatentConfig(
        num_heads=num_heads,
        query_rank=0 if file.raw("q_lora_rank") is None else file.integer("q_lora_rank"),
        rank=file.integer("kv_lora_rank"),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=file.integer("v_head_dim"),
        has_bias=file.flag("attention_bias", False),
        rope=rope,
        is_interleaved=is_interleaved,
        scale=(plain_dim + rope_dim) ** -0.5 * (1.0 if rope is None else rope.score_factor),
    )


@dataclass(frozen=True)
class LatentInputs:
    """Projections of the layer's input.

    Attributes:
        down: C -> [Q +] R + Dr features, whole on every tp rank: q_a if there is one, then kv_a.
        latent_norm: of the R features.
        query_norm: of the Q features; None if queries are projected from the input directly.
        query: Q or C -> H * (Dn + Dr).
        gate: C -> H or H * Dv, whose sigmoid multiplies the heads' outputs, or None.
    """

    down: ColumnLinear
    latent_norm: RMSNorm
    query_norm: RMSNorm | None
    query: ColumnLinear
    gate: ColumnLinear | None

    def over_cp(self, split: CpSplit) -> LatentInputs:
        """The same with weights split over cp. Features of the gate stay split, as heads do after attention."""
        return replace(
            self,
            down=self.down.over_cp(split),
            query=self.query.over_cp(split),
            gate=None if self.gate is None else self.gate.own_features(split),
        )


class LatentAttention:
    """Queries and latents, their rotary embedding, selection, attention, output projection.

    Args:
        layer: index in the whole model.
        projection: computes keys and values from latents.
        rotary: of the rotary parts, or None.
        rope_dim: Dr.
        scale: of the scores.
        selector: selects the tokens that each query attends to; None for all before it.
    """

    is_position_wise = False

    def __init__(
        self,
        layer: int,
        inputs: LatentInputs,
        projection: LatentProjection,
        out: RowLinear,
        *,
        rotary: Rotary | None,
        rope_dim: int,
        scale: float,
        selector: Selector | None = None,
    ) -> None:
        self._layer = layer
        self._inputs = inputs
        self._projection = projection
        self._out = out
        self._rotary = rotary
        self._scale = scale
        self._selector = selector
        heads, plain_dim, rank = projection.key.shape
        self._head_shape = (heads, plain_dim + rope_dim)
        self._plain_dim = plain_dim
        self._key_sizes = [rank, rope_dim]

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        source, latent, rope = self._down(x)
        q = self._inputs.query(source).view(x.shape[0], *self._head_shape)
        if self._rotary is not None:
            rotation = run.rotation(self._rotary, q.dtype)
            q_rope = q[..., self._plain_dim :]
            rotation(q_rope, out=q_rope)
            rope = rotation(rope[:, None])[:, 0]
        out = run.step.attend_latent(
            run.pool.latent(self._layer),
            q,
            latent,
            rope,
            self._projection,
            scale=self._scale,
            selection=None if self._selector is None else self._selector(x, source, run),
        )
        if self._inputs.gate is not None:
            gate = precise(self._inputs.gate(x)).sigmoid()
            out = out * gate.to(x.dtype).unflatten(1, (out.shape[1], -1))
        return self._out(out.flatten(1))

    def over_cp(self, split: CpSplit) -> LatentAttention:
        """The same with all heads until attention, and 1 / cp of them after it. Keys and values are computed from the
        latents with all of the projection: queries of all heads meet this rank's tokens."""
        split.part(self._head_shape[0], what="attention heads")
        own = copy(self)
        own._inputs, own._out = self._inputs.over_cp(split), self._out.over_cp(split)
        own._selector = None if self._selector is None else self._selector.over_cp(split)
        return own

    def _down(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, C] -> input of the query projection [T, Q or C], normalised latents [T, R], keys' rotary part [T, Dr]."""
        features = self._inputs.down(x)
        query_rank = features.shape[1] - sum(self._key_sizes)
        low, latent, rope = features.split([query_rank, *self._key_sizes], dim=1)
        source = x if self._inputs.query_norm is None else self._inputs.query_norm(low)
        return source, self._inputs.latent_norm(latent), rope


def load_latent_attention(
    config: LatentConfig,
    weights: ShardedWeights,
    *,
    layer: int,
    size: int,
    rotary: Rotary | None,
    names: LatentNames = LatentNames(),
    selector: Selector | None = None,
) -> LatentAttention:
    """Read this rank's heads; `size` is C."""
    heads = weights.heads(config.num_heads)
    out = weights.row(
        names.out,
        outputs=size,
        inputs=config.num_heads * config.value_dim,
        taken=features(heads, config.value_dim),
        has_bias=config.has_bias,
    )
    return LatentAttention(
        layer,
        _load_inputs(config, weights, heads, size=size, names=names),
        _load_projection(config, weights, heads),
        out,
        rotary=rotary,
        rope_dim=config.rope_dim,
        scale=config.scale,
        selector=selector,
    )


def _load_inputs(
    config: LatentConfig, weights: ShardedWeights, heads: range, *, size: int, names: LatentNames
) -> LatentInputs:
    """Read the projections of the layer's input for `heads`."""
    down = [whole_columns("kv_a_proj_with_mqa", config.rank + config.rope_dim)]
    query_norm, query_name, query_inputs = None, "q_proj", size
    if config.query_rank:
        down.insert(0, whole_columns("q_a_proj", config.query_rank))
        query_norm = RMSNorm(weights.whole("q_a_layernorm.weight", config.query_rank), LATENT_NORM_EPS)
        query_name, query_inputs = "q_b_proj", config.query_rank
    dim = config.plain_dim + config.rope_dim
    query = [Columns(query_name, config.num_heads * dim, features(heads, dim))]
    gates = [Columns(names.gate, config.num_heads * names.gate_dim, features(heads, names.gate_dim))]
    return LatentInputs(
        down=weights.column(down, inputs=size, has_bias=config.has_bias),
        latent_norm=RMSNorm(weights.whole("kv_a_layernorm.weight", config.rank), LATENT_NORM_EPS),
        query_norm=query_norm,
        query=weights.column(query, inputs=query_inputs, has_bias=False),
        gate=weights.column(gates, inputs=size, has_bias=False) if names.gate else None,
    )


def _load_projection(config: LatentConfig, weights: ShardedWeights, heads: range) -> LatentProjection:
    """Read kv_b_proj, whose rows are stored by head: those of its keys, then those of its values."""
    dim = config.plain_dim + config.value_dim
    shape = (config.num_heads * dim, config.rank)
    rows = weights.cut("kv_b_proj.weight", shape, axis=0, taken=features(heads, dim)).unflatten(0, (len(heads), dim))
    key, value = rows.split([config.plain_dim, config.value_dim], dim=1)
    return LatentProjection(key.contiguous(), value.contiguous())
