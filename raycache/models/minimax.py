"""MiniMax-Text-01 and -M1: layers of lightning and of grouped-query attention, with experts in all of them.

Residual connections start after the norm, and both branches are weighted ("MiniMax-01", arXiv 2501.08313):

    hidden = norm(hidden);  hidden = alpha * hidden + beta * mixer(hidden)

Full attention rotates the first `rotary_dim` features of a head, half of them in published checkpoints; lightning
attention has no rotary embedding. transformers ignores `rotary_dim` and rotates whole heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.layer_kinds import FULL, LINEAR, LayerKinds, read_layer_kinds
from raycache.errors import CheckpointError
from raycache.layers.cp_split import CpSplit
from raycache.layers.expert_config import ExpertConfig, require_experts
from raycache.layers.expert_weights import load_softmax_moe
from raycache.layers.feed_forward import MIXTRAL
from raycache.layers.forward_pass import ForwardPass, Mixer
from raycache.layers.lightning import LightningConfig, load_activated_lightning
from raycache.layers.norm import RMSNorm
from raycache.layers.self_attention import load_attention, read_attention, read_heads, read_rotary_share
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Norm, Progress, load_decoder
from raycache.models.llama import DenseConfig, read_dense
from raycache.parallel.sharding import HeadCount

PUBLISHED_NAMES = {
    f"{new}_{factor}_factor": f"layernorm_{old}_{factor}"
    for new, old in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
    for factor in ("alpha", "beta")
}
"""Key of transformers -> key of MiniMax-Text-01 and -M1."""

RATE_TENSORS = r"\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"
"""Tensors in checkpoints that can be computed from config.json."""


@dataclass(frozen=True)
class Weighting:
    """Weights of the normed input (alpha) and of the mixer's output (beta)."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class MiniMaxConfig(DenseConfig):
    """A MiniMax, with experts in every layer; `intermediate_size` is the inner size of an expert.

    Attributes:
        kinds: which layers have lightning (linear) attention, and which full attention.
        around_lightning, around_full, around_block: weights of both kinds of attention and of the experts.
    """

    kinds: LayerKinds
    experts: ExpertConfig
    lightning: LightningConfig
    around_lightning: Weighting
    around_full: Weighting
    around_block: Weighting

    def components(self, fmt: CacheFormat) -> tuple[Component, ...]:
        full, linear = self.kinds.full, self.kinds.linear
        return self.attention.components(full, fmt) + self.lightning.components(linear, fmt)

    @property
    def head_counts(self) -> tuple[HeadCount, ...]:
        heads, kv_heads = self.attention.head_counts
        return replace(heads, over_cp=bool(self.kinds.linear)), kv_heads


class WeightedResidual:
    """normed = norm(hidden); alpha * normed + beta * mixer(normed)."""

    def __init__(self, norm: Norm, mixer: Mixer, weighting: Weighting) -> None:
        self._norm = norm
        self._mixer = mixer
        self._weighting = weighting

    @property
    def is_position_wise(self) -> bool:
        return self._mixer.is_position_wise

    def __call__(self, hidden: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        normed = self._norm(hidden)
        out = self._mixer(normed, run).mul_(self._weighting.beta)
        return out.add_(normed, alpha=self._weighting.alpha)

    def over_cp(self, split: CpSplit) -> WeightedResidual:
        """The same around a mixer that is split over cp."""
        return WeightedResidual(self._norm, self._mixer.over_cp(split), self._weighting)


class MiniMax:
    """Layers of lightning or full attention, and experts, with weighted residual connections."""

    model_type = "minimax"

    def read_config(self, file: ConfigFile) -> MiniMaxConfig:
        """Sliding windows, shared experts and residual connections before the norm are not supported."""
        file = _renamed(file)
        if file.raw("sliding_window") is not None:
            raise CheckpointError(f"{file.path} has a sliding_window, which is not supported for {self.model_type}")
        served = {"attention_bias": False, "mlp_bias": False, "postnorm": True, "shared_intermediate_size": 0}
        for key, value in served.items():
            file.require(key, value)
        heads = read_heads(file)
        share = read_rotary_share(file, head_dim=heads.head_dim, default=1.0)
        dense = read_dense(file, read_attention(file, heads, rotary_share=share, theta=1e6))
        experts = ExpertConfig(
            count=file.integer("num_local_experts"),
            top_k=file.integer("num_experts_per_tok"),
            inner=dense.intermediate_size,
        )
        return MiniMaxConfig(
            **{**vars(dense), "ignored_tensors": (RATE_TENSORS,)},
            kinds=read_layer_kinds(file, is_full=lambda layer: layer % 2 == 0),
            experts=require_experts(file, experts),
            lightning=LightningConfig(heads.num_heads, heads.head_dim, dense.num_layers),
            around_lightning=_read_weighting(file, "linear_attn"),
            around_full=_read_weighting(file, "full_attn"),
            around_block=_read_weighting(file, "mlp"),
        )

    def load(self, config: MiniMaxConfig, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        size, eps = config.hidden_size, config.rms_norm_eps
        rotary = config.attention.rotary(weights.ctx.device)

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            at, around = own.under("self_attn"), config.around_full
            attention: Mixer
            if layer in config.kinds.linear:
                around = config.around_lightning
                attention = load_activated_lightning(config.lightning, at, layer=layer, size=size)
            else:
                attention = load_attention(config.attention, at, layer=layer, size=size, eps=eps, rotary=rotary)
            experts = load_softmax_moe(config.experts, own.under("block_sparse_moe"), size=size, names=MIXTRAL)
            before, between = (
                RMSNorm(own.whole(f"{name}.weight", size), eps)
                for name in ("input_layernorm", "post_attention_layernorm")
            )
            return (
                WeightedResidual(before, attention, around),
                WeightedResidual(between, experts, config.around_block),
            )

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress)


def _renamed(file: ConfigFile) -> ConfigFile:
    """The same file with the keys of transformers."""
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
