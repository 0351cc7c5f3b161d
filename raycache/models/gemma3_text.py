"""The text model of Gemma 3: sliding-window and full layers, norms before and after mixers (arXiv 2503.19786)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raycache.checkpoint.config_file import ConfigFile, read_rope
from raycache.checkpoint.layer_kinds import FULL, SLIDING, read_windowed
from raycache.checkpoint.rope_config import RopeConfig
from raycache.layers.activation import gelu_tanh_gated
from raycache.layers.feed_forward import load_feed_forward
from raycache.layers.forward_pass import Mixer
from raycache.layers.norm import CenteredNorm, RMSNorm
from raycache.layers.self_attention import load_attention, read_attention, read_stated_heads
from raycache.layers.weights import ShardedWeights
from raycache.models.decoder import Decoder, Progress, Residual, Scales, load_decoder
from raycache.models.llama import DenseConfig, read_dense


@dataclass(frozen=True)
class Gemma3Config(DenseConfig):
    """Gemma 3.

    Attributes:
        window_rope: rope of the sliding-window layers; that of `attention` is for full layers.
    """

    window_rope: RopeConfig


class Gemma3Text:
    """Layers of attention and an MLP, with norms before and after each."""

    model_type = "gemma3_text"

    def read_config(self, file: ConfigFile) -> Gemma3Config:
        """Soft caps of scores and logits, as in Gemma 2, are not supported."""
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            file.require(key, None)
        file.require("use_bidirectional_attention", False)
        file.require("hidden_activation", "gelu_pytorch_tanh")
        attention = replace(
            read_attention(file, read_stated_heads(file), has_qk_norm=True, layer_type=FULL, theta=1e6),
            scale=file.number("query_pre_attn_scalar", 256) ** -0.5,
            norm_offset=1.0,
            window=file.integer("sliding_window"),
            windowed=read_windowed(file, pattern=file.integer("sliding_window_pattern", 6)),
        )
        dense = replace(read_dense(file, attention), tie_word_embeddings=file.flag("tie_word_embeddings", True))
        return Gemma3Config(**vars(dense), window_rope=_read_window_rope(file))

    def load(self, config: Gemma3Config, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        size, eps, inner, device = config.hidden_size, config.rms_norm_eps, config.intermediate_size, weights.ctx.device
        full = config.attention.rotary(device)
        windowed = replace(config.attention, rope=config.window_rope).rotary(device)

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            def norm(name: str) -> RMSNorm:
                return CenteredNorm(own.whole(f"{name}_layernorm.weight", size), eps)

            rotary, at = windowed if layer in config.attention.windowed else full, own.under("self_attn")
            attention = load_attention(config.attention, at, layer=layer, size=size, eps=eps, rotary=rotary)
            mlp = load_feed_forward(own.under("mlp"), size=size, inner=inner, activation=gelu_tanh_gated)
            return (
                Residual(norm("input"), attention, after=norm("post_attention")),
                Residual(norm("pre_feedforward"), mlp, after=norm("post_feedforward")),
            )

        return load_decoder(
            config,
            weights,
            load_layer=load_layer,
            on_progress=on_progress,
            make_norm=CenteredNorm,
            scales=Scales(embedding=size**0.5),
        )


def _read_window_rope(file: ConfigFile) -> RopeConfig:
    theta = file.number("rope_local_base_freq", 10000.0)
    # `rope_scaling` applies to full layers only.
    if file.section("rope_parameters").raw(SLIDING) is not None:
        return read_rope(file.having(rope_theta=theta), layer_type=SLIDING)
    return RopeConfig(theta=theta)
