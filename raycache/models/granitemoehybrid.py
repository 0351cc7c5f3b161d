"""Granite 4: Mamba2 or attention in each layer, then a shared MLP and, in some models, experts beside it.

What the layers read, add and give is scaled: embeddings, residual additions, attention scores and logits. Attention has
rotary positions or none. A model without experts is one with num_local_experts = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile, read_common, read_layer_types, read_rope
from raycache.checkpoint.rope_config import RopeConfig
from raycache.errors import CheckpointError
from raycache.layers.activation import silu_gated
from raycache.layers.experts import MixtureOfExperts
from raycache.layers.feed_forward import FeedForward
from raycache.layers.forward_pass import Mixer
from raycache.layers.rope import Rotary
from raycache.layers.router import SoftmaxRouter
from raycache.layers.weights import Columns, ShardedWeights
from raycache.memory.component import CacheFormat, Component, kv
from raycache.models.decoder import Decoder, Progress, load_decoder, pre_norm_layer
from raycache.models.dense import DenseConfig, attention_head_counts, load_attention, require_heads
from raycache.models.feed_forward import (
    ExpertConfig,
    load_stacked_experts,
    load_stacked_shared_expert,
    require_experts,
)
from raycache.models.state_space import (
    Mamba2Config,
    load_mamba2,
    mamba2_component,
    mamba2_head_counts,
    read_dt_limit,
    require_groups,
)
from raycache.parallel.sharding import HeadCount, even_range

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

MAMBA = ("linear_attention", "mamba")
ATTENTION = ("full_attention", "attention")
"""Names of the kinds of layers, the newest first."""


@dataclass(frozen=True)
class GraniteConfig(DenseConfig):
    """A Granite 4. `intermediate_size` is of the shared MLP.

    Attributes:
        mamba_layers, attention_layers: which are which.
        mamba: of the first.
        has_rope: whether attention has positions; without them `rope` means nothing.
        experts: beside the shared MLP; None without any.
        embedding_scale, residual_scale, logit_scale: factors.
    """

    mamba_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    mamba: Mamba2Config
    has_rope: bool
    experts: ExpertConfig | None
    embedding_scale: float
    residual_scale: float
    logit_scale: float


class GraniteMoeHybrid:
    """See models.base.Family."""

    model_type = "granitemoehybrid"

    def read_config(self, file: ConfigFile) -> GraniteConfig:
        """Kinds of layers, positions and activations that do not exist here are refused."""
        file.require("hidden_act", "silu")
        file.require("normalization_function", "rmsnorm")
        kinds = read_layer_types(file, known=(*MAMBA, *ATTENTION))
        num_heads = file.integer("num_attention_heads")
        num_kv_heads = file.integer("num_key_value_heads", num_heads)
        head_dim = file.integer("head_dim", file.integer("hidden_size") // num_heads)
        require_heads(file, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        has_rope = _read_has_rope(file)
        return GraniteConfig(
            **read_common(file),
            intermediate_size=file.integer("shared_intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            attention_bias=file.flag("attention_bias", False),
            mlp_bias=False,
            has_qk_norm=False,
            rope=read_rope(file, theta=10000.0) if has_rope else RopeConfig(),
            mamba_layers=tuple(layer for layer, kind in enumerate(kinds) if kind in MAMBA),
            attention_layers=tuple(layer for layer, kind in enumerate(kinds) if kind in ATTENTION),
            mamba=_read_mamba(file),
            has_rope=has_rope,
            experts=_read_experts(file),
            embedding_scale=file.number("embedding_multiplier", 1.0),
            residual_scale=file.number("residual_multiplier", 1.0),
            attention_scale=file.number("attention_multiplier", 1.0),
            logit_scale=1.0 / file.number("logits_scaling", 1.0),
        )

    def components(self, config: GraniteConfig, fmt: CacheFormat) -> tuple[Component, ...]:
        attention, mamba = config.attention_layers, config.mamba_layers
        found = [kv("kv", attention, heads=config.num_kv_heads, dim=config.head_dim, fmt=fmt)] if attention else []
        return (*found, mamba2_component(config.mamba, mamba, fmt)) if mamba else tuple(found)

    def head_counts(self, config: GraniteConfig) -> tuple[HeadCount, ...]:
        counts: list[HeadCount] = []
        if config.attention_layers:
            counts += attention_head_counts(config)
        if config.mamba_layers:
            counts += mamba2_head_counts(config.mamba, heads_key="mamba_n_heads", groups_key="mamba_n_groups")
        return tuple(counts)

    def load(
        self, config: GraniteConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        size, eps = config.hidden_size, config.rms_norm_eps
        rotary = Rotary(config.rope, config.head_dim, ctx.device) if config.has_rope else None

        def load_layer(layer: int) -> Sequence[Mixer]:
            at = f"model.layers.{layer}"
            mixer: Mixer
            if layer in config.mamba_layers:
                mixer = load_mamba2(layer, f"{at}.mamba", config.mamba, weights, ctx, size=size, eps=eps)
            else:
                mixer = load_attention(layer, f"{at}.self_attn", config, weights, ctx, rotary=rotary)
            block = _load_feed_forward(at, config, weights, ctx)
            return pre_norm_layer(at, mixer, block, config, weights, scale=config.residual_scale)

        return load_decoder(
            config,
            weights,
            ctx,
            load_layer=load_layer,
            on_progress=on_progress,
            embedding_scale=config.embedding_scale,
            logit_scale=config.logit_scale,
        )


def _load_feed_forward(at: str, config: GraniteConfig, weights: ShardedWeights, ctx: ParallelContext) -> Mixer:
    """The shared MLP alone, or beside experts."""
    size, inner, experts = config.hidden_size, config.intermediate_size, config.experts
    shared = f"{at}.shared_mlp"
    if experts is None:
        taken = even_range(inner, ctx.tp.rank, ctx.tp.size)
        # Gate and up lie one after the other in one tensor.
        parts = [
            Columns(f"{shared}.input_linear", 2 * inner, range(start + taken.start, start + taken.stop))
            for start in (0, inner)
        ]
        down = weights.row(f"{shared}.output_linear", outputs=size, inputs=inner, taken=taken, has_bias=False)
        return FeedForward(weights.column(parts, inputs=size, has_bias=False), down, activation=silu_gated)
    moe = f"{at}.block_sparse_moe"
    router = weights.whole(f"{moe}.router.layer.weight", experts.count, size)
    up, down_all = f"{moe}.input_linear.weight", f"{moe}.output_linear.weight"
    shared_up, shared_down = f"{shared}.input_linear.weight", f"{shared}.output_linear.weight"
    return MixtureOfExperts(
        SoftmaxRouter(router, top_k=experts.top_k, renormalise=True),
        load_stacked_experts(up, down_all, experts, weights, ctx, size=size),
        ctx.tp,
        shared=load_stacked_shared_expert(shared_up, shared_down, weights, ctx, size=size, inner=inner),
    )


def _read_has_rope(file: ConfigFile) -> bool:
    kind = file.text("position_embedding_type", "nope")
    if kind not in ("rope", "nope"):
        raise CheckpointError(
            f"{file.path}: position_embedding_type={kind!r} is not supported; known are 'rope' and 'nope'"
        )
    return kind == "rope"


def _read_mamba(file: ConfigFile) -> Mamba2Config:
    heads = file.integer("mamba_n_heads", 128)
    inner = file.integer("mamba_expand", 2) * file.integer("hidden_size")
    head_dim = inner // heads if file.raw("mamba_d_head") in (None, "auto") else file.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise CheckpointError(
            f"{file.path}: mamba_n_heads={heads} of {head_dim} features are not mamba_expand * hidden_size={inner}"
        )
    mamba = Mamba2Config(
        heads=heads,
        head_dim=head_dim,
        groups=file.integer("mamba_n_groups", 1),
        state_dim=file.integer("mamba_d_state", 256),
        kernel=file.integer("mamba_d_conv", 4),
        has_bias=file.flag("mamba_proj_bias", False),
        has_conv_bias=file.flag("mamba_conv_bias", True),
        dt_limit=read_dt_limit(file),
    )
    return require_groups(file, mamba)


def _read_experts(file: ConfigFile) -> ExpertConfig | None:
    count = file.count("num_local_experts")
    if count == 0:
        return None
    experts = ExpertConfig(
        count=count,
        top_k=file.integer("num_experts_per_tok"),
        inner=file.integer("intermediate_size"),
    )
    return require_experts(file, experts)
