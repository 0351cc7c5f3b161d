"""MiniMax-Text-01 with its published config.json."""

from __future__ import annotations

from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.models.minimax import MiniMax, MiniMaxConfig


class MiniMaxText01(MiniMax):
    """The layers of MiniMax."""

    model_type = "minimax_text_01"

    def read_config(self, file: ConfigFile) -> MiniMaxConfig:
        """Like MiniMax, except that `postnorm` is required."""
        require_postnorm(file)
        return super().read_config(file)


def require_postnorm(file: ConfigFile) -> None:
    """Check that residual connections start after the norm.

    Raises:
        CheckpointError: postnorm is missing or false.
    """
    if not file.flag("postnorm", False):
        raise CheckpointError(f"{file.path} has postnorm=False, which is not supported; only True is")
