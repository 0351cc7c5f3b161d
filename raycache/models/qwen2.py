"""Qwen2 and 2.5, dense: Llama with biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.layer_kinds import read_optional_windows
from raycache.models.dense import DenseConfig, read_dense_config
from raycache.models.llama import Llama


class Qwen2(Llama):
    """See models.base.Family."""

    model_type = "qwen2"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """Some layers may have a window."""
        num_heads = file.integer("num_attention_heads")
        dense = read_dense_config(
            file,
            num_kv_heads=file.integer("num_key_value_heads", num_heads),
            head_dim=file.integer("head_dim", file.integer("hidden_size") // num_heads),
            has_qk_norm=False,
            theta=10000.0,
        )
        return replace(dense, attention_bias=True, output_bias=False, **read_optional_windows(file))
