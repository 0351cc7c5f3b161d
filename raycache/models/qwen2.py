"""Qwen2 and 2.5, dense: Llama with biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.layer_kinds import read_optional_windows
from raycache.layers.self_attention import read_attention, read_heads
from raycache.models.llama import DenseConfig, Llama, read_dense


class Qwen2(Llama):
    """The layers of Llama."""

    model_type = "qwen2"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """Some layers may have a window."""
        return read_qwen2(file)


def read_qwen2(file: ConfigFile) -> DenseConfig:
    """Read config.json of Qwen2 and of families derived from it."""
    attention = read_attention(file, read_heads(file), theta=10000.0)
    attention = replace(attention, has_bias=True, has_output_bias=False, **read_optional_windows(file))
    return read_dense(file, attention)
