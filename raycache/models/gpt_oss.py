"""gpt-oss: alternating sliding-window and full layers, attention sinks, experts with biases (arXiv 2508.10925)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.layer_kinds import read_windowed
from raycache.errors import CheckpointError
from raycache.layers.activation import clamped_swiglu
from raycache.layers.expert_config import ExpertConfig, require_experts
from raycache.layers.experts import Experts, MixtureOfExperts, RoutedExperts
from raycache.layers.forward_pass import Mixer
from raycache.layers.kept_weights import Cut
from raycache.layers.quantised_experts import QuantisedExperts
from raycache.layers.router import SoftmaxRouter
from raycache.layers.self_attention import load_attention, read_attention, read_stated_heads
from raycache.layers.weights import ShardedWeights
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.models.llama import DenseConfig, read_dense


@dataclass(frozen=True)
class GptOssConfig(DenseConfig):
    """gpt-oss, with experts in every layer; alpha and limit are those of `clamped_swiglu`."""

    experts: ExpertConfig
    swiglu_alpha: float
    swiglu_limit: float


class GptOss:
    """Layers of attention and experts, with a norm before each."""

    model_type = "gpt_oss"

    def read_config(self, file: ConfigFile) -> GptOssConfig:
        """`intermediate_size` is the inner size of an expert."""
        file.require("attention_bias", True)
        if file.raw("rope_scaling") is None and file.raw("rope_parameters") is None:
            raise CheckpointError(f"{file.path} has no rope_scaling, which all gpt-oss models have; download it again")
        attention = replace(
            read_attention(file, read_stated_heads(file)),
            has_bias=True,
            has_output_bias=True,
            has_sinks=True,
            window=file.integer("sliding_window"),
            windowed=read_windowed(file, pattern=2),
        )
        experts = ExpertConfig(
            count=file.integer("num_local_experts"),
            top_k=file.integer("num_experts_per_tok"),
            inner=file.integer("intermediate_size"),
        )
        return GptOssConfig(
            **vars(read_dense(file, attention)),
            experts=require_experts(file, experts),
            swiglu_alpha=file.number("swiglu_alpha", 1.702),
            swiglu_limit=file.number("swiglu_limit", 7.0),
        )

    def load(self, config: GptOssConfig, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        size, eps = config.hidden_size, config.rms_norm_eps
        rotary = config.attention.rotary(weights.ctx.device)

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            at = own.under("self_attn")
            attention = load_attention(config.attention, at, layer=layer, size=size, eps=eps, rotary=rotary)
            return pre_norm_layer(config, own, attention, load_gpt_oss_moe(config, own.under("mlp")))

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress)


def load_gpt_oss_moe(config: GptOssConfig, weights: ShardedWeights) -> MixtureOfExperts:
    """Read the router `router` and the experts `experts`."""
    count, size = config.experts.count, config.hidden_size
    router = SoftmaxRouter(
        weights.whole("router.weight", count, size),
        bias=weights.whole("router.bias", count),
        top_k=config.experts.top_k,
        renormalise=True,
    )
    return MixtureOfExperts(router, _load_experts(config, weights.under("experts")), weights.ctx.tp)


def _load_experts(config: GptOssConfig, weights: ShardedWeights) -> RoutedExperts:
    """The checkpoint stores matrices [E, in, out], with gate and up interleaved."""
    count, inner, size = config.experts.count, config.experts.inner, config.hidden_size
    taken = weights.heads(inner)
    pairs = range(2 * taken.start, 2 * taken.stop)
    up = Cut("gate_up_proj", (count, size, 2 * inner), axis=2, taken=pairs)
    down = Cut("down_proj", (count, inner, size), axis=1, taken=taken)
    activation = clamped_swiglu(alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    up_bias = _gate_first(weights.cut("gate_up_proj_bias", (count, 2 * inner), axis=1, taken=pairs))
    # Added on one rank only, since the outputs of all ranks are summed.
    down_bias = weights.whole("down_proj_bias", count, size) if weights.ctx.tp.rank == 0 else None
    gate_first = [*range(0, len(pairs), 2), *range(1, len(pairs), 2)]
    kept_up, kept_down = weights.kept_experts([[up]], rows=gate_first), weights.kept_experts([[down]])
    if kept_up is not None and kept_down is not None:
        return QuantisedExperts(
            kept_up, kept_down, count=count, activation=activation, up_bias=up_bias, down_bias=down_bias
        )
    return Experts(
        _gate_first(weights.cut(up.name, up.shape, axis=2, taken=pairs).mT),
        weights.cut(down.name, down.shape, axis=1, taken=taken).mT.contiguous(),
        activation=activation,
        held=range(count),
        up_bias=up_bias,
        down_bias=down_bias,
    )


def _gate_first(pairs: Tensor) -> Tensor:
    """[E, 2 I, ...] with gate and up interleaved -> all gates, then all ups."""
    return torch.cat((pairs[:, 0::2], pairs[:, 1::2]), dim=1)
