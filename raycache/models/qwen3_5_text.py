"""Qwen3.5, the dense text model: gated delta nets, gated attention, a gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raycache.layers.forward_pass import Mixer
from raycache.memory.component import CacheFormat, Component
from raycache.models.config import ConfigFile
from raycache.models.decoder import Decoder, Progress
from raycache.models.delta_net import packed_by_kind
from raycache.models.drafts import PredictionLayer
from raycache.models.feed_forward import load_feed_forward
from raycache.models.gated_hybrid import (
    GatedHybridConfig,
    gated_hybrid_components,
    gated_hybrid_head_counts,
    gated_prediction_layer,
    load_gated_hybrid,
    load_gated_prediction_layer,
    read_gated_hybrid,
)
from raycache.models.weights import ShardedWeights
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class Qwen35Config(GatedHybridConfig):
    """Adds the MLP.

    Attributes:
        intermediate_size: of it.
    """

    intermediate_size: int


class Qwen35Text:
    """See models.base.Family."""

    model_type = "qwen3_5_text"

    def read_config(self, file: ConfigFile) -> Qwen35Config:
        """The three axes of `mrope_section` all count tokens where there is only text, so it says nothing here."""
        return Qwen35Config(**read_gated_hybrid(file), intermediate_size=file.integer("intermediate_size"))

    def components(self, config: Qwen35Config, fmt: CacheFormat) -> tuple[Component, ...]:
        return gated_hybrid_components(config, fmt)

    def head_counts(self, config: Qwen35Config) -> tuple[HeadCount, ...]:
        return gated_hybrid_head_counts(config)

    def prediction_layer(self, config: Qwen35Config) -> Any:
        return gated_prediction_layer(config)

    def load_prediction_layer(
        self, config: Qwen35Config, weights: ShardedWeights, ctx: ParallelContext, target: Decoder
    ) -> PredictionLayer:
        blocks = _blocks(config, weights, ctx)
        return load_gated_prediction_layer(config, weights, ctx, target, load_feed_forward=blocks)

    def load(
        self, config: Qwen35Config, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        return load_gated_hybrid(
            config,
            weights,
            ctx,
            packing=packed_by_kind,
            load_feed_forward=_blocks(config, weights, ctx),
            on_progress=on_progress,
        )


def _blocks(config: Qwen35Config, weights: ShardedWeights, ctx: ParallelContext) -> Callable[[int, str], Mixer]:
    """Reads the feed-forward part of a layer: (layer, what its tensors begin with) -> it."""

    def load_block(layer: int, at: str) -> Mixer:
        return load_feed_forward(at, weights, ctx, size=config.hidden_size, inner=config.intermediate_size)

    return load_block
