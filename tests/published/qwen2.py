"""Qwen2.5, dense."""

from __future__ import annotations

from typing import Any

from tests.published import llama
from tests.published.tensors import Config, Tensors

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 128,
}


def tensors(config: Config) -> Tensors:
    found, dim = llama.tensors(config), config["hidden_size"] // config["num_attention_heads"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.self_attn."
        found |= {f"{at}{name}_proj.bias": ("BF16", (count * dim,)) for name, count in heads.items()}
    return found
