"""The text model of Kimi K3: Kimi Linear with attention residuals, gated attention, and experts in a latent space.

Its published model_type is `kimi_linear`, inside `kimi_k3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.layers.activation import Activation, situ
from raycache.layers.attention_residual import AttentionResidual, MixedNorm, PlaneMixture
from raycache.layers.expert_weights import load_experts, load_shared_expert, load_sigmoid_router
from raycache.layers.experts import MixtureOfExperts, NormedLatentExperts
from raycache.layers.feed_forward import MIXTRAL, load_feed_forward
from raycache.layers.forward_pass import Mixer
from raycache.layers.kda import KdaConfig, load_kda, require_kda
from raycache.layers.latent_attention import LatentNames, load_latent_attention, read_latent
from raycache.layers.norm import RMSNorm
from raycache.layers.weights import ShardedWeights
from raycache.models.decoder import Decoder, Progress, load_decoder
from raycache.models.kimi_linear import KdaHybridConfig, read_kda_hybrid, read_kimi_kinds


@dataclass(frozen=True)
class KimiK3Config(KdaHybridConfig):
    """Adds what Kimi Linear does not have.

    Attributes:
        block_size: layers per block of the residual stream (attention_residual.py).
        latent_size: input and output features of routed experts.
        beta, linear_beta: of the activation `situ`.
    """

    heads_key = "num_heads of linear_attn_config"
    block_size: int
    latent_size: int
    beta: float
    linear_beta: float

    def stream_width(self, layer: int) -> int:
        return self.hidden_size * (1 + -(-layer // self.block_size))

    @property
    def activation(self) -> Activation:
        """Activation of MLPs and experts."""
        return situ(beta=self.beta, linear_beta=self.linear_beta)


class KimiK3Text:
    """Layers of KDA or latent attention, and experts or an MLP, with attention residuals around them."""

    model_type = "kimi_k3_text"

    def read_config(self, file: ConfigFile) -> KimiK3Config:
        """Layers are counted from 1. Only the options of the published model are supported."""
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
            low_rank="f",
            rate_shape=(linear.integer("head_dim"),),
        )
        if kda.num_heads > kda.head_dim:
            raise CheckpointError(
                f"{file.path}: num_heads={kda.num_heads} of linear_attn_config exceeds head_dim={kda.head_dim}, the "
                "size of A_log"
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

    def load(self, config: KimiK3Config, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        size, eps, inner = config.hidden_size, config.rms_norm_eps, config.intermediate_size
        names = LatentNames(gate="g_proj", gate_dim=config.attention.value_dim)

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            at = own.under("self_attn")
            attention: Mixer
            if layer in config.kinds.linear:
                attention = load_kda(config.kda, at, layer=layer, size=size, eps=eps)
            else:
                attention = load_latent_attention(
                    config.attention, at, layer=layer, size=size, rotary=None, names=names
                )
            block: Mixer
            if layer in config.mlp_layers:
                block = load_feed_forward(own.under("mlp"), size=size, inner=inner, activation=config.activation)
            else:
                block = _load_experts(config, own.under("block_sparse_moe"))
            before, between = (
                RMSNorm(own.whole(f"{name}.weight", size), eps)
                for name in ("input_layernorm", "post_attention_layernorm")
            )
            mixtures = [_load_mixture(name, config, own) for name in ("self_attention_res", "mlp_res")]
            starts_block = layer % config.block_size == 0
            return (
                AttentionResidual(mixtures[0], before, attention, starts_block=starts_block),
                AttentionResidual(mixtures[1], between, block, starts_block=False),
            )

        def make_norm(weight: Tensor, eps: float) -> MixedNorm:
            return MixedNorm(_load_mixture("model.output_attn_res", config, weights), RMSNorm(weight, eps))

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress, make_norm=make_norm)


def _read_bound(file: ConfigFile, linear: ConfigFile) -> float | None:
    bound = linear.raw("gate_lower_bound")
    if bound is not None and type(bound) not in (int, float):
        raise CheckpointError(f"{file.path}: gate_lower_bound must be a number, got {bound!r}")
    return None if bound is None else float(bound)


def _load_mixture(name: str, config: KimiK3Config, weights: ShardedWeights) -> PlaneMixture:
    norm = weights.whole(f"{name}_norm.weight", config.hidden_size, dtype=weights.precise)
    projection = weights.whole(f"{name}_proj.weight", 1, config.hidden_size, dtype=weights.precise)
    return PlaneMixture(norm.mul_(projection[0]), config.rms_norm_eps)


def _load_experts(config: KimiK3Config, weights: ShardedWeights) -> MixtureOfExperts:
    size, latent, experts = config.hidden_size, config.latent_size, config.experts
    taken, activation, tp = weights.heads(latent), config.activation, weights.ctx.tp
    routed = NormedLatentExperts(
        weights.whole("routed_expert_down_proj.weight", latent, size),
        weights.cut("routed_expert_up_proj.weight", (size, latent), axis=1, taken=taken),
        load_experts(experts, weights.under("experts"), size=latent, names=MIXTRAL, activation=activation),
        norm=RMSNorm(weights.whole("routed_expert_norm.weight", latent), config.rms_norm_eps),
        taken=taken,
        group=tp,
    )
    shared = load_shared_expert(
        weights.under("shared_experts"), size=size, inner=experts.shared_inner, activation=activation
    )
    return MixtureOfExperts(load_sigmoid_router(experts, weights, size=size), routed, tp, shared=shared)
