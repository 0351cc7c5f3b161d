"""Qwen3-VL with experts, whose matrices are [in, out], those of a layer in one tensor."""

from __future__ import annotations

from typing import Any

from tests.published.tensors import Config, Tensors, gqa, norms, outside, plain

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl_moe",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "use_cache": True,
        "vocab_size": 128,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "tie_word_embeddings": False,
    "video_token_id": 151656,
    "vision_config": {"model_type": "qwen3_vl_moe", "depth": 1},
}


def tensors(config: Config) -> Tensors:
    text, at = config["text_config"], "model.language_model."
    size, inner, experts = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    found = outside(text, at=at)
    for layer in range(text["num_hidden_layers"]):
        block = f"{at}layers.{layer}."
        found |= norms(block, size) | gqa(f"{block}self_attn.", text, has_qk_norm=True)
        found |= plain(f"{block}mlp.", gate=(experts, size))
        found[f"{block}mlp.experts.gate_up_proj"] = "BF16", (experts, size, 2 * inner)
        found[f"{block}mlp.experts.down_proj"] = "BF16", (experts, inner, size)
    return found | {"model.visual.patch_embed.proj.weight": ("BF16", (32, 3, 2, 4, 4))}
