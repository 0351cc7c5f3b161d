"""Ling and Ring 2.5 and 2.6: lightning attention between layers of latent attention, grouped experts.

Published with the model_type of Ling 3, and told from it by the name of the architecture. docs/adr/0014-ring.md says
where the vendor's code and other engines differ, and what is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raycache.checkpoint.config_file import ConfigFile, ModelConfig, read_common, read_rope
from raycache.checkpoint.layer_kinds import LayerKinds
from raycache.checkpoint.rope_config import RopeConfig
from raycache.errors import CheckpointError
from raycache.layers.expert_config import ExpertConfig, read_grouped_experts, read_mlp_layers
from raycache.layers.expert_weights import load_grouped_moe
from raycache.layers.feed_forward import load_feed_forward
from raycache.layers.forward_pass import Mixer
from raycache.layers.latent_attention import LatentConfig, LatentNames, load_latent_attention, read_latent
from raycache.layers.lightning import LightningConfig, load_rotated_lightning
from raycache.layers.rope import Rotary
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Names, Progress, load_decoder, pre_norm_layer
from raycache.models.prediction import PredictionLayer, PredictionNames, load_prediction
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import HeadCount

WORD_EMBEDDINGS = Names(embedding="model.word_embeddings.weight")
CORRECTION = "gate.expert_bias"
"""Tensors outside of the layers and of a router, here and in Ling 3."""

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


@dataclass(frozen=True)
class BailingMoeV25Config(ModelConfig):
    """A decoder of both kinds of attention.

    Attributes:
        kinds: of layers; those with linear attention have lightning attention.
        lightning: of those.
        turned_dim, rope: features of a head that are turned there, and how.
        attention: of the other layers.
        mlp_layers: layers with an MLP; the others have experts.
        intermediate_size: of the MLPs.
        experts: of the other layers.
    """

    kinds: LayerKinds
    lightning: LightningConfig
    turned_dim: int
    rope: RopeConfig
    attention: LatentConfig
    mlp_layers: tuple[int, ...]
    intermediate_size: int
    experts: ExpertConfig


class BailingMoeV25:
    """Layers of lightning or latent attention, and experts or an MLP, with a norm before each; one more predicts."""

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
            lightning=LightningConfig(num_heads, head_dim, file.integer("num_hidden_layers"), num_groups),
            turned_dim=turned_dim,
            rope=rope,
            attention=attention,
            mlp_layers=read_mlp_layers(file, num_first=1),
            intermediate_size=file.integer("intermediate_size"),
            experts=read_bailing_experts(file),
            num_drafts=file.count("num_nextn_predict_layers", 0),
            ignored_tensors=(r"^model\.mtp",),
        )

    def components(self, config: BailingMoeV25Config, fmt: CacheFormat) -> tuple[Component, ...]:
        full, linear = config.kinds.full, config.kinds.linear
        return config.attention.components(full, fmt) + config.lightning.components(linear, fmt)

    def head_counts(self, config: BailingMoeV25Config) -> tuple[HeadCount, ...]:
        if not config.kinds.linear:
            return (config.attention.head_count,)
        counts = (HeadCount("num_attention_heads", config.lightning.num_heads, over_cp=True),)
        # One group over all heads is summed over tp.
        num_groups = config.lightning.num_groups
        return (*counts, HeadCount("group_norm_size", num_groups)) if num_groups > 1 else counts

    def prediction_layer(self, config: BailingMoeV25Config) -> BailingMoeV25Config:
        name = f"the prediction layer of {config.name}"
        return replace(config, name=name, num_layers=1, kinds=LayerKinds((), (0,)), mlp_layers=())

    def load_prediction_layer(
        self, config: BailingMoeV25Config, weights: ShardedWeights, target: Decoder
    ) -> PredictionLayer:
        only, at = self.prediction_layer(config), f"model.layers.{config.num_layers}"
        parts = _load_layer(0, only, weights.under(at), rotaries=_Rotaries.of(only, weights.ctx))
        return load_prediction(config, weights, parts, target, names=PredictionNames.inside(at, norm="final_layernorm"))

    def load(self, config: BailingMoeV25Config, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        rotaries = _Rotaries.of(config, weights.ctx)

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            return _load_layer(layer, config, own, rotaries=rotaries)

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress, names=WORD_EMBEDDINGS)


def _load_layer(
    layer: int, config: BailingMoeV25Config, own: ShardedWeights, *, rotaries: _Rotaries
) -> Sequence[Mixer]:
    size, eps, at, mlp = config.hidden_size, config.rms_norm_eps, own.under("attention"), own.under("mlp")
    attention: Mixer
    if layer in config.kinds.linear:
        attention = load_rotated_lightning(
            config.lightning, at, layer=layer, size=size, eps=eps, rotary=rotaries.linear
        )
    else:
        attention = load_latent_attention(
            config.attention, at, layer=layer, size=size, rotary=rotaries.full, names=LatentNames(out="dense")
        )
    block: Mixer
    if layer in config.mlp_layers:
        block = load_feed_forward(mlp, size=size, inner=config.intermediate_size)
    else:
        block = load_grouped_moe(config.experts, mlp, size=size, correction=CORRECTION)
    return pre_norm_layer(config, own, attention, block)


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
        return cls(Rotary(config.rope, config.turned_dim, ctx.device), config.attention.rotary(ctx.device))


def read_bailing_experts(file: ConfigFile) -> ExpertConfig:
    """The keys of `read_grouped_experts`; the shared expert may have a size of its own.

    Raises:
        CheckpointError: a key is missing, has a wrong value, or does not go with the others.
    """
    file.require("moe_router_enable_expert_bias", True)
    # No defaults: the vendor's are not those of `read_grouped_experts`.
    file.integer("num_expert_group" if file.says("num_expert_group") else "n_group")
    file.integer("topk_group")
    experts = read_grouped_experts(file)
    num_shared = experts.shared_inner // experts.inner
    inner = file.integer("moe_shared_expert_intermediate_size", experts.inner)
    return replace(experts, shared_inner=num_shared * inner)
