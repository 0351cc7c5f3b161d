"""Kimi Linear."""

from __future__ import annotations

from typing import Any

from tests.published.tensors import Config, Tensors, mixtral, mla, mlp, norms, outside, plain

CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_kimi.KimiLinearConfig",
        "AutoModel": "modeling_kimi.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
    },
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "head_dim": 16,
        "kda_layers": [1, 2, 3],
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 4,
    "num_expert_group": 1,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 16,
    "vocab_size": 128,
}


def tensors(config: Config) -> Tensors:
    found, size = outside(config), config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= norms(at, size)
        if layer + 1 in config["linear_attn_config"]["full_attn_layers"]:
            found |= mla(f"{at}self_attn.", config)
        else:
            found |= _kda(f"{at}self_attn.", config)
        if layer < config["first_k_dense_replace"]:
            found |= mlp(f"{at}mlp.", size, config["intermediate_size"])
        else:
            found |= _experts(f"{at}block_sparse_moe.", config)
    return found


def _kda(at: str, config: Config) -> Tensors:
    net, size = config["linear_attn_config"], config["hidden_size"]
    heads, dim, taps = net["num_heads"], net["head_dim"], net["short_conv_kernel_size"]
    inner = heads * dim
    found = plain(at, b_proj=(heads, size), o_norm=(dim,), o_proj=(size, inner))
    for kind in "qkv":
        found |= plain(at, **{f"{kind}_proj": (inner, size), f"{kind}_conv1d": (inner, 1, taps)})
    for kind in "fg":
        found |= plain(at, **{f"{kind}_a_proj": (dim, size), f"{kind}_b_proj": (inner, dim)})
    return found | {f"{at}A_log": ("F32", (1, 1, heads, 1)), f"{at}dt_bias": ("F32", (inner,))}


def _experts(at: str, config: Config) -> Tensors:
    size, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    found = plain(at, gate=(experts, size)) | {f"{at}gate.e_score_correction_bias": ("F32", (experts,))}
    for expert in range(experts):
        found |= mixtral(f"{at}experts.{expert}.", size, inner)
    return found | mlp(f"{at}shared_experts.", size, inner * config["num_shared_experts"])
