"""Qwen3-Next: gated delta nets, gated attention, experts beside one that every token passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile
from raycache.layers.experts import MixtureOfExperts
from raycache.layers.forward_pass import Mixer
from raycache.layers.weights import ShardedWeights
from raycache.models.delta_net import Packing, packed_per_key_head
from raycache.models.feed_forward import (
    ExpertConfig,
    load_feed_forward,
    load_shared_expert,
    load_softmax_moe,
    read_dense_layers,
    read_softmax_experts,
)
from raycache.models.gated_hybrid import GatedHybridConfig, GatedHybridFamily, read_gated_hybrid

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class Qwen3NextConfig(GatedHybridConfig):
    """Adds the feed-forward parts.

    Attributes:
        experts: of the layers that have them.
        dense_layers: those that have a plain block.
        intermediate_size: of the latter; not read where there are none.
    """

    experts: ExpertConfig
    dense_layers: tuple[int, ...]
    intermediate_size: int


class Qwen3Next(GatedHybridFamily):
    """See models.base.Family."""

    model_type = "qwen3_next"

    def read_config(self, file: ConfigFile) -> Qwen3NextConfig:
        """Layers in `mlp_only_layers` or between those of `decoder_sparse_step` have no experts."""
        dense = read_dense_layers(file)
        experts = read_softmax_experts(file, renormalise=file.flag("norm_topk_prob", True))
        return Qwen3NextConfig(
            **read_gated_hybrid(file),
            experts=replace(experts, shared_inner=file.integer("shared_expert_intermediate_size")),
            dense_layers=dense,
            intermediate_size=file.integer("intermediate_size") if dense else 0,
        )

    @property
    def packing(self) -> Packing:
        return packed_per_key_head

    def feed_forward(
        self, layer: int, at: str, config: Qwen3NextConfig, weights: ShardedWeights, ctx: ParallelContext
    ) -> Mixer:
        if layer in config.dense_layers:
            return load_feed_forward(at, weights, ctx, size=config.hidden_size, inner=config.intermediate_size)
        return _load_experts(at, config, weights, ctx)


def _load_experts(at: str, config: Qwen3NextConfig, weights: ShardedWeights, ctx: ParallelContext) -> MixtureOfExperts:
    size, experts = config.hidden_size, config.experts
    shared = load_shared_expert(
        f"{at}.shared_expert",
        weights,
        ctx,
        size=size,
        inner=experts.shared_inner,
        gate=f"{at}.shared_expert_gate.weight",
    )
    return load_softmax_moe(at, experts, weights, ctx, size=size, shared=shared)
