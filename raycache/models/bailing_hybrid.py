"""Ling 3: Kimi delta attention with bounded decays, latent attention with a gate per head, grouped experts with clamped
activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raycache.checkpoint.config_file import ConfigFile, read_rope
from raycache.checkpoint.layer_kinds import LayerKinds, read_layer_kinds
from raycache.errors import CheckpointError
from raycache.layers.activation import Activation, silu_clamped, silu_gated
from raycache.layers.expert_weights import load_grouped_moe, load_shared_expert
from raycache.layers.feed_forward import load_feed_forward
from raycache.layers.forward_pass import Mixer
from raycache.layers.kda import KdaConfig, load_kda, require_kda
from raycache.layers.latent_attention import LatentNames, load_latent_attention, read_latent
from raycache.layers.rope import Rotary
from raycache.layers.weights import ShardedWeights
from raycache.models.bailing_moe_v2_5 import CORRECTION, WORD_EMBEDDINGS, read_bailing_experts
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.models.kimi_linear import KdaHybridConfig, read_kda_hybrid
from raycache.models.prediction import PredictionLayer, PredictionNames, load_prediction

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
"""Keys that select variants of the model, with the supported value."""


@dataclass(frozen=True)
class Limits:
    """Limits of the activations of routed and shared experts, per layer.

    None means no limit; so does a layer beyond the end of the list.
    """

    routed: tuple[float | None, ...] = ()
    shared: tuple[float | None, ...] = ()

    def activations(self, layer: int) -> tuple[Activation, Activation]:
        """Activations of a layer's routed and shared experts."""
        routed, shared = (limits[layer] if layer < len(limits) else None for limits in (self.routed, self.shared))
        return _activation(routed), _activation(shared)


def _activation(limit: float | None) -> Activation:
    return silu_gated if limit is None else silu_clamped(limit=limit)


def read_limits(file: ConfigFile) -> Limits:
    """Read the limits; null, and null or 0 in a list, mean no limit.

    Raises:
        CheckpointError: a list has other values.
    """
    return Limits(*(_read_list(file, key) for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")))


def _read_list(file: ConfigFile, key: str) -> tuple[float | None, ...]:
    limits: Sequence[float | None] = [] if file.raw(key) is None else file.raw(key)
    if not isinstance(limits, list) or any(
        limit is not None and (type(limit) not in (int, float) or not 0 <= limit < float("inf")) for limit in limits
    ):
        raise CheckpointError(f"{file.path}: {key} must be a list of limits, one per layer, got {limits!r}")
    return tuple(float(limit) if limit else None for limit in limits)


@dataclass(frozen=True)
class BailingHybridConfig(KdaHybridConfig):
    """Adds the limits of the experts' activations."""

    limits: Limits


class BailingHybrid:
    """Layers of KDA or latent attention, and experts or an MLP, with a norm before each; a prediction layer."""

    model_type = "bailing_hybrid"

    def read_config(self, file: ConfigFile) -> BailingHybridConfig:
        """By default, KDA has as many heads as latent attention."""
        for key, served in SERVED.items():
            file.require(key, served)
        max_position = file.integer("model_max_length", file.integer("max_position_embeddings", 262144))
        file = file.having(max_position_embeddings=max_position)
        interval = file.integer("layer_group_size", 6)
        file.require("rotary_dim", file.raw("qk_rope_head_dim"))
        # All features are rotated; partial_rotary_factor=0.5 in published files is a leftover of an earlier model.
        rope = read_rope(file.having(partial_rotary_factor=None), theta=6e6)
        kda = KdaConfig(
            num_heads=file.integer("linear_num_heads", file.integer("num_attention_heads")),
            # transformers writes `linear_head_dim`; its `head_dim` means something else.
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

    def load(self, config: BailingHybridConfig, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        rotary = config.attention.rotary(weights.ctx.device)

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            size, eps, at = config.hidden_size, config.rms_norm_eps, own.under("attention")
            attention: Mixer
            if layer in config.kinds.linear:
                out = _out(at, published="o_proj")
                attention = load_kda(config.kda, at, layer=layer, size=size, eps=eps, out=out)
            else:
                attention = _load_full(layer, config, at, rotary=rotary)
            return pre_norm_layer(config, own, attention, _load_block(layer, config, own.under("mlp")))

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress, names=WORD_EMBEDDINGS)

    def prediction_layer(self, config: BailingHybridConfig) -> BailingHybridConfig:
        name = f"the prediction layer of {config.name}"
        return replace(config, name=name, num_layers=1, kinds=LayerKinds((), (0,)), mlp_layers=())

    def load_prediction_layer(
        self, config: BailingHybridConfig, weights: ShardedWeights, target: Decoder
    ) -> PredictionLayer:
        number = config.num_layers
        at = f"model.layers.{number}"
        own, rotary = weights.under(at), config.attention.rotary(weights.ctx.device)
        attention = _load_full(0, config, own.under("attention"), rotary=rotary)
        parts = pre_norm_layer(config, own, attention, _load_block(number, config, own.under("mlp")))
        return load_prediction(config, weights, parts, target, names=PredictionNames.inside(at, norm="final_layernorm"))


def _load_full(layer: int, config: BailingHybridConfig, weights: ShardedWeights, *, rotary: Rotary | None) -> Mixer:
    names = LatentNames(out=_out(weights, published="dense"), gate="g_proj")
    return load_latent_attention(
        config.attention, weights, layer=layer, size=config.hidden_size, rotary=rotary, names=names
    )


def _load_block(layer: int, config: BailingHybridConfig, weights: ShardedWeights) -> Mixer:
    size, experts = config.hidden_size, config.experts
    if layer in config.mlp_layers:
        return load_feed_forward(weights, size=size, inner=config.intermediate_size)
    activation, of_shared = config.limits.activations(layer)
    shared = None
    if experts.shared_inner:
        at = weights.under("shared_experts")
        shared = load_shared_expert(at, size=size, inner=experts.shared_inner, activation=of_shared)
    return load_grouped_moe(experts, weights, size=size, activation=activation, shared=shared, correction=CORRECTION)


def _read_bound(file: ConfigFile) -> float | None:
    if not file.flag("kda_safe_gate", True):
        return None
    bound = file.raw("kda_lower_bound")
    if bound is None:
        return -5.0
    if type(bound) not in (int, float):
        raise CheckpointError(f"{file.path}: kda_lower_bound must be a number, got {bound!r}")
    return float(bound)


def _out(weights: ShardedWeights, *, published: str) -> str:
    """Name of an output projection: transformers writes "dense" for all, published files differ by layer."""
    return next((name for name in ("o_proj", "dense") if weights.has(f"{name}.weight")), published)
