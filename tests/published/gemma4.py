"""Gemma 4 26B-A4B: a text model inside of one that sees."""

from __future__ import annotations

from typing import Any

from tests.published.tensors import Config, Tensors, mlp, norms, outside, plain

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": None,
    "audio_token_id": 258881,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "dtype": "bfloat16",
    "eoa_token_id": 258883,
    "eoa_token_index": 258883,
    "eoi_token_id": 258882,
    "image_token_id": 258880,
    "initializer_range": 0.02,
    "model_type": "gemma4",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": True,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 32,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "num_experts": 4,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "top_k_experts": 2,
        "use_bidirectional_attention": "vision",
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": 128,
        "vocab_size_per_layer_input": 128,
    },
    "tie_word_embeddings": True,
    "transformers_version": "5.5.0.dev0",
    "video_token_id": 258884,
    "vision_config": {"model_type": "gemma4_vision", "hidden_size": 32},
    "vision_soft_tokens_per_image": 280,
}


def tensors(config: Config) -> Tensors:
    text = config["text_config"]
    at, size = "model.language_model.", text["hidden_size"]
    found = outside(text, at=at, has_head=False)
    for layer, kind in enumerate(text["layer_types"]):
        here = f"{at}layers.{layer}."
        names = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        found |= norms(here, size, *(f"{name}_layernorm" for name in names))
        found |= norms(here, size, *(f"{name}_feedforward_layernorm_2" for name in ("pre", "post")))
        found |= norms(here, size, "post_feedforward_layernorm_1")
        found |= _attention(f"{here}self_attn.", text, is_full=kind == "full_attention")
        found |= mlp(f"{here}mlp.", size, text["intermediate_size"]) | _experts(here, text)
        found |= {f"{here}layer_scalar": ("BF16", (1,))}
    found |= {"model.embed_vision.embedding_projection.weight": ("BF16", (size, 32))}
    return found | {"model.vision_tower.patch_embedder.input_proj.weight": ("BF16", (32, 768))}


def _attention(at: str, text: Config, *, is_full: bool) -> Tensors:
    size, heads = text["hidden_size"], text["num_attention_heads"]
    dim = text["global_head_dim"] if is_full else text["head_dim"]
    kv = dim * (text["num_global_key_value_heads"] if is_full else text["num_key_value_heads"])
    found = plain(at, q_proj=(heads * dim, size), k_proj=(kv, size), o_proj=(size, heads * dim))
    found |= plain(at, q_norm=(dim,), k_norm=(dim,))
    return found if is_full else found | plain(at, v_proj=(kv, size))


def _experts(at: str, text: Config) -> Tensors:
    size, inner, experts = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    return plain(at, router__proj=(experts, size)) | {
        f"{at}router.scale": ("BF16", (size,)),
        f"{at}router.per_expert_scale": ("BF16", (experts,)),
        f"{at}experts.gate_up_proj": ("BF16", (experts, 2 * inner, size)),
        f"{at}experts.down_proj": ("BF16", (experts, size, inner)),
    }
