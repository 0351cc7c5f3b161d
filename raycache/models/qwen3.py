"""Qwen3, dense: Llama with normalised query and key heads."""

from __future__ import annotations

from dataclasses import replace

from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.layer_kinds import read_optional_windows
from raycache.layers.self_attention import read_attention, read_stated_heads
from raycache.models.llama import DenseConfig, Llama, read_dense


class Qwen3(Llama):
    """The layers of Llama."""

    model_type = "qwen3"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """Some layers may have a window."""
        attention = read_attention(file, read_stated_heads(file), has_qk_norm=True)
        return read_dense(file, replace(attention, **read_optional_windows(file)))
