"""Kimi Linear: Kimi delta attention, latent attention without rotary embedding, grouped experts (arXiv 2510.26692)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from raycache.checkpoint.config_file import ConfigFile, ModelConfig, read_common
from raycache.checkpoint.layer_kinds import LayerKinds, read_layer_kinds
from raycache.errors import CheckpointError
from raycache.layers.expert_config import ExpertConfig, read_grouped_experts, read_mlp_layers
from raycache.layers.expert_weights import load_grouped_moe
from raycache.layers.feed_forward import MIXTRAL, load_feed_forward
from raycache.layers.forward_pass import Mixer
from raycache.layers.kda import KdaConfig, load_kda, require_kda
from raycache.layers.latent_attention import LatentConfig, load_latent_attention, read_latent
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.parallel.sharding import HeadCount


@dataclass(frozen=True)
class KdaHybridConfig(ModelConfig):
    """A decoder with KDA and latent attention: Kimi Linear, Kimi K3 and Ling 3.

    Attributes:
        kinds: which layers have linear attention (KDA), and which full (latent) attention.
        mlp_layers: layers with an MLP; the others have experts.
        intermediate_size: of the MLPs.
        heads_key: of KDA's heads in config.json.
    """

    heads_key: ClassVar = "num_attention_heads"
    kinds: LayerKinds
    kda: KdaConfig
    attention: LatentConfig
    mlp_layers: tuple[int, ...]
    intermediate_size: int
    experts: ExpertConfig

    def components(self, fmt: CacheFormat) -> tuple[Component, ...]:
        """Latents of full layers, states of linear ones."""
        return self.attention.components(self.kinds.full, fmt) + self.kda.components(self.kinds.linear, fmt)

    @property
    def head_counts(self) -> tuple[HeadCount, ...]:
        counts = (self.attention.head_count,)
        return (*counts, HeadCount(self.heads_key, self.kda.num_heads, over_cp=True)) if self.kinds.linear else counts


def read_kda_hybrid(
    file: ConfigFile, *, num_mlp_layers: int, num_drafts: int, activation: str = "silu"
) -> dict[str, Any]:
    """Read the keys that these families share, as keyword arguments of `KdaHybridConfig`.

    Args:
        file: must have max_position_embeddings.
        num_mlp_layers: default number of layers with an MLP, the first ones.
        num_drafts: default number of prediction layers, after the others.
        activation: `hidden_act` of the family.
    Raises:
        CheckpointError: a key is missing, invalid or not supported.
    """
    for key, served in {"hidden_act": activation, "moe_layer_freq": 1, "pretraining_tp": 1}.items():
        file.require(key, served)
    return {
        **read_common(file),
        "mlp_layers": read_mlp_layers(file, num_first=num_mlp_layers),
        "intermediate_size": file.integer("intermediate_size"),
        "experts": read_grouped_experts(file),
        "num_drafts": file.count("num_nextn_predict_layers", num_drafts),
    }


@dataclass(frozen=True)
class KimiLinearConfig(KdaHybridConfig):
    """Adds the prefix of the MLPs' tensors, which differs between published checkpoints and those of transformers."""

    heads_key = "linear_num_heads"
    mlp_name: str


class KimiLinear:
    """Layers of KDA or latent attention, and experts or an MLP, with a norm before each."""

    model_type = "kimi_linear"

    def read_config(self, file: ConfigFile) -> KimiLinearConfig:
        """Published files have the sizes of KDA in `linear_attn_config`, and count layers from 1."""
        for key, served in {"mla_use_nope": True, "attention_bias": False}.items():
            file.require(key, served)
        max_position = file.integer("model_max_length", file.integer("max_position_embeddings", 1048576))
        file = file.having(max_position_embeddings=max_position)
        published = file.section("linear_attn_config")
        num_heads = published.integer("num_heads", file.integer("linear_num_heads", 32))
        kda = KdaConfig(
            num_heads=num_heads,
            head_dim=published.integer("head_dim", file.integer("linear_head_dim", 128)),
            kernel=published.integer("short_conv_kernel_size", file.integer("linear_conv_kernel_dim", 4)),
            low_rank="fg",
            rate_shape=(1, 1, num_heads, 1),
            rate_axis=2,
        )
        return KimiLinearConfig(
            **read_kda_hybrid(file, num_mlp_layers=1, num_drafts=0),
            kinds=read_kimi_kinds(file, published),
            kda=require_kda(file, kda),
            attention=read_latent(file, rope=None),
            # Only transformers writes `mlp_layer_types`; it renames the MLPs as well.
            mlp_name="mlp" if file.raw("mlp_layer_types") is None else "block_sparse_moe",
        )

    def load(self, config: KimiLinearConfig, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        size, eps, inner = config.hidden_size, config.rms_norm_eps, config.intermediate_size

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            at = own.under("self_attn")
            attention: Mixer
            if layer in config.kinds.linear:
                attention = load_kda(config.kda, at, layer=layer, size=size, eps=eps)
            else:
                attention = load_latent_attention(config.attention, at, layer=layer, size=size, rotary=None)
            block: Mixer
            if layer in config.mlp_layers:
                block = load_feed_forward(own.under(config.mlp_name), size=size, inner=inner)
            else:
                block = load_grouped_moe(config.experts, own.under("block_sparse_moe"), size=size, names=MIXTRAL)
            return pre_norm_layer(config, own, attention, block)

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress)


def read_kimi_kinds(file: ConfigFile, published: ConfigFile) -> LayerKinds:
    """Read the kinds of layers from `linear_attn_config`, which counts them from 1, or from `layer_types`.

    Raises:
        CheckpointError: a layer has no kind, or two.
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
