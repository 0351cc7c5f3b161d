"""Qwen3.5 with experts, those of a layer in one tensor."""

from __future__ import annotations

from typing import Any

from tests.published.delta_nets import gated_hybrid
from tests.published.tensors import Config, Tensors, mlp, outside, plain

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "full_attention_interval": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 32,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 32,
        "use_cache": True,
        "vocab_size": 128,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
        "bos_token_id": 1,
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {"model_type": "qwen3_5_moe", "depth": 1},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}


def tensors(config: Config) -> Tensors:
    text, at = config["text_config"], "model.language_model."
    size, inner, experts = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]

    def block(at: str) -> Tensors:
        found = plain(at, gate=(experts, size), shared_expert_gate=(1, size))
        found |= {f"{at}experts.gate_up_proj": ("BF16", (experts, 2 * inner, size))}
        found |= {f"{at}experts.down_proj": ("BF16", (experts, size, inner))}
        return found | mlp(f"{at}shared_expert.", size, text["shared_expert_intermediate_size"])

    found = gated_hybrid(at, text, feed_forward=block, is_packed=False, num_drafts=1)
    return found | outside(text, at=at) | {"model.visual.patch_embed.proj.weight": ("BF16", (32, 3, 2, 4, 4))}
