"""Llama 1 to 3, SmolLM2 and others of the same shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile, require_full_attention
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress
from raycache.models.dense import DenseConfig, attention_head_counts, dense_components, load_dense, read_dense_config
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


class Llama:
    """See models.base.Family."""

    model_type = "llama"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """Early Llamas say neither KV heads nor head size."""
        file.require("pretraining_tp", 1)
        require_full_attention(file)
        num_heads = file.integer("num_attention_heads")
        return read_dense_config(
            file,
            num_kv_heads=file.integer("num_key_value_heads", num_heads),
            head_dim=file.integer("head_dim", file.integer("hidden_size") // num_heads),
            has_qk_norm=False,
            theta=10000.0,
        )

    def components(self, config: DenseConfig, fmt: CacheFormat) -> tuple[Component, ...]:
        return dense_components(config, fmt)

    def head_counts(self, config: DenseConfig) -> tuple[HeadCount, ...]:
        return attention_head_counts(config)

    def load(
        self, config: DenseConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        return load_dense(config, weights, ctx, on_progress=on_progress)
