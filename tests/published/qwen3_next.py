"""Qwen3-Next."""

from __future__ import annotations

from typing import Any

from tests.published.delta_nets import gated_hybrid
from tests.published.tensors import Config, Tensors, mlp, outside, plain

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
    "full_attention_interval": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 32,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 128,
}


def tensors(config: Config) -> Tensors:
    def feed_forward(at: str) -> Tensors:
        size, experts = config["hidden_size"], config["num_experts"]
        found = plain(at, gate=(experts, size), shared_expert_gate=(1, size))
        found |= mlp(f"{at}shared_expert.", size, config["shared_expert_intermediate_size"])
        for expert in range(experts):
            found |= mlp(f"{at}experts.{expert}.", size, config["moe_intermediate_size"])
        return found

    return outside(config) | gated_hybrid("model.", config, feed_forward=feed_forward, is_packed=True, num_drafts=1)
