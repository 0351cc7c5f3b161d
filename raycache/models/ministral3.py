"""Ministral 3: Mistral with queries scaled by position."""

from __future__ import annotations

from dataclasses import replace

from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.models.llama import DenseConfig, Llama, read_dense
from raycache.models.mistral import read_mistral_attention


class Ministral3(Llama):
    """The layers of Llama."""

    model_type = "ministral3"

    def read_config(self, file: ConfigFile) -> DenseConfig:
        """The scaling of queries is part of `rope_parameters`."""
        if file.raw("rope_parameters") is None:
            raise CheckpointError(f"{file.path} has no rope_parameters; is the file damaged? Download it again")
        attention, section = read_mistral_attention(file), file.section("rope_parameters")
        growth = section.weight("llama_4_scaling_beta", 0.0)
        if growth:
            original = section.integer("original_max_position_embeddings")
            rope = replace(attention.rope, query_growth=growth, original_max_position=original)
            attention = replace(attention, rope=rope)
        return read_dense(file, attention)
