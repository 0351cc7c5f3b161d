"""GLM-4.5 and 4.6: grouped-query attention whose heads are turned in part, grouped experts with a shared one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile, require_full_attention
from raycache.layers.forward_pass import Mixer
from raycache.layers.rope import Rotary
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.models.dense import (
    DenseConfig,
    attention_head_counts,
    dense_components,
    load_attention,
    read_dense_config,
    read_rotary_share,
)
from raycache.models.feed_forward import (
    ExpertConfig,
    load_feed_forward,
    load_grouped_moe,
    read_grouped_experts,
    read_mlp_layers,
)
from raycache.models.prediction import PredictionLayer, PredictionNames, load_prediction
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class Glm4MoeConfig(DenseConfig):
    """A decoder with experts after some first layers with an MLP.

    Attributes:
        experts: of the layers that have them.
        mlp_layers: layers with an MLP instead.
    """

    experts: ExpertConfig = field(kw_only=True)
    mlp_layers: tuple[int, ...] = field(kw_only=True)


class Glm4Moe:
    """See models.base.Family, and models.drafts.loading.PredictingFamily."""

    model_type = "glm4_moe"

    def read_config(self, file: ConfigFile) -> Glm4MoeConfig:
        """Half of a head is turned unless the file says otherwise."""
        file.require("mlp_bias", False)
        require_full_attention(file)
        num_heads = file.integer("num_attention_heads")
        head_dim = file.integer("head_dim", file.integer("hidden_size") // num_heads)
        dense = read_dense_config(
            file,
            num_kv_heads=file.integer("num_key_value_heads"),
            head_dim=head_dim,
            has_qk_norm=file.flag("use_qk_norm", False),
            rotary_share=read_rotary_share(file, head_dim=head_dim, default=0.5),
            theta=10000.0,
        )
        return Glm4MoeConfig(
            **{
                **vars(dense),
                "output_bias": False,
                # Published checkpoints have one, whether or not the file says so.
                "num_drafts": file.count("num_nextn_predict_layers", 1),
            },
            experts=read_grouped_experts(file, scale=1.0),
            mlp_layers=read_mlp_layers(file, num_first=1),
        )

    def components(self, config: Glm4MoeConfig, fmt: CacheFormat) -> tuple[Component, ...]:
        return dense_components(config, fmt)

    def head_counts(self, config: Glm4MoeConfig) -> tuple[HeadCount, ...]:
        return attention_head_counts(config)

    def load(
        self, config: Glm4MoeConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        rotary = Rotary(config.rope, config.rotary_dim, ctx.device)

        def load_layer(layer: int) -> Sequence[Mixer]:
            return _load_layer(layer, f"model.layers.{layer}", config, weights, ctx, rotary=rotary)

        return load_decoder(config, weights, ctx, load_layer=load_layer, on_progress=on_progress)

    def prediction_layer(self, config: Glm4MoeConfig) -> Glm4MoeConfig:
        return replace(config, name=f"the prediction layer of {config.name}", num_layers=1, mlp_layers=())

    def load_prediction_layer(
        self, config: Glm4MoeConfig, weights: ShardedWeights, ctx: ParallelContext, target: Decoder
    ) -> PredictionLayer:
        only, at = self.prediction_layer(config), f"model.layers.{config.num_layers}"
        rotary = Rotary(config.rope, config.rotary_dim, ctx.device)
        parts = _load_layer(0, at, only, weights, ctx, rotary=rotary)
        names = PredictionNames(f"{at}.shared_head.norm", f"{at}.enorm", f"{at}.hnorm", f"{at}.eh_proj")
        return load_prediction(parts, names, config, weights, ctx, target)


def _load_layer(
    layer: int, at: str, config: Glm4MoeConfig, weights: ShardedWeights, ctx: ParallelContext, *, rotary: Rotary
) -> Sequence[Mixer]:
    """Read the layer whose tensors begin with `at`."""
    size = config.hidden_size
    attention = load_attention(layer, f"{at}.self_attn", config, weights, ctx, rotary=rotary)
    block: Mixer
    if layer in config.mlp_layers:
        block = load_feed_forward(f"{at}.mlp", weights, ctx, size=size, inner=config.intermediate_size)
    else:
        block = load_grouped_moe(f"{at}.mlp", config.experts, weights, ctx, size=size)
    return pre_norm_layer(at, attention, block, config, weights)
