"""SmolLM3: Llama, some layers of which have no positions."""

from __future__ import annotations

from dataclasses import replace

from raycache.checkpoint.config_file import ConfigFile, require_full_attention
from raycache.errors import CheckpointError
from raycache.models.dense import DenseConfig, read_dense_config
from raycache.models.llama import Llama


class SmolLM3(Llama):
    """See models.base.Family."""

    model_type = "smollm3"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """The head is tied unless the file says otherwise; windows are refused."""
        file.require("use_sliding_window", False)
        require_full_attention(file)
        num_heads = file.integer("num_attention_heads")
        dense = read_dense_config(
            file,
            num_kv_heads=file.integer("num_key_value_heads", 4),
            head_dim=file.integer("head_dim", file.integer("hidden_size") // num_heads),
            has_qk_norm=False,
        )
        is_tied = file.flag("tie_word_embeddings", True)
        return replace(dense, tie_word_embeddings=is_tied, unrotated=_read_unrotated(file))


def _read_unrotated(file: ConfigFile) -> tuple[int, ...]:
    """Layers without positions: zeros of `no_rope_layers`, or every `no_rope_layer_interval`-th."""
    num_layers, rotated = file.integer("num_hidden_layers"), file.raw("no_rope_layers")
    interval = file.integer("no_rope_layer_interval", 4)
    if rotated is None:
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(rotated, list) or len(rotated) != num_layers or any(layer not in (0, 1) for layer in rotated):
        raise CheckpointError(f"{file.path}: no_rope_layers must have 0 or 1 for each layer, got {rotated!r}")
    return tuple(layer for layer, is_rotated in enumerate(rotated) if not is_rotated)
