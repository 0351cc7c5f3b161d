"""SmolLM3."""

from __future__ import annotations

from typing import Any

from tests.published import llama
from tests.published.tensors import Config, Tensors

CONFIG: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 65536,
    "no_rope_layers": [1, 0],
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "layer_types": ["full_attention", "full_attention"],
    "no_rope_layer_interval": 2,
    "attention_bias": False,
    "mlp_bias": False,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
    "rope_scaling": None,
    "pretraining_tp": 2,
}


def tensors(config: Config) -> Tensors:
    return {name: tensor for name, tensor in llama.tensors(config).items() if name != "lm_head.weight"}
