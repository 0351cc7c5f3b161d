"""Qwen3, dense: Llama with normalised query and key heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycache.errors import CheckpointError
from raycache.memory.component import Component
from raycache.models.config import ConfigFile, ModelConfig, read_dense_config
from raycache.models.dense import DenseModel, Progress, kv_component, load_dense
from raycache.models.weights import ShardedWeights

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


class Qwen3:
    """See models.base.Family."""

    model_type = "qwen3"

    def read_config(self, file: ConfigFile) -> ModelConfig:
        """Check and read config.json."""
        _refuse_windows(file)
        return read_dense_config(
            file, num_kv_heads=file.integer("num_key_value_heads"), head_dim=file.integer("head_dim")
        )

    def components(self, config: ModelConfig, *, itemsize: int) -> tuple[Component, ...]:
        """Keys and values of every layer."""
        return (kv_component(config, itemsize=itemsize),)

    def load(
        self, config: ModelConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> DenseModel:
        """Read this rank's share of the weights."""
        return load_dense(config, weights, ctx, has_qk_norm=True, on_progress=on_progress)


def _refuse_windows(file: ConfigFile) -> None:
    # Layers from `max_window_layers` on have a window, if any has one; `layer_types`, if given, has the last word.
    kinds = file.raw("layer_types")
    if kinds is None:
        uses_windows = file.flag("use_sliding_window", False) and file.raw("sliding_window") is not None
        windowed = uses_windows and file.integer("max_window_layers", 28) < file.integer("num_hidden_layers")
    else:
        windowed = kinds != ["full_attention"] * file.integer("num_hidden_layers")
    if windowed:
        raise CheckpointError(f"{file.path} has layers with sliding-window attention, which is not supported for qwen3")
