"""MiMo 7B: Qwen2 with prediction layers, which are not used."""

from __future__ import annotations

from dataclasses import replace

from raycache.models.config import ConfigFile
from raycache.models.dense import DenseConfig
from raycache.models.qwen2 import Qwen2


class MiMo(Qwen2):
    """See models.base.Family."""

    model_type = "mimo"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """Prediction layers have names of their own."""
        file.require("attention_bias", True)
        return replace(super().read_config(file), ignored_tensors=(r"^model\.mtp_layers\.",))
