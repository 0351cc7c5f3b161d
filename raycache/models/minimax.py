"""MiniMax-Text-01 and -M1: lightning attention between layers of grouped-query attention, experts in all of them.

Residuals go around the norm, not before it, and both ways are weighted ("MiniMax-01", arXiv 2501.08313):

    hidden = norm(hidden);  hidden = alpha * hidden + beta * mixer(hidden)

Full attention turns the first `rotary_dim` features of a head, which are half of it in published checkpoints; lightning
attention has no positions. transformers ignores `rotary_dim`, and turns whole heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.layer_kinds import FULL, LINEAR, LayerKinds, read_layer_kinds
from raycache.errors import CheckpointError
from raycache.layers.forward_pass import ForwardPass, Mixer
from raycache.layers.lightning import ActivatedHeads, LightningAttention, SplitNorm, slope_rates
from raycache.layers.norm import RMSNorm
from raycache.layers.rope import Rotary
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component, kv, recurrent
from raycache.models.decoder import Decoder, Norm, Progress, load_decoder
from raycache.models.dense import DenseConfig, load_attention, read_dense_config, read_rotary_share
from raycache.models.feed_forward import MIXTRAL, ExpertConfig, load_softmax_moe, require_experts
from raycache.parallel.sharding import HeadCount, even_range, state_part

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

LIGHTNING_NORM_EPS = 1e-6
"""Of lightning attention's own norm, whatever `rms_norm_eps` says."""

PUBLISHED_NAMES = {
    f"{new}_{factor}_factor": f"layernorm_{old}_{factor}"
    for new, old in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
    for factor in ("alpha", "beta")
}
"""Key of transformers -> key of MiniMax-Text-01 and -M1."""

RATE_TENSORS = r"\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"
"""Numbers that follow from the config and are saved all the same."""


@dataclass(frozen=True)
class Weighting:
    """Of the two ways of a residual.

    Attributes:
        alpha: of the normed input.
        beta: of the mixer's output.
    """

    alpha: float
    beta: float


@dataclass(frozen=True)
class MiniMaxConfig(DenseConfig):
    """A decoder of both kinds of layers. `intermediate_size` is that of an expert.

    Attributes:
        kinds: of layers; those with linear attention have lightning attention.
        experts: of every layer.
        lightning, full, block: weighting around the two kinds of attention and around the experts.
    """

    kinds: LayerKinds
    experts: ExpertConfig
    lightning: Weighting
    full: Weighting
    block: Weighting


class WeightedResidual:
    """normed = norm(hidden); alpha * normed + beta * mixer(normed)."""

    def __init__(self, norm: Norm, mixer: Mixer, weighting: Weighting) -> None:
        self._norm = norm
        self._mixer = mixer
        self._weighting = weighting

    def __call__(self, hidden: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        normed = self._norm(hidden)
        out = self._mixer(normed, run).mul_(self._weighting.beta)
        return out.add_(normed, alpha=self._weighting.alpha)


class MiniMax:
    """See models.base.Family."""

    model_type = "minimax"

    def read_config(self, file: ConfigFile) -> MiniMaxConfig:
        """Windows, shared experts and residuals around more than a norm are refused."""
        file = _renamed(file)
        num_heads = file.integer("num_attention_heads")
        head_dim = file.integer("head_dim", file.integer("hidden_size") // num_heads)
        if file.raw("sliding_window") is not None:
            raise CheckpointError(f"{file.path} has a sliding_window, which is not supported for {self.model_type}")
        served = {"attention_bias": False, "mlp_bias": False, "postnorm": True, "shared_intermediate_size": 0}
        for key, value in served.items():
            file.require(key, value)
        dense = read_dense_config(
            file,
            num_kv_heads=file.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            has_qk_norm=False,
            rotary_share=read_rotary_share(file, head_dim=head_dim, default=1.0),
            theta=1e6,
        )
        experts = ExpertConfig(
            count=file.integer("num_local_experts"),
            top_k=file.integer("num_experts_per_tok"),
            inner=dense.intermediate_size,
        )
        return MiniMaxConfig(
            **{**vars(dense), "ignored_tensors": (RATE_TENSORS,)},
            kinds=read_layer_kinds(file, is_full=lambda layer: layer % 2 == 0),
            experts=require_experts(file, experts),
            lightning=_read_weighting(file, "linear_attn"),
            full=_read_weighting(file, "full_attn"),
            block=_read_weighting(file, "mlp"),
        )

    def components(self, config: MiniMaxConfig, fmt: CacheFormat) -> tuple[Component, ...]:
        full, linear = config.kinds.full, config.kinds.linear
        heads, dim = config.num_heads, config.head_dim
        return (
            *([kv("kv", full, heads=config.num_kv_heads, dim=dim, fmt=fmt)] if full else []),
            *([recurrent(linear, heads=heads, key_dim=dim, value_dim=dim, fmt=fmt)] if linear else []),
        )

    def head_counts(self, config: MiniMaxConfig) -> tuple[HeadCount, ...]:
        return (
            HeadCount("num_attention_heads", config.num_heads, over_cp=bool(config.kinds.linear)),
            HeadCount("num_key_value_heads", config.num_kv_heads, is_shared=True),
        )

    def load(
        self, config: MiniMaxConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        rotary = Rotary(config.rope, config.rotary_dim, ctx.device)
        size, eps = config.hidden_size, config.rms_norm_eps

        def load_layer(layer: int) -> Sequence[Mixer]:
            at = f"model.layers.{layer}"
            is_lightning = layer in config.kinds.linear
            attention: Mixer
            if is_lightning:
                attention = _load_lightning(layer, f"{at}.self_attn", config, weights, ctx)
            else:
                attention = load_attention(layer, f"{at}.self_attn", config, weights, ctx, rotary=rotary)
            experts = load_softmax_moe(f"{at}.block_sparse_moe", config.experts, weights, ctx, size=size, names=MIXTRAL)
            before = RMSNorm(weights.whole(f"{at}.input_layernorm.weight", size), eps)
            between = RMSNorm(weights.whole(f"{at}.post_attention_layernorm.weight", size), eps)
            return (
                WeightedResidual(before, attention, config.lightning if is_lightning else config.full),
                WeightedResidual(between, experts, config.block),
            )

        return load_decoder(config, weights, ctx, load_layer=load_layer, on_progress=on_progress)


def _renamed(file: ConfigFile) -> ConfigFile:
    """The file under the names that transformers gives to its keys."""
    factors = {new: file.number(old) for new, old in PUBLISHED_NAMES.items() if file.raw(old) is not None}
    listed = file.raw("attn_type_list")
    if listed is None:
        return file.having(**factors)
    kinds = {0: LINEAR, 1: FULL}
    if not isinstance(listed, list) or any(type(kind) is not int or kind not in kinds for kind in listed):
        raise CheckpointError(f"{file.path}: attn_type_list must be a list of 0 and 1, got {listed!r}")
    return file.having(**factors, layer_types=[kinds[kind] for kind in listed])


def _read_weighting(file: ConfigFile, name: str) -> Weighting:
    return Weighting(file.number(f"{name}_alpha_factor", 1.0), file.number(f"{name}_beta_factor", 1.0))


def _load_lightning(
    layer: int, at: str, config: MiniMaxConfig, weights: ShardedWeights, ctx: ParallelContext
) -> LightningAttention:
    num_heads, dim = config.num_heads, config.head_dim
    heads = even_range(num_heads, ctx.tp.rank, ctx.tp.size)
    taken, inner = features(heads, dim), num_heads * dim
    parts = (
        Columns(f"{at}.qkv_proj", 3 * inner, features(heads, 3 * dim)),
        Columns(f"{at}.output_gate", inner, taken),
    )
    own = even_range(num_heads, *state_part(ctx.split, ctx.coords))
    slopes = slope_rates(layer, num_layers=config.num_layers, num_heads=num_heads)[own.start : own.stop]
    norm = weights.cut(f"{at}.norm.weight", (inner,), axis=0, taken=taken)
    return LightningAttention(
        layer,
        weights.column(parts, inputs=config.hidden_size, has_bias=False),
        weights.row(f"{at}.out_proj", outputs=config.hidden_size, inputs=inner, taken=taken, has_bias=False),
        heads=ActivatedHeads(len(heads), dim),
        norm=SplitNorm(norm, inner, LIGHTNING_NORM_EPS, ctx.tp),
        slopes=slopes.to(ctx.device),
    )
