"""gpt-oss: experts in MXFP4, all else in bfloat16."""

from __future__ import annotations

from typing import Any

from tests.published.tensors import Config, Tensors, gqa, norms, outside, plain

CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "experts_per_token": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "output_router_logits": False,
    "pad_token_id": 0,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 128,
    "bos_token_id": 1,
}


def tensors(config: Config) -> Tensors:
    found, size, inner = outside(config), config["hidden_size"], config["intermediate_size"]
    experts, heads = config["num_local_experts"], config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        attention = gqa(f"{at}self_attn.", config)
        biases = {name.replace(".weight", ".bias"): (dtype, shape[:1]) for name, (dtype, shape) in attention.items()}
        found |= norms(at, size) | attention | biases | {f"{at}self_attn.sinks": ("BF16", (heads,))}
        found |= plain(f"{at}mlp.", router=(experts, size)) | {f"{at}mlp.router.bias": ("BF16", (experts,))}
        found |= {
            f"{at}mlp.experts.{name}": shape
            for name, shape in {
                "gate_up_proj_blocks": ("U8", (experts, 2 * inner, size // 32, 16)),
                "gate_up_proj_scales": ("U8", (experts, 2 * inner, size // 32)),
                "gate_up_proj_bias": ("BF16", (experts, 2 * inner)),
                "down_proj_blocks": ("U8", (experts, size, inner // 32, 16)),
                "down_proj_scales": ("U8", (experts, size, inner // 32)),
                "down_proj_bias": ("BF16", (experts, size)),
            }.items()
        }
    return found
