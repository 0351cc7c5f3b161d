"""Mixtral: Mistral with experts in every layer ("Mixtral of Experts", arXiv 2401.04088)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile
from raycache.layers.forward_pass import Mixer
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress
from raycache.models.dense import DenseConfig, attention_head_counts, dense_components, load_attention_mlp
from raycache.models.feed_forward import MIXTRAL, ExpertConfig, load_softmax_moe, require_experts
from raycache.models.mistral import read_mistral, read_window
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class MixtralConfig(DenseConfig):
    """Adds the experts.

    Attributes:
        experts: of every layer.
    """

    experts: ExpertConfig = field(kw_only=True)


class Mixtral:
    """See models.base.Family."""

    model_type = "mixtral"

    def read_config(self, file: ConfigFile) -> MixtralConfig:
        """`intermediate_size` is that of one expert."""
        experts = ExpertConfig(
            count=file.integer("num_local_experts", 8),
            top_k=file.integer("num_experts_per_tok", 2),
            inner=file.integer("intermediate_size"),
        )
        fields = {**vars(read_mistral(file, theta=1e6)), **read_window(file)}
        return MixtralConfig(**fields, experts=require_experts(file, experts))

    def components(self, config: MixtralConfig, fmt: CacheFormat) -> tuple[Component, ...]:
        return dense_components(config, fmt)

    def head_counts(self, config: MixtralConfig) -> tuple[HeadCount, ...]:
        return attention_head_counts(config)

    def load(
        self, config: MixtralConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        def load_layer_mlp(layer: int) -> Mixer:
            at = f"model.layers.{layer}.block_sparse_moe"
            return load_softmax_moe(at, config.experts, weights, ctx, size=config.hidden_size, names=MIXTRAL)

        return load_attention_mlp(config, weights, ctx, load_layer_mlp=load_layer_mlp, on_progress=on_progress)
