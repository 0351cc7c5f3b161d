"""Qwen3, dense: Llama with normalised query and key heads."""

from __future__ import annotations

from raycache.errors import CheckpointError
from raycache.models.config import ConfigFile, read_given_layer_types
from raycache.models.dense import DenseConfig, read_dense_config
from raycache.models.llama import Llama


class Qwen3(Llama):
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


def _refuse_windows(file: ConfigFile) -> None:
    # Layers from `max_window_layers` on have a window, if any has one; `layer_types`, if given, has the last word.
    kinds = read_given_layer_types(file, known=("full_attention", "sliding_attention"))
    has_window = file.raw("sliding_window") is not None
    if not kinds:
        uses_windows = file.flag("use_sliding_window", False) and has_window
        windowed = uses_windows and file.integer("max_window_layers", 28) < file.integer("num_hidden_layers")
    else:
        windowed = "sliding_attention" in kinds
    if windowed:
        raise CheckpointError(f"{file.path} has layers with sliding-window attention, which is not supported for qwen3")
