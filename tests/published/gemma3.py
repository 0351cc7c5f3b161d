"""Gemma 3 from 4B on: a text model inside of one that sees, whose config.json leaves most to class defaults."""

from __future__ import annotations

from typing import Any

from tests.published import gemma3_text
from tests.published.tensors import Config, Tensors

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 32, "model_type": "siglip_vision_model", "vision_use_head": False},
}

_CLASS = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}


def tensors(config: Config) -> Tensors:
    text = gemma3_text.tensors({**_CLASS, **config["text_config"]})
    found = {f"language_model.{name}": tensor for name, tensor in text.items()}
    found |= {"multi_modal_projector.mm_input_projection_weight": ("BF16", (32, 64))}
    return found | {"vision_tower.vision_model.embeddings.patch_embedding.weight": ("BF16", (32, 3, 14, 14))}
