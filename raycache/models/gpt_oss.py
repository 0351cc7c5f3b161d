"""gpt-oss: windowed and full layers in turn, attention sinks, experts with biases ("gpt-oss", arXiv 2508.10925)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.layer_kinds import read_windowed
from raycache.errors import CheckpointError
from raycache.layers.activation import clamped_swiglu
from raycache.layers.experts import Experts, MixtureOfExperts, RoutedExperts
from raycache.layers.forward_pass import Mixer
from raycache.layers.kept_weights import Cut
from raycache.layers.quantised_experts import QuantisedExperts
from raycache.layers.router import SoftmaxRouter
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress
from raycache.models.dense import (
    DenseConfig,
    attention_head_counts,
    dense_components,
    load_attention_mlp,
    read_dense_config,
)
from raycache.models.feed_forward import ExpertConfig, require_experts
from raycache.parallel.sharding import HeadCount, even_range

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class GptOssConfig(DenseConfig):
    """gpt-oss.

    Attributes:
        experts: of every layer.
        swiglu_alpha, swiglu_limit: of their activation.
    """

    experts: ExpertConfig = field(kw_only=True)
    swiglu_alpha: float = field(kw_only=True)
    swiglu_limit: float = field(kw_only=True)


class GptOss:
    """See models.base.Family."""

    model_type = "gpt_oss"

    def read_config(self, file: ConfigFile) -> GptOssConfig:
        """`intermediate_size` is that of one expert."""
        file.require("attention_bias", True)
        if file.raw("rope_scaling") is None and file.raw("rope_parameters") is None:
            raise CheckpointError(f"{file.path} does not say rope_scaling, which all gpt-oss have; download it again")
        dense = read_dense_config(
            file,
            num_kv_heads=file.integer("num_key_value_heads"),
            head_dim=file.integer("head_dim"),
            has_qk_norm=False,
        )
        experts = ExpertConfig(
            count=file.integer("num_local_experts"),
            top_k=file.integer("num_experts_per_tok"),
            inner=file.integer("intermediate_size"),
        )
        changed = {
            "attention_bias": True,
            "has_sinks": True,
            "window": file.integer("sliding_window"),
            "windowed": read_windowed(file, pattern=2),
        }
        return GptOssConfig(
            **{**vars(dense), **changed},
            experts=require_experts(file, experts),
            swiglu_alpha=file.number("swiglu_alpha", 1.702),
            swiglu_limit=file.number("swiglu_limit", 7.0),
        )

    def components(self, config: GptOssConfig, fmt: CacheFormat) -> tuple[Component, ...]:
        return dense_components(config, fmt)

    def head_counts(self, config: GptOssConfig) -> tuple[HeadCount, ...]:
        return attention_head_counts(config)

    def load(
        self, config: GptOssConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        def load_layer_mlp(layer: int) -> Mixer:
            return load_gpt_oss_moe(f"model.layers.{layer}.mlp", config, weights, ctx)

        return load_attention_mlp(config, weights, ctx, load_layer_mlp=load_layer_mlp, on_progress=on_progress)


def load_gpt_oss_moe(at: str, config: GptOssConfig, weights: ShardedWeights, ctx: ParallelContext) -> MixtureOfExperts:
    """Read the layer `{at}.router` and `{at}.experts`."""
    count, size = config.experts.count, config.hidden_size
    router = SoftmaxRouter(
        weights.whole(f"{at}.router.weight", count, size),
        bias=weights.whole(f"{at}.router.bias", count),
        top_k=config.experts.top_k,
        renormalise=True,
    )
    return MixtureOfExperts(router, _load_experts(f"{at}.experts", config, weights, ctx), ctx.tp)


def _load_experts(at: str, config: GptOssConfig, weights: ShardedWeights, ctx: ParallelContext) -> RoutedExperts:
    """The model calls them [E, in, out], with gate and up of a feature side by side."""
    count, inner, size = config.experts.count, config.experts.inner, config.hidden_size
    taken = even_range(inner, ctx.tp.rank, ctx.tp.size)
    pairs = range(2 * taken.start, 2 * taken.stop)
    up = Cut(f"{at}.gate_up_proj", (count, size, 2 * inner), axis=2, taken=pairs)
    down = Cut(f"{at}.down_proj", (count, inner, size), axis=1, taken=taken)
    activation = clamped_swiglu(alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    up_bias = _gate_first(weights.cut(f"{at}.gate_up_proj_bias", (count, 2 * inner), axis=1, taken=pairs))
    # One rank adds it, for the outputs of all are added up.
    down_bias = weights.whole(f"{at}.down_proj_bias", count, size) if ctx.tp.rank == 0 else None
    gate_first = [*range(0, len(pairs), 2), *range(1, len(pairs), 2)]
    kept_up, kept_down = weights.kept_experts([[up]], rows=gate_first), weights.kept_experts([[down]])
    if kept_up is not None and kept_down is not None:
        return QuantisedExperts(
            kept_up, kept_down, count=count, activation=activation, up_bias=up_bias, down_bias=down_bias
        )
    return Experts(
        _gate_first(weights.cut(up.name, up.shape, axis=2, taken=pairs).mT),
        weights.cut(down.name, down.shape, axis=1, taken=taken).mT.contiguous(),
        activation=activation,
        held=range(count),
        up_bias=up_bias,
        down_bias=down_bias,
    )


def _gate_first(pairs: Tensor) -> Tensor:
    """[E, 2 I, ...] of gate and up in turn -> all gates, then all ups."""
    return torch.cat((pairs[:, 0::2], pairs[:, 1::2]), dim=1)
