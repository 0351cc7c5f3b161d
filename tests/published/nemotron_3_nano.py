"""Nemotron 3."""

from __future__ import annotations

from typing import Any

from tests.published.tensors import Config, Tensors, gqa, plain

CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModel": "modeling_nemotron_h.NemotronHForCausalLM",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    },
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 16,
    "hidden_dropout": 0.0,
    "hidden_size": 64,
    "hybrid_override_pattern": "MEM*-",
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 16,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 8,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "n_group": 1,
    "n_groups": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 16,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.2",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 128,
}


def tensors(config: Config) -> Tensors:
    size, vocab = config["hidden_size"], config["vocab_size"]
    found = plain("backbone.", embeddings=(vocab, size), norm_f=(size,)) | plain(lm_head=(vocab, size))
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        found |= layer_of(kind, f"backbone.layers.{layer}.", config)
    return found


def layer_of(kind: str, at: str, config: Config) -> Tensors:
    """A layer of one kind, as a letter of the pattern."""
    size, norm, at = config["hidden_size"], plain(at, norm=(config["hidden_size"],)), f"{at}mixer."
    match kind:
        case "M":
            return norm | _mamba(at, config)
        case "*":
            return norm | gqa(at, config)
        case "-":
            inner = config["intermediate_size"]
            return norm | plain(at, up_proj=(inner, size), down_proj=(size, inner))
    return norm | _experts(at, config)


def _mamba(at: str, config: Config) -> Tensors:
    size, heads, taps = config["hidden_size"], config["mamba_num_heads"], config["conv_kernel"]
    inner = heads * config["mamba_head_dim"]
    channels = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    found = plain(at, in_proj=(inner + channels + heads, size), conv1d=(channels, 1, taps))
    found |= plain(at, norm=(inner,), out_proj=(size, inner)) | {f"{at}conv1d.bias": ("BF16", (channels,))}
    return found | {f"{at}{name}": ("F32", (heads,)) for name in ("A_log", "D", "dt_bias")}


def _experts(at: str, config: Config) -> Tensors:
    size, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    shared, latent = config["moe_shared_expert_intermediate_size"], config.get("moe_latent_size", size)
    found = plain(at, gate=(experts, size)) | {f"{at}gate.e_score_correction_bias": ("F32", (experts,))}
    if latent != size:
        found |= plain(at, fc1_latent_proj=(latent, size), fc2_latent_proj=(size, latent))
    for expert in range(experts):
        found |= plain(f"{at}experts.{expert}.", up_proj=(inner, latent), down_proj=(latent, inner))
    return found | plain(f"{at}shared_experts.", up_proj=(shared, size), down_proj=(size, shared))
