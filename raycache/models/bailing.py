"""What Ling 3 and Ling 2.5 share: names outside of the layers, and experts whose activations may have limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.layers.activation import Activation, silu_clamped, silu_gated
from raycache.layers.experts import MixtureOfExperts
from raycache.layers.weights import ShardedWeights
from raycache.models.decoder import Names
from raycache.models.feed_forward import (
    ExpertConfig,
    load_experts,
    load_shared_expert,
    load_sigmoid_router,
    read_grouped_experts,
)
from raycache.models.prediction import PredictionNames

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

WORD_EMBEDDINGS = Names(embedding="model.word_embeddings.weight")
"""Tensors outside of the layers."""


def prediction_names(at: str) -> PredictionNames:
    """Tensors of the layer that predicts the token after the next one, whose names begin with `at`."""
    return PredictionNames(f"{at}.final_layernorm", f"{at}.enorm", f"{at}.hnorm", f"{at}.eh_proj")


@dataclass(frozen=True)
class LayerLimits:
    """How large the activations of one layer's experts may be; None for no limit.

    Attributes:
        routed, shared: of the two kinds of experts.
    """

    routed: float | None = None
    shared: float | None = None


@dataclass(frozen=True)
class Limits:
    """The same of all layers; those past the end of a list have no limit.

    Attributes:
        routed, shared: one per layer.
    """

    routed: tuple[float | None, ...] = ()
    shared: tuple[float | None, ...] = ()

    def of(self, layer: int) -> LayerLimits:
        """Those of a layer."""
        return LayerLimits(*(dict(enumerate(limits)).get(layer) for limits in (self.routed, self.shared)))


def read_limits(file: ConfigFile) -> Limits:
    """Read the lists of limits; null, and null or 0 in a list, mean no limit.

    Raises:
        CheckpointError: a list has something else.
    """
    return Limits(*(_read_list(file, key) for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")))


def _read_list(file: ConfigFile, key: str) -> tuple[float | None, ...]:
    limits: Sequence[float | None] = [] if file.raw(key) is None else file.raw(key)
    if not isinstance(limits, list) or any(
        limit is not None and (type(limit) not in (int, float) or not 0 <= limit < float("inf")) for limit in limits
    ):
        raise CheckpointError(f"{file.path}: {key} must be a list of limits, one per layer, got {limits!r}")
    return tuple(float(limit) if limit else None for limit in limits)


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


def load_bailing_moe(
    at: str,
    experts: ExpertConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    size: int,
    limits: LayerLimits = LayerLimits(),
) -> MixtureOfExperts:
    """Read the layer `{at}.gate`, `{at}.experts` and, where there is one, `{at}.shared_experts`."""
    shared = None
    if experts.shared_inner:
        shared = load_shared_expert(
            f"{at}.shared_experts",
            weights,
            ctx,
            size=size,
            inner=experts.shared_inner,
            activation=_activation(limits.shared),
        )
    return MixtureOfExperts(
        load_sigmoid_router(f"{at}.gate", experts, weights, size=size, correction="expert_bias"),
        load_experts(f"{at}.experts", experts, weights, ctx, size=size, activation=_activation(limits.routed)),
        ctx.tp,
        shared=shared,
    )


def _activation(limit: float | None) -> Activation:
    return silu_gated if limit is None else silu_clamped(limit=limit)
