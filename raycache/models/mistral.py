"""Mistral, dense: Llama, maybe with a window in every layer ("Mistral 7B", arXiv 2310.06825)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raycache.checkpoint.config_file import ConfigFile
from raycache.models.dense import DenseConfig, read_dense_config
from raycache.models.llama import Llama

_WINDOW = 4096
"""Of files that do not say; null is no window."""


class Mistral(Llama):
    """See models.base.Family."""

    model_type = "mistral"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """Heads need not share out the hidden size."""
        window = file.raw("sliding_window") if file.says("sliding_window") else _WINDOW
        return replace(read_mistral(file), **read_window(file.having(sliding_window=window)))


def read_mistral(file: ConfigFile, *, theta: float = 10000.0) -> DenseConfig:
    """Read all but windows, with the `theta` of files that do not say; errors are those of `read_dense_config`."""
    num_heads = file.integer("num_attention_heads")
    return read_dense_config(
        file,
        num_kv_heads=file.integer("num_key_value_heads", 8),
        head_dim=file.integer("head_dim", file.integer("hidden_size") // num_heads),
        has_qk_norm=False,
        theta=theta,
    )


def read_window(file: ConfigFile) -> dict[str, Any]:
    """`window` and `windowed` of `DenseConfig` where all layers have a window or none.

    Raises:
        CheckpointError: it is no positive number of tokens.
    """
    if file.raw("sliding_window") is None:
        return {}
    return {"window": file.integer("sliding_window"), "windowed": tuple(range(file.integer("num_hidden_layers")))}
