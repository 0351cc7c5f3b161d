"""Reading feed-forward parts and mixtures of experts: their keys of config.json and their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.checkpoint.config_file import ConfigFile, read_given_layer_types
from raycache.errors import CheckpointError
from raycache.layers.activation import Activation, silu_gated
from raycache.layers.experts import Experts, MixtureOfExperts, RoutedExperts, SharedExpert
from raycache.layers.feed_forward import FeedForward
from raycache.layers.kept_weights import Cut
from raycache.layers.linear import ColumnLinear
from raycache.layers.quantised_experts import QuantisedExperts
from raycache.layers.router import SigmoidRouter, SoftmaxRouter
from raycache.layers.weights import Columns, ShardedWeights
from raycache.parallel.sharding import even_range

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

# Shapes in this file: E experts, C features outside of them, I inner features of one on all ranks.


@dataclass(frozen=True)
class ExpertConfig:
    """The experts of a model's layers.

    Attributes:
        count: routed experts.
        top_k: of them per token.
        inner: inner features of each.
        shared_inner: inner features of the shared expert, 0 for none.
        renormalise: a token's weights sum to one (before they are scaled).
        num_groups, top_groups: limit of the choice, 1 and 1 for none.
        scale: of the weights.
        is_transposed: matrices of all experts in one tensor may be [in, out] instead of [out, in].
    """

    count: int
    top_k: int
    inner: int
    shared_inner: int = 0
    renormalise: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    is_transposed: bool = False


@dataclass(frozen=True)
class Products:
    """Tensors of one feed-forward block or expert, without ".weight".

    Attributes:
        up: gate and up, in this order, or up alone.
        down: back to the hidden size.
    """

    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


MIXTRAL = Products(up=("w1", "w3"), down="w2")
"""As Mixtral and those after it call them."""

UNGATED = Products(up=("up_proj",))
"""Up and down without a gate."""


def load_feed_forward(
    at: str,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    size: int,
    inner: int,
    names: Products = Products(),
    activation: Activation = silu_gated,
    has_bias: bool = False,
) -> FeedForward:
    """Read the block whose tensors begin with `at`; `size` features outside, `inner` inside."""
    taken = even_range(inner, ctx.tp.rank, ctx.tp.size)
    parts = [Columns(f"{at}.{name}", inner, taken) for name in names.up]
    return FeedForward(
        weights.column(parts, inputs=size, has_bias=has_bias),
        weights.row(f"{at}.{names.down}", outputs=size, inputs=inner, taken=taken, has_bias=has_bias),
        activation=activation,
    )


def require_experts(file: ConfigFile, experts: ExpertConfig) -> ExpertConfig:
    """Refuse a choice that cannot be made; returns `experts`.

    Raises:
        CheckpointError: says which.
    """
    size = experts.count // experts.num_groups
    if experts.count % experts.num_groups or experts.top_groups > experts.num_groups:
        wrong = f"cannot choose {experts.top_groups} of {experts.num_groups} groups of {experts.count} experts"
    elif experts.num_groups > 1 and size < 2:
        wrong = f"has {experts.num_groups} groups of {size} expert; a group's rank is made of two"
    elif experts.top_k > size * experts.top_groups:
        wrong = f"cannot choose {experts.top_k} of {size * experts.top_groups} experts"
    else:
        return experts
    raise CheckpointError(f"{file.path} {wrong}; is the file damaged? Download it again")


def read_grouped_experts(file: ConfigFile, *, scale: float | None = None) -> ExpertConfig:
    """Experts with a `SigmoidRouter`, under any of the names that DeepSeek-V3 and its descendants give to the keys.

    Args:
        file: config.json.
        scale: routed_scaling_factor of files that do not say; None: they must, for descendants differ.
    Raises:
        CheckpointError: a key is missing, has a wrong value, or does not go with the others.
    """

    def key(*names: str) -> str:
        return next((name for name in names if file.raw(name) is not None), names[0])

    for name in ("scoring_func", "moe_router_activation_func", "score_function"):
        file.require(name, "sigmoid")
    file.require("topk_method", "noaux_tc")
    inner = file.integer("moe_intermediate_size")
    experts = ExpertConfig(
        count=file.integer(key("n_routed_experts", "num_experts", "num_local_experts")),
        top_k=file.integer(key("num_experts_per_tok", "num_experts_per_token")),
        inner=inner,
        shared_inner=file.count(key("n_shared_experts", "num_shared_experts"), 0) * inner,
        renormalise=file.flag(key("norm_topk_prob", "moe_renormalize"), True),
        num_groups=file.integer(key("n_group", "num_expert_group"), 1),
        top_groups=file.integer("topk_group", 1),
        scale=file.number("routed_scaling_factor", scale),
    )
    return require_experts(file, experts)


def read_softmax_experts(file: ConfigFile, *, renormalise: bool) -> ExpertConfig:
    """Experts with a `SoftmaxRouter`; a shared one is the family's business.

    Raises:
        CheckpointError: a key is missing, has a wrong value, or does not go with the others.
    """
    # `num_local_experts` is what transformers 5 writes.
    count = file.integer("num_experts" if file.raw("num_experts") is not None else "num_local_experts")
    experts = ExpertConfig(
        count=count,
        top_k=file.integer("num_experts_per_tok"),
        inner=file.integer("moe_intermediate_size"),
        renormalise=renormalise,
    )
    return require_experts(file, experts)


def read_mlp_layers(file: ConfigFile, *, num_first: int) -> tuple[int, ...]:
    """Layers with an MLP where others have experts, as DeepSeek's configs say it.

    Args:
        file: config.json.
        num_first: how many there are, before all others, when it does not say.
    Raises:
        CheckpointError: a key has a wrong value.
    """
    num_first = file.count("first_k_dense_replace", num_first)
    kinds = read_given_layer_types(file, key="mlp_layer_types", known=("dense", "sparse"))
    if kinds:
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    return tuple(range(min(num_first, file.integer("num_hidden_layers"))))


def read_dense_layers(file: ConfigFile) -> tuple[int, ...]:
    """Layers with a plain MLP where others have experts, as Qwen's configs say it.

    Raises:
        CheckpointError: a key has a wrong value.
    """
    step, named = file.integer("decoder_sparse_step", 1), file.raw("mlp_only_layers") or []
    num_layers = file.integer("num_hidden_layers")
    if not isinstance(named, list) or any(type(layer) is not int or not 0 <= layer < num_layers for layer in named):
        raise CheckpointError(f"{file.path}: mlp_only_layers must be a list of layer numbers, got {named!r}")
    return tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)


def load_experts(
    at: str,
    experts: ExpertConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    size: int,
    names: Products = Products(),
    activation: Activation = silu_gated,
) -> RoutedExperts:
    """Read experts one by one, `{at}.{expert}.{name}.weight`, or gated ones all at once, `{at}.gate_up_proj` and
    `{at}.down_proj`, whichever the checkpoint has; `size` is C."""
    both = (f"{at}.gate_up_proj", f"{at}.down_proj")
    if names == Products() and any(weights.has(name) for name in both):
        return load_stacked_experts(*both, experts, weights, ctx, size=size, activation=activation)
    taken = even_range(experts.inner, ctx.tp.rank, ctx.tp.size)
    held = range(experts.count)

    def up_cut(expert: int, name: str) -> Cut:
        return Cut(f"{at}.{expert}.{name}.weight", (experts.inner, size), axis=0, taken=taken)

    def down_cut(expert: int) -> Cut:
        return Cut(f"{at}.{expert}.{names.down}.weight", (size, experts.inner), axis=1, taken=taken)

    up_groups = [[up_cut(expert, name) for name in names.up] for expert in held]
    kept = _kept(weights, up_groups, [[down_cut(expert)] for expert in held], experts, activation)
    if kept is not None:
        return kept

    def up(expert: int) -> Tensor:
        cuts = [up_cut(expert, name) for name in names.up]
        return torch.cat([weights.cut(own.name, own.shape, axis=0, taken=taken) for own in cuts])

    def down(expert: int) -> Tensor:
        own = down_cut(expert)
        return weights.cut(own.name, own.shape, axis=1, taken=taken)

    return Experts(_stack(held, up), _stack(held, down), activation=activation, held=held)


def load_stacked_experts(
    up: str,
    down: str,
    experts: ExpertConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    size: int,
    activation: Activation = silu_gated,
) -> RoutedExperts:
    """Read gated experts whose tensors hold all of them: `up` [E, 2 I, C] with gate first, `down` [E, C, I]."""
    taken, count, inner = even_range(experts.inner, ctx.tp.rank, ctx.tp.size), experts.count, experts.inner
    up_shape, down_shape = (count, 2 * inner, size), (count, size, inner)
    if experts.is_transposed and weights.fits(down, count, inner, size):
        gate_up = _cut_halves(weights, up, (count, size, 2 * inner), axis=2, taken=taken).mT.contiguous()
        rows = weights.cut(down, (count, inner, size), axis=1, taken=taken).mT.contiguous()
        return Experts(gate_up, rows, activation=activation, held=range(count))
    halves = [Cut(up, up_shape, axis=1, taken=run) for run in _halves(2 * inner, taken)]
    kept = _kept(weights, [halves], [[Cut(down, down_shape, axis=2, taken=taken)]], experts, activation)
    if kept is not None:
        return kept
    gate_up = _cut_halves(weights, up, up_shape, axis=1, taken=taken)
    rows = weights.cut(down, down_shape, axis=2, taken=taken)
    return Experts(gate_up, rows, activation=activation, held=range(experts.count))


def load_stacked_shared_expert(
    up: str,
    down: str,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    size: int,
    inner: int,
    activation: Activation = silu_gated,
) -> SharedExpert:
    """Read the shared expert made of `up` [2 I, C] with gate first, and `down` [C, I]."""
    taken = even_range(inner, ctx.tp.rank, ctx.tp.size)
    gate_up = _cut_halves(weights, up, (2 * inner, size), axis=0, taken=taken)
    rows = weights.cut(down, (size, inner), axis=1, taken=taken)
    return SharedExpert(ColumnLinear(gate_up, None), rows, activation=activation)


def load_shared_expert(
    at: str,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    size: int,
    inner: int,
    gate: str = "",
    names: Products = Products(),
    activation: Activation = silu_gated,
) -> SharedExpert:
    """Read the shared expert whose tensors begin with `at`; `gate` names the tensor of its gate, if it has one."""
    taken = even_range(inner, ctx.tp.rank, ctx.tp.size)
    parts = [Columns(f"{at}.{name}", inner, taken) for name in names.up]
    return SharedExpert(
        weights.column(parts, inputs=size, has_bias=False),
        weights.inner(f"{at}.{names.down}.weight", outputs=size, inputs=inner, taken=taken),
        activation=activation,
        gate=weights.whole(gate, 1, size) if gate else None,
    )


def load_softmax_moe(
    at: str,
    experts: ExpertConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    size: int,
    names: Products = Products(),
    shared: SharedExpert | None = None,
) -> MixtureOfExperts:
    """Read the layer `{at}.gate` and `{at}.experts`; the shared expert, where there is one, is given."""
    router = SoftmaxRouter(
        weights.whole(f"{at}.gate.weight", experts.count, size), top_k=experts.top_k, renormalise=experts.renormalise
    )
    routed = load_experts(f"{at}.experts", experts, weights, ctx, size=size, names=names)
    return MixtureOfExperts(router, routed, ctx.tp, shared=shared)


def load_sigmoid_router(
    at: str,
    experts: ExpertConfig,
    weights: ShardedWeights,
    *,
    size: int,
    weight: str = "weight",
    correction: str = "e_score_correction_bias",
) -> SigmoidRouter:
    """Read the router `{at}.{weight}` and its correction `{at}.{correction}`."""
    return SigmoidRouter(
        weights.whole(f"{at}.{weight}", experts.count, size, dtype=weights.precise),
        weights.whole(f"{at}.{correction}", experts.count, dtype=weights.precise),
        top_k=experts.top_k,
        num_groups=experts.num_groups,
        top_groups=experts.top_groups,
        renormalise=experts.renormalise,
        scale=experts.scale,
    )


def load_grouped_moe(
    at: str,
    experts: ExpertConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    size: int,
    names: Products = Products(),
    shared_names: Products = Products(),
    activation: Activation = silu_gated,
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
            names=shared_names,
            activation=activation,
        )
    return MixtureOfExperts(
        load_sigmoid_router(f"{at}.gate", experts, weights, size=size),
        load_experts(f"{at}.experts", experts, weights, ctx, size=size, names=names, activation=activation),
        ctx.tp,
        shared=shared,
    )


def _cut_halves(weights: ShardedWeights, name: str, shape: Sequence[int], *, axis: int, taken: range) -> Tensor:
    """The run `taken` of each half of a tensor along an axis, such as gate and up in one, stacked along that axis."""
    runs = _halves(shape[axis], taken)
    return torch.cat([weights.cut(name, shape, axis=axis, taken=run) for run in runs], dim=axis)


def _halves(size: int, taken: range) -> list[range]:
    """The run `taken` of each half of `size` features."""
    return [range(start + taken.start, start + taken.stop) for start in (0, size // 2)]


def _kept(
    weights: ShardedWeights,
    up: Sequence[Sequence[Cut]],
    down: Sequence[Sequence[Cut]],
    experts: ExpertConfig,
    activation: Activation,
) -> QuantisedExperts | None:
    """Experts that stay quantised, None where one of their products cannot."""
    up_matrices = weights.kept_experts(up)
    down_matrices = None if up_matrices is None else weights.kept_experts(down)
    if up_matrices is None or down_matrices is None:
        return None
    return QuantisedExperts(up_matrices, down_matrices, count=experts.count, activation=activation)


def _stack(experts: range, read: Callable[[int], Tensor]) -> Tensor:
    """One tensor per expert -> [E, ...], with one of them in memory twice at most."""
    first = read(experts[0])
    rows = first.new_empty(len(experts), *first.shape)
    rows[0] = first
    for row, expert in enumerate(experts[1:], start=1):
        rows[row] = read(expert)
    return rows
