"""Mistral: Llama, optionally with a sliding window in every layer ("Mistral 7B", arXiv 2310.06825)."""

from __future__ import annotations

from dataclasses import replace

from raycache.checkpoint.config_file import ConfigFile
from raycache.layers.self_attention import AttentionConfig, read_attention, read_heads
from raycache.models.llama import DenseConfig, Llama, read_dense

_WINDOW = 4096
"""Default of `sliding_window`; null means no window."""


class Mistral(Llama):
    """The layers of Llama."""

    model_type = "mistral"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """`head_dim` may differ from hidden_size / num_attention_heads."""
        window = file.raw("sliding_window") if file.says("sliding_window") else _WINDOW
        return read_dense(file, read_mistral_attention(file.having(sliding_window=window)))


def read_mistral_attention(file: ConfigFile, *, theta: float = 10000.0) -> AttentionConfig:
    """Read attention with the same window, or none, in all layers.

    Args:
        theta: default of rope_theta.
    Raises:
        CheckpointError: see `read_attention`; or the window is not a positive integer.
    """
    attention = read_attention(file, read_heads(file, default_kv_heads=8), theta=theta)
    if file.raw("sliding_window") is None:
        return attention
    layers = tuple(range(file.integer("num_hidden_layers")))
    return replace(attention, window=file.integer("sliding_window"), windowed=layers)
