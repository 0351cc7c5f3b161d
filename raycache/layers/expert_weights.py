"""Reads experts, routers and shared experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raycache.layers.activation import Activation, silu_gated
from raycache.layers.expert_config import ExpertConfig
from raycache.layers.experts import Experts, MixtureOfExperts, RoutedExperts, SharedExpert
from raycache.layers.feed_forward import GATED, FeedForwardNames
from raycache.layers.kept_weights import Cut
from raycache.layers.linear import ColumnLinear
from raycache.layers.quantised_experts import QuantisedExperts
from raycache.layers.router import SigmoidRouter, SoftmaxRouter
from raycache.layers.weights import Columns, ShardedWeights

# Shapes in this file: E experts, C hidden size, I inner features of an expert on all ranks.


def load_experts(
    experts: ExpertConfig,
    weights: ShardedWeights,
    *,
    size: int,
    names: FeedForwardNames = GATED,
    activation: Activation = silu_gated,
) -> RoutedExperts:
    """Read experts from a tensor per expert, `{expert}.{name}.weight`, or gated ones from the stacked tensors
    `gate_up_proj` and `down_proj`, whichever the checkpoint has. `size` is C."""
    up_all, down_all = "gate_up_proj", "down_proj"
    if names == GATED and (weights.has(up_all) or weights.has(down_all)):
        return load_stacked_experts(experts, weights, up=up_all, down=down_all, size=size, activation=activation)
    taken = weights.heads(experts.inner)
    held = range(experts.count)

    up = [[Cut(f"{i}.{name}.weight", (experts.inner, size), axis=0, taken=taken) for name in names.up] for i in held]
    down = [[Cut(f"{i}.{names.down}.weight", (size, experts.inner), axis=1, taken=taken)] for i in held]
    kept = _kept(weights, up, down, experts, activation)
    if kept is not None:
        return kept
    return Experts(_stack(weights, up), _stack(weights, down), activation=activation, held=held)


def load_stacked_experts(
    experts: ExpertConfig,
    weights: ShardedWeights,
    *,
    up: str,
    down: str,
    size: int,
    activation: Activation = silu_gated,
) -> RoutedExperts:
    """Read gated experts from stacked tensors: `up` [E, 2 I, C] with gate first, `down` [E, C, I]."""
    taken, count, inner = weights.heads(experts.inner), experts.count, experts.inner
    up_shape, down_shape = (count, 2 * inner, size), (count, size, inner)
    if experts.is_transposed and weights.fits(down, count, inner, size):
        gate_up = _numbers(weights, _halves(up, (count, size, 2 * inner), axis=2, taken=taken)).mT.contiguous()
        rows = weights.cut(down, (count, inner, size), axis=1, taken=taken).mT.contiguous()
        return Experts(gate_up, rows, activation=activation, held=range(count))
    halves = _halves(up, up_shape, axis=1, taken=taken)
    rest = [Cut(down, down_shape, axis=2, taken=taken)]
    kept = _kept(weights, [halves], [rest], experts, activation)
    if kept is not None:
        return kept
    return Experts(_numbers(weights, halves), _numbers(weights, rest), activation=activation, held=range(count))


def load_stacked_shared_expert(
    weights: ShardedWeights, *, up: str, down: str, size: int, inner: int, activation: Activation = silu_gated
) -> SharedExpert:
    """Read a shared expert from `up` [2 I, C] with gate first, and `down` [C, I]."""
    taken = weights.heads(inner)
    gate_up = _numbers(weights, _halves(up, (2 * inner, size), axis=0, taken=taken))
    rows = weights.cut(down, (size, inner), axis=1, taken=taken)
    return SharedExpert(ColumnLinear(gate_up, None), rows, activation=activation)


def load_shared_expert(
    weights: ShardedWeights,
    *,
    size: int,
    inner: int,
    names: FeedForwardNames = GATED,
    activation: Activation = silu_gated,
    gate: Tensor | None = None,
) -> SharedExpert:
    """Read a shared expert; for `gate` see `SharedExpert`."""
    taken = weights.heads(inner)
    return SharedExpert(
        weights.column([Columns(name, inner, taken) for name in names.up], inputs=size, has_bias=False),
        weights.inner(f"{names.down}.weight", outputs=size, inputs=inner, taken=taken),
        activation=activation,
        gate=gate,
    )


def load_softmax_moe(
    experts: ExpertConfig,
    weights: ShardedWeights,
    *,
    size: int,
    names: FeedForwardNames = GATED,
    shared: SharedExpert | None = None,
) -> MixtureOfExperts:
    """Read the router `gate` and the experts `experts`."""
    router = SoftmaxRouter(
        weights.whole("gate.weight", experts.count, size), top_k=experts.top_k, renormalise=experts.renormalise
    )
    return MixtureOfExperts(
        router, load_experts(experts, weights.under("experts"), size=size, names=names), weights.ctx.tp, shared=shared
    )


def load_sigmoid_router(
    experts: ExpertConfig, weights: ShardedWeights, *, size: int, correction: str = "gate.e_score_correction_bias"
) -> SigmoidRouter:
    """Read the router `gate` and its correction."""
    return SigmoidRouter(
        weights.whole("gate.weight", experts.count, size, dtype=weights.precise),
        weights.whole(correction, experts.count, dtype=weights.precise),
        top_k=experts.top_k,
        num_groups=experts.num_groups,
        top_groups=experts.top_groups,
        renormalise=experts.renormalise,
        scale=experts.scale,
    )


def load_grouped_moe(
    experts: ExpertConfig,
    weights: ShardedWeights,
    *,
    size: int,
    names: FeedForwardNames = GATED,
    activation: Activation = silu_gated,
    shared: SharedExpert | None = None,
    correction: str = "gate.e_score_correction_bias",
) -> MixtureOfExperts:
    """Read the router `gate`, the experts `experts` and, unless one is given, the shared expert `shared_experts`."""
    if shared is None and experts.shared_inner:
        shared = load_shared_expert(weights.under("shared_experts"), size=size, inner=experts.shared_inner)
    return MixtureOfExperts(
        load_sigmoid_router(experts, weights, size=size, correction=correction),
        load_experts(experts, weights.under("experts"), size=size, names=names, activation=activation),
        weights.ctx.tp,
        shared=shared,
    )


def _halves(name: str, shape: tuple[int, ...], *, axis: int, taken: range) -> list[Cut]:
    """Cuts of the slice `taken` of each half of an axis, such as gate and up."""
    starts = (0, shape[axis] // 2)
    return [Cut(name, shape, axis, range(start + taken.start, start + taken.stop)) for start in starts]


def _kept(
    weights: ShardedWeights,
    up: Sequence[Sequence[Cut]],
    down: Sequence[Sequence[Cut]],
    experts: ExpertConfig,
    activation: Activation,
) -> QuantisedExperts | None:
    """Experts that stay quantised; None if either of their matrices cannot."""
    up_matrices = weights.kept_experts(up)
    down_matrices = None if up_matrices is None else weights.kept_experts(down)
    if up_matrices is None or down_matrices is None:
        return None
    return QuantisedExperts(up_matrices, down_matrices, count=experts.count, activation=activation)


def _stack(weights: ShardedWeights, groups: Sequence[Sequence[Cut]]) -> Tensor:
    """Stack one tensor per group, [E, ...]; only one at a time is in memory twice."""
    first = _numbers(weights, groups[0])
    rows = first.new_empty(len(groups), *first.shape)
    rows[0] = first
    for row, cuts in enumerate(groups[1:], start=1):
        rows[row] = _numbers(weights, cuts)
    return rows


def _numbers(weights: ShardedWeights, cuts: Sequence[Cut]) -> Tensor:
    """Read cuts along one axis, and concatenate them along it."""
    parts = [weights.cut(own.name, own.shape, axis=own.axis, taken=own.taken) for own in cuts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=cuts[0].axis)
