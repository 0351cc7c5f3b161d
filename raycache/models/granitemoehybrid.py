"""Granite 4: Mamba2 or attention in each layer, then a shared MLP and, in some models, experts in parallel.

Embeddings, residual additions, attention scores and logits have constant factors. Rotary embedding is optional. Models
without experts have num_local_experts = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raycache.checkpoint.config_file import ConfigFile, ModelConfig, read_common, read_layer_types, read_rope
from raycache.checkpoint.rope_config import RopeConfig
from raycache.errors import CheckpointError
from raycache.layers.activation import silu_gated
from raycache.layers.expert_config import ExpertConfig, require_experts
from raycache.layers.expert_weights import load_stacked_experts, load_stacked_shared_expert, make_softmax_moe
from raycache.layers.feed_forward import FeedForward
from raycache.layers.forward_pass import Mixer
from raycache.layers.mamba2 import load_mamba2
from raycache.layers.mamba2_config import Mamba2Config, read_dt_limit, require_groups
from raycache.layers.self_attention import AttentionConfig, load_attention, read_heads, require_heads
from raycache.layers.weights import Columns, ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Progress, Scales, load_decoder, pre_norm_layer
from raycache.parallel.sharding import HeadCount

MAMBA = ("linear_attention", "mamba")
ATTENTION = ("full_attention", "attention")
"""Names of the kinds of layers, the current ones first."""


@dataclass(frozen=True)
class GraniteConfig(ModelConfig):
    """A Granite 4.

    Attributes:
        has_rope: whether attention has rotary embedding; if not, its `rope` is not used.
        intermediate_size: of the shared MLP.
        experts: None without any.
        residual_scale: factor of residual additions.
    """

    mamba_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    mamba: Mamba2Config
    attention: AttentionConfig
    has_rope: bool
    intermediate_size: int
    experts: ExpertConfig | None
    residual_scale: float
    scales: Scales

    def components(self, fmt: CacheFormat) -> tuple[Component, ...]:
        attention, mamba = self.attention_layers, self.mamba_layers
        return self.attention.components(attention, fmt) + self.mamba.components(mamba, fmt)

    @property
    def head_counts(self) -> tuple[HeadCount, ...]:
        attention = self.attention.head_counts if self.attention_layers else ()
        mamba = self.mamba.head_counts(heads_key="mamba_n_heads", groups_key="mamba_n_groups")
        return attention + mamba if self.mamba_layers else attention


class GraniteMoeHybrid:
    """Layers of Mamba2 or attention, and a shared MLP with or without experts, with a norm before each."""

    model_type = "granitemoehybrid"

    def read_config(self, file: ConfigFile) -> GraniteConfig:
        """Other kinds of layers, position embeddings, norms and activations are not supported."""
        file.require("hidden_act", "silu")
        file.require("normalization_function", "rmsnorm")
        kinds = read_layer_types(file, known=(*MAMBA, *ATTENTION))
        has_rope = _read_has_rope(file)
        return GraniteConfig(
            **read_common(file),
            mamba_layers=tuple(layer for layer, kind in enumerate(kinds) if kind in MAMBA),
            attention_layers=tuple(layer for layer, kind in enumerate(kinds) if kind in ATTENTION),
            mamba=_read_mamba(file),
            attention=_read_attention(file, has_rope=has_rope),
            has_rope=has_rope,
            intermediate_size=file.integer("shared_intermediate_size"),
            experts=_read_experts(file),
            residual_scale=file.number("residual_multiplier", 1.0),
            scales=Scales(
                embedding=file.number("embedding_multiplier", 1.0), logits=1.0 / file.number("logits_scaling", 1.0)
            ),
        )

    def load(self, config: GraniteConfig, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        size, eps = config.hidden_size, config.rms_norm_eps
        rotary = config.attention.rotary(weights.ctx.device) if config.has_rope else None

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            mixer: Mixer
            if layer in config.mamba_layers:
                mixer = load_mamba2(config.mamba, own.under("mamba"), layer=layer, size=size, eps=eps)
            else:
                at = own.under("self_attn")
                mixer = load_attention(config.attention, at, layer=layer, size=size, eps=eps, rotary=rotary)
            return pre_norm_layer(config, own, mixer, _load_feed_forward(config, own), scale=config.residual_scale)

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress, scales=config.scales)


def _load_feed_forward(config: GraniteConfig, weights: ShardedWeights) -> Mixer:
    """Load the shared MLP, and experts if there are any."""
    size, inner, experts = config.hidden_size, config.intermediate_size, config.experts
    shared, moe = weights.under("shared_mlp"), weights.under("block_sparse_moe")
    if experts is None:
        taken = weights.heads(inner)
        # Gate and up lie one after the other in one tensor.
        runs = (range(start + taken.start, start + taken.stop) for start in (0, inner))
        parts = [Columns("input_linear", 2 * inner, run) for run in runs]
        down = shared.row("output_linear", outputs=size, inputs=inner, taken=taken, has_bias=False)
        return FeedForward(shared.column(parts, inputs=size, has_bias=False), down, activation=silu_gated)
    up, out = "input_linear.weight", "output_linear.weight"
    last = load_stacked_shared_expert(shared, up=up, down=out, size=size, inner=inner)
    router = moe.whole("router.layer.weight", experts.count, size)
    routed = load_stacked_experts(experts, moe, up=up, down=out, size=size, shared=last)
    return make_softmax_moe(experts, router, routed, weights.ctx.tp, shared=last)


def _read_attention(file: ConfigFile, *, has_rope: bool) -> AttentionConfig:
    heads, has_bias = read_heads(file), file.flag("attention_bias", False)
    require_heads(file, heads)
    return AttentionConfig(
        **vars(heads),
        rope=read_rope(file, theta=10000.0) if has_rope else RopeConfig(),
        has_bias=has_bias,
        has_output_bias=has_bias,
        scale=file.number("attention_multiplier", 1.0),
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
