"""MiniMax-M2: grouped-query attention with queries and keys normalised over all heads and partial rotary embedding,
experts in every layer.

config.json mentions prediction layers (`num_mtp_modules`). In published checkpoints they are missing or untrained, so
they are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raycache.checkpoint.config_file import ConfigFile, require_full_attention
from raycache.errors import CheckpointError
from raycache.layers.expert_config import ExpertConfig, require_experts
from raycache.layers.expert_weights import load_grouped_moe
from raycache.layers.feed_forward import MIXTRAL
from raycache.layers.forward_pass import Mixer
from raycache.layers.self_attention import load_attention, read_attention, read_heads, read_rotary_share
from raycache.layers.weights import ShardedWeights
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.models.llama import DenseConfig, read_dense

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
"""Keys of config.json with the only supported value."""


@dataclass(frozen=True)
class MiniMaxM2Config(DenseConfig):
    """A MiniMax-M2, with experts in every layer; `intermediate_size` is the inner size of an expert."""

    experts: ExpertConfig


class MiniMaxM2:
    """Layers of attention and experts, with a norm before each."""

    model_type = "minimax_m2"

    def read_config(self, file: ConfigFile) -> MiniMaxM2Config:
        """Sliding windows, shared experts and other norms of queries and keys are not supported."""
        for key, served in SERVED.items():
            file.require(key, served)
        require_full_attention(file)
        _require_full_attention_list(file)
        heads = read_heads(file)
        share = read_rotary_share(file, head_dim=heads.head_dim, default=1.0)
        attention = replace(read_attention(file, heads, rotary_share=share, theta=5e6), has_joint_qk_norm=True)
        dense = read_dense(file, attention)
        experts = ExpertConfig(
            count=file.integer("num_local_experts"),
            top_k=file.integer("num_experts_per_tok"),
            inner=dense.intermediate_size,
        )
        behind = range(dense.num_layers, dense.num_layers + file.count("num_mtp_modules", 0))
        ignored = tuple(rf"^model\.layers\.{layer}\." for layer in behind)
        return MiniMaxM2Config(**{**vars(dense), "ignored_tensors": ignored}, experts=require_experts(file, experts))

    def load(self, config: MiniMaxM2Config, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        size, eps = config.hidden_size, config.rms_norm_eps
        rotary = config.attention.rotary(weights.ctx.device)

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            at, moe = own.under("self_attn"), own.under("block_sparse_moe")
            attention = load_attention(config.attention, at, layer=layer, size=size, eps=eps, rotary=rotary)
            experts = load_grouped_moe(
                config.experts, moe, size=size, names=MIXTRAL, correction="e_score_correction_bias"
            )
            return pre_norm_layer(config, own, attention, experts)

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress)


def _require_full_attention_list(file: ConfigFile) -> None:
    kinds = file.raw("attn_type_list")
    if kinds is not None and kinds != [1] * file.integer("num_hidden_layers"):
        raise CheckpointError(f"{file.path}: attn_type_list must be 1, full attention, for each layer, got {kinds!r}")
