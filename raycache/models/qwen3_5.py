"""Qwen3.5 as it is published, with a vision part: its text model only, which needs nothing of the other."""

from __future__ import annotations

from raycache.errors import CheckpointError
from raycache.models.config import ConfigFile
from raycache.models.gated_hybrid import read_gated_hybrid
from raycache.models.qwen3_5_text import Qwen35Config, Qwen35Text

VISION_TENSORS = r"^model\.visual\."

INHERITED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id")
"""Keys that the text model takes from the whole one where it does not have them."""


class Qwen35(Qwen35Text):
    """See models.base.Family."""

    model_type = "qwen3_5"

    def read_config(self, file: ConfigFile) -> Qwen35Config:
        """What is said about text stands in `text_config`."""
        text = file.section("text_config")
        if not text.values():
            raise CheckpointError(f"{file.path} has no text_config; is the file complete? Download it again")
        inherited = {key: file.raw(key) for key in INHERITED if text.raw(key) is None}
        is_tied = file.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False))
        text = text.having(**inherited, tie_word_embeddings=is_tied, model_type=self.model_type)
        return Qwen35Config(
            **read_gated_hybrid(text, at="model.language_model", ignored_tensors=(VISION_TENSORS,)),
            intermediate_size=text.integer("intermediate_size"),
        )
