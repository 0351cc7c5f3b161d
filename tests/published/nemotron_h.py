"""Nemotron-3-Super as published: latent experts, a prediction part, a step limit that is infinite."""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 16,
    "hidden_dropout": 0.0,
    "hidden_size": 64,
    "hybrid_override_pattern": "MEM*-E",
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 16,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 8,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 48,
    "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 80,
    "moe_shared_expert_overlap": False,
    "mtp_hybrid_override_pattern": "*E",
    "n_group": 1,
    "n_groups": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 5.0,
    "sliding_window": None,
    "ssm_state_size": 24,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "transformers_version": "4.57.1",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 515,
}

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def tensors(config: dict[str, Any]) -> Shapes:
    """Name -> type and shape of every published tensor."""
    size, vocab = config["hidden_size"], config["vocab_size"]
    found: Shapes = {
        "backbone.embeddings.weight": ("BF16", (vocab, size)),
        "backbone.norm_f.weight": ("BF16", (size,)),
        "lm_head.weight": ("BF16", (vocab, size)),
    }
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        found |= _layer(f"backbone.layers.{layer}", kind, config)
    for layer, kind in enumerate(config["mtp_hybrid_override_pattern"]):
        found |= _layer(f"mtp.layers.{layer}", kind, config)
    found |= {f"mtp.layers.0.{name}.weight": ("BF16", (size,)) for name in ("enorm", "hnorm")}
    found["mtp.layers.0.eh_proj.weight"] = ("BF16", (size, 2 * size))
    found["mtp.layers.1.final_layernorm.weight"] = ("BF16", (size,))
    return found


def _layer(at: str, kind: str, config: dict[str, Any]) -> Shapes:
    make = {"M": _mamba, "*": _attention, "-": _mlp, "E": _experts}[kind]
    shapes = {f"{at}.mixer.{name}": value for name, value in make(config).items()}
    return {f"{at}.norm.weight": ("BF16", (config["hidden_size"],)), **shapes}


def _mamba(config: dict[str, Any]) -> Shapes:
    size, heads = config["hidden_size"], config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    channels = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    return {
        "in_proj.weight": ("BF16", (inner + channels + heads, size)),
        "conv1d.weight": ("BF16", (channels, 1, config["conv_kernel"])),
        "conv1d.bias": ("BF16", (channels,)),
        **{name: ("F32", (heads,)) for name in ("A_log", "D", "dt_bias")},
        "norm.weight": ("BF16", (inner,)),
        "out_proj.weight": ("BF16", (size, inner)),
    }


def _attention(config: dict[str, Any]) -> Shapes:
    size, dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "q_proj.weight": ("BF16", (q, size)),
        "k_proj.weight": ("BF16", (kv, size)),
        "v_proj.weight": ("BF16", (kv, size)),
        "o_proj.weight": ("BF16", (size, q)),
    }


def _mlp(config: dict[str, Any], *, inner: int = 0) -> Shapes:
    size, inner = config["hidden_size"], inner or config["intermediate_size"]
    return {"up_proj.weight": ("BF16", (inner, size)), "down_proj.weight": ("BF16", (size, inner))}


def _experts(config: dict[str, Any]) -> Shapes:
    size, latent = config["hidden_size"], config["moe_latent_size"]
    count, inner, shared = (
        config[key] for key in ("n_routed_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size")
    )
    routed: Shapes = {}
    for expert in range(count):
        routed[f"experts.{expert}.up_proj.weight"] = ("BF16", (inner, latent))
        routed[f"experts.{expert}.down_proj.weight"] = ("BF16", (latent, inner))
    return {
        "gate.weight": ("BF16", (count, size)),
        "gate.e_score_correction_bias": ("F32", (count,)),
        "fc1_latent_proj.weight": ("BF16", (latent, size)),
        "fc2_latent_proj.weight": ("BF16", (size, latent)),
        **{f"shared_experts.{name}": shape for name, shape in _mlp(config, inner=shared).items()},
        **routed,
    }
