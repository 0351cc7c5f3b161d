"""MiniMax-M2.5, in bfloat16."""

from __future__ import annotations

from typing import Any

from tests.published.tensors import Config, Tensors, gqa, mixtral, norms, outside, plain

CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [1, 1, 1],
    "auto_map": {
        "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
        "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
    },
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 32,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "partial_rotary_factor": 0.5,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 8,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 128,
}


def tensors(config: Config) -> Tensors:
    found, size, experts = outside(config), config["hidden_size"], config["num_local_experts"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= norms(at, size) | gqa(f"{at}self_attn.", config)
        found |= plain(f"{at}self_attn.", q_norm=(heads * config["head_dim"],), k_norm=(kv_heads * config["head_dim"],))
        at = f"{at}block_sparse_moe."
        found |= plain(at, gate=(experts, size)) | {f"{at}e_score_correction_bias": ("F32", (experts,))}
        for expert in range(experts):
            found |= mixtral(f"{at}experts.{expert}.", size, config["intermediate_size"])
    return found
