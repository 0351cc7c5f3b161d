"""DeepSeek-V3 and R1: latent attention, grouped experts with a shared one, MLPs in the first layers ("DeepSeek-V3",
arXiv 2412.19437, section 2.1); in derived families, sparse indexers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raycache.checkpoint.config_file import (
    ConfigFile,
    ModelConfig,
    read_common,
    read_rope,
    require_full_attention,
)
from raycache.layers.expert_config import ExpertConfig, read_grouped_experts, read_mlp_layers
from raycache.layers.expert_weights import load_grouped_moe
from raycache.layers.feed_forward import load_feed_forward
from raycache.layers.forward_pass import Mixer
from raycache.layers.indexer import IndexerConfig, load_selector
from raycache.layers.latent_attention import LatentConfig, load_latent_attention, read_latent
from raycache.layers.rope import Rotary
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.models.prediction import PredictionLayer, PredictionNames, load_prediction
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import HeadCount


@dataclass(frozen=True)
class DeepseekConfig(ModelConfig):
    """A decoder with latent attention and experts.

    Attributes:
        indexer: None if queries attend to all tokens before them.
        mlp_layers: layers with an MLP; the others have experts.
        intermediate_size: of the MLPs.
    """

    attention: LatentConfig
    indexer: IndexerConfig | None
    mlp_layers: tuple[int, ...]
    intermediate_size: int
    experts: ExpertConfig

    def components(self, fmt: CacheFormat) -> tuple[Component, ...]:
        latents = self.attention.components(range(self.num_layers), fmt)
        return latents if self.indexer is None else latents + self.indexer.components(fmt)

    @property
    def head_counts(self) -> tuple[HeadCount, ...]:
        """Without the heads of indexers, which are replicated on every rank."""
        return (self.attention.head_count,)


def read_deepseek(
    file: ConfigFile, *, indexer: IndexerConfig | None = None, is_interleaved: bool = True
) -> DeepseekConfig:
    """Read the keys that DeepSeek-V3 and derived families share.

    Args:
        is_interleaved: whether the rope of attention is interleaved.
    Raises:
        CheckpointError: a key is missing, invalid or not supported.
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
        # Published checkpoints have a prediction layer even if config.json does not mention it.
        num_drafts=file.count("num_nextn_predict_layers", 1),
    )


class DeepseekV3:
    """Layers of latent attention and experts or an MLP, with a norm before each; a prediction layer."""

    model_type = "deepseek_v3"

    def read_config(self, file: ConfigFile) -> DeepseekConfig:
        """By default, the rope is interleaved."""
        require_full_attention(file)
        return read_deepseek(file, is_interleaved=file.flag("rope_interleave", True))

    def load(self, config: DeepseekConfig, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        rotaries = _Rotaries.of(config, weights.ctx)

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            return _load_layer(layer, config, own, rotaries=rotaries)

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress)

    def prediction_layer(self, config: DeepseekConfig) -> DeepseekConfig:
        return replace(
            config,
            name=f"the prediction layer of {config.name}",
            num_layers=1,
            indexer=None if config.indexer is None else replace(config.indexer, sources=(0,)),
            mlp_layers=(),
            bound_layers=(),
        )

    def load_prediction_layer(
        self, config: DeepseekConfig, weights: ShardedWeights, target: Decoder
    ) -> PredictionLayer:
        only, at = self.prediction_layer(config), f"model.layers.{config.num_layers}"
        parts = _load_layer(0, only, weights.under(at), rotaries=_Rotaries.of(only, weights.ctx))
        return load_prediction(
            config, weights, parts, target, names=PredictionNames.inside(at, norm="shared_head.norm")
        )


@dataclass(frozen=True)
class _Rotaries:
    """Rotary embedding of attention and indexers, shared if both pair the same features."""

    attention: Rotary
    indexer: Rotary

    @classmethod
    def of(cls, config: DeepseekConfig, ctx: ParallelContext) -> _Rotaries:
        attention, indexer = config.attention, config.indexer
        own = attention.rotary(ctx.device)
        assert own is not None and attention.rope is not None, "these families have rotary embedding"
        if indexer is None or indexer.is_interleaved == attention.is_interleaved:
            return cls(own, own)
        return cls(own, Rotary(attention.rope, attention.rope_dim, ctx.device, is_interleaved=indexer.is_interleaved))


def _load_layer(layer: int, config: DeepseekConfig, own: ShardedWeights, *, rotaries: _Rotaries) -> Sequence[Mixer]:
    size, at, mlp = config.hidden_size, own.under("self_attn"), own.under("mlp")
    selector = None
    if config.indexer is not None:
        indexer = at.under("indexer")
        selector = load_selector(config.indexer, indexer, layer=layer, size=size, rotary=rotaries.indexer)
    attention = load_latent_attention(
        config.attention, at, layer=layer, size=size, rotary=rotaries.attention, selector=selector
    )
    block: Mixer
    if layer in config.mlp_layers:
        block = load_feed_forward(mlp, size=size, inner=config.intermediate_size)
    else:
        block = load_grouped_moe(config.experts, mlp, size=size)
    return pre_norm_layer(config, own, attention, block)
