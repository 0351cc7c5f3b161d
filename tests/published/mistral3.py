"""Mistral Small 3.1: Mistral inside of a model that sees."""

from __future__ import annotations

from typing import Any

from tests.published import llama
from tests.published.tensors import Config, Tensors

CONFIG: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 128,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"model_type": "pixtral", "hidden_size": 32},
    "vision_feature_layer": -1,
}


def tensors(config: Config) -> Tensors:
    found = {f"language_model.{name}": tensor for name, tensor in llama.tensors(config["text_config"]).items()}
    found |= {"multi_modal_projector.linear_1.weight": ("BF16", (64, 32))}
    return found | {"vision_tower.patch_conv.weight": ("BF16", (32, 3, 14, 14))}
