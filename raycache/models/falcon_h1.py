"""Falcon-H1: Mamba2 and attention side by side in every layer, then an MLP, with fixed factors around all of them.

x      = norm(hidden)
hidden = hidden + ssm_out * mamba(ssm_in * x) + attention_out * attention(attention_in * x)
hidden = hidden + mlp(norm(hidden))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.layers.activation import silu_scaled
from raycache.layers.forward_pass import Mixer
from raycache.layers.norm import RMSNorm
from raycache.layers.rope import Rotary
from raycache.layers.scaled import Scaled, SideBySide
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Names, Progress, Residual, load_decoder
from raycache.models.dense import (
    DenseConfig,
    attention_head_counts,
    dense_components,
    load_attention,
    read_dense_config,
)
from raycache.models.feed_forward import load_feed_forward
from raycache.models.state_space import (
    Mamba2Config,
    load_mamba2,
    mamba2_component,
    mamba2_head_counts,
    read_dt_limit,
    require_groups,
)
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

NAMES = Names(norm="model.final_layernorm.weight")


@dataclass(frozen=True)
class Factors:
    """Around the parts of a Falcon-H1.

    Attributes:
        embedding, head: of the embedded tokens and of the logits.
        attention_in, attention_out, ssm_in, ssm_out: of what the two mixers read and give.
        gate, down: of an MLP's gate before its activation, and of its output.
    """

    embedding: float
    head: float
    attention_in: float
    attention_out: float
    ssm_in: float
    ssm_out: float
    gate: float
    down: float


@dataclass(frozen=True)
class FalconH1Config(DenseConfig):
    """A Falcon-H1.

    Attributes:
        mamba: of every layer.
        factors: of every layer.
    """

    mamba: Mamba2Config = field(kw_only=True)
    factors: Factors = field(kw_only=True)


class FalconH1:
    """See models.base.Family."""

    model_type = "falcon_h1"

    def read_config(self, file: ConfigFile) -> FalconH1Config:
        """Layers without one of the parts, and norms of Mamba2 before its gate, are refused."""
        for key, served in {"attn_layer_indices": None, "mamba_use_mlp": True}.items():
            file.require(key, served)
        num_heads = file.integer("num_attention_heads")
        head_dim = file.integer("head_dim", file.integer("hidden_size") // num_heads)
        dense = read_dense_config(
            file,
            num_kv_heads=file.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            has_qk_norm=False,
            theta=10000.0,
        )
        # The factor of the keys is one of the scores: cached keys are without it.
        scale = head_dim**-0.5 * file.number("key_multiplier", 1.0)
        return FalconH1Config(
            **{**vars(dense), "attention_scale": scale}, mamba=_read_mamba(file), factors=_read_factors(file)
        )

    def components(self, config: FalconH1Config, fmt: CacheFormat) -> tuple[Component, ...]:
        return (*dense_components(config, fmt), mamba2_component(config.mamba, range(config.num_layers), fmt))

    def head_counts(self, config: FalconH1Config) -> tuple[HeadCount, ...]:
        mamba = mamba2_head_counts(config.mamba, heads_key="mamba_n_heads", groups_key="mamba_n_groups")
        return (*attention_head_counts(config), *mamba)

    def load(
        self, config: FalconH1Config, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        rotary = Rotary(config.rope, config.head_dim, ctx.device)

        def load_layer(layer: int) -> Sequence[Mixer]:
            return _load_layer(layer, config, weights, ctx, rotary=rotary)

        return load_decoder(
            config,
            weights,
            ctx,
            load_layer=load_layer,
            on_progress=on_progress,
            names=NAMES,
            embedding_scale=config.factors.embedding,
            logit_scale=config.factors.head,
        )


def _load_layer(
    layer: int, config: FalconH1Config, weights: ShardedWeights, ctx: ParallelContext, *, rotary: Rotary
) -> Sequence[Mixer]:
    at, size, eps, factors = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps, config.factors
    mamba = load_mamba2(layer, f"{at}.mamba", config.mamba, weights, ctx, size=size, eps=eps)
    attention = load_attention(layer, f"{at}.self_attn", config, weights, ctx, rotary=rotary)
    mlp = load_feed_forward(
        f"{at}.feed_forward",
        weights,
        ctx,
        size=size,
        inner=config.intermediate_size,
        activation=silu_scaled(factor=factors.gate),
        has_bias=config.mlp_bias,
    )
    before, between = (
        RMSNorm(weights.whole(f"{at}.{name}.weight", size), eps) for name in ("input_layernorm", "pre_ff_layernorm")
    )
    mixers = SideBySide(
        Scaled(mamba, before=factors.ssm_in, after=factors.ssm_out),
        Scaled(attention, before=factors.attention_in, after=factors.attention_out),
    )
    return Residual(before, mixers), Residual(between, Scaled(mlp, after=factors.down))


def _read_mamba(file: ConfigFile) -> Mamba2Config:
    heads = file.integer("mamba_n_heads", 128)
    inner = file.integer("mamba_expand", 2) * file.integer("hidden_size")
    inner = file.integer("mamba_d_ssm", inner)
    head_dim = inner // heads if file.raw("mamba_d_head") in (None, "auto") else file.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise CheckpointError(f"{file.path}: mamba_n_heads={heads} of {head_dim} features are not mamba_d_ssm={inner}")
    has_bias, has_norm = file.flag("mamba_proj_bias", False), file.flag("mamba_rms_norm", False)
    file.require("projectors_bias", has_bias)
    if file.flag("mamba_norm_before_gate", True) and has_norm:
        raise CheckpointError(f"{file.path} has mamba_norm_before_gate=True, which is not supported; only False is")
    mamba = Mamba2Config(
        heads=heads,
        head_dim=head_dim,
        groups=file.integer("mamba_n_groups", 1),
        state_dim=file.integer("mamba_d_state", 256),
        kernel=file.integer("mamba_d_conv", 4),
        has_bias=has_bias,
        has_conv_bias=file.flag("mamba_conv_bias", True),
        dt_limit=read_dt_limit(file),
        has_norm=has_norm,
        factors=_read_list(file, "ssm_multipliers", 5),
    )
    return require_groups(file, mamba)


def _read_factors(file: ConfigFile) -> Factors:
    gate, down = _read_list(file, "mlp_multipliers", 2)
    return Factors(
        embedding=file.number("embedding_multiplier", 1.0),
        head=file.number("lm_head_multiplier", 1.0),
        attention_in=file.number("attention_in_multiplier", 1.0),
        attention_out=file.number("attention_out_multiplier", 1.0),
        ssm_in=file.number("ssm_in_multiplier", 1.0),
        ssm_out=file.number("ssm_out_multiplier", 1.0),
        gate=gate,
        down=down,
    )


def _read_list(file: ConfigFile, key: str, count: int) -> tuple[float, ...]:
    """So many positive numbers, ones by default."""
    values = file.raw(key)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointError(f"{file.path}: {key} must be {count} numbers, got {values!r}")
    numbered = ConfigFile(file.path, {f"{key}[{i}]": value for i, value in enumerate(values)})
    return tuple(numbered.number(f"{key}[{i}]") for i in range(count))
