"""Qwen3, dense: Llama with normalised query and key heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycache.errors import CheckpointError
from raycache.memory.component import CacheFormat, Component
from raycache.models.config import ConfigFile
from raycache.models.decoder import Decoder, Progress
from raycache.models.dense import DenseConfig, attention_head_counts, dense_components, load_dense, read_dense_config
from raycache.models.weights import ShardedWeights
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


class Qwen3:
    """See models.base.Family."""

    model_type = "qwen3"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """Layers with a window are refused."""
        _refuse_windows(file)
        return read_dense_config(
            file,
            num_kv_heads=file.integer("num_key_value_heads"),
            head_dim=file.integer("head_dim"),
            has_qk_norm=True,
        )

    def components(self, config: DenseConfig, fmt: CacheFormat) -> tuple[Component, ...]:
        return dense_components(config, fmt)

    def head_counts(self, config: DenseConfig) -> tuple[HeadCount, ...]:
        return attention_head_counts(config)

    def load(
        self, config: DenseConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        return load_dense(config, weights, ctx, on_progress=on_progress)


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
