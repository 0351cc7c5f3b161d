"""The text model of Gemma 4: sliding-window layers and full ones with wider heads; in some models, experts in parallel
with the MLP.

Full layers may use one projection for keys and values (`attention_k_eq_v`), to which different norms are applied.
Models with per-layer embeddings or with keys and values shared between layers (E2B, E4B) are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raycache.checkpoint.config_file import ConfigFile, ModelConfig, read_common
from raycache.checkpoint.layer_kinds import FULL, SLIDING, read_windowed
from raycache.checkpoint.rope_config import RopeConfig
from raycache.errors import CheckpointError
from raycache.layers.activation import gelu_tanh_gated
from raycache.layers.expert_config import ExpertConfig, require_experts
from raycache.layers.expert_weights import load_experts, load_stacked_experts
from raycache.layers.experts import RoutedExperts
from raycache.layers.feed_forward import load_feed_forward
from raycache.layers.forward_pass import Mixer
from raycache.layers.mlp_and_experts import BranchNorms, LayerScale, MlpAndExperts, ScaledRouter
from raycache.layers.norm import RMSNorm
from raycache.layers.normed_attention import NormedAttentionConfig, load_normed_attention
from raycache.layers.rope import Rotary
from raycache.layers.router import SoftmaxRouter
from raycache.layers.self_attention import require_heads
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress, Residual, Scales, load_decoder
from raycache.parallel.sharding import HeadCount


@dataclass(frozen=True)
class Gemma4Config(ModelConfig):
    """Gemma 4.

    Attributes:
        full, windowed: attention of full and of sliding-window layers.
        intermediate_size: of the MLPs.
        experts: None without any.
        logit_cap: soft cap of the logits, or None.
    """

    full: NormedAttentionConfig
    windowed: NormedAttentionConfig
    intermediate_size: int
    experts: ExpertConfig | None
    logit_cap: float | None

    def attention(self, layer: int) -> NormedAttentionConfig:
        """Attention of a layer."""
        return self.windowed if layer in self.windowed.layers else self.full

    def components(self, fmt: CacheFormat) -> tuple[Component, ...]:
        return self.full.components(fmt) + self.windowed.components(fmt)

    @property
    def head_counts(self) -> tuple[HeadCount, ...]:
        return (
            HeadCount("num_attention_heads", self.full.num_heads),
            HeadCount("num_key_value_heads", self.windowed.num_kv_heads, is_shared=True),
            HeadCount("num_global_key_value_heads", self.full.num_kv_heads, is_shared=True),
        )


class Gemma4Text:
    """Layers of attention and an MLP, optionally with experts, with norms before and after each, and a scale."""

    model_type = "gemma4_text"

    def read_config(self, file: ConfigFile) -> Gemma4Config:
        """Per-layer embeddings and shared keys and values are not supported."""
        for key, served in {
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "attention_bias": False,
        }.items():
            file.require(key, served)
        if file.raw("use_bidirectional_attention") != "vision":
            file.require("use_bidirectional_attention", False)
        file = file.having(tie_word_embeddings=file.flag("tie_word_embeddings", True))
        last = file.integer("num_hidden_layers") - 1  # always a full layer
        window_layers = tuple(layer for layer in read_windowed(file, pattern=6) if layer != last)
        num_heads, num_kv_heads = file.integer("num_attention_heads"), file.integer("num_key_value_heads")
        is_shared = file.flag("attention_k_eq_v", False)
        others = tuple(layer for layer in range(file.integer("num_hidden_layers")) if layer not in window_layers)
        full_heads, full_dim = _read_full_heads(file, others, is_shared=is_shared)
        full = NormedAttentionConfig(
            num_heads, full_heads, full_dim, layers=others, rope=_read_full_rope(file), has_values=not is_shared
        )
        windowed = NormedAttentionConfig(
            num_heads,
            num_kv_heads,
            file.integer("head_dim", 256),
            layers=window_layers,
            rope=_read_window_rope(file),
            window=file.integer("sliding_window"),
        )
        for kind in (full, windowed):
            require_heads(file, kind)
        cap = file.raw("final_logit_softcapping")
        return Gemma4Config(
            **read_common(file),
            full=full,
            windowed=windowed,
            intermediate_size=file.integer("intermediate_size"),
            experts=_read_experts(file),
            logit_cap=None if cap is None else file.number("final_logit_softcapping"),
        )

    def load(self, config: Gemma4Config, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        size, eps, device = config.hidden_size, config.rms_norm_eps, weights.ctx.device
        rotaries = {kind: Rotary(kind.rope, kind.head_dim, device) for kind in (config.full, config.windowed)}

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            kind, at = config.attention(layer), own.under("self_attn")
            attention = load_normed_attention(kind, at, layer=layer, size=size, eps=eps, rotary=rotaries[kind])
            before, after = _load_norms(config, own, "input_layernorm", "post_attention_layernorm")
            return (
                Residual(before, attention, after=after),
                _load_block(config, own),
                LayerScale(own.whole("layer_scalar", 1)),
            )

        scales = Scales(embedding=size**0.5, logit_cap=config.logit_cap)
        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress, scales=scales)


def _read_full_heads(file: ConfigFile, layers: Sequence[int], *, is_shared: bool) -> tuple[int, int]:
    """KV heads of full layers, and their size; transformers may write them per layer."""
    num_kv_heads = file.integer("num_key_value_heads")
    by_layer = file.raw("per_layer_config")
    if by_layer is None:
        count = file.integer("num_global_key_value_heads", num_kv_heads) if is_shared else num_kv_heads
        return count, file.integer("global_head_dim", 512)
    if not isinstance(by_layer, dict) or set(by_layer) != set(map(str, layers)):
        raise CheckpointError(f"{file.path}: per_layer_config must name the layers with full attention, {list(layers)}")
    parts = [file.section("per_layer_config").section(key) for key in by_layer]
    found = {(part.integer("num_key_value_heads", num_kv_heads), part.integer("head_dim")) for part in parts}
    if len(found) > 1 or any(set(by_layer[key]) - {"num_key_value_heads", "head_dim"} for key in by_layer):
        raise CheckpointError(
            f"{file.path}: per_layer_config must have the same num_key_value_heads and head_dim for all layers with "
            "full attention, and nothing else"
        )
    return found.pop() if found else (num_kv_heads, 512)


def _read_full_rope(file: ConfigFile) -> RopeConfig:
    rope = file.section("rope_parameters").section(FULL)
    rope.require("rope_type", "proportional")
    share = 0.25 if file.raw("rope_parameters") is None else 1.0
    return RopeConfig(
        "proportional",
        rope.number("rope_theta", 1e6),
        rope.number("factor", 1.0),
        share=rope.number("partial_rotary_factor", share),
    )


def _read_window_rope(file: ConfigFile) -> RopeConfig:
    rope = file.section("rope_parameters").section(SLIDING)
    for key, served in {"rope_type": "default", "partial_rotary_factor": 1.0}.items():
        rope.require(key, served)
    return RopeConfig(theta=rope.number("rope_theta", 1e4))


def _read_experts(file: ConfigFile) -> ExpertConfig | None:
    if not file.flag("enable_moe_block", False):
        return None
    # Some files have the inner size as `expert_intermediate_size`.
    key = "moe_intermediate_size" if file.raw("moe_intermediate_size") is not None else "expert_intermediate_size"
    experts = ExpertConfig(
        count=file.integer("num_experts"), top_k=file.integer("top_k_experts"), inner=file.integer(key)
    )
    return require_experts(file, experts)


def _load_norms(config: Gemma4Config, own: ShardedWeights, *names: str) -> list[RMSNorm]:
    return [RMSNorm(own.whole(f"{name}.weight", config.hidden_size), config.rms_norm_eps) for name in names]


def _load_block(config: Gemma4Config, own: ShardedWeights) -> Mixer:
    """Load the MLP, and experts if there are any."""
    size, inner = config.hidden_size, config.intermediate_size
    mlp = load_feed_forward(own.under("mlp"), size=size, inner=inner, activation=gelu_tanh_gated)
    before, after = _load_norms(config, own, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    if config.experts is None:
        return Residual(before, mlp, after=after)
    dense = BranchNorms(before, *_load_norms(config, own, "post_feedforward_layernorm_1"))
    routed = BranchNorms(*_load_norms(config, own, "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"))
    return MlpAndExperts(
        mlp,
        _load_experts(config.experts, own.under("experts"), size=size),
        (dense, routed),
        router=_load_router(config.experts, config, own.under("router")),
        after=after,
        group=own.ctx.tp,
    )


def _load_experts(experts: ExpertConfig, weights: ShardedWeights, *, size: int) -> RoutedExperts:
    """Load stacked experts, or a tensor per expert as in quantised checkpoints."""
    if weights.has("0.gate_proj.weight"):
        return load_experts(experts, weights, size=size, activation=gelu_tanh_gated)
    up, down = "gate_up_proj", "down_proj"
    return load_stacked_experts(experts, weights, up=up, down=down, size=size, activation=gelu_tanh_gated)


def _load_router(experts: ExpertConfig, config: Gemma4Config, weights: ShardedWeights) -> ScaledRouter:
    size, precise = config.hidden_size, weights.precise
    scale = weights.whole("scale", size, dtype=precise)
    projection = weights.whole("proj.weight", experts.count, size, dtype=precise)
    return ScaledRouter(
        RMSNorm(torch.ones(size, dtype=precise, device=scale.device), config.rms_norm_eps),
        SoftmaxRouter(projection * scale * size**-0.5, top_k=experts.top_k, renormalise=True),
        weights.whole("per_expert_scale", experts.count, dtype=precise),
    )
