"""Mixtral 8x7B."""

from __future__ import annotations

from typing import Any

from tests.published.tensors import Config, Tensors, gqa, mixtral, norms, outside, plain

CONFIG: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 128,
}


def tensors(config: Config) -> Tensors:
    found, size, inner = outside(config), config["hidden_size"], config["intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= norms(at, size) | gqa(f"{at}self_attn.", config)
        found |= plain(f"{at}block_sparse_moe.", gate=(config["num_local_experts"], size))
        for expert in range(config["num_local_experts"]):
            found |= mixtral(f"{at}block_sparse_moe.experts.{expert}.", size, inner)
    return found
