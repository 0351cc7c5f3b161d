"""Qwen3-MoE: Qwen3 with experts in most layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raycache.checkpoint.config_file import ConfigFile, require_full_attention
from raycache.layers.expert_config import ExpertConfig, read_dense_layers, read_softmax_experts
from raycache.layers.expert_weights import load_softmax_moe
from raycache.layers.feed_forward import load_feed_forward
from raycache.layers.forward_pass import Mixer
from raycache.layers.self_attention import HeadShape, load_attention, read_attention
from raycache.layers.weights import ShardedWeights
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.models.llama import DenseConfig, read_dense


@dataclass(frozen=True)
class Qwen3MoeConfig(DenseConfig):
    """Qwen3 with experts.

    Attributes:
        dense_layers: layers with an MLP instead of experts.
    """

    experts: ExpertConfig
    dense_layers: tuple[int, ...]


class Qwen3Moe:
    """Layers of attention and experts or an MLP, with a norm before each."""

    model_type = "qwen3_moe"

    def read_config(self, file: ConfigFile) -> Qwen3MoeConfig:
        """Sliding windows and shared experts are not supported."""
        for key, served in {"use_sliding_window": False, "use_qk_norm": True}.items():
            file.require(key, served)
        file.require("shared_expert_intermediate_size", 0)
        require_full_attention(file)
        num_heads, num_kv_heads = file.integer("num_attention_heads"), file.integer("num_key_value_heads")
        heads = HeadShape(num_heads, num_kv_heads, file.integer("head_dim", file.integer("hidden_size") // num_heads))
        dense = read_dense(file, read_attention(file, heads, has_qk_norm=True))
        experts = read_softmax_experts(file, renormalise=file.flag("norm_topk_prob", False))
        return Qwen3MoeConfig(**vars(dense), experts=experts, dense_layers=read_dense_layers(file))

    def load(self, config: Qwen3MoeConfig, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        size, eps = config.hidden_size, config.rms_norm_eps
        rotary = config.attention.rotary(weights.ctx.device)

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            at, mlp = own.under("self_attn"), own.under("mlp")
            attention = load_attention(config.attention, at, layer=layer, size=size, eps=eps, rotary=rotary)
            block: Mixer
            if layer in config.dense_layers:
                block = load_feed_forward(mlp, size=size, inner=config.intermediate_size)
            else:
                block = load_softmax_moe(config.experts, mlp, size=size)
            return pre_norm_layer(config, own, attention, block)

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress)
