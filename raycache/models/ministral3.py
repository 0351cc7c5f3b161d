"""Ministral 3: Mistral whose queries grow with their position."""

from __future__ import annotations

from dataclasses import replace

from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.models.dense import DenseConfig
from raycache.models.llama import Llama
from raycache.models.mistral import read_mistral, read_window


class Ministral3(Llama):
    """See models.base.Family."""

    model_type = "ministral3"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """How much queries grow, and after how many tokens, stands with the position embedding.

        Raises:
            CheckpointError: see `models.base.Family`; there is no position embedding.
        """
        if file.raw("rope_parameters") is None:
            raise CheckpointError(f"{file.path} has no rope_parameters; is the file damaged? Download it again")
        dense, said = read_mistral(file), file.section("rope_parameters")
        rope, growth = dense.rope, said.weight("llama_4_scaling_beta", 0.0)
        if growth:
            original = said.integer("original_max_position_embeddings")
            rope = replace(rope, query_growth=growth, original_max_position=original)
        return replace(dense, rope=rope, **read_window(file))
