"""Nemotron-H: layers of one mixer each, which is Mamba2, attention without positions, an ungated MLP or experts.

config.json says which as a list (`layers_block_type`) or as a pattern of letters (`hybrid_override_pattern`):

    M  linear_attention, mamba      E  moe
    *  full_attention, attention    -  mlp
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ConfigFile, read_common, read_layer_types
from raycache.checkpoint.rope_config import RopeConfig
from raycache.layers.activation import relu2
from raycache.layers.experts import LatentExperts, MixtureOfExperts
from raycache.layers.forward_pass import Mixer
from raycache.layers.norm import RMSNorm
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component, kv
from raycache.models.decoder import Decoder, Names, Progress, Residual, load_decoder
from raycache.models.dense import DenseConfig, attention_head_counts, load_attention, require_heads
from raycache.models.feed_forward import (
    UNGATED,
    ExpertConfig,
    load_experts,
    load_feed_forward,
    load_grouped_moe,
    load_shared_expert,
    load_sigmoid_router,
    read_grouped_experts,
)
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

KINDS = {
    "M": ("linear_attention", "mamba"),
    "*": ("full_attention", "attention"),
    "-": ("mlp",),
    "E": ("moe",),
}
"""Letter of a kind of layer -> its names, the newest first."""

NAMES = Names(embedding="backbone.embeddings.weight", norm="backbone.norm_f.weight")


@dataclass(frozen=True)
class NemotronHConfig(DenseConfig):
    """A Nemotron-H. Its MLP layers have `intermediate_size`; its attention has no positions, so `rope` means nothing.

    Attributes:
        kinds: a letter of `KINDS` per layer.
        mamba: of the M layers.
        experts: of the E layers; None without any.
        expert_latent_size: features of what they read and give; 0 is hidden_size.
    """

    kinds: str
    mamba: Mamba2Config
    experts: ExpertConfig | None
    expert_latent_size: int

    def layers_of(self, kind: str) -> tuple[int, ...]:
        """Which layers are of a kind."""
        return tuple(layer for layer, letter in enumerate(self.kinds) if letter == kind)


class NemotronH:
    """See models.base.Family."""

    model_type = "nemotron_h"

    def read_config(self, file: ConfigFile) -> NemotronHConfig:
        """Windows and biases beside experts are refused; layers for drafts are not read."""
        kinds = _read_kinds(file)
        for key, served in {
            "mamba_hidden_act": "silu",
            "mlp_hidden_act": "relu2",
            "mamba_proj_bias": False,  # its own name for it is use_bias
            "attention_bias": False,
            "sliding_window": None,
            "tie_word_embeddings": False,
            **({"mlp_bias": False} if "E" in kinds else {}),
        }.items():
            file.require(key, served)
        num_heads = file.integer("num_attention_heads")
        num_kv_heads = file.integer("num_key_value_heads", num_heads)
        head_dim = file.integer("head_dim", file.integer("attention_head_dim", 128))
        eps = file.number("layer_norm_epsilon", file.number("norm_eps", 1e-5))
        require_heads(file, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        return NemotronHConfig(
            **read_common(file.having(num_hidden_layers=len(kinds), rms_norm_eps=eps)),
            intermediate_size=file.integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            attention_bias=False,
            mlp_bias=file.flag("mlp_bias", False),
            has_qk_norm=False,
            rope=RopeConfig(),
            kinds=kinds,
            mamba=_read_mamba(file),
            experts=_read_experts(file) if "E" in kinds else None,
            expert_latent_size=file.count("moe_latent_size", 0),
            ignored_tensors=(r"^mtp\.",),
        )

    def components(self, config: NemotronHConfig, fmt: CacheFormat) -> tuple[Component, ...]:
        attention, mamba = config.layers_of("*"), config.layers_of("M")
        found = [kv("kv", attention, heads=config.num_kv_heads, dim=config.head_dim, fmt=fmt)] if attention else []
        return (*found, mamba2_component(config.mamba, mamba, fmt)) if mamba else tuple(found)

    def head_counts(self, config: NemotronHConfig) -> tuple[HeadCount, ...]:
        counts: list[HeadCount] = []
        if "*" in config.kinds:
            counts += attention_head_counts(config)
        if "M" in config.kinds:
            counts += mamba2_head_counts(config.mamba, heads_key="mamba_num_heads", groups_key="n_groups")
        return tuple(counts)

    def load(
        self, config: NemotronHConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Decoder:
        def load_layer(layer: int) -> Sequence[Mixer]:
            at = f"backbone.layers.{layer}"
            norm = RMSNorm(weights.whole(f"{at}.norm.weight", config.hidden_size), config.rms_norm_eps)
            return (Residual(norm, _load_mixer(layer, f"{at}.mixer", config, weights, ctx)),)

        return load_decoder(config, weights, ctx, load_layer=load_layer, on_progress=on_progress, names=NAMES)


def _load_mixer(layer: int, at: str, config: NemotronHConfig, weights: ShardedWeights, ctx: ParallelContext) -> Mixer:
    size = config.hidden_size
    match config.kinds[layer]:
        case "M":
            return load_mamba2(layer, at, config.mamba, weights, ctx, size=size, eps=config.rms_norm_eps)
        case "*":
            return load_attention(layer, at, config, weights, ctx, rotary=None)
        case "-":
            inner, has_bias = config.intermediate_size, config.mlp_bias
            return load_feed_forward(
                at, weights, ctx, size=size, inner=inner, names=UNGATED, activation=relu2, has_bias=has_bias
            )
    assert config.experts is not None, "a model with E layers has read what their experts are"
    if config.expert_latent_size:
        return _load_latent_moe(at, config.experts, config.expert_latent_size, weights, ctx, size=size)
    return load_grouped_moe(
        at, config.experts, weights, ctx, size=size, names=UNGATED, shared_names=UNGATED, activation=relu2
    )


def _load_latent_moe(
    at: str, experts: ExpertConfig, latent: int, weights: ShardedWeights, ctx: ParallelContext, *, size: int
) -> MixtureOfExperts:
    """Experts of `latent` features, and a shared one of all `size` features."""
    router = load_sigmoid_router(f"{at}.gate", experts, weights, size=size)
    routed = load_experts(f"{at}.experts", experts, weights, ctx, size=latent, names=UNGATED, activation=relu2)
    into = weights.whole(f"{at}.fc1_latent_proj.weight", latent, size)
    back = weights.whole(f"{at}.fc2_latent_proj.weight", size, latent)
    inner = experts.shared_inner
    return MixtureOfExperts(
        router,
        LatentExperts(into, back, routed),
        ctx.tp,
        shared=load_shared_expert(
            f"{at}.shared_experts", weights, ctx, size=size, inner=inner, names=UNGATED, activation=relu2
        ),
    )


def _read_kinds(file: ConfigFile) -> str:
    """A letter of `KINDS` per layer; of a list and a pattern, the list has the last word."""
    listed = [key for key in ("layers_block_type", "layer_types") if file.raw(key) is not None]
    pattern = file.text("hybrid_override_pattern", "")
    if not listed and pattern:
        file, key = file.having(hybrid_override_pattern=list(pattern)), "hybrid_override_pattern"
        return "".join(read_layer_types(file, key=key, known=list(KINDS)))
    letters = {name: letter for letter, names in KINDS.items() for name in names}
    kinds = read_layer_types(file, key=[*listed, "layers_block_type"][0], known=list(letters))
    return "".join(letters[kind] for kind in kinds)


def _read_mamba(file: ConfigFile) -> Mamba2Config:
    mamba = Mamba2Config(
        heads=file.integer("mamba_num_heads", 128),
        head_dim=file.integer("mamba_head_dim", 64),
        groups=file.integer("n_groups", 8),
        state_dim=file.integer("ssm_state_size", 128),
        kernel=file.integer("conv_kernel", 4),
        has_bias=file.flag("use_bias", False),
        has_conv_bias=file.flag("use_conv_bias", True),
        # Not `time_step_min`, which is for initialisation: as a floor it makes long prompts forget (docs/models.md).
        dt_limit=read_dt_limit(file),
    )
    return require_groups(file, mamba)


def _read_experts(file: ConfigFile) -> ExpertConfig:
    # All shared experts are one, whose size is said by itself.
    return replace(
        read_grouped_experts(file, scale=1.0), shared_inner=file.integer("moe_shared_expert_intermediate_size")
    )
