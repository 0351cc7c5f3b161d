"""The text model of Qwen3-VL-MoE: Qwen3-MoE with stacked experts."""

from __future__ import annotations

from dataclasses import replace

from raycache.checkpoint.config_file import ConfigFile
from raycache.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig


class Qwen3VlMoeText(Qwen3Moe):
    """The layers of Qwen3 with experts."""

    model_type = "qwen3_vl_moe_text"

    def read_config(self, file: ConfigFile) -> Qwen3MoeConfig:
        """The weights of a token's experts always sum to one."""
        file.require("norm_topk_prob", True)
        config = super().read_config(file)
        return replace(config, experts=replace(config.experts, renormalise=True, is_transposed=True))
