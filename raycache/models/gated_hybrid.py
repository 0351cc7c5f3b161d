"""What Qwen3-Next and Qwen3.5 share: gated delta nets between layers of gated attention, and norms around one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from raycache.checkpoint.config_file import ConfigFile, ModelConfig, read_common, read_rope
from raycache.checkpoint.layer_kinds import LayerKinds, read_layer_kinds
from raycache.checkpoint.rope_config import RopeConfig
from raycache.errors import CheckpointError
from raycache.layers.forward_pass import Mixer
from raycache.layers.gated_attention import GatedAttention
from raycache.layers.norm import CenteredNorm, HeadNorm
from raycache.layers.rope import Rotary
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component, kv
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.models.delta_net import (
    DeltaNetConfig,
    Packing,
    delta_net_component,
    delta_net_head_counts,
    load_delta_net,
    read_delta_net,
)
from raycache.models.dense import require_heads
from raycache.models.prediction import PredictionLayer, PredictionNames, load_prediction
from raycache.parallel.sharding import HeadCount, even_range, shared_head_range

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

ROTARY_SHARE = 0.25
"""Share of a head's features that are turned."""

DRAFT_TENSORS = r"^mtp\."
"""Layers that draft several tokens ahead; used with draft=mtp only."""


@dataclass(frozen=True)
class GatedHybridConfig(ModelConfig):
    """A decoder of both kinds of layers.

    Attributes:
        kinds: of layers.
        num_heads, num_kv_heads, head_dim, attention_bias: of the attention.
        rope: its position embedding.
        net: the gated delta nets.
    """

    kinds: LayerKinds
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_bias: bool
    rope: RopeConfig
    net: DeltaNetConfig

    @property
    def rotary_dim(self) -> int:
        """Features of a head that are turned."""
        return int(self.head_dim * ROTARY_SHARE)


def read_gated_hybrid(file: ConfigFile) -> dict[str, Any]:
    """Read the keys that both share, as keyword arguments of a family's own config class.

    Args:
        file: config.json.
    Raises:
        CheckpointError: a key is missing, has a wrong value, or asks for what is not implemented.
    """
    for key, served in {
        "hidden_act": "silu",
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_use_dedicated_embeddings": False,
    }.items():
        file.require(key, served)
    interval = file.integer("full_attention_interval", 4)
    num_heads, num_kv_heads = file.integer("num_attention_heads"), file.integer("num_key_value_heads")
    head_dim = file.integer("head_dim")
    require_heads(file, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    if int(head_dim * ROTARY_SHARE) % 2 or head_dim < 8:
        raise CheckpointError(f"{file.path}: a quarter of head_dim={head_dim} is turned in pairs; it must be even")
    return {
        **read_common(file),
        "kinds": read_layer_kinds(file, is_full=lambda layer: (layer + 1) % interval == 0),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "attention_bias": file.flag("attention_bias", False),
        "rope": read_rope(file, partial=ROTARY_SHARE),
        "net": read_delta_net(file),
        "num_drafts": file.count("mtp_num_hidden_layers", file.count("num_nextn_predict_layers", 1)),
        "ignored_tensors": (DRAFT_TENSORS,),
    }


class GatedHybridFamily(ABC):
    """What the families do alike; see models.base.Family, and models.drafts.loading.PredictingFamily."""

    @property
    @abstractmethod
    def packing(self) -> Packing:
        """Of the gated delta nets' projections."""

    @abstractmethod
    def feed_forward(self, layer: int, at: str, config: Any, weights: ShardedWeights, ctx: ParallelContext) -> Mixer:
        """Read the feed-forward part of a layer, whose tensors begin with `at`."""

    def components(self, config: GatedHybridConfig, fmt: CacheFormat) -> tuple[Component, ...]:
        full, linear = config.kinds.full, config.kinds.linear
        return (
            *([kv("kv", full, heads=config.num_kv_heads, dim=config.head_dim, fmt=fmt)] if full else []),
            *([delta_net_component(config.net, linear, fmt)] if linear else []),
        )

    def head_counts(self, config: GatedHybridConfig) -> tuple[HeadCount, ...]:
        return (
            HeadCount("num_attention_heads", config.num_heads),
            HeadCount("num_key_value_heads", config.num_kv_heads, is_shared=True),
            *(delta_net_head_counts(config.net) if config.kinds.linear else ()),
        )

    def load(
        self, config: GatedHybridConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        rotary = Rotary(config.rope, config.rotary_dim, ctx.device)
        size, eps, packing = config.hidden_size, config.rms_norm_eps, self.packing

        def load_layer(layer: int) -> Sequence[Mixer]:
            at = f"model.layers.{layer}"
            mixer: Mixer
            if layer in config.kinds.linear:
                mixer = load_delta_net(
                    layer, f"{at}.linear_attn", config.net, weights, ctx, size=size, eps=eps, packing=packing
                )
            else:
                mixer = load_gated_attention(layer, f"{at}.self_attn", config, weights, ctx, rotary=rotary)
            block = self.feed_forward(layer, f"{at}.mlp", config, weights, ctx)
            return pre_norm_layer(at, mixer, block, config, weights, make_norm=CenteredNorm)

        return load_decoder(
            config, weights, ctx, load_layer=load_layer, on_progress=on_progress, make_norm=CenteredNorm
        )

    def prediction_layer(self, config: GatedHybridConfig) -> Any:
        """It has attention."""
        name = f"the prediction layer of {config.name}"
        return replace(config, name=name, num_layers=1, kinds=LayerKinds(linear=(), full=(0,)))

    def load_prediction_layer(
        self, config: GatedHybridConfig, weights: ShardedWeights, ctx: ParallelContext, target: Decoder
    ) -> PredictionLayer:
        at = "mtp.layers.0"
        rotary = Rotary(config.rope, config.rotary_dim, ctx.device)
        attention = load_gated_attention(0, f"{at}.self_attn", config, weights, ctx, rotary=rotary)
        block = self.feed_forward(config.num_layers, f"{at}.mlp", config, weights, ctx)
        return load_prediction(
            pre_norm_layer(at, attention, block, config, weights, make_norm=CenteredNorm),
            PredictionNames("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc"),
            config,
            weights,
            ctx,
            target,
            make_norm=CenteredNorm,
        )


def load_gated_attention(
    layer: int, at: str, config: GatedHybridConfig, weights: ShardedWeights, ctx: ParallelContext, *, rotary: Rotary
) -> GatedAttention:
    """Read the attention whose tensors begin with `at`; `q_proj` has query and gate of each head together."""
    dim = config.head_dim
    heads = even_range(config.num_heads, ctx.tp.rank, ctx.tp.size)
    kv_heads = shared_head_range(config.num_kv_heads, ctx.tp.rank, ctx.tp.size)

    def of_queries(half: int) -> list[Columns]:
        starts = ((2 * head + half) * dim for head in heads)
        return [Columns(f"{at}.q_proj", 2 * config.num_heads * dim, range(start, start + dim)) for start in starts]

    of_kv = [
        Columns(f"{at}.{name}", config.num_kv_heads * dim, features(kv_heads, dim)) for name in ("k_proj", "v_proj")
    ]
    return GatedAttention(
        layer,
        weights.column(
            [*of_queries(0), *of_kv, *of_queries(1)], inputs=config.hidden_size, has_bias=config.attention_bias
        ),
        weights.row(
            f"{at}.o_proj",
            outputs=config.hidden_size,
            inputs=config.num_heads * dim,
            taken=features(heads, dim),
            has_bias=config.attention_bias,
        ),
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        head_dim=dim,
        rotary=rotary,
        qk_norm=_load_qk_norm(at, config, weights, len(heads), len(kv_heads)),
    )


def _load_qk_norm(
    at: str, config: GatedHybridConfig, weights: ShardedWeights, num_heads: int, num_kv_heads: int
) -> HeadNorm:
    """The norms of query and key heads as one, with 1 + weight in at least float32."""
    counts = {"q_norm": num_heads, "k_norm": num_kv_heads}
    rows = [
        weights.whole(f"{at}.{name}.weight", config.head_dim, dtype=weights.precise).expand(count, -1)
        for name, count in counts.items()
    ]
    return HeadNorm(1 + torch.cat(rows), config.rms_norm_eps)
