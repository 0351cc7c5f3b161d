"""Qwen3.5 with experts, the text model: its layers, with the feed-forward parts of Qwen3-Next."""

from __future__ import annotations

from raycache.checkpoint.config_file import ConfigFile
from raycache.models.delta_net import Packing, packed_by_kind
from raycache.models.qwen3_next import Qwen3Next, Qwen3NextConfig


class Qwen35MoeText(Qwen3Next):
    """See models.base.Family."""

    model_type = "qwen3_5_moe_text"

    def read_config(self, file: ConfigFile) -> Qwen3NextConfig:
        """Weights of a token's experts always sum to one, and every layer has experts."""
        file.require("norm_topk_prob", True)
        file.require("mlp_only_layers", [])
        file.require("decoder_sparse_step", 1)
        return super().read_config(file)

    @property
    def packing(self) -> Packing:
        return packed_by_kind
