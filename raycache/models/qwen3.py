"""Qwen3, dense: Llama with normalised query and key heads."""

from __future__ import annotations

from dataclasses import replace

from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.layer_kinds import read_optional_windows
from raycache.models.dense import DenseConfig, read_dense_config
from raycache.models.llama import Llama


class Qwen3(Llama):
    """See models.base.Family."""

    model_type = "qwen3"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """Some layers may have a window."""
        dense = read_dense_config(
            file,
            num_kv_heads=file.integer("num_key_value_heads"),
            head_dim=file.integer("head_dim"),
            has_qk_norm=True,
        )
        return replace(dense, **read_optional_windows(file))
