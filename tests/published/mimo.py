"""MiMo 7B: Qwen2 with a layer beside the others that predicts the token after the next one."""

from __future__ import annotations

from typing import Any

from tests.published import qwen2
from tests.published.tensors import Config, Tensors, norms, plain

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
    found, size = qwen2.tensors(config), config["hidden_size"]
    last = config["num_hidden_layers"] - 1
    at, own = f"model.layers.{last}.", "model.mtp_layers.0."
    found |= {name.replace(at, own): tensor for name, tensor in found.items() if name.startswith(at)}
    found |= norms(own, size, "token_layernorm", "hidden_layernorm", "final_layernorm")
    return found | plain(own, input_proj=(size, 2 * size))
