"""Qwen3-VL, dense, with a tied head."""

from __future__ import annotations

from typing import Any

from tests.published import qwen3
from tests.published.tensors import Config, Tensors, inside

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 128,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "tie_word_embeddings": True,
    "video_token_id": 151656,
    "vision_config": {"model_type": "qwen3_vl", "depth": 1},
}


def tensors(config: Config) -> Tensors:
    text = qwen3.tensors(config["text_config"])
    found = {inside(name, "model.language_model."): tensor for name, tensor in text.items() if name != "lm_head.weight"}
    return found | {"model.visual.patch_embed.proj.weight": ("BF16", (32, 3, 2, 4, 4))}
