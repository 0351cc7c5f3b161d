"""Tiny random checkpoints of every family that is compared with transformers or a twin, as data.

Each is small enough for seconds on a CPU and large enough that every path of its family computes something: windows
and the indexer's top k are shorter than the prompts of the tests, routers choose among groups, scales differ from one,
states are no squares where they need not be. Heads divide by 2, 4 and 8, but for 2 KV heads, 2 groups of Mamba2 and 4
key heads of the gated delta net.

    deepseek_v3        MLA, grouped MoE                     bailing_hybrid     3 KDA (bounded gates), 1 MLA, MoE
    deepseek_v32       MLA with an indexer per layer        kimi_linear        3 KDA, 1 MLA without positions, MoE
    glm_moe_dsa        the same, every second one shared    minimax            3 lightning attention, 1 GQA, MoE
    gpt_oss            window and full, sinks, MoE          qwen3_next         3 gated delta nets, 1 gated GQA, MoE
    gemma3             3 window, 1 full, tied head          qwen3_5            the same with an MLP
    gemma4             the same, wider heads in full layers, keys as values, MoE beside the MLP
    qwen3_moe          GQA, MoE                             nemotron_h         2 Mamba2, 2 GQA, 2 MoE, 2 MLP
    llama, qwen3       GQA                                  granitemoehybrid   3 Mamba2, 1 GQA, MoE, tied head
    bailing_moe_v2_5   3 lightning attention, 1 MLA, MoE

and, made of the same parts (`ALIKE`):

    qwen2      GQA with biases of q, k and v      mixtral    GQA, MoE
    mistral    GQA, wide heads                    smollm3    GQA, 1 of 4 without positions, tied head
    kimi_k3    KDA, MLA, latent MoE, attention residuals
    qwen3_5_moe   qwen3_5 with experts      ministral3   GQA, queries that grow with their position
    glm4_moe   GQA turned in part, grouped MoE    minimax_m2   the same with a norm over all heads
    falcon_h1  Mamba2 beside GQA, factors
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import tests.oracle.plain_torch  # noqa: F401  # before models are imported
from tests.oracle.kimi_k3 import make_kimi_k3
from tests.oracle.quantised import PLAIN, Form, fp8_blocks, mxfp4_experts, write_quantised
from tests.oracle.tiny import SIZES
from tests.published import ring_2_5
from tests.published.tensors import Tensors

WINDOW = 24
"""Tokens that a sliding-window layer sees, the newest one included."""

TOPK = 24
"""Tokens that a sparse indexer selects."""


@dataclass(frozen=True)
class Family:
    """A tiny configuration.

    Attributes:
        model_type: of Hugging Face.
        settings: keys of config.json.
        tensors: names, types and shapes of a family that transformers has no class for, given config.json.
        make: writes one that wants weights of its own kind.
        form: in which it is published, if that is a quantised one.
    """

    model_type: str
    settings: Mapping[str, Any]
    tensors: Callable[[Mapping[str, Any]], Tensors] | None = None
    make: Callable[..., Path] | None = None
    form: Form | None = None


def make_family(model_dir: Path, name: str, *, seed: int = 0, **settings: Any) -> Path:
    """Write config.json and the float32 weights of a random model, under the tensor names of published checkpoints.

    Args:
        model_dir: made if needed.
        name: a key of `KNOWN`.
        seed: of the weights.
        settings: keys of config.json that differ from the family's.
    Returns:
        `model_dir`. Of a quantised one, its folder `PLAIN` has the same numbers in float32.
    """
    family = KNOWN[name]
    if family.make is not None:
        return family.make(model_dir, seed=seed, **settings)
    if family.form is not None:
        with tempfile.TemporaryDirectory() as folder:
            source = make_family(Path(folder) / "source", family.model_type, seed=seed, **family.settings, **settings)
            write_quantised(source, model_dir, Path(folder) / PLAIN, family.form)
            shutil.move(Path(folder) / PLAIN, model_dir / PLAIN)
        return model_dir
    if family.tensors is not None:
        write_config(model_dir, name, **settings)
        tensors = _draw_published(family.tensors({**family.settings, **settings}), seed=seed)
        save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
        return model_dir
    config = AutoConfig.for_model(family.model_type, **copy.deepcopy({**family.settings, **settings}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the time steps of Mamba2 are drawn by the model itself
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, seed=seed)
    model.save_pretrained(model_dir)
    return model_dir


def write_config(model_dir: Path, name: str, **settings: Any) -> Path:
    """Write config.json alone; see `make_family`."""
    family = KNOWN[name]
    values = copy.deepcopy({**family.settings, **settings})
    if family.tensors is None:
        AutoConfig.for_model(family.model_type, **values).save_pretrained(model_dir)
        return model_dir
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps({**values, "model_type": family.model_type}))
    return model_dir


def _draw_published(tensors: Tensors, *, seed: int) -> dict[str, Tensor]:
    """The same in float32, for a family that transformers has no class for."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:  # norms, and biases that steer the choice of experts
            return 0.1 * noise + (1.0 if "norm" in name else 0.0)
        return noise if "embeddings" in name else noise * shape[-1] ** -0.5

    return {name: draw(name, shape) for name, (_, shape) in tensors.items()}


@torch.no_grad()
def draw_weights(model: PreTrainedModel, *, seed: int) -> None:
    """Redraw all weights so that every path matters.

    The usual standard deviation of 0.02 gives a tiny model that ignores its context, and the usual decays of recurrent
    layers one that forgets it within a few tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    has_bounded_gate = model.config.model_type == "bailing_hybrid"
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        uniform = torch.rand(weight.shape, generator=generator)
        leaf = name.rsplit(".", 1)[-1]
        match leaf:
            case "A_log" if has_bounded_gate:
                weight.copy_(0.1 * noise)
            case "dt_bias" if (
                has_bounded_gate
            ):  # log decay = -5 sigmoid(exp(A_log) (x + dt_bias)), at x = 0 -0.24 to -0.01
                weight.copy_(-3.0 - 3.0 * uniform)
            case "A_log":  # half-lives of some ten to a thousand tokens
                weight.copy_(torch.log(0.01 * 30**uniform))
            case "sinks":
                weight.copy_(1.0 + noise)
            case _ if weight.dim() == 1:  # norms, biases, time steps, skips: around the values they start from
                weight.add_(0.1 * noise)
            case _:
                weight.copy_(_scale(name, weight, model=model) * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # steers the choice of experts, not their weights
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("layer_scalar"):
            buffer.copy_(0.8 + 0.4 * torch.rand(buffer.shape, generator=generator))


def _scale(name: str, weight: Tensor, *, model: PreTrainedModel) -> float:
    """The standard deviation that keeps activations and logits near one."""
    is_embedding = weight is model.get_input_embeddings().weight
    if is_embedding:  # as a head, it must not just find the token that came in again
        return 0.25 * weight.shape[1] ** -0.5 if model.config.tie_word_embeddings else 1.0
    if model.config.model_type == "gpt_oss" and ".experts." in name:  # [experts, in, out], biases [experts, out]
        return 0.1 if weight.dim() == 2 else weight.shape[1] ** -0.5
    if name.endswith("router.proj.weight"):  # Gemma 4, whose router divides by the root itself
        return 1.0
    return weight.shape[-1] ** -0.5  # [.., out, in], and [channels, 1, kernel] of a convolution


_GQA = {**SIZES, "intermediate_size": 128}
_NARROW = {key: value for key, value in _GQA.items() if key != "head_dim"}  # head size = hidden size / heads
_MLA = {
    **_NARROW,
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 3}
_GROUPED = {**_EXPERTS, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
_UNGROUPED = {**_GROUPED, "n_group": 1, "topk_group": 1}
_INDEXER = {"index_topk": TOPK, "index_head_dim": 16, "index_n_heads": 16}  # below 8 heads, scores tie at exactly 0
_DEEPSEEK = {
    **_MLA,
    **_GROUPED,
    "q_lora_rank": 48,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,  # sharpens the attention's scale as well
        "original_max_position_embeddings": 1024,
    },
}
_DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
_MOSTLY_LINEAR = ["linear_attention"] * 3 + ["full_attention"]

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", _GQA),
    "qwen3": Family("qwen3", _GQA),
    "qwen3_moe": Family("qwen3_moe", {**_GQA, **_EXPERTS, "num_experts": 8, "norm_topk_prob": True}),
    "deepseek_v3": Family("deepseek_v3", _DEEPSEEK),
    "deepseek_v32": Family("deepseek_v32", {**_DEEPSEEK, **_INDEXER}),
    "glm_moe_dsa": Family(
        "glm_moe_dsa",
        {
            **_MLA,
            **_UNGROUPED,
            **_INDEXER,
            "q_lora_rank": 48,
            "n_routed_experts": 8,
            "first_k_dense_replace": 1,
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    ),
    "bailing_hybrid": Family(
        "bailing_hybrid",
        {
            **_MLA,
            **_GROUPED,
            "num_local_experts": 8,
            "first_k_dense_replace": 1,
            "head_dim": 16,  # of KDA
            "short_conv_kernel_size": 4,
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
            "num_mtp_layers": 0,
            "layer_types": _MOSTLY_LINEAR,
        },
    ),
    "bailing_moe_v2_5": Family(
        "bailing_hybrid",
        {
            **_MLA,
            **_EXPERTS,
            "architectures": ["BailingMoeV2_5ForCausalLM"],
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "rope_interleave": True,
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 48,
            "head_dim": 16,  # of lightning attention
            "layer_group_size": 4,
            "group_norm_size": 4,
            "first_k_dense_replace": 1,
            "num_experts": 8,
            "num_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "num_nextn_predict_layers": 0,
        },
        tensors=ring_2_5.tensors,
    ),
    "kimi_linear": Family(
        "kimi_linear",
        {
            **_MLA,
            **_UNGROUPED,
            "q_lora_rank": None,
            "num_local_experts": 8,
            "linear_head_dim": 16,
            "linear_num_heads": 8,
            "linear_conv_kernel_dim": 4,
            "layer_types": _MOSTLY_LINEAR,
        },
    ),
    "minimax": Family(
        "minimax",
        {
            **_GQA,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "block_size": 32,
            "layer_types": _MOSTLY_LINEAR,
            "full_attn_alpha_factor": 1.25,
            "full_attn_beta_factor": 0.75,
            "linear_attn_alpha_factor": 1.5,
            "linear_attn_beta_factor": 0.875,
            "mlp_alpha_factor": 1.125,
            "mlp_beta_factor": 0.625,
        },
    ),
    "qwen3_next": Family(
        "qwen3_next",
        {
            **_GQA,
            **_DELTA_NET,
            **_EXPERTS,
            "head_dim": 32,
            "num_experts": 8,
            "shared_expert_intermediate_size": 32,
            "layer_types": _MOSTLY_LINEAR,
        },
    ),
    "qwen3_5": Family("qwen3_5_text", {**_GQA, **_DELTA_NET, "head_dim": 32, "layer_types": _MOSTLY_LINEAR}),
    "nemotron_h": Family(
        "nemotron_h",
        {
            **{key: value for key, value in _GQA.items() if key != "num_hidden_layers"},
            **_UNGROUPED,
            "n_routed_experts": 8,
            "moe_shared_expert_intermediate_size": 32,
            "ssm_state_size": 24,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 32,
            # transformers holds a prompt's steps, and not those of generated tokens, at this or above.
            "time_step_min": 1e-9,
            "time_step_floor": 1e-2,
            "layers_block_type": [
                *("linear_attention", "moe", "full_attention", "mlp"),
                *("linear_attention", "mlp", "full_attention", "moe"),
            ],
        },
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {
            **_NARROW,
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 24,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 32,
            "embedding_multiplier": 8.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.75,
            "logits_scaling": 0.25,
            "tie_word_embeddings": True,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {
            **_GQA,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "swiglu_limit": 1.5,  # so that it is reached
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 1024,
            },
        },
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            **SIZES,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": WINDOW,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 515,
            "num_kv_shared_layers": 0,
            "use_bidirectional_attention": "vision",
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "gemma3": Family(
        "gemma3_text",
        {
            **_GQA,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
}
"""By name, which is that of the family's file, but for qwen3_5, gemma3 and gemma4 (with _text behind)."""

VARIANTS: dict[str, Family] = {
    "glm-bound": Family(
        "glm_moe_dsa",
        {
            **FAMILIES["glm_moe_dsa"].settings,
            "num_hidden_layers": 6,
            "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
        },
    ),
}
"""Other configurations of those families; even pipeline stages would part layers of glm-bound that share an indexer."""

ALIKE: dict[str, Family] = {
    "kimi_k3": Family("kimi_k3", {}, make=make_kimi_k3),
    "falcon_h1": Family(
        "falcon_h1",
        {
            **_NARROW,
            "mamba_d_ssm": 96,
            "mamba_n_heads": 8,
            "mamba_d_head": 12,
            "mamba_n_groups": 2,
            "mamba_d_state": 24,
            "mamba_chunk_size": 32,
            "mamba_norm_before_gate": False,
            "mamba_rms_norm": True,  # without, the states are louder than all else
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.75,
            "attention_in_multiplier": 1.125,
            "attention_out_multiplier": 0.875,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.625,
            "ssm_multipliers": [0.75, 1.25, 1.5, 0.875, 1.125],
            "mlp_multipliers": [0.875, 0.625],
        },
    ),
    "qwen2": Family("qwen2", _NARROW),
    "qwen3_5_moe": Family(
        "qwen3_5_moe_text",
        {
            **_GQA,
            **_DELTA_NET,
            **_EXPERTS,
            "head_dim": 32,
            "num_experts": 8,
            "shared_expert_intermediate_size": 32,
            "layer_types": _MOSTLY_LINEAR,
        },
    ),
    "ministral3": Family(
        "ministral3",
        {
            **_GQA,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 24,
                "llama_4_scaling_beta": 0.25,
            },
        },
    ),
    "mistral": Family("mistral", {**_GQA, "head_dim": 32, "sliding_window": None}),
    "mixtral": Family(
        "mixtral", {**_NARROW, "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
    ),
    "smollm3": Family("smollm3", {**_NARROW, "tie_word_embeddings": True}),
    "glm4_moe": Family(
        "glm4_moe",
        {
            **_GQA,
            **_UNGROUPED,
            "n_routed_experts": 8,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
        },
    ),
    "minimax_m2": Family(
        "minimax_m2",
        {**_GQA, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "rotary_dim": 8},
    ),
}
"""Families made of parts that those of `FAMILIES` have too, and tested with them: for these, logits are enough."""

QUANTISED = {
    "deepseek_v3_fp8": Family("deepseek_v3", {}, form=fp8_blocks((24, 40))),
    "gpt_oss_mxfp4": Family("gpt_oss", {}, form=mxfp4_experts()),
}
"""Families as they are published: blocks that no split keeps whole, and experts in MXFP4."""

KNOWN = {**FAMILIES, **VARIANTS, **ALIKE, **QUANTISED}
