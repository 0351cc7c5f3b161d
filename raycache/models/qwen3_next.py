"""Qwen3-Next: layers of gated delta nets and of gated attention, and experts with a shared one. Base of Qwen3.5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from raycache.checkpoint.config_file import ConfigFile, ModelConfig, read_common
from raycache.checkpoint.layer_kinds import LayerKinds, read_layer_kinds
from raycache.errors import CheckpointError
from raycache.layers.expert_config import ExpertConfig, read_dense_layers, read_softmax_experts
from raycache.layers.expert_weights import load_shared_expert, load_softmax_moe
from raycache.layers.feed_forward import load_feed_forward
from raycache.layers.forward_pass import Mixer
from raycache.layers.gated_attention import load_gated_attention
from raycache.layers.gated_delta_net import (
    DeltaNetConfig,
    Packing,
    load_delta_net,
    packed_per_key_head,
    read_delta_net,
)
from raycache.layers.norm import CenteredNorm
from raycache.layers.self_attention import AttentionConfig, read_attention, read_stated_heads
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.models.prediction import PredictionLayer, PredictionNames, load_prediction
from raycache.parallel.sharding import HeadCount

ROTARY_SHARE = 0.25
"""Share of a head's features that are rotated."""

DRAFT_TENSORS = r"^mtp\."
"""Prediction layers, which only draft=mtp uses."""

PREDICTION = PredictionNames("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc")


@dataclass(frozen=True)
class GatedHybridConfig(ModelConfig):
    """A decoder with layers of gated attention and of gated delta nets."""

    kinds: LayerKinds
    attention: AttentionConfig
    net: DeltaNetConfig

    def components(self, fmt: CacheFormat) -> tuple[Component, ...]:
        full, linear = self.kinds.full, self.kinds.linear
        return self.attention.components(full, fmt) + self.net.components(linear, fmt)

    @property
    def head_counts(self) -> tuple[HeadCount, ...]:
        return self.attention.head_counts + (self.net.head_counts if self.kinds.linear else ())


@dataclass(frozen=True)
class Qwen3NextConfig(GatedHybridConfig):
    """Adds the feed-forward blocks.

    Attributes:
        dense_layers: layers with an MLP instead of experts.
        intermediate_size: of the MLPs; 0 without any.
    """

    experts: ExpertConfig
    dense_layers: tuple[int, ...]
    intermediate_size: int


def read_gated_hybrid(file: ConfigFile) -> dict[str, Any]:
    """Read the keys that Qwen3-Next and Qwen3.5 share, as keyword arguments of `GatedHybridConfig`.

    Raises:
        CheckpointError: a key is missing, invalid or not supported.
    """
    for key, served in {
        "hidden_act": "silu",
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_use_dedicated_embeddings": False,
    }.items():
        file.require(key, served)
    interval = file.integer("full_attention_interval", 4)
    heads = read_stated_heads(file)
    head_dim = heads.head_dim
    attention = read_attention(file, heads, rotary_share=ROTARY_SHARE)
    if int(head_dim * ROTARY_SHARE) % 2 or head_dim < 8:
        raise CheckpointError(f"{file.path}: a quarter of head_dim={head_dim} is rotated in pairs; it must be even")
    return {
        **read_common(file),
        "kinds": read_layer_kinds(file, is_full=lambda layer: (layer + 1) % interval == 0),
        "attention": replace(attention, norm_offset=1.0),
        "net": read_delta_net(file),
        "num_drafts": file.count("mtp_num_hidden_layers", file.count("num_nextn_predict_layers", 1)),
        "ignored_tensors": (DRAFT_TENSORS,),
    }


class Qwen3Next:
    """Layers of gated delta nets or attention, and experts or an MLP, with a norm before each; a prediction layer.

    Attributes:
        packing: layout of the gated delta nets' projections.
    """

    model_type = "qwen3_next"
    packing: Packing = staticmethod(packed_per_key_head)

    def read_config(self, file: ConfigFile) -> GatedHybridConfig:
        """Layers in `mlp_only_layers`, or skipped by `decoder_sparse_step`, have no experts."""
        dense = read_dense_layers(file)
        experts = read_softmax_experts(file, renormalise=file.flag("norm_topk_prob", True))
        return Qwen3NextConfig(
            **read_gated_hybrid(file),
            experts=replace(experts, shared_inner=file.integer("shared_expert_intermediate_size")),
            dense_layers=dense,
            intermediate_size=file.integer("intermediate_size") if dense else 0,
        )

    def load(self, config: GatedHybridConfig, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        size, eps, packing = config.hidden_size, config.rms_norm_eps, self.packing
        rotary = config.attention.rotary(weights.ctx.device)

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            mixer: Mixer
            if layer in config.kinds.linear:
                at = own.under("linear_attn")
                mixer = load_delta_net(config.net, at, layer=layer, size=size, eps=eps, packing=packing)
            else:
                at = own.under("self_attn")
                mixer = load_gated_attention(config.attention, at, layer=layer, size=size, eps=eps, rotary=rotary)
            block = self.feed_forward(layer, config, own.under("mlp"))
            return pre_norm_layer(config, own, mixer, block, make_norm=CenteredNorm)

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress, make_norm=CenteredNorm)

    def feed_forward(self, layer: int, config: Any, weights: ShardedWeights) -> Mixer:
        """Load the experts or the MLP of a layer."""
        if layer in config.dense_layers:
            return load_feed_forward(weights, size=config.hidden_size, inner=config.intermediate_size)
        size, experts = config.hidden_size, config.experts
        gate, at = weights.whole("shared_expert_gate.weight", 1, size), weights.under("shared_expert")
        shared = load_shared_expert(at, size=size, inner=experts.shared_inner, gate=gate)
        return load_softmax_moe(experts, weights, size=size, shared=shared)

    def prediction_layer(self, config: GatedHybridConfig) -> GatedHybridConfig:
        """It has full attention."""
        name = f"the prediction layer of {config.name}"
        return replace(config, name=name, num_layers=1, kinds=LayerKinds(linear=(), full=(0,)))

    def load_prediction_layer(
        self, config: GatedHybridConfig, weights: ShardedWeights, target: Decoder
    ) -> PredictionLayer:
        size, eps, own = config.hidden_size, config.rms_norm_eps, weights.under("mtp.layers.0")
        at, rotary = own.under("self_attn"), config.attention.rotary(weights.ctx.device)
        attention = load_gated_attention(config.attention, at, layer=0, size=size, eps=eps, rotary=rotary)
        block = self.feed_forward(config.num_layers, config, own.under("mlp"))
        parts = pre_norm_layer(config, own, attention, block, make_norm=CenteredNorm)
        return load_prediction(config, weights, parts, target, names=PREDICTION, make_norm=CenteredNorm)
