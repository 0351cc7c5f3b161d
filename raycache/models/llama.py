"""Llama 1 to 3, SmolLM2 and others of the same shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycache.memory.component import Component
from raycache.models.config import ConfigFile, ModelConfig, read_dense_config
from raycache.models.dense import DenseModel, Progress, kv_component, load_dense
from raycache.models.weights import ShardedWeights

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


class Llama:
    """See models.base.Family."""

    model_type = "llama"

    def read_config(self, file: ConfigFile) -> ModelConfig:
        """Check and read config.json; early Llamas say neither KV heads nor head size."""
        file.require("pretraining_tp", 1)
        num_heads = file.integer("num_attention_heads")
        return read_dense_config(
            file,
            num_kv_heads=file.integer("num_key_value_heads", num_heads),
            head_dim=file.integer("head_dim", file.integer("hidden_size") // num_heads),
        )

    def components(self, config: ModelConfig, *, itemsize: int) -> tuple[Component, ...]:
        """Keys and values of every layer."""
        return (kv_component(config, itemsize=itemsize),)

    def load(
        self, config: ModelConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> DenseModel:
        """Read this rank's share of the weights."""
        return load_dense(config, weights, ctx, has_qk_norm=False, on_progress=on_progress)
