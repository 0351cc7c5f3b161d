"""The text model of Kimi K3: Kimi Linear with attention residuals, a gate on every attention, and experts that work in
a space of fewer features.

Published files give it the model_type `kimi_linear`, inside of `kimi_k3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.layers.activation import Activation, situ
from raycache.layers.attention_residual import AttentionResidual, MixedNorm, PlaneMixture
from raycache.layers.experts import MixtureOfExperts, NormedLatentExperts
from raycache.layers.forward_pass import Mixer
from raycache.layers.kda import LowRank, Projection
from raycache.layers.norm import RMSNorm
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress, load_decoder
from raycache.models.feed_forward import (
    MIXTRAL,
    load_experts,
    load_feed_forward,
    load_shared_expert,
    load_sigmoid_router,
)
from raycache.models.kda import (
    KdaConfig,
    KdaHybridConfig,
    kda_hybrid_components,
    kda_hybrid_head_counts,
    load_kda,
    read_kda_hybrid,
    require_kda,
)
from raycache.models.kimi_linear import read_kimi_kinds
from raycache.models.latent_attention import LatentNames, load_latent_attention, read_latent
from raycache.parallel.sharding import HeadCount, even_range

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class KimiK3Config(KdaHybridConfig):
    """Adds what Kimi Linear does not have.

    Attributes:
        block_size: layers that share a plane of the stream (attention_residual.py).
        latent_size: features that routed experts take and give.
        beta, linear_beta: bounds of the activation.
    """

    block_size: int
    latent_size: int
    beta: float
    linear_beta: float

    def stream_width(self, layer: int) -> int:
        return self.hidden_size * (1 + -(-layer // self.block_size))

    @property
    def activation(self) -> Activation:
        """Of the MLPs and experts."""
        return situ(beta=self.beta, linear_beta=self.linear_beta)


class KimiK3Text:
    """See models.base.Family."""

    model_type = "kimi_k3_text"

    def read_config(self, file: ConfigFile) -> KimiK3Config:
        """Layers are named from 1 on. What K3 has switched on is required, for nothing else was published."""
        linear = file.section("linear_attn_config")
        for place, served in (
            (file, {"mla_use_nope": True, "mla_use_output_gate": True, "latent_moe_use_norm": True}),
            (file, {"attention_bias": False, "routed_scaling_factor": 1.0}),
            (linear, {"use_full_rank_gate": True}),
        ):
            for key, value in served.items():
                place.require(key, value)
        kda = KdaConfig(
            num_heads=linear.integer("num_heads"),
            head_dim=linear.integer("head_dim"),
            kernel=linear.integer("short_conv_kernel_size", 4),
            bound=_read_bound(file, linear),
        )
        if kda.num_heads > kda.head_dim:
            raise CheckpointError(
                f"{file.path}: num_heads={kda.num_heads} of linear_attn_config is above head_dim={kda.head_dim}, the "
                "numbers that A_log has"
            )
        return KimiK3Config(
            **read_kda_hybrid(file, num_mlp_layers=1, num_drafts=0, activation="situ"),
            kinds=read_kimi_kinds(file, linear),
            kda=require_kda(file, kda),
            attention=read_latent(file, rope=None),
            block_size=file.integer("attn_res_block_size"),
            latent_size=file.integer("routed_expert_hidden_size"),
            beta=file.number("activation_situ_beta"),
            linear_beta=file.number("activation_situ_linear_beta"),
        )

    def components(self, config: KimiK3Config, fmt: CacheFormat) -> tuple[Component, ...]:
        return kda_hybrid_components(config, fmt)

    def head_counts(self, config: KimiK3Config) -> tuple[HeadCount, ...]:
        return kda_hybrid_head_counts(config, heads_key="num_heads of linear_attn_config")

    def load(
        self, config: KimiK3Config, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        size, eps = config.hidden_size, config.rms_norm_eps

        def load_layer(layer: int) -> Sequence[Mixer]:
            at = f"model.layers.{layer}"
            attention = _load_attention(layer, at, config, weights, ctx)
            block = _load_block(layer, at, config, weights, ctx)
            before, between = (
                RMSNorm(weights.whole(f"{at}.{name}.weight", size), eps)
                for name in ("input_layernorm", "post_attention_layernorm")
            )
            mixtures = [_load_mixture(f"{at}.{name}", config, weights) for name in ("self_attention_res", "mlp_res")]
            starts_block = layer % config.block_size == 0
            return (
                AttentionResidual(mixtures[0], before, attention, starts_block=starts_block),
                AttentionResidual(mixtures[1], between, block, starts_block=False),
            )

        def make_norm(weight: Tensor, eps: float) -> MixedNorm:
            return MixedNorm(_load_mixture("model.output_attn_res", config, weights), RMSNorm(weight, eps))

        return load_decoder(config, weights, ctx, load_layer=load_layer, on_progress=on_progress, make_norm=make_norm)


def _read_bound(file: ConfigFile, linear: ConfigFile) -> float | None:
    bound = linear.raw("gate_lower_bound")
    if bound is not None and type(bound) not in (int, float):
        raise CheckpointError(f"{file.path}: gate_lower_bound must be a number, got {bound!r}")
    return None if bound is None else float(bound)


def _load_mixture(at: str, config: KimiK3Config, weights: ShardedWeights) -> PlaneMixture:
    norm = weights.whole(f"{at}_norm.weight", config.hidden_size, dtype=weights.precise)
    projection = weights.whole(f"{at}_proj.weight", 1, config.hidden_size, dtype=weights.precise)
    return PlaneMixture(norm.mul_(projection[0]), config.rms_norm_eps)


def _load_attention(layer: int, at: str, config: KimiK3Config, weights: ShardedWeights, ctx: ParallelContext) -> Mixer:
    at, size, kda = f"{at}.self_attn", config.hidden_size, config.kda
    if layer not in config.kinds.linear:
        names = LatentNames(gate="g_proj", gate_dim=config.attention.value_dim)
        return load_latent_attention(layer, at, config.attention, weights, ctx, size=size, rotary=None, names=names)
    taken = features(even_range(kda.num_heads, ctx.tp.rank, ctx.tp.size), kda.head_dim)

    def load_projection(kind: str) -> Projection:
        if kind == "g":
            return weights.column([Columns(f"{at}.g_proj", kda.inner, taken)], inputs=size, has_bias=False)
        up = [Columns(f"{at}.{kind}_b_proj", kda.inner, taken)]
        return LowRank(
            weights.whole(f"{at}.{kind}_a_proj.weight", kda.head_dim, size),
            weights.column(up, inputs=kda.head_dim, has_bias=False),
        )

    return load_kda(
        layer,
        at,
        kda,
        weights,
        ctx,
        size=size,
        eps=config.rms_norm_eps,
        load_projection=load_projection,
        rate_shape=(kda.head_dim,),
    )


def _load_block(layer: int, at: str, config: KimiK3Config, weights: ShardedWeights, ctx: ParallelContext) -> Mixer:
    size, latent, experts = config.hidden_size, config.latent_size, config.experts
    if layer in config.mlp_layers:
        return load_feed_forward(
            f"{at}.mlp", weights, ctx, size=size, inner=config.intermediate_size, activation=config.activation
        )
    at = f"{at}.block_sparse_moe"
    taken = even_range(latent, ctx.tp.rank, ctx.tp.size)
    routed = NormedLatentExperts(
        weights.whole(f"{at}.routed_expert_down_proj.weight", latent, size),
        weights.cut(f"{at}.routed_expert_up_proj.weight", (size, latent), axis=1, taken=taken),
        load_experts(f"{at}.experts", experts, weights, ctx, size=latent, names=MIXTRAL, activation=config.activation),
        norm=RMSNorm(weights.whole(f"{at}.routed_expert_norm.weight", latent), config.rms_norm_eps),
        taken=taken,
        group=ctx.tp,
    )
    shared = load_shared_expert(
        f"{at}.shared_experts", weights, ctx, size=size, inner=experts.shared_inner, activation=config.activation
    )
    return MixtureOfExperts(
        load_sigmoid_router(f"{at}.gate", experts, weights, size=size), routed, ctx.tp, shared=shared
    )
