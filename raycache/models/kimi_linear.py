"""Kimi Linear: Kimi delta attention, latent attention without positions, grouped experts (arXiv 2510.26692)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.layer_kinds import LayerKinds, read_layer_kinds
from raycache.errors import CheckpointError
from raycache.layers.forward_pass import Mixer
from raycache.layers.kda import LowRank, Projection
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Names, Progress
from raycache.models.feed_forward import MIXTRAL, load_feed_forward, load_grouped_moe
from raycache.models.kda import (
    KdaConfig,
    KdaHybridConfig,
    kda_hybrid_components,
    kda_hybrid_head_counts,
    load_kda,
    load_kda_hybrid,
    read_kda_hybrid,
    require_kda,
)
from raycache.models.latent_attention import load_latent_attention, read_latent
from raycache.parallel.sharding import HeadCount, even_range

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class KimiLinearConfig(KdaHybridConfig):
    """Adds a name.

    Attributes:
        mlp_name: of the MLPs, which depends on who wrote the checkpoint.
    """

    mlp_name: str


class KimiLinear:
    """See models.base.Family."""

    model_type = "kimi_linear"

    def read_config(self, file: ConfigFile) -> KimiLinearConfig:
        """Published files have KDA's sizes in `linear_attn_config`, and name the layers of a kind from 1 on."""
        for key, served in {"mla_use_nope": True, "attention_bias": False}.items():
            file.require(key, served)
        max_position = file.integer("model_max_length", file.integer("max_position_embeddings", 1048576))
        file = file.having(max_position_embeddings=max_position)
        published = file.section("linear_attn_config")
        kda = KdaConfig(
            num_heads=published.integer("num_heads", file.integer("linear_num_heads", 32)),
            head_dim=published.integer("head_dim", file.integer("linear_head_dim", 128)),
            kernel=published.integer("short_conv_kernel_size", file.integer("linear_conv_kernel_dim", 4)),
        )
        return KimiLinearConfig(
            **read_kda_hybrid(file, num_mlp_layers=1, num_drafts=0),
            kinds=read_kimi_kinds(file, published),
            kda=require_kda(file, kda),
            attention=read_latent(file, rope=None),
            # transformers calls the MLPs so, and is the one that writes `mlp_layer_types`.
            mlp_name="mlp" if file.raw("mlp_layer_types") is None else "block_sparse_moe",
        )

    def components(self, config: KimiLinearConfig, fmt: CacheFormat) -> tuple[Component, ...]:
        return kda_hybrid_components(config, fmt)

    def head_counts(self, config: KimiLinearConfig) -> tuple[HeadCount, ...]:
        return kda_hybrid_head_counts(config, heads_key="linear_num_heads")

    def load(
        self, config: KimiLinearConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        size = config.hidden_size

        def load_full(layer: int, at: str) -> Mixer:
            return load_latent_attention(
                layer, f"{at}.self_attn", config.attention, weights, ctx, size=size, rotary=None
            )

        def load_block(layer: int, at: str) -> Mixer:
            if layer in config.mlp_layers:
                inner = config.intermediate_size
                return load_feed_forward(f"{at}.{config.mlp_name}", weights, ctx, size=size, inner=inner)
            return load_grouped_moe(f"{at}.block_sparse_moe", config.experts, weights, ctx, size=size, names=MIXTRAL)

        return load_kda_hybrid(
            config,
            weights,
            ctx,
            load_linear=lambda layer, at: _load_linear(layer, f"{at}.self_attn", config, weights, ctx),
            load_full=load_full,
            load_block=load_block,
            on_progress=on_progress,
            names=Names(),
        )


def read_kimi_kinds(file: ConfigFile, published: ConfigFile) -> LayerKinds:
    """Kinds as `linear_attn_config` names them, from 1 on, or as `layer_types` does.

    Raises:
        CheckpointError: not each layer has one.
    """
    listed = [published.raw(key) for key in ("kda_layers", "full_attn_layers")]
    if file.raw("layer_types") is not None or listed == [None, None]:
        return read_layer_kinds(file, is_full=lambda layer: layer > 0 and layer % 4 == 0)
    linear, full = (layers if isinstance(layers, list) else [] for layers in listed)
    num_layers = file.integer("num_hidden_layers")
    if any(type(layer) is not int for layer in linear + full) or sorted(linear + full) != [*range(1, num_layers + 1)]:
        raise CheckpointError(
            f"{file.path}: kda_layers and full_attn_layers must name each layer from 1 to {num_layers} once"
        )
    return LayerKinds(tuple(layer - 1 for layer in sorted(linear)), tuple(layer - 1 for layer in sorted(full)))


def _load_linear(layer: int, at: str, config: KimiLinearConfig, weights: ShardedWeights, ctx: ParallelContext) -> Mixer:
    kda, size = config.kda, config.hidden_size
    taken = features(even_range(kda.num_heads, ctx.tp.rank, ctx.tp.size), kda.head_dim)

    def load_projection(kind: str) -> Projection:
        up = [Columns(f"{at}.{kind}_b_proj", kda.inner, taken)]
        return LowRank(
            weights.whole(f"{at}.{kind}_a_proj.weight", kda.head_dim, size),
            weights.column(up, inputs=kda.head_dim, has_bias=False),
        )

    return load_kda(
        layer,
        at,
        kda,
        weights,
        ctx,
        size=size,
        eps=config.rms_norm_eps,
        load_projection=load_projection,
        rate_shape=(1, 1, kda.num_heads, 1),
        rate_axis=2,
    )
