"""GLM-5."""

from __future__ import annotations

from typing import Any

from tests.published.deepseek import deepseek
from tests.published.tensors import Config, Tensors

CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [2, 3, 4],
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "head_dim": 8,
    "hidden_size": 64,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 16,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "model_type": "glm_moe_dsa",
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "q_lora_rank": 48,
    "qk_head_dim": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.2.dev0",
    "use_cache": True,
    "v_head_dim": 16,
    "vocab_size": 128,
    "bos_token_id": 1,
}


def tensors(config: Config) -> Tensors:
    return deepseek(config)
