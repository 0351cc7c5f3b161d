"""MiniMax-Text-01; MiniMax-M1 but for its `model_type` and `architectures`."""

from __future__ import annotations

from typing import Any

from tests.published.tensors import Config, Tensors, gqa, mixtral, norms, outside, plain

CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxText01ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [0, 0, 1],
    "auto_map": {
        "AutoConfig": "configuration_minimax_text_01.MiniMaxText01Config",
        "AutoModelForCausalLM": "modeling_minimax_text_01.MiniMaxText01ForCausalLM",
    },
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 32,
    "layernorm_full_attention_alpha": 3.5565588200778455,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 3.5565588200778455,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 3.5565588200778455,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 10240000,
    "model_type": "minimax_text_01",
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "output_router_logits": False,
    "postnorm": True,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000,
    "rotary_dim": 8,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.45.2",
    "use_cache": True,
    "vocab_size": 128,
}


def tensors(config: Config) -> Tensors:
    found, size, experts = outside(config), config["hidden_size"], config["num_local_experts"]
    inner = config["num_attention_heads"] * config["head_dim"]
    for layer, kind in enumerate(config["attn_type_list"]):
        at = f"model.layers.{layer}."
        found |= norms(at, size)
        if kind == 1:
            found |= gqa(f"{at}self_attn.", config)
        else:
            found |= plain(f"{at}self_attn.", qkv_proj=(3 * inner, size), output_gate=(inner, size), norm=(inner,))
            found |= plain(f"{at}self_attn.", out_proj=(size, inner))
        found |= plain(f"{at}block_sparse_moe.", gate=(experts, size))
        for expert in range(experts):
            found |= mixtral(f"{at}block_sparse_moe.experts.{expert}.", size, config["intermediate_size"])
    return found
