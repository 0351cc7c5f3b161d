"""MiniMax-M1 with its published config.json."""

from __future__ import annotations

from raycache.checkpoint.config_file import ConfigFile
from raycache.models.minimax import MiniMax, MiniMaxConfig
from raycache.models.minimax_text_01 import require_postnorm


class MiniMaxM1(MiniMax):
    """The layers of MiniMax."""

    model_type = "minimax_m1"

    def read_config(self, file: ConfigFile) -> MiniMaxConfig:
        """Like MiniMax-Text-01."""
        require_postnorm(file)
        return super().read_config(file)
