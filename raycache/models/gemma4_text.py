"""Gemma 4, text only: windowed layers between full ones with wider heads, and in some models experts beside the MLP.

Keys and values of full layers can be one projection (`attention_k_eq_v`): what becomes a key by norm and rotation
becomes a value by another norm. Models with embeddings per layer or with keys and values that layers share (E2B, E4B)
are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from raycache.checkpoint.config_file import ConfigFile, ModelConfig, read_common
from raycache.checkpoint.layer_kinds import FULL, SLIDING, read_windowed
from raycache.checkpoint.rope_config import RopeConfig
from raycache.errors import CheckpointError
from raycache.layers.activation import gelu_tanh_gated
from raycache.layers.experts import RoutedExperts
from raycache.layers.forward_pass import Mixer
from raycache.layers.mlp_and_experts import LayerScale, MlpAndExperts, ScaledRouter, Way
from raycache.layers.norm import HeadNorm, RMSNorm
from raycache.layers.normed_attention import NormedAttention
from raycache.layers.rope import Rotary
from raycache.layers.router import SoftmaxRouter
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component, kv
from raycache.models.decoder import Decoder, Progress, Residual, load_decoder
from raycache.models.dense import require_heads
from raycache.models.feed_forward import (
    ExpertConfig,
    load_experts,
    load_feed_forward,
    load_stacked_experts,
    require_experts,
)
from raycache.parallel.sharding import HeadCount, even_range, shared_head_range

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class AttentionConfig:
    """The attention of layers of one kind.

    Attributes:
        layers: that have it.
        num_kv_heads, head_dim: of each.
        rope: position embedding.
        has_values: whether values have a projection of their own.
        window: tokens that a query sees, itself included; 0 for all.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    has_values: bool = True
    window: int = 0


@dataclass(frozen=True)
class Gemma4Config(ModelConfig):
    """Gemma 4.

    Attributes:
        num_heads: of queries, in all layers.
        full, windowed: the two kinds of attention.
        intermediate_size: of the MLPs.
        experts: beside the MLPs, or None.
        logit_cap: bound of the logits, or None.
    """

    num_heads: int
    full: AttentionConfig
    windowed: AttentionConfig
    intermediate_size: int
    experts: ExpertConfig | None
    logit_cap: float | None

    def attention(self, layer: int) -> AttentionConfig:
        """Of a layer."""
        return self.windowed if layer in self.windowed.layers else self.full


class Gemma4Text:
    """See models.base.Family."""

    model_type = "gemma4_text"

    def read_config(self, file: ConfigFile) -> Gemma4Config:
        """Embeddings per layer and shared keys and values are refused."""
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
        last = file.integer("num_hidden_layers") - 1  # sees everything, whatever the file says
        window_layers = tuple(layer for layer in read_windowed(file, pattern=6) if layer != last)
        num_heads, num_kv_heads = file.integer("num_attention_heads"), file.integer("num_key_value_heads")
        is_shared = file.flag("attention_k_eq_v", False)
        others = tuple(layer for layer in range(file.integer("num_hidden_layers")) if layer not in window_layers)
        full_heads, full_dim = _read_full_heads(file, others, is_shared=is_shared)
        full = AttentionConfig(others, full_heads, full_dim, _read_full_rope(file), has_values=not is_shared)
        windowed = AttentionConfig(
            window_layers,
            num_kv_heads,
            file.integer("head_dim", 256),
            _read_window_rope(file),
            window=file.integer("sliding_window"),
        )
        for kind in (full, windowed):
            require_heads(file, num_heads=num_heads, num_kv_heads=kind.num_kv_heads, head_dim=kind.head_dim)
        cap = file.raw("final_logit_softcapping")
        return Gemma4Config(
            **read_common(file),
            num_heads=num_heads,
            full=full,
            windowed=windowed,
            intermediate_size=file.integer("intermediate_size"),
            experts=_read_experts(file),
            logit_cap=None if cap is None else file.number("final_logit_softcapping"),
        )

    def components(self, config: Gemma4Config, fmt: CacheFormat) -> tuple[Component, ...]:
        return tuple(
            kv(name, kind.layers, heads=kind.num_kv_heads, dim=kind.head_dim, fmt=fmt, window=kind.window)
            for name, kind in (("kv", config.full), ("window", config.windowed))
            if kind.layers
        )

    def head_counts(self, config: Gemma4Config) -> tuple[HeadCount, ...]:
        return (
            HeadCount("num_attention_heads", config.num_heads),
            HeadCount("num_key_value_heads", config.windowed.num_kv_heads, is_shared=True),
            HeadCount("num_global_key_value_heads", config.full.num_kv_heads, is_shared=True),
        )

    def load(
        self, config: Gemma4Config, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        rotaries = {kind: Rotary(kind.rope, kind.head_dim, ctx.device) for kind in (config.full, config.windowed)}

        def load_layer(layer: int) -> Sequence[Mixer]:
            at, kind = f"model.layers.{layer}", config.attention(layer)
            attention = _load_attention(layer, f"{at}.self_attn", config, weights, ctx, rotary=rotaries[kind])
            before, after = (
                _load_norm(f"{at}.{name}_layernorm", config, weights) for name in ("input", "post_attention")
            )
            return (
                Residual(before, attention, after=after),
                _load_block(at, config, weights, ctx),
                LayerScale(weights.whole(f"{at}.layer_scalar", 1)),
            )

        return load_decoder(
            config,
            weights,
            ctx,
            load_layer=load_layer,
            on_progress=on_progress,
            embedding_scale=config.hidden_size**0.5,
            logit_cap=config.logit_cap,
        )


def _read_full_heads(file: ConfigFile, layers: Sequence[int], *, is_shared: bool) -> tuple[int, int]:
    """KV heads of full layers, and their size; transformers writes them for each layer by itself."""
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
            f"{file.path}: per_layer_config must say the same num_key_value_heads and head_dim of all layers with full "
            "attention, and nothing else"
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
    # Files of one version call the inner size `expert_intermediate_size`.
    key = "moe_intermediate_size" if file.raw("moe_intermediate_size") is not None else "expert_intermediate_size"
    experts = ExpertConfig(
        count=file.integer("num_experts"), top_k=file.integer("top_k_experts"), inner=file.integer(key)
    )
    return require_experts(file, experts)


def _load_norm(name: str, config: Gemma4Config, weights: ShardedWeights) -> RMSNorm:
    return RMSNorm(weights.whole(f"{name}.weight", config.hidden_size), config.rms_norm_eps)


def _load_attention(
    layer: int, at: str, config: Gemma4Config, weights: ShardedWeights, ctx: ParallelContext, *, rotary: Rotary
) -> NormedAttention:
    kind = config.attention(layer)
    dim = kind.head_dim
    heads = even_range(config.num_heads, ctx.tp.rank, ctx.tp.size)
    kv_heads = shared_head_range(kind.num_kv_heads, ctx.tp.rank, ctx.tp.size)
    parts = [Columns(f"{at}.q_proj", config.num_heads * dim, features(heads, dim))]
    for name in ("k_proj", "v_proj") if kind.has_values else ("k_proj",):
        parts.append(Columns(f"{at}.{name}", kind.num_kv_heads * dim, features(kv_heads, dim)))
    norms = [
        weights.whole(f"{at}.{name}.weight", dim).expand(count, -1)
        for name, count in (("q_norm", len(heads)), ("k_norm", len(kv_heads)))
    ]
    both = norms[0].new_empty(len(heads) + len(kv_heads), dim)
    both[: len(heads)], both[len(heads) :] = norms
    return NormedAttention(
        layer,
        weights.column(parts, inputs=config.hidden_size, has_bias=False),
        weights.row(
            f"{at}.o_proj",
            outputs=config.hidden_size,
            inputs=config.num_heads * dim,
            taken=features(heads, dim),
            has_bias=False,
        ),
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        head_dim=dim,
        rotary=rotary,
        qk_norm=HeadNorm(both, config.rms_norm_eps),
        eps=config.rms_norm_eps,
        has_values=kind.has_values,
    )


def _load_block(at: str, config: Gemma4Config, weights: ShardedWeights, ctx: ParallelContext) -> Mixer:
    size = config.hidden_size
    mlp = load_feed_forward(
        f"{at}.mlp", weights, ctx, size=size, inner=config.intermediate_size, activation=gelu_tanh_gated
    )
    before, after = (_load_norm(f"{at}.{name}_feedforward_layernorm", config, weights) for name in ("pre", "post"))
    if config.experts is None:
        return Residual(before, mlp, after=after)
    dense = Way(before, _load_norm(f"{at}.post_feedforward_layernorm_1", config, weights))
    routed = Way(*(_load_norm(f"{at}.{name}_feedforward_layernorm_2", config, weights) for name in ("pre", "post")))
    return MlpAndExperts(
        mlp,
        _load_experts(f"{at}.experts", config.experts, weights, ctx, size=size),
        (dense, routed),
        router=_load_router(f"{at}.router", config.experts, config, weights),
        after=after,
        group=ctx.tp,
    )


def _load_experts(
    at: str, experts: ExpertConfig, weights: ShardedWeights, ctx: ParallelContext, *, size: int
) -> RoutedExperts:
    """All in one tensor, or one by one, as quantised checkpoints have them."""
    if weights.has(f"{at}.0.gate_proj.weight"):
        return load_experts(at, experts, weights, ctx, size=size, activation=gelu_tanh_gated)
    up, down = f"{at}.gate_up_proj", f"{at}.down_proj"
    return load_stacked_experts(up, down, experts, weights, ctx, size=size, activation=gelu_tanh_gated)


def _load_router(at: str, experts: ExpertConfig, config: Gemma4Config, weights: ShardedWeights) -> ScaledRouter:
    size, precise = config.hidden_size, weights.precise
    scale = weights.whole(f"{at}.scale", size, dtype=precise)
    projection = weights.whole(f"{at}.proj.weight", experts.count, size, dtype=precise)
    return ScaledRouter(
        RMSNorm(torch.ones(size, dtype=precise, device=scale.device), config.rms_norm_eps),
        SoftmaxRouter(projection * scale * size**-0.5, top_k=experts.top_k, renormalise=True),
        weights.whole(f"{at}.per_expert_scale", experts.count, dtype=precise),
    )
