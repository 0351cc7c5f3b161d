"""Mixtral: Mistral with experts in every layer ("Mixtral of Experts", arXiv 2401.04088)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raycache.checkpoint.config_file import ConfigFile
from raycache.layers.expert_config import ExpertConfig, require_experts
from raycache.layers.expert_weights import load_softmax_moe
from raycache.layers.feed_forward import MIXTRAL
from raycache.layers.forward_pass import Mixer
from raycache.layers.self_attention import load_attention
from raycache.layers.weights import ShardedWeights
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.models.llama import DenseConfig, read_dense
from raycache.models.mistral import read_mistral_attention


@dataclass(frozen=True)
class MixtralConfig(DenseConfig):
    """Adds the experts of every layer."""

    experts: ExpertConfig


class Mixtral:
    """Layers of attention and experts, with a norm before each."""

    model_type = "mixtral"

    def read_config(self, file: ConfigFile) -> MixtralConfig:
        """`intermediate_size` is the inner size of an expert."""
        experts = ExpertConfig(
            count=file.integer("num_local_experts", 8),
            top_k=file.integer("num_experts_per_tok", 2),
            inner=file.integer("intermediate_size"),
        )
        dense = read_dense(file, read_mistral_attention(file, theta=1e6))
        return MixtralConfig(**vars(dense), experts=require_experts(file, experts))

    def load(self, config: MixtralConfig, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        size, eps = config.hidden_size, config.rms_norm_eps
        rotary = config.attention.rotary(weights.ctx.device)

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            at = own.under("self_attn")
            attention = load_attention(config.attention, at, layer=layer, size=size, eps=eps, rotary=rotary)
            experts = load_softmax_moe(config.experts, own.under("block_sparse_moe"), size=size, names=MIXTRAL)
            return pre_norm_layer(config, own, attention, experts)

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress)
