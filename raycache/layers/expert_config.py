"""What config.json says about experts, under the names that families give to its keys."""

from __future__ import annotations

from dataclasses import dataclass

from raycache.checkpoint.config_file import ConfigFile, read_given_layer_types
from raycache.errors import CheckpointError


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
