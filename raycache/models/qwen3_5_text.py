"""Qwen3.5, the dense text model: gated delta nets, gated attention, a gated MLP."""

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
    """Adds the MLP.

    Attributes:
        intermediate_size: of it.
    """

    intermediate_size: int


class Qwen35Text(Qwen3Next):
    """The layers of Qwen3-Next, packed in another way, with MLPs."""

    model_type = "qwen3_5_text"
    packing = staticmethod(packed_by_kind)

    def read_config(self, file: ConfigFile) -> Qwen35Config:
        """The three axes of `mrope_section` all count tokens where there is only text, so it says nothing here."""
        return Qwen35Config(**read_gated_hybrid(file), intermediate_size=file.integer("intermediate_size"))

    def feed_forward(self, layer: int, config: Any, weights: ShardedWeights) -> Mixer:
        """Read the MLP of a layer."""
        return load_feed_forward(weights, size=config.hidden_size, inner=config.intermediate_size)
