"""Qwen3.5, the dense text model: gated delta nets, gated attention, a gated MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile
from raycache.layers.forward_pass import Mixer
from raycache.layers.weights import ShardedWeights
from raycache.models.delta_net import Packing, packed_by_kind
from raycache.models.feed_forward import load_feed_forward
from raycache.models.gated_hybrid import GatedHybridConfig, GatedHybridFamily, read_gated_hybrid

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class Qwen35Config(GatedHybridConfig):
    """Adds the MLP.

    Attributes:
        intermediate_size: of it.
    """

    intermediate_size: int


class Qwen35Text(GatedHybridFamily):
    """See models.base.Family."""

    model_type = "qwen3_5_text"

    def read_config(self, file: ConfigFile) -> Qwen35Config:
        """The three axes of `mrope_section` all count tokens where there is only text, so it says nothing here."""
        return Qwen35Config(**read_gated_hybrid(file), intermediate_size=file.integer("intermediate_size"))

    @property
    def packing(self) -> Packing:
        return packed_by_kind

    def feed_forward(
        self, layer: int, at: str, config: Qwen35Config, weights: ShardedWeights, ctx: ParallelContext
    ) -> Mixer:
        return load_feed_forward(at, weights, ctx, size=config.hidden_size, inner=config.intermediate_size)
