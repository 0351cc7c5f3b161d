"""What dense decoders are made of: grouped-query attention and a gated MLP, with RMSNorm before each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import MAX_HEAD_DIM, ConfigFile, ModelConfig, read_common, read_rope
from raycache.checkpoint.rope_config import RopeConfig
from raycache.errors import CheckpointError
from raycache.layers.forward_pass import Mixer
from raycache.layers.linear import ColumnLinear
from raycache.layers.norm import HeadNorm
from raycache.layers.rope import Rotary
from raycache.layers.self_attention import NormedProjection, SelfAttention
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component, kv
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.models.feed_forward import load_feed_forward
from raycache.parallel.sharding import HeadCount, even_range, shared_head_range

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class DenseConfig(ModelConfig):
    """A dense decoder.

    Attributes:
        intermediate_size: of its MLPs.
        num_heads, num_kv_heads, head_dim: of its attention.
        attention_bias, mlp_bias: whether those projections have a bias.
        output_bias: whether attention's output projection has one; None is `attention_bias`.
        has_qk_norm: whether query and key heads are normalised.
        rope: its position embedding.
        attention_scale: of the scores; None is head_dim ** -0.5.
        has_sinks: whether every head has one more key without value.
        norm_offset: added to the weights of the query and key norms.
        rotary_share: of a head's features are turned, the first ones.
        has_joint_qk_norm: whether queries and keys are normalised over all heads at once.
        window: tokens that a query of a windowed layer sees, itself included.
        windowed: layers that have one, ascending.
        unrotated: layers without positions.
    """

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_bias: bool
    mlp_bias: bool
    has_qk_norm: bool
    rope: RopeConfig
    attention_scale: float | None = field(default=None, kw_only=True)
    has_sinks: bool = field(default=False, kw_only=True)
    norm_offset: float = field(default=0.0, kw_only=True)
    rotary_share: float = field(default=1.0, kw_only=True)
    has_joint_qk_norm: bool = field(default=False, kw_only=True)
    output_bias: bool | None = field(default=None, kw_only=True)
    window: int = field(default=0, kw_only=True)
    windowed: tuple[int, ...] = field(default=(), kw_only=True)
    unrotated: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    def rotary_dim(self) -> int:
        """Features of a head that are turned."""
        return int(self.head_dim * self.rotary_share)


def read_dense_config(
    file: ConfigFile,
    *,
    num_kv_heads: int,
    head_dim: int,
    has_qk_norm: bool,
    layer_type: str = "",
    theta: float | None = None,
    rotary_share: float = 1.0,
) -> DenseConfig:
    """Read the keys that dense decoders share.

    Args:
        file: config.json.
        num_kv_heads, head_dim: families differ in what they are when the file does not say.
        has_qk_norm: of the family.
        layer_type: whose rope parameters to read, in a model that has them per layer type.
        theta: base of the frequencies of files that do not say; None where all do.
        rotary_share: see `DenseConfig` and `read_rotary_share`.
    Raises:
        CheckpointError: a key is missing, has a wrong value, or asks for what is not implemented.
    """
    file.require("hidden_act", "silu")
    num_heads = file.integer("num_attention_heads")
    require_heads(file, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    return DenseConfig(
        **read_common(file),
        intermediate_size=file.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        attention_bias=file.flag("attention_bias", False),
        mlp_bias=file.flag("mlp_bias", False),
        has_qk_norm=has_qk_norm,
        rope=read_rope(file, layer_type=layer_type, partial=rotary_share, theta=theta),
        rotary_share=rotary_share,
    )


def read_rotary_share(file: ConfigFile, *, head_dim: int, default: float) -> float:
    """The share of a head's features that are turned, said as a share or as `rotary_dim` features.

    Raises:
        CheckpointError: they are no pairs of a head's features, or the file says it twice and differently.
    """
    places = (file, file.section("rope_parameters"), file.section("rope_scaling"))
    shares = [place.number("partial_rotary_factor", 0.0) for place in places]
    shares.append(file.count("rotary_dim", 0) / head_dim)
    said = sorted({share for share in shares if share})
    if len(said) > 1:
        raise CheckpointError(f"{file.path}: partial_rotary_factor and rotary_dim say shares of {said} of a head")
    share = said[0] if said else default
    turned = int(head_dim * share)
    if not 2 <= turned <= head_dim or turned % 2:
        raise CheckpointError(
            f"{file.path}: {turned} of head_dim={head_dim} features are turned in pairs; it must be an even number"
        )
    return share


def require_heads(file: ConfigFile, *, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Refuse heads that cannot be grouped or turned.

    Raises:
        CheckpointError: says which.
    """
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{file.path}: num_key_value_heads={num_kv_heads} does not divide num_attention_heads={num_heads}"
        )
    if head_dim > MAX_HEAD_DIM:
        raise CheckpointError(f"{file.path}: head_dim={head_dim} must be at most {MAX_HEAD_DIM}")
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(
            f"{file.path}: head_dim={head_dim} must be even; rotary embedding turns pairs of features"
        )


def dense_components(config: DenseConfig, fmt: CacheFormat) -> tuple[Component, ...]:
    """Keys and values: of all tokens in the layers that see everything, of the window's in the others."""

    def rows(name: str, layers: Sequence[int], window: int) -> tuple[Component, ...]:
        sizes = {"heads": config.num_kv_heads, "dim": config.head_dim}
        return (kv(name, layers, fmt=fmt, window=window, **sizes),) if layers else ()

    full = [layer for layer in range(config.num_layers) if layer not in config.windowed]
    return rows("kv", full, 0) + rows("window", config.windowed, config.window)


def attention_head_counts(config: DenseConfig) -> tuple[HeadCount, ...]:
    """What tp divides; inner features of feed-forward parts need not be even."""
    return (
        HeadCount("num_attention_heads", config.num_heads),
        HeadCount("num_key_value_heads", config.num_kv_heads, is_shared=True),
    )


def load_dense(config: DenseConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress) -> Decoder:
    """Read this rank's share of a model whose layers are all alike."""

    def load_layer_mlp(layer: int) -> Mixer:
        size, inner = config.hidden_size, config.intermediate_size
        at = f"model.layers.{layer}.mlp"
        return load_feed_forward(at, weights, ctx, size=size, inner=inner, has_bias=config.mlp_bias)

    return load_attention_mlp(config, weights, ctx, load_layer_mlp=load_layer_mlp, on_progress=on_progress)


def load_attention_mlp(
    config: DenseConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    load_layer_mlp: Callable[[int], Mixer],
    on_progress: Progress,
) -> Decoder:
    """Read this rank's share of a model whose layers are attention and a feed-forward part, with a norm before each.

    Args:
        config: of the whole model.
        weights: where to read.
        ctx: whose share.
        load_layer_mlp: reads the feed-forward part of a layer.
        on_progress: told after each layer.
    """
    rotary = Rotary(config.rope, config.rotary_dim, ctx.device)

    def load_layer(layer: int) -> Sequence[Mixer]:
        at = f"model.layers.{layer}"
        turned = None if layer in config.unrotated else rotary
        attention = load_attention(layer, f"{at}.self_attn", config, weights, ctx, rotary=turned)
        return pre_norm_layer(at, attention, load_layer_mlp(layer), config, weights)

    return load_decoder(config, weights, ctx, load_layer=load_layer, on_progress=on_progress)


def load_attention(
    layer: int,
    at: str,
    config: DenseConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    rotary: Rotary | None,
    inputs: int = 0,
) -> SelfAttention:
    """Read the grouped-query attention whose tensors begin with `at`; without `rotary`, it has no positions. It takes
    `inputs` features, by default those of the hidden size."""
    dim, num_heads, num_kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    heads = even_range(num_heads, ctx.tp.rank, ctx.tp.size)
    kv_heads = shared_head_range(num_kv_heads, ctx.tp.rank, ctx.tp.size)
    parts = (
        Columns(f"{at}.q_proj", num_heads * dim, features(heads, dim)),
        Columns(f"{at}.k_proj", num_kv_heads * dim, features(kv_heads, dim)),
        Columns(f"{at}.v_proj", num_kv_heads * dim, features(kv_heads, dim)),
    )
    qkv: ColumnLinear | NormedProjection
    qkv = weights.column(parts, inputs=inputs or config.hidden_size, has_bias=config.attention_bias)
    if config.has_joint_qk_norm:
        norms = (
            weights.cut(f"{at}.{name}.weight", (count * dim,), axis=0, taken=features(own, dim))
            for name, count, own in (("q_norm", num_heads, heads), ("k_norm", num_kv_heads, kv_heads))
        )
        qkv = NormedProjection(qkv, *norms, eps=config.rms_norm_eps, group=ctx.tp)
    return SelfAttention(
        layer,
        qkv,
        weights.row(
            f"{at}.o_proj",
            outputs=config.hidden_size,
            inputs=num_heads * dim,
            taken=features(heads, dim),
            has_bias=config.attention_bias if config.output_bias is None else config.output_bias,
        ),
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        head_dim=dim,
        rotary=rotary,
        qk_norm=load_qk_norm(at, config, weights, len(heads), len(kv_heads)) if config.has_qk_norm else None,
        scale=config.attention_scale,
        sinks=weights.cut(f"{at}.sinks", (num_heads,), axis=0, taken=heads) if config.has_sinks else None,
    )


def load_qk_norm(at: str, config: DenseConfig, weights: ShardedWeights, num_heads: int, num_kv_heads: int) -> HeadNorm:
    """Read the norms of query and key heads as one."""
    dtype = weights.precise if config.norm_offset else None  # 1 + a small weight would lose digits
    q = weights.whole(f"{at}.q_norm.weight", config.head_dim, dtype=dtype).expand(num_heads, -1)
    k = weights.whole(f"{at}.k_norm.weight", config.head_dim, dtype=dtype).expand(num_kv_heads, -1)
    # No torch.cat, no sum: on the meta device, where shapes are checked, they import torch's compiler, for seconds.
    both = q.new_empty(num_heads + num_kv_heads, config.head_dim)
    both[:num_heads], both[num_heads:] = q, k
    return HeadNorm(both.add_(config.norm_offset), config.rms_norm_eps)
