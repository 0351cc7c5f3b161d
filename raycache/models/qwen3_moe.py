"""Qwen3 with a mixture of experts in most layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile, require_full_attention
from raycache.layers.forward_pass import Mixer
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress
from raycache.models.dense import (
    DenseConfig,
    attention_head_counts,
    dense_components,
    load_attention_mlp,
    read_dense_config,
)
from raycache.models.feed_forward import (
    ExpertConfig,
    load_feed_forward,
    load_softmax_moe,
    read_dense_layers,
    read_softmax_experts,
)
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class Qwen3MoeConfig(DenseConfig):
    """Qwen3 with experts.

    Attributes:
        experts: of the layers that have them.
        dense_layers: layers with a plain MLP instead.
    """

    experts: ExpertConfig = field(kw_only=True)
    dense_layers: tuple[int, ...] = field(kw_only=True)


class Qwen3Moe:
    """See models.base.Family."""

    model_type = "qwen3_moe"

    def read_config(self, file: ConfigFile) -> Qwen3MoeConfig:
        """Windows and shared experts are refused."""
        for key, served in {"use_sliding_window": False, "use_qk_norm": True}.items():
            file.require(key, served)
        file.require("shared_expert_intermediate_size", 0)
        require_full_attention(file)
        heads = file.integer("num_attention_heads")
        dense = read_dense_config(
            file,
            num_kv_heads=file.integer("num_key_value_heads"),
            head_dim=file.integer("head_dim", file.integer("hidden_size") // heads),
            has_qk_norm=True,
        )
        experts = read_softmax_experts(file, renormalise=file.flag("norm_topk_prob", False))
        return Qwen3MoeConfig(**vars(dense), experts=experts, dense_layers=read_dense_layers(file))

    def components(self, config: Qwen3MoeConfig, fmt: CacheFormat) -> tuple[Component, ...]:
        return dense_components(config, fmt)

    def head_counts(self, config: Qwen3MoeConfig) -> tuple[HeadCount, ...]:
        return attention_head_counts(config)

    def load(
        self, config: Qwen3MoeConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        def load_layer_mlp(layer: int) -> Mixer:
            at, size = f"model.layers.{layer}.mlp", config.hidden_size
            if layer in config.dense_layers:
                return load_feed_forward(at, weights, ctx, size=size, inner=config.intermediate_size)
            return load_softmax_moe(at, config.experts, weights, ctx, size=size)

        return load_attention_mlp(config, weights, ctx, load_layer_mlp=load_layer_mlp, on_progress=on_progress)
