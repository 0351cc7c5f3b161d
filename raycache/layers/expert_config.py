"""Reads the configuration of experts from config.json, whose keys differ between families."""

from __future__ import annotations

from dataclasses import dataclass

from raycache.checkpoint.config_file import ConfigFile, read_given_layer_types
from raycache.errors import CheckpointError


@dataclass(frozen=True)
class ExpertConfig:
    """The experts of a model's layers.

    Attributes:
        count: number of routed experts.
        top_k: experts per token.
        inner: inner features of each routed expert.
        shared_inner: inner features of the shared expert, 0 for none.
        renormalise: whether a token's weights are made to sum to one (before they are scaled).
        num_groups, top_groups: a token's experts come from its best `top_groups` of `num_groups`; 1 and 1 for no limit.
        scale: factor of the weights.
        is_transposed: whether a tensor of all experts may store [in, out] matrices instead of [out, in].
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


def require_experts(file: ConfigFile, experts: ExpertConfig) -> ExpertConfig:
    """Return `experts` if a token can choose `top_k` of them.

    Raises:
        CheckpointError: there are too few experts or groups, or groups are not of equal size.
    """
    size = experts.count // experts.num_groups
    if experts.count % experts.num_groups or experts.top_groups > experts.num_groups:
        wrong = f"cannot choose {experts.top_groups} of {experts.num_groups} groups of {experts.count} experts"
    elif experts.num_groups > 1 and size < 2:
        wrong = f"has {experts.num_groups} groups of {size} expert; groups are ranked by the scores of two"
    elif experts.top_k > size * experts.top_groups:
        wrong = f"cannot choose {experts.top_k} of {size * experts.top_groups} experts"
    else:
        return experts
    raise CheckpointError(f"{file.path} {wrong}; is the file damaged? Download it again")


def read_grouped_experts(file: ConfigFile, *, scale: float | None = None) -> ExpertConfig:
    """Read experts with a `SigmoidRouter`, under any of the keys that DeepSeek-V3 and its descendants use.

    Args:
        scale: default of routed_scaling_factor; None makes it required, since the defaults of descendants differ.
    Raises:
        CheckpointError: a key is missing, invalid, or contradicts another.
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
    """Read experts with a `SoftmaxRouter`, without the shared expert.

    Raises:
        CheckpointError: a key is missing, invalid, or contradicts another.
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
    """Read which layers have an MLP instead of experts, from the keys of DeepSeek.

    Args:
        num_first: default of `first_k_dense_replace`.
    Raises:
        CheckpointError: a key is invalid.
    """
    num_first = file.count("first_k_dense_replace", num_first)
    kinds = read_given_layer_types(file, key="mlp_layer_types", known=("dense", "sparse"))
    if kinds:
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    return tuple(range(min(num_first, file.integer("num_hidden_layers"))))


def read_dense_layers(file: ConfigFile) -> tuple[int, ...]:
    """Read which layers have an MLP instead of experts, from the keys of Qwen.

    Raises:
        CheckpointError: a key is invalid.
    """
    step, named = file.integer("decoder_sparse_step", 1), file.raw("mlp_only_layers") or []
    num_layers = file.integer("num_hidden_layers")
    if not isinstance(named, list) or any(type(layer) is not int or not 0 <= layer < num_layers for layer in named):
        raise CheckpointError(f"{file.path}: mlp_only_layers must be a list of layer numbers, got {named!r}")
    return tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)
