"""Ring-2.5-1T, made small. Ling 2.5 and 2.6 have the same form."""

from __future__ import annotations

from typing import Any

from tests.published.ling_3 import bailing_experts
from tests.published.tensors import Config, Tensors, mla, mlp, norms, plain

CONFIG: dict[str, Any] = {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "model_type": "bailing_hybrid",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "use_qkv_bias": False,
    "use_bias": False,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "rope_theta": 6000000.0,
    "rope_scaling": None,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "num_experts": 8,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 2.5,
    "layer_group_size": 4,
    "group_norm_size": 4,
    "linear_silu": False,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "rope_interleave": True,
    "partial_rotary_factor": 0.5,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
    "router_dtype": "fp32",
    "torch_dtype": "bfloat16",
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
            found |= _lightning(f"{at}attention.", config)
        else:
            found |= mla(f"{at}attention.", config, out="dense")
        if layer < config["first_k_dense_replace"]:
            found |= mlp(f"{at}mlp.", size, config["intermediate_size"])
        else:
            found |= bailing_experts(f"{at}mlp.", config)
    return found


def _lightning(at: str, config: Config) -> Tensors:
    size, dim = config["hidden_size"], config["head_dim"]
    inner = config["num_attention_heads"] * dim
    found = plain(at, query_key_value=(3 * inner, size), query_layernorm=(dim,), key_layernorm=(dim,))
    return found | plain(at, g_proj=(inner, size), g_norm=(inner,), dense=(size, inner))
