"""Falcon-H1: Mamba2 and attention in parallel in every layer, then an MLP, with constant factors.

x      = norm(hidden)
hidden = hidden + ssm_out * mamba(ssm_in * x) + attention_out * attention(attention_in * x)
hidden = hidden + mlp(norm(hidden))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.layers.activation import silu_scaled
from raycache.layers.feed_forward import load_feed_forward
from raycache.layers.forward_pass import Mixer
from raycache.layers.mamba2 import load_mamba2
from raycache.layers.mamba2_config import Mamba2Config, read_dt_limit, require_groups
from raycache.layers.norm import RMSNorm
from raycache.layers.scaled import ParallelMixers, Scaled
from raycache.layers.self_attention import load_attention, read_attention, read_heads
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Names, Progress, Residual, Scales, load_decoder
from raycache.models.llama import DenseConfig, read_dense
from raycache.parallel.sharding import HeadCount

NAMES = Names(norm="model.final_layernorm.weight")


@dataclass(frozen=True)
class Factors:
    """Constant factors of a Falcon-H1.

    Attributes:
        embedding, head: of embeddings and logits.
        attention_in, attention_out, ssm_in, ssm_out: of inputs and outputs of the two mixers.
        gate, down: of an MLP's gate before the activation, and of its output.
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
    """Adds Mamba2 and the factors, which are the same in every layer."""

    mamba: Mamba2Config
    factors: Factors

    def components(self, fmt: CacheFormat) -> tuple[Component, ...]:
        layers = range(self.num_layers)
        return self.attention.components(layers, fmt) + self.mamba.components(layers, fmt)

    @property
    def head_counts(self) -> tuple[HeadCount, ...]:
        mamba = self.mamba.head_counts(heads_key="mamba_n_heads", groups_key="mamba_n_groups")
        return self.attention.head_counts + mamba


class FalconH1:
    """Layers of parallel Mamba2 and attention, and an MLP, with a norm before each."""

    model_type = "falcon_h1"

    def read_config(self, file: ConfigFile) -> FalconH1Config:
        """Layers that lack a mixer or the MLP are not supported, nor is a norm of Mamba2 before its gate."""
        for key, served in {"attn_layer_indices": None, "mamba_use_mlp": True}.items():
            file.require(key, served)
        attention = read_attention(file, read_heads(file), theta=10000.0)
        # The factor of keys is applied to scores instead, so that cached keys do not include it.
        scale = attention.head_dim**-0.5 * file.number("key_multiplier", 1.0)
        dense = read_dense(file, replace(attention, scale=scale))
        return FalconH1Config(**vars(dense), mamba=_read_mamba(file), factors=_read_factors(file))

    def load(self, config: FalconH1Config, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        size, eps, factors = config.hidden_size, config.rms_norm_eps, config.factors
        rotary = config.attention.rotary(weights.ctx.device)

        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            at = own.under("self_attn")
            mamba = load_mamba2(config.mamba, own.under("mamba"), layer=layer, size=size, eps=eps)
            attention = load_attention(config.attention, at, layer=layer, size=size, eps=eps, rotary=rotary)
            mlp = load_feed_forward(
                own.under("feed_forward"),
                size=size,
                inner=config.intermediate_size,
                activation=silu_scaled(factor=factors.gate),
                has_bias=config.mlp_bias,
            )
            before, between = (
                RMSNorm(own.whole(f"{name}.weight", size), eps) for name in ("input_layernorm", "pre_ff_layernorm")
            )
            mixers = ParallelMixers(
                Scaled(mamba, before=factors.ssm_in, after=factors.ssm_out),
                Scaled(attention, before=factors.attention_in, after=factors.attention_out),
            )
            return Residual(before, mixers), Residual(between, Scaled(mlp, after=factors.down))

        scales = Scales(embedding=factors.embedding, logits=factors.head)
        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress, names=NAMES, scales=scales)


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
    """Read `count` positive numbers; ones by default."""
    values = file.raw(key)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointError(f"{file.path}: {key} must be {count} numbers, got {values!r}")
    numbered = ConfigFile(file.path, {f"{key}[{i}]": value for i, value in enumerate(values)})
    return tuple(numbered.number(f"{key}[{i}]") for i in range(count))
