"""The text model of Qwen3.5-MoE: Qwen3-Next with another layout of the gated delta nets."""

from __future__ import annotations

from raycache.checkpoint.config_file import ConfigFile
from raycache.layers.gated_delta_net import packed_by_kind
from raycache.models.qwen3_next import GatedHybridConfig, Qwen3Next


class Qwen35MoeText(Qwen3Next):
    """The layers of Qwen3-Next."""

    model_type = "qwen3_5_moe_text"
    packing = staticmethod(packed_by_kind)

    def read_config(self, file: ConfigFile) -> GatedHybridConfig:
        """The weights of a token's experts always sum to one, and every layer has experts."""
        file.require("norm_topk_prob", True)
        file.require("mlp_only_layers", [])
        file.require("decoder_sparse_step", 1)
        return super().read_config(file)
