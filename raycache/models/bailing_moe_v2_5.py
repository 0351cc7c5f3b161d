"""Ling and Ring 2.5 and 2.6: layers of lightning and of latent attention, grouped experts.

They are published with the model_type of Ling 3 and distinguished by the architecture's name. docs/adr/0014-ring.md
describes where the vendor's code and other engines differ, and what is supported here.
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
"""Tensor names that Ling 3 shares."""

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
"""Keys that select variants of the model, with the supported value."""


@dataclass(frozen=True)
class BailingMoeV25Config(ModelConfig):
    """A decoder with lightning attention and latent attention.

    Attributes:
        kinds: which layers have lightning (linear) attention, and which full (latent) attention.
        rotated_dim, rope: number of rotated features of a head in lightning attention, and their rope.
        mlp_layers: layers with an MLP; the others have experts.
        intermediate_size: of the MLPs.
    """

    kinds: LayerKinds
    lightning: LightningConfig
    rotated_dim: int
    rope: RopeConfig
    attention: LatentConfig
    mlp_layers: tuple[int, ...]
    intermediate_size: int
    experts: ExpertConfig

    def components(self, fmt: CacheFormat) -> tuple[Component, ...]:
        full, linear = self.kinds.full, self.kinds.linear
        return self.attention.components(full, fmt) + self.lightning.components(linear, fmt)

    @property
    def head_counts(self) -> tuple[HeadCount, ...]:
        if not self.kinds.linear:
            return (self.attention.head_count,)
        counts = (HeadCount("num_attention_heads", self.lightning.num_heads, over_cp=True),)
        # A single group of all heads can be split: its norm is reduced over tp.
        num_groups = self.lightning.num_groups
        return (*counts, HeadCount("group_norm_size", num_groups)) if num_groups > 1 else counts


class BailingMoeV25:
    """Layers of lightning or latent attention, and experts or an MLP, with a norm before each; a prediction layer."""

    model_type = "bailing_moe_v2_5"

    def read_config(self, file: ConfigFile) -> BailingMoeV25Config:
        """Extended contexts and layers after the last whole group are not supported: engines disagree on both."""
        for key, served in SERVED.items():
            file.require(key, served)
        num_heads, head_dim = file.integer("num_attention_heads"), file.integer("head_dim", 128)
        partial = file.number("partial_rotary_factor")
        rotated_dim = int(head_dim * partial)
        if rotated_dim % 2 or not 0 < rotated_dim <= head_dim:
            raise CheckpointError(
                f"{file.path}: partial_rotary_factor={partial} rotates {rotated_dim} of {head_dim} features; it must "
                "be an even number of them"
            )
        file.require("rotary_dim", rotated_dim)
        num_groups = file.integer("group_norm_size", 1)
        if num_heads * head_dim % num_groups:
            raise CheckpointError(f"{file.path}: group_norm_size={num_groups} does not divide {num_heads * head_dim}")
        rope = read_rope(file, partial=partial, theta=6e5)
        if rope.kind != "default":
            raise CheckpointError(
                f"{file.path}: rope type {rope.kind!r} is not supported for Ling 2.5; only 'default' is"
            )
        # In both kinds of layers every head has its own keys, whatever num_key_value_heads says.
        attention = read_latent(file.having(num_key_value_heads=None), rope=rope)
        return BailingMoeV25Config(
            **read_common(file),
            kinds=_read_kinds(file),
            lightning=LightningConfig(num_heads, head_dim, file.integer("num_hidden_layers"), num_groups),
            rotated_dim=rotated_dim,
            rope=rope,
            attention=attention,
            mlp_layers=read_mlp_layers(file, num_first=1),
            intermediate_size=file.integer("intermediate_size"),
            experts=read_bailing_experts(file),
            num_drafts=file.count("num_nextn_predict_layers", 0),
            ignored_tensors=(r"^model\.mtp",),
        )

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
            f"{file.path}: layer_group_size={group} does not divide num_hidden_layers={num_layers}; layers after the "
            "last whole group are not supported"
        )
    full = range(group - 1, num_layers, group)
    return LayerKinds(tuple(layer for layer in range(num_layers) if layer not in full), tuple(full))


@dataclass(frozen=True)
class _Rotaries:
    """Rotary embedding of lightning attention (halves) and of latent attention (interleaved)."""

    linear: Rotary
    full: Rotary | None

    @classmethod
    def of(cls, config: BailingMoeV25Config, ctx: ParallelContext) -> _Rotaries:
        return cls(Rotary(config.rope, config.rotated_dim, ctx.device), config.attention.rotary(ctx.device))


def read_bailing_experts(file: ConfigFile) -> ExpertConfig:
    """Like `read_grouped_experts`; the shared expert may have a size of its own.

    Raises:
        CheckpointError: a key is missing, invalid, or contradicts another.
    """
    file.require("moe_router_enable_expert_bias", True)
    # Required, since the vendor's defaults differ from those of `read_grouped_experts`.
    file.integer("num_expert_group" if file.says("num_expert_group") else "n_group")
    file.integer("topk_group")
    experts = read_grouped_experts(file)
    num_shared = experts.shared_inner // experts.inner
    inner = file.integer("moe_shared_expert_intermediate_size", experts.inner)
    return replace(experts, shared_inner=num_shared * inner)
