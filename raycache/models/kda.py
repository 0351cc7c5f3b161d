"""What Kimi Linear and Ling share: Kimi delta attention between layers of latent attention, and grouped experts.

Names and shapes differ; a family says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raycache.checkpoint.config_file import ConfigFile, ModelConfig, read_common
from raycache.checkpoint.layer_kinds import LayerKinds
from raycache.errors import CheckpointError
from raycache.layers.delta_rule import DeltaRule, GatedHeadNorm
from raycache.layers.forward_pass import Mixer
from raycache.layers.kda import ForgetGate, KimiDeltaAttention, Projection
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component, latent, recurrent
from raycache.models.decoder import Decoder, Names, Progress, load_decoder, pre_norm_layer
from raycache.models.feed_forward import ExpertConfig, read_grouped_experts, read_mlp_layers
from raycache.models.latent_attention import LatentConfig
from raycache.parallel.sharding import HeadCount, even_range, state_part

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

# Shapes in this file: H heads of D features, K taps; of the whole model.


@dataclass(frozen=True)
class KdaConfig:
    """The layers with Kimi delta attention.

    Attributes:
        num_heads, head_dim: H and D.
        kernel: K.
        bound: smallest log decay, or None.
    """

    num_heads: int
    head_dim: int
    kernel: int
    bound: float | None = None

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class KdaHybridConfig(ModelConfig):
    """A decoder of both kinds of attention.

    Attributes:
        kinds: of layers; those with linear attention have KDA.
        kda, attention: of the two kinds.
        mlp_layers: layers with an MLP; the others have experts.
        intermediate_size: of the MLPs.
        experts: of the other layers.
    """

    kinds: LayerKinds
    kda: KdaConfig
    attention: LatentConfig
    mlp_layers: tuple[int, ...]
    intermediate_size: int
    experts: ExpertConfig


LoadPart = Callable[[int, str], Mixer]
"""(layer, what its tensors begin with) -> one part of it."""


def read_kda_hybrid(
    file: ConfigFile, *, num_mlp_layers: int, num_drafts: int, activation: str = "silu"
) -> dict[str, Any]:
    """Read the keys that both share, as keyword arguments of `KdaHybridConfig`.

    Args:
        file: config.json, with max_position_embeddings.
        num_mlp_layers: first layers with an MLP when the file does not say.
        num_drafts: layers for speculative drafts, which come after the others, when the file does not say.
        activation: of the family's MLPs.
    Raises:
        CheckpointError: a key is missing, has a wrong value, or asks for what is not implemented.
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


def require_kda(file: ConfigFile, kda: KdaConfig) -> KdaConfig:
    """Refuse sizes that no layer can have; returns `kda`.

    Raises:
        CheckpointError: says which.
    """
    if kda.kernel < 2:
        raise CheckpointError(f"{file.path}: a convolution of {kda.kernel} tap is not supported; at least 2 are")
    if kda.bound is not None and not kda.bound < 0:
        raise CheckpointError(f"{file.path}: kda_lower_bound={kda.bound} must be below zero")
    return kda


def kda_hybrid_components(config: KdaHybridConfig, fmt: CacheFormat) -> tuple[Component, ...]:
    """Latents of the layers with attention; states and the last inputs of three convolutions of the others."""
    attention, kda, kinds = config.attention, config.kda, config.kinds
    per_head = (kda.num_heads, kda.head_dim)
    latents = [latent(kinds.full, rank=attention.rank, rope_dim=attention.rope_dim, fmt=fmt)] if kinds.full else []
    if not kinds.linear:
        return tuple(latents)
    states = recurrent(
        kinds.linear,
        heads=kda.num_heads,
        key_dim=kda.head_dim,
        value_dim=kda.head_dim,
        fmt=fmt,
        conv=[("q", *per_head), ("k", *per_head), ("v", *per_head)],
        conv_kernel=kda.kernel,
    )
    return (*latents, states)


def kda_hybrid_head_counts(config: KdaHybridConfig, *, heads_key: str) -> tuple[HeadCount, ...]:
    """What tp and cp divide; `heads_key` of config.json counts the heads of KDA."""
    counts = (config.attention.head_count,)
    return (*counts, HeadCount(heads_key, config.kda.num_heads, over_cp=True)) if config.kinds.linear else counts


def load_kda_hybrid(
    config: KdaHybridConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    load_linear: LoadPart,
    load_full: LoadPart,
    load_block: LoadPart,
    on_progress: Progress,
    names: Names,
) -> Decoder:
    """Read this rank's share.

    Args:
        config: of the whole model.
        weights: where to read.
        ctx: whose share.
        load_linear, load_full: read the two kinds of attention.
        load_block: reads the MLP or the experts.
        on_progress: told after each layer.
        names: of the tensors outside of the layers.
    """

    def load_layer(layer: int) -> Sequence[Mixer]:
        at = f"model.layers.{layer}"
        load_attention = load_linear if layer in config.kinds.linear else load_full
        return pre_norm_layer(at, load_attention(layer, at), load_block(layer, at), config, weights)

    return load_decoder(config, weights, ctx, load_layer=load_layer, on_progress=on_progress, names=names)


def load_kda(
    layer: int,
    at: str,
    kda: KdaConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    size: int,
    eps: float,
    load_projection: Callable[[str], Projection],
    rate_shape: Sequence[int],
    rate_axis: int = 0,
    out: str = "o_proj",
) -> KimiDeltaAttention:
    """Read the layer whose tensors begin with `at`.

    Args:
        layer: its number.
        at: such as "model.layers.0.self_attn".
        kda: sizes.
        weights: where to read.
        ctx: whose share.
        size: the hidden size.
        eps: of the output's norm.
        load_projection: reads what makes the forget gate's input, "f", and the output gate, "g", for this tp rank.
        rate_shape: of A_log.
        rate_axis: where that has H numbers, or more, of which the first ones count.
        out: name of the output projection.
    """
    heads = even_range(kda.num_heads, ctx.tp.rank, ctx.tp.size)
    taken = features(heads, kda.head_dim)
    inputs = [
        *(Columns(f"{at}.{name}", kda.inner, taken) for name in ("q_proj", "k_proj", "v_proj")),
        Columns(f"{at}.b_proj", kda.num_heads, heads),
    ]
    rate = weights.cut(f"{at}.A_log", rate_shape, axis=rate_axis, taken=heads, dtype=weights.precise).exp()
    dt_bias = weights.cut(f"{at}.dt_bias", (kda.inner,), axis=0, taken=taken, dtype=weights.precise)
    norm = weights.whole(f"{at}.o_norm.weight", kda.head_dim, dtype=weights.precise)
    return KimiDeltaAttention(
        weights.column(inputs, inputs=size, has_bias=False),
        weights.row(f"{at}.{out}", outputs=size, inputs=kda.inner, taken=taken, has_bias=False),
        decay=load_projection("f"),
        forget=ForgetGate(rate.view(-1, 1), dt_bias.view(-1, kda.head_dim), bound=kda.bound),
        gate=load_projection("g"),
        rule=DeltaRule(layer, _load_taps(at, kda, weights, ctx)),
        norm=GatedHeadNorm(norm, eps, activation=torch.sigmoid),
        num_heads=len(heads),
        head_dim=kda.head_dim,
    )


def _load_taps(at: str, kda: KdaConfig, weights: ShardedWeights, ctx: ParallelContext) -> dict[str, Tensor]:
    """[H, D, K] of q, k and v, for this rank's recurrent heads."""
    heads = even_range(kda.num_heads, *state_part(ctx.split, ctx.coords))
    shape, taken = (kda.inner, 1, kda.kernel), features(heads, kda.head_dim)

    def taps(kind: str) -> Tensor:
        rows = weights.cut(f"{at}.{kind}_conv1d.weight", shape, axis=0, taken=taken, dtype=weights.precise)
        return rows.view(-1, kda.head_dim, kda.kernel)

    return {kind: taps(kind) for kind in ("q", "k", "v")}
