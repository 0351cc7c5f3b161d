"""Qwen3.5, a text model inside of one that sees."""

from __future__ import annotations

from typing import Any

from tests.published.delta_nets import gated_hybrid
from tests.published.tensors import Config, Tensors, mlp, outside

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
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
        "intermediate_size": 128,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
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
    "vision_config": {"model_type": "qwen3_5", "depth": 1},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}


def tensors(config: Config) -> Tensors:
    text = config["text_config"]
    found = gated_hybrid(
        "model.language_model.",
        text,
        feed_forward=lambda at: mlp(at, text["hidden_size"], text["intermediate_size"]),
        is_packed=False,
        num_drafts=1,
    )
    found |= {"model.visual.patch_embed.proj.weight": ("BF16", (32, 3, 2, 4, 4))}
    return found | outside(text, at="model.language_model.")
