"""Ling-3.0-tiny, made small, with limits and a prediction layer, which larger ones have."""

from __future__ import annotations

from typing import Any

from tests.published.tensors import Config, Tensors, mla, mlp, norms, plain

CONFIG: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_bailing_moe_v3.BailingMoeV3Config",
        "AutoModelForCausalLM": "modeling_bailing_moe_v3.BailingMoeV3ForCausalLM",
    },
    "dtype": "bfloat16",
    "embedding_dropout": 0.0,
    "eos_token_id": 1,
    "expert_swiglu_limit_list": [None, 0, 7.0, 7.0],
    "first_k_dense_replace": 1,
    "gated_attention_proj_granularity_type": "head_wise",
    "group_norm_size": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "kda_lower_bound": -5,
    "kda_safe_gate": True,
    "kv_lora_rank": 32,
    "layer_group_size": 4,
    "linear_silu": True,
    "max_position_embeddings": 131072,
    "max_window_layers": 20,
    "model_type": "bailing_hybrid",
    "moe_intermediate_size": 32,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 48,
    "mtp_loss_scaling_factor": 0,
    "mtp_use_kda": False,
    "n_group": 4,
    "no_kda_lora": True,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_kv_heads_for_linear_attn": 0,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "output_router_logits": False,
    "pad_token_id": 0,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 48,
    "qk_head_dim": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_scaling": None,
    "rope_theta": 6000000,
    "rotary_dim": 8,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "scale_router_input": False,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "share_expert_swiglu_limit_list": None,
    "short_conv_kernel_size": 4,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "up_proj_norm": False,
    "use_bias": False,
    "use_cache": True,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "use_nGPT": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "v_head_dim": 16,
    "value_norm": False,
    "vocab_size": 256,
}


def tensors(config: Config) -> Tensors:
    size, vocab = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
    found = plain(model__word_embeddings=vocab, model__norm=(size,), lm_head=vocab)
    last = config["num_hidden_layers"]
    for layer in range(last + config["num_nextn_predict_layers"]):
        at = f"model.layers.{layer}."
        found |= norms(at, size)
        if layer >= last:
            found |= plain(at, eh_proj=(size, 2 * size), enorm=(size,), hnorm=(size,), final_layernorm=(size,))
        if layer < last and (layer + 1) % config["layer_group_size"]:
            found |= _kda(f"{at}attention.", config)
        else:
            found |= mla(f"{at}attention.", config, out="dense")
            found |= plain(f"{at}attention.", g_proj=(config["num_attention_heads"], size))
        if layer < config["first_k_dense_replace"]:
            found |= mlp(f"{at}mlp.", size, config["intermediate_size"])
        else:
            found |= bailing_experts(f"{at}mlp.", config)
    return found


def bailing_experts(at: str, config: Config) -> Tensors:
    """The routed experts, their router and the shared one."""
    size, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    found = plain(at, gate=(experts, size)) | {f"{at}gate.expert_bias": ("F32", (experts,))}
    for expert in range(experts):
        found |= mlp(f"{at}experts.{expert}.", size, inner)
    return found | mlp(f"{at}shared_experts.", size, config.get("moe_shared_expert_intermediate_size", inner))


def _kda(at: str, config: Config) -> Tensors:
    size, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    inner, taps = heads * dim, config["short_conv_kernel_size"]
    found = plain(at, b_proj=(heads, size), o_norm=(dim,), o_proj=(size, inner))
    found |= plain(at, **dict.fromkeys((f"{kind}_proj" for kind in "qkvfg"), (inner, size)))
    found |= plain(at, **dict.fromkeys((f"{kind}_conv1d" for kind in "qkv"), (inner, 1, taps)))
    return found | {f"{at}A_log": ("F32", (heads,)), f"{at}dt_bias": ("F32", (inner,))}
