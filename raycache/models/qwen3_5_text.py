"""The dense text model of Qwen3.5: Qwen3-Next with MLPs and another layout of the gated delta nets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raycache.checkpoint.config_file import ConfigFile
from raycache.layers.feed_forward import load_feed_forward
from raycache.layers.forward_pass import Mixer
from raycache.layers.gated_delta_net import packed_by_kind
from raycache.layers.weights import ShardedWeights
from raycache.models.qwen3_next import GatedHybridConfig, Qwen3Next, read_gated_hybrid


@dataclass(frozen=True)
class Qwen35Config(GatedHybridConfig):
    """Adds the MLPs; `intermediate_size` is their inner size."""

    intermediate_size: int


class Qwen35Text(Qwen3Next):
    """The layers of Qwen3-Next, with MLPs instead of experts."""

    model_type = "qwen3_5_text"
    packing = staticmethod(packed_by_kind)

    def read_config(self, file: ConfigFile) -> Qwen35Config:
        """`mrope_section` is ignored: for text, its three axes have the same positions."""
        return Qwen35Config(**read_gated_hybrid(file), intermediate_size=file.integer("intermediate_size"))

    def feed_forward(self, layer: int, config: Any, weights: ShardedWeights) -> Mixer:
        """Load the MLP of a layer."""
        return load_feed_forward(weights, size=config.hidden_size, inner=config.intermediate_size)
