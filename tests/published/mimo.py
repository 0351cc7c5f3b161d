"""MiMo 7B, with a prediction layer."""

from __future__ import annotations

from typing import Any

from tests.published import qwen2
from tests.published.tensors import Config, Tensors, gqa, mlp, norms, plain

CONFIG: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 640000,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "sliding_window": 32768,
    "max_window_layers": 32,
    "use_sliding_window": False,
    "use_mrope": False,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
}


def tensors(config: Config) -> Tensors:
    at, size = "model.mtp_layers.0.", config["hidden_size"]
    found = qwen2.tensors(config) | norms(at, size) | gqa(f"{at}self_attn.", config)
    found |= norms(at, size, "token_layernorm", "hidden_layernorm", "final_layernorm")
    return found | mlp(f"{at}mlp.", size, config["intermediate_size"]) | plain(at, input_proj=(size, 2 * size))
