"""Llama 1 to 3, SmolLM2 and others with the same architecture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raycache.checkpoint.config_file import ConfigFile, ModelConfig, read_common, require_full_attention
from raycache.layers.feed_forward import load_feed_forward
from raycache.layers.forward_pass import Mixer
from raycache.layers.self_attention import AttentionConfig, load_attention, read_attention, read_heads
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.parallel.sharding import HeadCount


@dataclass(frozen=True)
class DenseConfig(ModelConfig):
    """A decoder with grouped-query attention and MLPs; derived families may replace the MLPs."""

    attention: AttentionConfig
    intermediate_size: int
    mlp_bias: bool

    def components(self, fmt: CacheFormat) -> tuple[Component, ...]:
        return self.attention.components(range(self.num_layers), fmt)

    @property
    def head_counts(self) -> tuple[HeadCount, ...]:
        return self.attention.head_counts


def read_dense(file: ConfigFile, attention: AttentionConfig) -> DenseConfig:
    """Read the keys that dense decoders share.

    Raises:
        CheckpointError: a key is missing, invalid or not supported.
    """
    file.require("hidden_act", "silu")
    return DenseConfig(
        **read_common(file),
        attention=attention,
        intermediate_size=file.integer("intermediate_size"),
        mlp_bias=file.flag("mlp_bias", False),
    )


class Llama:
    """Layers of attention and an MLP, with a norm before each."""

    model_type = "llama"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """Config files of early Llamas have neither KV heads nor a head size."""
        file.require("pretraining_tp", 1)
        require_full_attention(file)
        return read_dense(file, read_attention(file, read_heads(file), theta=10000.0))

    def load(self, config: DenseConfig, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        size, eps, inner = config.hidden_size, config.rms_norm_eps, config.intermediate_size
        positions = config.attention.rotary(weights.ctx.device)

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            rotary = None if layer in config.attention.unrotated else positions
            at = own.under("self_attn")
            attention = load_attention(config.attention, at, layer=layer, size=size, eps=eps, rotary=rotary)
            mlp = load_feed_forward(own.under("mlp"), size=size, inner=inner, has_bias=config.mlp_bias)
            return pre_norm_layer(config, own, attention, mlp)

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress)
