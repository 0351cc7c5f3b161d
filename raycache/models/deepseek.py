"""What DeepSeek-V3 and its descendants are made of: latent attention, maybe with a sparse indexer, and grouped experts
with a shared one, after some first layers with an MLP ("DeepSeek-V3", arXiv 2412.19437, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile, ModelConfig, read_common, read_given_layer_types, read_rope
from raycache.errors import CheckpointError
from raycache.layers.forward_pass import Mixer
from raycache.layers.latent_attention import LatentAttention
from raycache.layers.rope import Rotary
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component, index_keys, latent
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.models.feed_forward import (
    ExpertConfig,
    load_feed_forward,
    load_grouped_moe,
    read_grouped_experts,
    read_mlp_layers,
)
from raycache.models.latent_attention import (
    IndexerConfig,
    LatentConfig,
    load_latent_attention,
    load_selector,
    read_latent,
)
from raycache.models.prediction import PredictionLayer, PredictionNames, load_prediction
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class DeepseekConfig(ModelConfig):
    """A decoder with latent attention and experts.

    Attributes:
        attention: of all layers.
        indexer: of all layers, or None where queries see all tokens before them.
        mlp_layers: layers with an MLP; the others have experts.
        intermediate_size: of the MLPs.
        experts: of the other layers.
    """

    attention: LatentConfig
    indexer: IndexerConfig | None
    mlp_layers: tuple[int, ...]
    intermediate_size: int
    experts: ExpertConfig


def read_deepseek(
    file: ConfigFile, *, indexer: IndexerConfig | None = None, is_interleaved: bool = True
) -> DeepseekConfig:
    """Read the keys that the families share.

    Args:
        file: config.json.
        indexer: of the family.
        is_interleaved: whether attention's rope pairs neighbours.
    Raises:
        CheckpointError: a key is missing, has a wrong value, or asks for what is not implemented.
    """
    for key, served in {"hidden_act": "silu", "mlp_bias": False, "moe_layer_freq": 1, "pretraining_tp": 1}.items():
        file.require(key, served)
    return DeepseekConfig(
        **read_common(file),
        attention=read_latent(file, rope=read_rope(file, theta=10000.0), is_interleaved=is_interleaved),
        indexer=indexer,
        mlp_layers=read_mlp_layers(file, num_first=3),
        intermediate_size=file.integer("intermediate_size"),
        experts=read_grouped_experts(file),
        bound_layers=() if indexer is None else indexer.sharing_layers,
        # Published checkpoints have one, whether or not the file says so.
        num_drafts=file.count("num_nextn_predict_layers", 1),
    )


def read_indexer(file: ConfigFile, *, sources: Sequence[int], is_interleaved: bool) -> IndexerConfig:
    """Read the keys of sparse indexers.

    Args:
        file: config.json.
        sources: per layer the one whose indexer it uses.
        is_interleaved: which features their rope pairs.
    Raises:
        CheckpointError: a key is missing, has a wrong value, or does not go with the others.
    """
    read_given_layer_types(file, known=("indexed_attention", "deepseek_sparse_attention"))
    head_dim, rope_dim = file.integer("index_head_dim"), file.integer("qk_rope_head_dim")
    if head_dim < rope_dim:
        raise CheckpointError(f"{file.path}: index_head_dim={head_dim} is less than qk_rope_head_dim={rope_dim}")
    if file.raw("q_lora_rank") is None:
        raise CheckpointError(f"{file.path} has no q_lora_rank, which its indexer's queries are made of")
    return IndexerConfig(
        num_heads=file.integer("index_n_heads"),
        head_dim=head_dim,
        top_k=file.integer("index_topk"),
        is_interleaved=is_interleaved,
        sources=tuple(sources),
    )


def deepseek_components(config: DeepseekConfig, fmt: CacheFormat) -> tuple[Component, ...]:
    """Latents of every layer, index keys of those with an indexer of their own."""
    attention, layers = config.attention, range(config.num_layers)
    latents = latent(layers, rank=attention.rank, rope_dim=attention.rope_dim, fmt=fmt)
    if config.indexer is None:
        return (latents,)
    return latents, index_keys(config.indexer.layers, dim=config.indexer.head_dim, fmt=fmt)


def deepseek_head_counts(config: DeepseekConfig) -> tuple[HeadCount, ...]:
    """What tp divides; not the heads of indexers, which every rank has whole."""
    return (config.attention.head_count,)


def load_deepseek(
    config: DeepseekConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
) -> Decoder:
    """Read this rank's share."""
    rotaries = _rotaries(config, ctx)

    def load_layer(layer: int) -> Sequence[Mixer]:
        at = f"model.layers.{layer}"
        attention = _load_attention(layer, f"{at}.self_attn", config, weights, ctx, rotaries=rotaries)
        return pre_norm_layer(at, attention, _load_mlp(layer, f"{at}.mlp", config, weights, ctx), config, weights)

    return load_decoder(config, weights, ctx, load_layer=load_layer, on_progress=on_progress)


def prediction_layer(config: DeepseekConfig) -> DeepseekConfig:
    """The layer behind a model's own that says what follows the next token, as a model of one layer."""
    return replace(
        config,
        name=f"the prediction layer of {config.name}",
        num_layers=1,
        indexer=None if config.indexer is None else replace(config.indexer, sources=(0,)),
        mlp_layers=(),
        bound_layers=(),
    )


def load_prediction_layer(
    config: DeepseekConfig, weights: ShardedWeights, ctx: ParallelContext, target: Decoder
) -> PredictionLayer:
    """Read this rank's share of it.

    Args:
        config: of the target.
        weights: where to read.
        ctx: whose share.
        target: the model that it belongs to.
    """
    only, at = prediction_layer(config), f"model.layers.{config.num_layers}"
    rotaries = _rotaries(only, ctx)
    attention = _load_attention(0, f"{at}.self_attn", only, weights, ctx, rotaries=rotaries)
    parts = pre_norm_layer(at, attention, _load_mlp(0, f"{at}.mlp", only, weights, ctx), only, weights)
    names = PredictionNames(f"{at}.shared_head.norm", f"{at}.enorm", f"{at}.hnorm", f"{at}.eh_proj")
    return load_prediction(parts, names, config, weights, ctx, target)


def _rotaries(config: DeepseekConfig, ctx: ParallelContext) -> tuple[Rotary, Rotary]:
    """Attention's and the indexers', one where both pair the same features."""
    attention, indexer = config.attention, config.indexer
    assert attention.rope is not None, "these families have positions"
    own = Rotary(attention.rope, attention.rope_dim, ctx.device, is_interleaved=attention.is_interleaved)
    if indexer is None or indexer.is_interleaved == attention.is_interleaved:
        return own, own
    return own, Rotary(attention.rope, attention.rope_dim, ctx.device, is_interleaved=indexer.is_interleaved)


def _load_attention(
    layer: int,
    at: str,
    config: DeepseekConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    rotaries: tuple[Rotary, Rotary],
) -> LatentAttention:
    own, size, selector = config.attention, config.hidden_size, None
    if config.indexer is not None:
        name = f"{at}.indexer"
        selector = load_selector(layer, name, config.indexer, own, weights, size=size, rotary=rotaries[1])
    return load_latent_attention(layer, at, own, weights, ctx, size=size, rotary=rotaries[0], selector=selector)


def _load_mlp(layer: int, at: str, config: DeepseekConfig, weights: ShardedWeights, ctx: ParallelContext) -> Mixer:
    if layer in config.mlp_layers:
        return load_feed_forward(at, weights, ctx, size=config.hidden_size, inner=config.intermediate_size)
    return load_grouped_moe(at, config.experts, weights, ctx, size=config.hidden_size)
