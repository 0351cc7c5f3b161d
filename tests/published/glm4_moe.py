"""GLM-4.6."""

from __future__ import annotations

from typing import Any

from tests.published.deepseek import feed_forward, prediction
from tests.published.tensors import Config, Tensors, gqa, norms, outside

CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "pad_token_id": 2,
    "eos_token_id": [2, 3, 4],
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "partial_rotary_factor": 0.5,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_attention_heads": 6,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": 128,
}


def tensors(config: Config) -> Tensors:
    found, last = outside(config), config["num_hidden_layers"]
    for layer in range(last + config["num_nextn_predict_layers"]):
        at = f"model.layers.{layer}."
        found |= norms(at, config["hidden_size"]) | feed_forward(layer, f"{at}mlp.", config)
        own = gqa(f"{at}self_attn.", config, has_qk_norm=True)
        for name in ("q_proj", "k_proj", "v_proj"):
            dtype, shape = own[f"{at}self_attn.{name}.weight"]
            found[f"{at}self_attn.{name}.bias"] = dtype, shape[:1]
        found |= own
        if layer >= last:
            found |= prediction(at, config)
    return found
