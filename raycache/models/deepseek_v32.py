"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, an indexer in each layer."""

from __future__ import annotations

from raycache.checkpoint.config_file import ConfigFile
from raycache.layers.indexer import read_indexer
from raycache.models.deepseek_v3 import DeepseekConfig, DeepseekV3, read_deepseek


class DeepseekV32(DeepseekV3):
    """The layers of DeepSeek-V3, each with an indexer."""

    model_type = "deepseek_v32"

    def read_config(self, file: ConfigFile) -> DeepseekConfig:
        """The rope of indexers pairs halves, that of attention is interleaved."""
        file.require("rope_interleave", True)
        indexer = read_indexer(file, sources=range(file.integer("num_hidden_layers")), is_interleaved=False)
        return read_deepseek(file, indexer=indexer)
