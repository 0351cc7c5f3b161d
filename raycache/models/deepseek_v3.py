"""DeepSeek-V3 and R1: latent attention, experts in groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile, require_full_attention
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress
from raycache.models.deepseek import (
    DeepseekConfig,
    deepseek_components,
    deepseek_head_counts,
    load_deepseek,
    load_prediction_layer,
    prediction_layer,
    read_deepseek,
)
from raycache.models.prediction import PredictionLayer
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


class DeepseekV3:
    """See models.base.Family."""

    model_type = "deepseek_v3"

    def read_config(self, file: ConfigFile) -> DeepseekConfig:
        """The rope pairs neighbours unless the file says otherwise."""
        require_full_attention(file)
        return read_deepseek(file, is_interleaved=file.flag("rope_interleave", True))

    def components(self, config: DeepseekConfig, fmt: CacheFormat) -> tuple[Component, ...]:
        return deepseek_components(config, fmt)

    def head_counts(self, config: DeepseekConfig) -> tuple[HeadCount, ...]:
        return deepseek_head_counts(config)

    def prediction_layer(self, config: DeepseekConfig) -> DeepseekConfig:
        return prediction_layer(config)

    def load_prediction_layer(
        self, config: DeepseekConfig, weights: ShardedWeights, ctx: ParallelContext, target: Decoder
    ) -> PredictionLayer:
        return load_prediction_layer(config, weights, ctx, target)

    def load(
        self, config: DeepseekConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        return load_deepseek(config, weights, ctx, on_progress=on_progress)
