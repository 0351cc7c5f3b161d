"""SmolLM3: Llama with some layers without rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from raycache.checkpoint.config_file import ConfigFile, require_full_attention
from raycache.errors import CheckpointError
from raycache.layers.self_attention import read_attention, read_heads
from raycache.models.llama import DenseConfig, Llama, read_dense


class SmolLM3(Llama):
    """The layers of Llama."""

    model_type = "smollm3"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """Embeddings are tied by default; sliding windows are not supported."""
        file.require("use_sliding_window", False)
        require_full_attention(file)
        attention = read_attention(file, read_heads(file, default_kv_heads=4))
        dense = read_dense(file, replace(attention, unrotated=_read_unrotated(file)))
        return replace(dense, tie_word_embeddings=file.flag("tie_word_embeddings", True))


def _read_unrotated(file: ConfigFile) -> tuple[int, ...]:
    """Layers without rotary embedding: zeros of `no_rope_layers`, or every `no_rope_layer_interval`-th."""
    num_layers, rotated = file.integer("num_hidden_layers"), file.raw("no_rope_layers")
    interval = file.integer("no_rope_layer_interval", 4)
    if rotated is None:
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(rotated, list) or len(rotated) != num_layers or any(layer not in (0, 1) for layer in rotated):
        raise CheckpointError(f"{file.path}: no_rope_layers must have 0 or 1 for each layer, got {rotated!r}")
    return tuple(layer for layer, is_rotated in enumerate(rotated) if not is_rotated)
