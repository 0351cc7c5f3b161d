"""MiniMax-M2: grouped-query attention, normalised over all heads and turned in part, and experts in every layer.

config.json speaks of prediction layers (`num_mtp_modules`). Published checkpoints do not have them, or have them with
numbers that were not trained: they are passed over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile, require_full_attention
from raycache.errors import CheckpointError
from raycache.layers.experts import MixtureOfExperts
from raycache.layers.forward_pass import Mixer
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress
from raycache.models.dense import (
    DenseConfig,
    attention_head_counts,
    dense_components,
    load_attention_mlp,
    read_dense_config,
    read_rotary_share,
)
from raycache.models.feed_forward import (
    MIXTRAL,
    ExpertConfig,
    load_experts,
    load_sigmoid_router,
    require_experts,
)
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

SERVED = {
    "attention_bias": False,
    "attn_window_size": None,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "use_qk_norm": True,
    "use_routing_bias": True,
}
"""Keys of config.json with the only value that they have here."""


@dataclass(frozen=True)
class MiniMaxM2Config(DenseConfig):
    """A MiniMax-M2. `intermediate_size` is that of an expert.

    Attributes:
        experts: of every layer.
    """

    experts: ExpertConfig = field(kw_only=True)


class MiniMaxM2:
    """See models.base.Family."""

    model_type = "minimax_m2"

    def read_config(self, file: ConfigFile) -> MiniMaxM2Config:
        """Windows, shared experts and other norms of queries and keys are refused."""
        for key, served in SERVED.items():
            file.require(key, served)
        require_full_attention(file)
        _require_full_attention_list(file)
        num_heads = file.integer("num_attention_heads")
        head_dim = file.integer("head_dim", file.integer("hidden_size") // num_heads)
        dense = read_dense_config(
            file,
            num_kv_heads=file.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            has_qk_norm=False,
            rotary_share=read_rotary_share(file, head_dim=head_dim, default=1.0),
            theta=5e6,
        )
        experts = ExpertConfig(
            count=file.integer("num_local_experts"),
            top_k=file.integer("num_experts_per_tok"),
            inner=dense.intermediate_size,
        )
        behind = range(dense.num_layers, dense.num_layers + file.count("num_mtp_modules", 0))
        return MiniMaxM2Config(
            **{
                **vars(dense),
                "has_joint_qk_norm": True,
                "ignored_tensors": tuple(rf"^model\.layers\.{layer}\." for layer in behind),
            },
            experts=require_experts(file, experts),
        )

    def components(self, config: MiniMaxM2Config, fmt: CacheFormat) -> tuple[Component, ...]:
        return dense_components(config, fmt)

    def head_counts(self, config: MiniMaxM2Config) -> tuple[HeadCount, ...]:
        return attention_head_counts(config)

    def load(
        self, config: MiniMaxM2Config, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        size, experts = config.hidden_size, config.experts

        def load_layer_mlp(layer: int) -> Mixer:
            at = f"model.layers.{layer}.block_sparse_moe"
            router = load_sigmoid_router(at, experts, weights, size=size, weight="gate.weight")
            routed = load_experts(f"{at}.experts", experts, weights, ctx, size=size, names=MIXTRAL)
            return MixtureOfExperts(router, routed, ctx.tp)

        return load_attention_mlp(config, weights, ctx, load_layer_mlp=load_layer_mlp, on_progress=on_progress)


def _require_full_attention_list(file: ConfigFile) -> None:
    kinds = file.raw("attn_type_list")
    if kinds is not None and kinds != [1] * file.integer("num_hidden_layers"):
        raise CheckpointError(f"{file.path}: attn_type_list must be 1, full attention, for each layer, got {kinds!r}")
