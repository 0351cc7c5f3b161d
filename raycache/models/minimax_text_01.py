"""MiniMax-Text-01 as published."""

from __future__ import annotations

from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.models.minimax import MiniMax, MiniMaxConfig


class MiniMaxText01(MiniMax):
    """The layers of MiniMax."""

    model_type = "minimax_text_01"

    def read_config(self, file: ConfigFile) -> MiniMaxConfig:
        """As MiniMax, but residuals go around the norm only where the file says so."""
        require_postnorm(file)
        return super().read_config(file)


def require_postnorm(file: ConfigFile) -> None:
    """Refuse files that do not say so.

    Raises:
        CheckpointError: postnorm is missing or false.
    """
    if not file.flag("postnorm", False):
        raise CheckpointError(f"{file.path} has postnorm=False, which is not supported; only True is")
