"""Reads experts, routers and shared experts.

Where experts run in fused kernels, a shared expert of the size of some routed ones is stored behind them, and every
token chooses it: its products are then part of theirs, and it needs no launches of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.layers.activation import Activation, silu_gated
from raycache.layers.expert_config import ExpertConfig
from raycache.layers.experts import Experts, MixtureOfExperts, SharedExpert
from raycache.layers.feed_forward import GATED, FeedForwardNames
from raycache.layers.fused_experts import has_kernels
from raycache.layers.kept_weights import Cut
from raycache.layers.linear import ColumnLinear
from raycache.layers.quantised_experts import QuantisedExperts
from raycache.layers.router import SigmoidRouter, SoftmaxRouter
from raycache.layers.weights import Columns, ShardedWeights

if TYPE_CHECKING:
    from raycache.parallel.collectives import Group

# Shapes in this file: E experts, C hidden size, I inner features of an expert on all ranks.


def load_experts(
    experts: ExpertConfig,
    weights: ShardedWeights,
    *,
    size: int,
    names: FeedForwardNames = GATED,
    activation: Activation = silu_gated,
    shared: SharedExpert | None = None,
) -> Experts | QuantisedExperts:
    """Read experts from a tensor per expert, `{expert}.{name}.weight`, or gated ones from the stacked tensors
    `gate_up_proj` and `down_proj`, whichever the checkpoint has.

    Args:
        size: C.
        shared: stored behind the others if that is faster; `num_shared` of the result tells whether it is.
    """
    up_all, down_all = "gate_up_proj", "down_proj"
    if names == GATED and (weights.has(up_all) or weights.has(down_all)):
        return load_stacked_experts(
            experts, weights, up=up_all, down=down_all, size=size, activation=activation, shared=shared
        )
    taken = weights.heads(experts.inner)
    held = range(experts.count)

    up = [[Cut(f"{i}.{name}.weight", (experts.inner, size), axis=0, taken=taken) for name in names.up] for i in held]
    down = [[Cut(f"{i}.{names.down}.weight", (size, experts.inner), axis=1, taken=taken)] for i in held]
    kept = _kept(weights, up, down, experts, activation)
    if kept is not None:
        return kept
    last_up, last_down = _last(weights, shared, inner=len(taken), activation=activation)
    num_shared = len(last_up)
    return Experts(
        _stack(weights, up, last_up),
        _stack(weights, down, last_down),
        activation=activation,
        held=range(experts.count + num_shared),
        num_shared=num_shared,
    )


def load_stacked_experts(
    experts: ExpertConfig,
    weights: ShardedWeights,
    *,
    up: str,
    down: str,
    size: int,
    activation: Activation = silu_gated,
    shared: SharedExpert | None = None,
) -> Experts | QuantisedExperts:
    """Read gated experts from stacked tensors: `up` [E, 2 I, C] with gate first, `down` [E, C, I].

    For `shared` see `load_experts`.
    """
    taken, count, inner = weights.heads(experts.inner), experts.count, experts.inner
    up_shape, down_shape = (count, 2 * inner, size), (count, size, inner)
    if experts.is_transposed and weights.fits(down, count, inner, size):
        gate_up = _numbers(weights, _halves(up, (count, size, 2 * inner), axis=2, taken=taken)).mT.contiguous()
        rows = weights.cut(down, (count, inner, size), axis=1, taken=taken).mT.contiguous()
        return _with_shared(gate_up, rows, weights, shared, activation=activation)
    halves = _halves(up, up_shape, axis=1, taken=taken)
    rest = [Cut(down, down_shape, axis=2, taken=taken)]
    kept = _kept(weights, [halves], [rest], experts, activation)
    if kept is not None:
        return kept
    return _with_shared(_numbers(weights, halves), _numbers(weights, rest), weights, shared, activation=activation)


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
    router = weights.whole("gate.weight", experts.count, size)
    routed = load_experts(experts, weights.under("experts"), size=size, names=names, shared=shared)
    return make_softmax_moe(experts, router, routed, weights.ctx.tp, shared=shared)


def make_softmax_moe(
    experts: ExpertConfig,
    router: Tensor,
    routed: Experts | QuantisedExperts,
    tp: Group,
    *,
    shared: SharedExpert | None,
) -> MixtureOfExperts:
    """Experts with a softmax router [E, C]; `routed` may have the shared expert among them."""
    is_last = routed.num_shared > 0
    chosen = SoftmaxRouter(
        router,
        top_k=experts.top_k,
        renormalise=experts.renormalise,
        num_shared=routed.num_shared,
        shared_gate=shared.gate if shared is not None and is_last else None,
    )
    return MixtureOfExperts(chosen, routed, tp, shared=None if is_last else shared)


def load_sigmoid_router(
    experts: ExpertConfig,
    weights: ShardedWeights,
    *,
    size: int,
    correction: str = "gate.e_score_correction_bias",
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
    router = load_sigmoid_router(experts, weights, size=size, correction=correction)
    if shared is None and experts.shared_inner:
        shared = load_shared_expert(weights.under("shared_experts"), size=size, inner=experts.shared_inner)
    routed = load_experts(
        experts, weights.under("experts"), size=size, names=names, activation=activation, shared=shared
    )
    router = router.with_shared(routed.num_shared)
    return MixtureOfExperts(router, routed, weights.ctx.tp, shared=None if routed.num_shared else shared)


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


def _last(
    weights: ShardedWeights, shared: SharedExpert | None, *, inner: int, activation: Activation
) -> tuple[Tensor, Tensor]:
    """Matrices of the shared expert as S routed ones with `inner` features on this rank; S is 0 if it stays apart."""
    if shared is not None and has_kernels(weights.dtype, weights.ctx.device):
        found = shared.as_routed(inner, activation)
        if found is not None:
            return found
    return torch.empty(0), torch.empty(0)


def _with_shared(
    up: Tensor, down: Tensor, weights: ShardedWeights, shared: SharedExpert | None, *, activation: Activation
) -> Experts:
    """Experts with the matrices up [E, F, C] and down [E, C, I], and the shared one behind them if that is faster."""
    last_up, last_down = _last(weights, shared, inner=down.shape[2], activation=activation)
    if num_shared := len(last_up):
        up, down = torch.cat((up, last_up)), torch.cat((down, last_down))
    return Experts(up, down, activation=activation, held=range(len(down)), num_shared=num_shared)


def _stack(weights: ShardedWeights, groups: Sequence[Sequence[Cut]], last: Tensor) -> Tensor:
    """Stack one tensor per group and those of `last`, [E + S, ...]; only one at a time is in memory twice."""
    first = _numbers(weights, groups[0])
    rows = first.new_empty(len(groups) + len(last), *first.shape)
    rows[0] = first
    if len(last):
        rows[len(groups) :] = last
    for row, cuts in enumerate(groups[1:], start=1):
        rows[row] = _numbers(weights, cuts)
    return rows


def _numbers(weights: ShardedWeights, cuts: Sequence[Cut]) -> Tensor:
    """Read cuts along one axis, and concatenate them along it."""
    parts = [weights.cut(own.name, own.shape, axis=own.axis, taken=own.taken) for own in cuts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=cuts[0].axis)
