"""Ling and Ring 2.5 and 2.6: lightning attention between layers of latent attention, grouped experts.

Published with the model_type of Ling 3, and told from it by the name of the architecture. docs/adr/0014-ring.md says
where the vendor's code and other engines differ, and what is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.checkpoint.config_file import ConfigFile, ModelConfig, read_common, read_rope
from raycache.checkpoint.layer_kinds import LayerKinds
from raycache.checkpoint.rope_config import RopeConfig
from raycache.errors import CheckpointError
from raycache.layers.forward_pass import Mixer
from raycache.layers.lightning import GroupNorm, LightningAttention, RotatedHeads, SplitNorm, alibi_rates
from raycache.layers.norm import HeadNorm
from raycache.layers.rope import Rotary
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component, latent, recurrent
from raycache.models.bailing import WORD_EMBEDDINGS, load_bailing_moe, prediction_names, read_bailing_experts
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.models.feed_forward import ExpertConfig, load_feed_forward, read_mlp_layers
from raycache.models.latent_attention import LatentConfig, LatentNames, load_latent_attention, read_latent
from raycache.models.prediction import PredictionLayer, load_prediction
from raycache.parallel.sharding import HeadCount, even_range, state_part

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

SERVED = {
    "attention_bias": False,
    "full_attention_type": "mla",
    "hidden_act": "silu",
    "lightning_layerwise_decay": True,
    "linear_rope": True,
    "linear_silu": False,
    "rope_interleave": True,
    "router_dtype": "fp32",
    "use_bias": False,
    "use_linear_silu": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "using_split_qkv_in_self_attention": False,
}
"""Keys that choose among forms of the model, and the one that is implemented."""

# Shapes in this file: H heads of D features of the layers with lightning attention, G groups of their norm; of the
# whole model.


@dataclass(frozen=True)
class BailingMoeV25Config(ModelConfig):
    """A decoder of both kinds of attention.

    Attributes:
        kinds: of layers; those with linear attention have lightning attention.
        num_heads, head_dim: H and D.
        turned_dim, rope: features of a head that are turned there, and how.
        num_groups: G.
        attention: of the other layers.
        mlp_layers: layers with an MLP; the others have experts.
        intermediate_size: of the MLPs.
        experts: of the other layers.
    """

    kinds: LayerKinds
    num_heads: int
    head_dim: int
    turned_dim: int
    rope: RopeConfig
    num_groups: int
    attention: LatentConfig
    mlp_layers: tuple[int, ...]
    intermediate_size: int
    experts: ExpertConfig


class BailingMoeV25:
    """See models.base.Family."""

    model_type = "bailing_moe_v2_5"

    def read_config(self, file: ConfigFile) -> BailingMoeV25Config:
        """A stretched context is refused, and so are layers behind the last whole group: engines disagree on both."""
        for key, served in SERVED.items():
            file.require(key, served)
        num_heads, head_dim = file.integer("num_attention_heads"), file.integer("head_dim", 128)
        partial = file.number("partial_rotary_factor")
        turned_dim = int(head_dim * partial)
        if turned_dim % 2 or not 0 < turned_dim <= head_dim:
            raise CheckpointError(
                f"{file.path}: partial_rotary_factor={partial} turns {turned_dim} of {head_dim} features, "
                "which must be pairs"
            )
        file.require("rotary_dim", turned_dim)
        num_groups = file.integer("group_norm_size", 1)
        if num_heads * head_dim % num_groups:
            raise CheckpointError(f"{file.path}: group_norm_size={num_groups} does not divide {num_heads * head_dim}")
        rope = read_rope(file, partial=partial, theta=6e5)
        if rope.kind != "default":
            raise CheckpointError(
                f"{file.path}: rope type {rope.kind!r} is not supported for Ling 2.5; use the plain one"
            )
        # All heads of both kinds of layers have keys of their own, whatever num_key_value_heads says.
        attention = read_latent(file.having(num_key_value_heads=None), rope=rope)
        return BailingMoeV25Config(
            **read_common(file),
            kinds=_read_kinds(file),
            num_heads=num_heads,
            head_dim=head_dim,
            turned_dim=turned_dim,
            rope=rope,
            num_groups=num_groups,
            attention=attention,
            mlp_layers=read_mlp_layers(file, num_first=1),
            intermediate_size=file.integer("intermediate_size"),
            experts=read_bailing_experts(file),
            num_drafts=file.count("num_nextn_predict_layers", 0),
            ignored_tensors=(r"^model\.mtp",),
        )

    def components(self, config: BailingMoeV25Config, fmt: CacheFormat) -> tuple[Component, ...]:
        full, linear, attention = config.kinds.full, config.kinds.linear, config.attention
        heads, dim = config.num_heads, config.head_dim
        return (
            *([latent(full, rank=attention.rank, rope_dim=attention.rope_dim, fmt=fmt)] if full else []),
            *([recurrent(linear, heads=heads, key_dim=dim, value_dim=dim, fmt=fmt)] if linear else []),
        )

    def head_counts(self, config: BailingMoeV25Config) -> tuple[HeadCount, ...]:
        if not config.kinds.linear:
            return (config.attention.head_count,)
        counts = (HeadCount("num_attention_heads", config.num_heads, over_cp=True),)
        # One group over all heads is summed over tp.
        return (*counts, HeadCount("group_norm_size", config.num_groups)) if config.num_groups > 1 else counts

    def prediction_layer(self, config: BailingMoeV25Config) -> BailingMoeV25Config:
        name = f"the prediction layer of {config.name}"
        return replace(config, name=name, num_layers=1, kinds=LayerKinds((), (0,)), mlp_layers=())

    def load_prediction_layer(
        self, config: BailingMoeV25Config, weights: ShardedWeights, ctx: ParallelContext, target: Decoder
    ) -> PredictionLayer:
        only, at = self.prediction_layer(config), f"model.layers.{config.num_layers}"
        parts = _load_layer(0, at, only, weights, ctx, rotaries=_Rotaries.of(only, ctx))
        return load_prediction(parts, prediction_names(at), config, weights, ctx, target)

    def load(
        self, config: BailingMoeV25Config, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        rotaries = _Rotaries.of(config, ctx)

        def load_layer(layer: int) -> Sequence[Mixer]:
            return _load_layer(layer, f"model.layers.{layer}", config, weights, ctx, rotaries=rotaries)

        return load_decoder(config, weights, ctx, load_layer=load_layer, on_progress=on_progress, names=WORD_EMBEDDINGS)


def _read_kinds(file: ConfigFile) -> LayerKinds:
    """The last layer of each group has latent attention."""
    num_layers, group = file.integer("num_hidden_layers"), file.integer("layer_group_size")
    if num_layers % group:
        raise CheckpointError(
            f"{file.path}: layer_group_size={group} does not divide num_hidden_layers={num_layers}; layers behind the "
            "last whole group are not supported"
        )
    full = range(group - 1, num_layers, group)
    return LayerKinds(tuple(layer for layer in range(num_layers) if layer not in full), tuple(full))


@dataclass(frozen=True)
class _Rotaries:
    """Of the two kinds of attention: in one, pairs are in two halves, in the other neighbours."""

    linear: Rotary
    full: Rotary | None

    @classmethod
    def of(cls, config: BailingMoeV25Config, ctx: ParallelContext) -> _Rotaries:
        return cls(Rotary(config.rope, config.turned_dim, ctx.device), config.attention.rotary(ctx))


def _load_layer(
    layer: int,
    at: str,
    config: BailingMoeV25Config,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    rotaries: _Rotaries,
) -> Sequence[Mixer]:
    """Read the layer whose tensors begin with `at`."""
    size = config.hidden_size
    attention: Mixer
    if layer in config.kinds.linear:
        attention = _load_lightning(layer, f"{at}.attention", config, weights, ctx, rotary=rotaries.linear)
    else:
        latent_names, rotary = LatentNames(out="dense"), rotaries.full
        attention = load_latent_attention(
            layer, f"{at}.attention", config.attention, weights, ctx, size=size, rotary=rotary, names=latent_names
        )
    block: Mixer
    if layer in config.mlp_layers:
        block = load_feed_forward(f"{at}.mlp", weights, ctx, size=size, inner=config.intermediate_size)
    else:
        block = load_bailing_moe(f"{at}.mlp", config.experts, weights, ctx, size=size)
    return pre_norm_layer(at, attention, block, config, weights)


def _load_lightning(
    layer: int,
    at: str,
    config: BailingMoeV25Config,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    rotary: Rotary,
) -> LightningAttention:
    dim, size, eps = config.head_dim, config.hidden_size, config.rms_norm_eps
    heads, inner = even_range(config.num_heads, ctx.tp.rank, ctx.tp.size), config.num_heads * dim
    taken = features(heads, dim)
    parts = [
        *(Columns(f"{at}.query_key_value", 3 * inner, _shifted(taken, kind * inner)) for kind in range(3)),
        Columns(f"{at}.g_proj", inner, taken),
    ]
    return LightningAttention(
        layer,
        weights.column(parts, inputs=size, has_bias=False),
        weights.row(f"{at}.dense", outputs=size, inputs=inner, taken=taken, has_bias=False),
        heads=RotatedHeads(
            HeadNorm(_qk_weight(at, weights, num_heads=len(heads), dim=dim), eps),
            rotary,
            num_heads=len(heads),
            head_dim=dim,
        ),
        norm=_load_norm(at, config, weights, ctx, taken=taken),
        slopes=_slopes(layer, at, config, weights, ctx),
    )


def _shifted(run: range, start: int) -> range:
    return range(start + run.start, start + run.stop)


def _qk_weight(at: str, weights: ShardedWeights, *, num_heads: int, dim: int) -> Tensor:
    """[2 H, D] of queries and keys; a query's scale of D ** -0.5 is in it, for a rotation does not change it."""
    query, key = (
        weights.whole(f"{at}.{kind}_layernorm.weight", dim, dtype=weights.precise) for kind in ("query", "key")
    )
    return torch.cat(((query * dim**-0.5).expand(num_heads, dim), key.expand(num_heads, dim)))


def _load_norm(
    at: str, config: BailingMoeV25Config, weights: ShardedWeights, ctx: ParallelContext, *, taken: range
) -> GroupNorm | SplitNorm:
    inner, eps = config.num_heads * config.head_dim, config.rms_norm_eps
    weight = weights.cut(f"{at}.g_norm.weight", (inner,), axis=0, taken=taken)
    if config.num_groups == 1:
        return SplitNorm(weight, inner, eps, ctx.tp)
    return GroupNorm(weight, config.num_groups // ctx.tp.size, eps)


def _slopes(layer: int, at: str, config: BailingMoeV25Config, weights: ShardedWeights, ctx: ParallelContext) -> Tensor:
    """[H / (tp cp)]: those of the checkpoint if it has any, as decays or their logarithms; ALiBi's otherwise, smaller
    in later layers."""
    own, name = even_range(config.num_heads, *state_part(ctx.split, ctx.coords)), f"{at}.slope"
    if weights.has(name):
        return weights.cut(name, (config.num_heads,), axis=0, taken=own, dtype=weights.precise).abs()
    share = 1 - layer / max(config.num_layers - 1, 1) + 1e-5
    return (alibi_rates(config.num_heads) * share)[own.start : own.stop].to(ctx.device, weights.precise)
