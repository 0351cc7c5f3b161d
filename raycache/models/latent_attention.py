"""Reading latent attention and its sparse indexer: their keys of config.json and their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycache.attention.base import LatentProjection
from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.rope_config import RopeConfig
from raycache.errors import CheckpointError
from raycache.layers.indexer import Indexer, Selector, SharedSelection
from raycache.layers.latent_attention import LatentAttention, LatentInputs
from raycache.layers.norm import RMSNorm
from raycache.layers.rope import Rotary
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.parallel.sharding import HeadCount, even_range

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

LATENT_NORM_EPS = 1e-6
"""Of the norms of latents and low-rank queries: the same in all models, whatever their rms_norm_eps."""


@dataclass(frozen=True)
class LatentConfig:
    """The latent attention of a model's layers.

    Attributes:
        num_heads: of queries.
        query_rank: Q, 0 where queries are made of the input itself.
        rank: R of latents.
        plain_dim, rope_dim: Dn and Dr, features of a head without and with positions.
        value_dim: Dv.
        has_bias: of the products that take the layer's input or give its output, but q_proj.
        rope: of the Dr features, or None for no positions.
        is_interleaved: which features the rope pairs.
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
        """What tp divides."""
        return HeadCount("num_attention_heads", self.num_heads)

    def rotary(self, ctx: ParallelContext) -> Rotary | None:
        """One for all layers."""
        if self.rope is None:
            return None
        return Rotary(self.rope, self.rope_dim, ctx.device, is_interleaved=self.is_interleaved)


@dataclass(frozen=True)
class IndexerConfig:
    """The sparse indexers of a model's layers.

    Attributes:
        num_heads, head_dim: of an indexer.
        top_k: tokens that a query sees.
        is_interleaved: which features its rope pairs.
        sources: per layer the one whose indexer it uses, itself or one before.
    """

    num_heads: int
    head_dim: int
    top_k: int
    is_interleaved: bool
    sources: tuple[int, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Those with an indexer of their own."""
        return tuple(layer for layer, source in enumerate(self.sources) if layer == source)

    @property
    def sharing_layers(self) -> tuple[int, ...]:
        """Those that use what a layer before them chose."""
        return tuple(layer for layer, source in enumerate(self.sources) if layer != source)


@dataclass(frozen=True)
class LatentNames:
    """Tensors that families name in their own ways, without ".weight"."""

    out: str = "o_proj"
    gate: str = ""
    """Of the outputs; none where it is empty."""
    gate_dim: int = 1
    """Numbers that a gate has per head."""


def read_latent(file: ConfigFile, *, rope: RopeConfig | None, is_interleaved: bool = True) -> LatentConfig:
    """Read the keys of latent attention.

    Args:
        file: config.json.
        rope: of the family, None for no positions.
        is_interleaved: of the family.
    Raises:
        CheckpointError: a key is missing or has a wrong value.
    """
    num_heads = file.integer("num_attention_heads")
    # All heads have keys and values of their own, made of the one latent.
    file.require("num_key_value_heads", num_heads)
    plain_dim, rope_dim = file.integer("qk_nope_head_dim"), file.integer("qk_rope_head_dim")
    if rope is not None and rope_dim % 2:
        raise CheckpointError(
            f"{file.path}: qk_rope_head_dim={rope_dim} must be even; rotary embedding turns pairs of features"
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


def load_latent_attention(
    layer: int,
    at: str,
    config: LatentConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    size: int,
    rotary: Rotary | None,
    names: LatentNames = LatentNames(),
    selector: Selector | None = None,
) -> LatentAttention:
    """Read the attention whose tensors begin with `at`; `size` is the hidden size, for the rest see LatentAttention."""
    heads = even_range(config.num_heads, ctx.tp.rank, ctx.tp.size)
    out = weights.row(
        f"{at}.{names.out}",
        outputs=size,
        inputs=config.num_heads * config.value_dim,
        taken=features(heads, config.value_dim),
        has_bias=config.has_bias,
    )
    return LatentAttention(
        layer,
        load_inputs(at, config, weights, heads, size=size, names=names),
        load_projection(f"{at}.kv_b_proj.weight", config, weights, heads),
        out,
        rotary=rotary,
        rope_dim=config.rope_dim,
        scale=config.scale,
        selector=selector,
    )


def load_inputs(
    at: str, config: LatentConfig, weights: ShardedWeights, heads: range, *, size: int, names: LatentNames
) -> LatentInputs:
    """Read what comes before the attention of `heads`."""
    down = [whole_columns(f"{at}.kv_a_proj_with_mqa", config.rank + config.rope_dim)]
    query_norm, query_name, query_inputs = None, "q_proj", size
    if config.query_rank:
        down.insert(0, whole_columns(f"{at}.q_a_proj", config.query_rank))
        query_norm = RMSNorm(weights.whole(f"{at}.q_a_layernorm.weight", config.query_rank), LATENT_NORM_EPS)
        query_name, query_inputs = "q_b_proj", config.query_rank
    dim = config.plain_dim + config.rope_dim
    query = [Columns(f"{at}.{query_name}", config.num_heads * dim, features(heads, dim))]
    gates = [Columns(f"{at}.{names.gate}", config.num_heads * names.gate_dim, features(heads, names.gate_dim))]
    return LatentInputs(
        down=weights.column(down, inputs=size, has_bias=config.has_bias),
        latent_norm=RMSNorm(weights.whole(f"{at}.kv_a_layernorm.weight", config.rank), LATENT_NORM_EPS),
        query_norm=query_norm,
        query=weights.column(query, inputs=query_inputs, has_bias=False),
        gate=weights.column(gates, inputs=size, has_bias=False) if names.gate else None,
    )


def load_projection(name: str, config: LatentConfig, weights: ShardedWeights, heads: range) -> LatentProjection:
    """Read what makes keys and values of latents, stored per head: its keys' rows, then its values'."""
    dim = config.plain_dim + config.value_dim
    shape = (config.num_heads * dim, config.rank)
    rows = weights.cut(name, shape, axis=0, taken=features(heads, dim)).unflatten(0, (len(heads), dim))
    key, value = rows.split([config.plain_dim, config.value_dim], dim=1)
    return LatentProjection(key.contiguous(), value.contiguous())


def load_selector(
    layer: int,
    at: str,
    config: IndexerConfig,
    latent: LatentConfig,
    weights: ShardedWeights,
    *,
    size: int,
    rotary: Rotary,
) -> Selector:
    """Read the indexer whose tensors begin with `at`, all of it on every rank, unless this layer shares another's.

    Args:
        rotary: that pairs features as the indexers do; for the rest see `load_latent_attention`.
    """
    if config.sources[layer] != layer:
        return SharedSelection(config.sources[layer])
    query = whole_columns(f"{at}.wq_b", config.num_heads * config.head_dim)
    norm = weights.whole(f"{at}.k_norm.weight", config.head_dim), weights.whole(f"{at}.k_norm.bias", config.head_dim)
    return Indexer(
        layer,
        query=weights.column([query], inputs=latent.query_rank, has_bias=False),
        key=weights.column([whole_columns(f"{at}.wk", config.head_dim)], inputs=size, has_bias=False),
        key_norm=norm,
        head_weights=weights.whole(f"{at}.weights_proj.weight", config.num_heads, size, dtype=weights.precise),
        rotary=rotary,
        rope_dim=latent.rope_dim,
        top_k=config.top_k,
    )


def whole_columns(name: str, size: int) -> Columns:
    """All output features, on every rank."""
    return Columns(name, size, range(size))
