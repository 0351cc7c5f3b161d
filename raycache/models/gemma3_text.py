"""Gemma 3, text only: a full layer after every few windowed ones, norms on both sides ("Gemma 3", arXiv 2503.19786)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile, read_rope
from raycache.checkpoint.layer_kinds import FULL, SLIDING, read_windowed
from raycache.checkpoint.rope_config import RopeConfig
from raycache.layers.activation import gelu_tanh_gated
from raycache.layers.forward_pass import Mixer
from raycache.layers.norm import CenteredNorm
from raycache.layers.rope import Rotary
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress, Residual, load_decoder
from raycache.models.dense import (
    DenseConfig,
    attention_head_counts,
    dense_components,
    load_attention,
    read_dense_config,
)
from raycache.models.feed_forward import load_feed_forward
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class Gemma3Config(DenseConfig):
    """Gemma 3.

    Attributes:
        window_rope: position embedding of the windowed layers; `rope` is that of the others.
    """

    window_rope: RopeConfig = field(kw_only=True)


class Gemma3Text:
    """See models.base.Family."""

    model_type = "gemma3_text"

    def read_config(self, file: ConfigFile) -> Gemma3Config:
        """Soft caps of scores or logits, which Gemma 2 had, are refused."""
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            file.require(key, None)
        file.require("use_bidirectional_attention", False)
        file.require("hidden_activation", "gelu_pytorch_tanh")
        dense = read_dense_config(
            file,
            num_kv_heads=file.integer("num_key_value_heads"),
            head_dim=file.integer("head_dim"),
            has_qk_norm=True,
            layer_type=FULL,
            theta=1e6,
        )
        changed = {
            "tie_word_embeddings": file.flag("tie_word_embeddings", True),
            "attention_scale": file.number("query_pre_attn_scalar", 256) ** -0.5,
            "norm_offset": 1.0,
            "window": file.integer("sliding_window"),
            "windowed": read_windowed(file, pattern=file.integer("sliding_window_pattern", 6)),
        }
        return Gemma3Config(**{**vars(dense), **changed}, window_rope=_read_window_rope(file))

    def components(self, config: Gemma3Config, fmt: CacheFormat) -> tuple[Component, ...]:
        return dense_components(config, fmt)

    def head_counts(self, config: Gemma3Config) -> tuple[HeadCount, ...]:
        return attention_head_counts(config)

    def load(
        self, config: Gemma3Config, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        full, windowed = (Rotary(rope, config.head_dim, ctx.device) for rope in (config.rope, config.window_rope))

        def load_layer(layer: int) -> Sequence[Mixer]:
            at, size = f"model.layers.{layer}", config.hidden_size

            def norm(name: str) -> CenteredNorm:
                return CenteredNorm(weights.whole(f"{at}.{name}_layernorm.weight", size), config.rms_norm_eps)

            rotary = windowed if layer in config.windowed else full
            attention = load_attention(layer, f"{at}.self_attn", config, weights, ctx, rotary=rotary)
            mlp = load_feed_forward(
                f"{at}.mlp", weights, ctx, size=size, inner=config.intermediate_size, activation=gelu_tanh_gated
            )
            return (
                Residual(norm("input"), attention, after=norm("post_attention")),
                Residual(norm("pre_feedforward"), mlp, after=norm("post_feedforward")),
            )

        return load_decoder(
            config,
            weights,
            ctx,
            load_layer=load_layer,
            on_progress=on_progress,
            make_norm=CenteredNorm,
            embedding_scale=config.hidden_size**0.5,
        )


def _read_window_rope(file: ConfigFile) -> RopeConfig:
    theta = file.number("rope_local_base_freq", 10000.0)
    # What scales the positions of the full layers says nothing about the others.
    if file.section("rope_parameters").raw(SLIDING) is not None:
        return read_rope(file.having(rope_theta=theta), layer_type=SLIDING)
    return RopeConfig(theta=theta)
