"""MiniMax-Text-01 as published."""

from __future__ import annotations

from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.models.minimax import MiniMax, MiniMaxConfig


class MiniMaxText01(MiniMax):
    """See models.base.Family."""

    model_type = "minimax_text_01"

    def read_config(self, file: ConfigFile) -> MiniMaxConfig:
        """As MiniMax, but residuals go around the norm only where the file says so."""
        if not file.flag("postnorm", False):
            raise CheckpointError(f"{file.path} has postnorm=False, which is not supported; only True is")
        return super().read_config(file)
