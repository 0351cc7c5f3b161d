"""Ling 3: Kimi delta attention with bounded decays, latent attention with a gate per head, grouped experts whose
activations have limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile, read_rope
from raycache.checkpoint.layer_kinds import LayerKinds, read_layer_kinds
from raycache.errors import CheckpointError
from raycache.layers.forward_pass import Mixer
from raycache.layers.kda import Projection
from raycache.layers.rope import Rotary
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component
from raycache.models.bailing import (
    WORD_EMBEDDINGS,
    Limits,
    load_bailing_moe,
    prediction_names,
    read_bailing_experts,
    read_limits,
)
from raycache.models.decoder import Decoder, Progress, pre_norm_layer
from raycache.models.feed_forward import load_feed_forward
from raycache.models.kda import (
    KdaConfig,
    KdaHybridConfig,
    kda_hybrid_components,
    kda_hybrid_head_counts,
    load_kda,
    load_kda_hybrid,
    read_kda_hybrid,
    require_kda,
)
from raycache.models.latent_attention import LatentNames, load_latent_attention, read_latent
from raycache.models.prediction import PredictionLayer, load_prediction
from raycache.parallel.sharding import HeadCount, even_range

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

SERVED = {
    "attention_bias": False,
    "rope_interleave": True,
    "use_mla_nope": False,
    "no_kda_lora": True,
    "use_kda_lora": False,
    "gated_attention_proj_granularity_type": "head_wise",
    "router_type": "topN",
    "multi_gate": False,
    "up_proj_norm": False,
    "value_norm": False,
    "use_nGPT": False,
    "scale_router_input": False,
    "router_dtype": "fp32",
    "use_qk_norm": True,
    "num_kv_heads_for_linear_attn": 0,
}
"""Keys that choose among forms of the model, and the one that is implemented."""


@dataclass(frozen=True)
class BailingHybridConfig(KdaHybridConfig):
    """Adds the limits of activations.

    Attributes:
        limits: of the experts.
    """

    limits: Limits


class BailingHybrid:
    """See models.base.Family."""

    model_type = "bailing_hybrid"

    def read_config(self, file: ConfigFile) -> BailingHybridConfig:
        """KDA has as many heads as the attention."""
        for key, served in SERVED.items():
            file.require(key, served)
        max_position = file.integer("model_max_length", file.integer("max_position_embeddings", 262144))
        file = file.having(max_position_embeddings=max_position)
        interval = file.integer("layer_group_size", 6)
        file.require("rotary_dim", file.raw("qk_rope_head_dim"))
        # All of them are turned, though published files have partial_rotary_factor=0.5, as an earlier architecture.
        rope = read_rope(file.having(partial_rotary_factor=None), theta=6e6)
        kda = KdaConfig(
            num_heads=file.integer("linear_num_heads", file.integer("num_attention_heads")),
            # transformers writes `linear_head_dim`, and another number as `head_dim`.
            head_dim=file.integer("linear_head_dim", file.integer("head_dim", 128)),
            kernel=file.integer("linear_conv_kernel_dim", file.integer("short_conv_kernel_size", 4)),
            bound=_read_bound(file),
        )
        shared = {**read_kda_hybrid(file, num_mlp_layers=2, num_drafts=1), "experts": read_bailing_experts(file)}
        return BailingHybridConfig(
            **shared,
            kinds=read_layer_kinds(file, is_full=lambda layer: (layer + 1) % interval == 0),
            kda=require_kda(file, kda),
            attention=read_latent(file, rope=rope),
            limits=read_limits(file),
        )

    def components(self, config: BailingHybridConfig, fmt: CacheFormat) -> tuple[Component, ...]:
        return kda_hybrid_components(config, fmt)

    def head_counts(self, config: BailingHybridConfig) -> tuple[HeadCount, ...]:
        return kda_hybrid_head_counts(config, heads_key="num_attention_heads")

    def prediction_layer(self, config: BailingHybridConfig) -> BailingHybridConfig:
        name = f"the prediction layer of {config.name}"
        return replace(config, name=name, num_layers=1, kinds=LayerKinds((), (0,)), mlp_layers=())

    def load_prediction_layer(
        self, config: BailingHybridConfig, weights: ShardedWeights, ctx: ParallelContext, target: Decoder
    ) -> PredictionLayer:
        number = config.num_layers
        at = f"model.layers.{number}"
        attention = _load_full(0, f"{at}.attention", config, weights, ctx, rotary=config.attention.rotary(ctx))
        block = _load_block(number, f"{at}.mlp", config, weights, ctx)
        parts = pre_norm_layer(at, attention, block, config, weights)
        return load_prediction(parts, prediction_names(at), config, weights, ctx, target)

    def load(
        self, config: BailingHybridConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        rotary = config.attention.rotary(ctx)
        return load_kda_hybrid(
            config,
            weights,
            ctx,
            load_linear=lambda layer, at: _load_linear(layer, f"{at}.attention", config, weights, ctx),
            load_full=lambda layer, at: _load_full(layer, f"{at}.attention", config, weights, ctx, rotary=rotary),
            load_block=lambda layer, at: _load_block(layer, f"{at}.mlp", config, weights, ctx),
            on_progress=on_progress,
            names=WORD_EMBEDDINGS,
        )


def _read_bound(file: ConfigFile) -> float | None:
    if not file.flag("kda_safe_gate", True):
        return None
    bound = file.raw("kda_lower_bound")
    if bound is None:
        return -5.0
    if type(bound) not in (int, float):
        raise CheckpointError(f"{file.path}: kda_lower_bound must be a number, got {bound!r}")
    return float(bound)


def _out(at: str, weights: ShardedWeights, *, published: str) -> str:
    """Name of an output projection, which depends on who wrote the checkpoint: transformers writes "dense" only."""
    return next((name for name in ("o_proj", "dense") if weights.has(f"{at}.{name}.weight")), published)


def _load_full(
    layer: int,
    at: str,
    config: BailingHybridConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    rotary: Rotary | None,
) -> Mixer:
    size, names = config.hidden_size, LatentNames(out=_out(at, weights, published="dense"), gate="g_proj")
    return load_latent_attention(layer, at, config.attention, weights, ctx, size=size, rotary=rotary, names=names)


def _load_block(
    layer: int, at: str, config: BailingHybridConfig, weights: ShardedWeights, ctx: ParallelContext
) -> Mixer:
    size = config.hidden_size
    if layer in config.mlp_layers:
        return load_feed_forward(at, weights, ctx, size=size, inner=config.intermediate_size)
    return load_bailing_moe(at, config.experts, weights, ctx, size=size, limits=config.limits.of(layer))


def _load_linear(
    layer: int, at: str, config: BailingHybridConfig, weights: ShardedWeights, ctx: ParallelContext
) -> Mixer:
    kda, size = config.kda, config.hidden_size
    taken = features(even_range(kda.num_heads, ctx.tp.rank, ctx.tp.size), kda.head_dim)

    def load_projection(kind: str) -> Projection:
        return weights.column([Columns(f"{at}.{kind}_proj", kda.inner, taken)], inputs=size, has_bias=False)

    return load_kda(
        layer,
        at,
        kda,
        weights,
        ctx,
        size=size,
        eps=config.rms_norm_eps,
        load_projection=load_projection,
        rate_shape=(kda.num_heads,),
        out=_out(at, weights, published="o_proj"),
    )
