"""DeepSeek-V3.2: DeepSeek-V3 whose layers each select the tokens that they see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycache.memory.component import CacheFormat, Component
from raycache.models.config import ConfigFile
from raycache.models.decoder import Decoder, Progress
from raycache.models.deepseek import (
    DeepseekConfig,
    deepseek_components,
    deepseek_head_counts,
    load_deepseek,
    read_deepseek,
    read_indexer,
)
from raycache.models.weights import ShardedWeights
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


class DeepseekV32:
    """See models.base.Family."""

    model_type = "deepseek_v32"

    def read_config(self, file: ConfigFile) -> DeepseekConfig:
        """The indexers' rope pairs halves, that of attention neighbours."""
        file.require("rope_interleave", True)
        indexer = read_indexer(file, sources=range(file.integer("num_hidden_layers")), is_interleaved=False)
        return read_deepseek(file, indexer=indexer)

    def components(self, config: DeepseekConfig, fmt: CacheFormat) -> tuple[Component, ...]:
        return deepseek_components(config, fmt)

    def head_counts(self, config: DeepseekConfig) -> tuple[HeadCount, ...]:
        return deepseek_head_counts(config)

    def load(
        self, config: DeepseekConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        return load_deepseek(config, weights, ctx, on_progress=on_progress)
