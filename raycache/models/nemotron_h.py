"""Nemotron-H: layers with one mixer each: Mamba2, attention without rotary embedding, an ungated MLP or experts.

config.json lists them by name (`layers_block_type`) or as a pattern of letters (`hybrid_override_pattern`):

    M  linear_attention, mamba      E  moe
    *  full_attention, attention    -  mlp
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raycache.checkpoint.config_file import ConfigFile, ModelConfig, read_common, read_layer_types
from raycache.layers.activation import relu2
from raycache.layers.expert_config import ExpertConfig, read_grouped_experts
from raycache.layers.expert_weights import load_experts, load_grouped_moe, load_shared_expert, load_sigmoid_router
from raycache.layers.experts import LatentExperts, MixtureOfExperts
from raycache.layers.feed_forward import UNGATED, load_feed_forward
from raycache.layers.forward_pass import Mixer
from raycache.layers.mamba2 import load_mamba2
from raycache.layers.mamba2_config import Mamba2Config, read_dt_limit, require_groups
from raycache.layers.norm import RMSNorm
from raycache.layers.self_attention import AttentionConfig, HeadShape, load_attention, require_heads
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Decoder, Names, Progress, Residual, load_decoder
from raycache.parallel.sharding import HeadCount

KINDS = {
    "M": ("linear_attention", "mamba"),
    "*": ("full_attention", "attention"),
    "-": ("mlp",),
    "E": ("moe",),
}
"""Letter of a kind of layer -> its names, the current one first."""

NAMES = Names(embedding="backbone.embeddings.weight", layers="backbone.layers", norm="backbone.norm_f.weight")


@dataclass(frozen=True)
class NemotronHConfig(ModelConfig):
    """A Nemotron-H.

    Attributes:
        kinds: a letter of `KINDS` per layer.
        mamba: of the M layers.
        attention: of the * layers; its `rope` is not used.
        intermediate_size, mlp_bias: of the - layers.
        experts: of the E layers; None without any.
        expert_latent_size: input and output features of routed experts; 0 for hidden_size.
    """

    kinds: str
    mamba: Mamba2Config
    attention: AttentionConfig
    intermediate_size: int
    mlp_bias: bool
    experts: ExpertConfig | None
    expert_latent_size: int

    def layers_of(self, kind: str) -> tuple[int, ...]:
        """Layers of a kind."""
        return tuple(layer for layer, letter in enumerate(self.kinds) if letter == kind)

    def components(self, fmt: CacheFormat) -> tuple[Component, ...]:
        attention, mamba = self.layers_of("*"), self.layers_of("M")
        return self.attention.components(attention, fmt) + self.mamba.components(mamba, fmt)

    @property
    def head_counts(self) -> tuple[HeadCount, ...]:
        attention = self.attention.head_counts if "*" in self.kinds else ()
        mamba = self.mamba.head_counts(heads_key="mamba_num_heads", groups_key="n_groups")
        return attention + mamba if "M" in self.kinds else attention


class NemotronH:
    """Layers with one mixer each, after a norm."""

    model_type = "nemotron_h"

    def read_config(self, file: ConfigFile) -> NemotronHConfig:
        """Sliding windows, and MLP biases in models with experts, are not supported; prediction layers are ignored."""
        kinds = _read_kinds(file)
        for key, served in {
            "mamba_hidden_act": "silu",
            "mlp_hidden_act": "relu2",
            "mamba_proj_bias": False,  # use_bias is the key for this
            "attention_bias": False,
            "sliding_window": None,
            "tie_word_embeddings": False,
            **({"mlp_bias": False} if "E" in kinds else {}),
        }.items():
            file.require(key, served)
        num_heads = file.integer("num_attention_heads")
        num_kv_heads = file.integer("num_key_value_heads", num_heads)
        heads = HeadShape(num_heads, num_kv_heads, file.integer("head_dim", file.integer("attention_head_dim", 128)))
        eps = file.number("layer_norm_epsilon", file.number("norm_eps", 1e-5))
        require_heads(file, heads)
        return NemotronHConfig(
            **read_common(file.having(num_hidden_layers=len(kinds), rms_norm_eps=eps)),
            kinds=kinds,
            mamba=_read_mamba(file),
            attention=AttentionConfig(**vars(heads)),
            intermediate_size=file.integer("intermediate_size"),
            mlp_bias=file.flag("mlp_bias", False),
            experts=_read_experts(file) if "E" in kinds else None,
            expert_latent_size=file.count("moe_latent_size", 0),
            ignored_tensors=(r"^mtp\.",),
        )

    def load(self, config: NemotronHConfig, weights: ShardedWeights, *, on_progress: Progress) -> Decoder:
        def load_layer(layer: int, own: ShardedWeights) -> Sequence[Mixer]:
            norm = RMSNorm(own.whole("norm.weight", config.hidden_size), config.rms_norm_eps)
            return (Residual(norm, _load_mixer(layer, config, own.under("mixer"))),)

        return load_decoder(config, weights, load_layer=load_layer, on_progress=on_progress, names=NAMES)


def _load_mixer(layer: int, config: NemotronHConfig, weights: ShardedWeights) -> Mixer:
    size, eps, inner = config.hidden_size, config.rms_norm_eps, config.intermediate_size
    match config.kinds[layer]:
        case "M":
            return load_mamba2(config.mamba, weights, layer=layer, size=size, eps=eps)
        case "*":
            return load_attention(config.attention, weights, layer=layer, size=size, eps=eps, rotary=None)
        case "-":
            return load_feed_forward(
                weights, size=size, inner=inner, names=UNGATED, activation=relu2, has_bias=config.mlp_bias
            )
    assert config.experts is not None, "a model with E layers has experts"
    return load_nemotron_moe(config.experts, weights, size=size, latent=config.expert_latent_size)


def load_nemotron_moe(experts: ExpertConfig, weights: ShardedWeights, *, size: int, latent: int) -> MixtureOfExperts:
    """Load routed experts with `latent` features (0 for `size`), and a shared one with `size` features."""
    inner, of_shared = experts.shared_inner, weights.under("shared_experts")
    shared = load_shared_expert(of_shared, size=size, inner=inner, names=UNGATED, activation=relu2)
    if not latent:
        return load_grouped_moe(experts, weights, size=size, names=UNGATED, activation=relu2, shared=shared)
    routed = load_experts(experts, weights.under("experts"), size=latent, names=UNGATED, activation=relu2)
    down = weights.whole("fc1_latent_proj.weight", latent, size)
    up = weights.whole("fc2_latent_proj.weight", size, latent)
    router = load_sigmoid_router(experts, weights, size=size)
    return MixtureOfExperts(router, LatentExperts(down, up, routed), weights.ctx.tp, shared=shared)


def _read_kinds(file: ConfigFile) -> str:
    """A letter of `KINDS` per layer; a list takes precedence over a pattern."""
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
        # Not `time_step_min`, which is for initialisation: as a limit it makes long prompts forgotten (docs/models.md).
        dt_limit=read_dt_limit(file),
    )
    return require_groups(file, mamba)


def _read_experts(file: ConfigFile) -> ExpertConfig:
    # Shared experts are stored as one, whose size has a key of its own.
    return replace(
        read_grouped_experts(file, scale=1.0), shared_inner=file.integer("moe_shared_expert_intermediate_size")
    )
