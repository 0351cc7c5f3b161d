"""Granite 4."""

from __future__ import annotations

from typing import Any

from tests.published.tensors import Config, Tensors, gqa, norms, outside, plain

CONFIG: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 1,
    "embedding_multiplier": 12,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 32,
    "layer_types": ["mamba", "attention", "mamba"],
    "logits_scaling": 6,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "output_router_logits": False,
    "pad_token_id": 0,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.0001,
    "shared_intermediate_size": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.56.0",
    "use_cache": True,
    "vocab_size": 128,
}


def tensors(config: Config) -> Tensors:
    found, size = outside(config, has_head=False), config["hidden_size"]
    experts, inner, shared = (
        config[key] for key in ("num_local_experts", "intermediate_size", "shared_intermediate_size")
    )
    for layer, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{layer}."
        moe = f"{at}block_sparse_moe."
        found |= norms(at, size)
        found |= gqa(f"{at}self_attn.", config) if kind == "attention" else _mamba(f"{at}mamba.", config)
        found |= plain(moe, input_linear=(experts, 2 * inner, size), output_linear=(experts, size, inner))
        found |= plain(moe, router__layer=(experts, size))
        found |= plain(f"{at}shared_mlp.", input_linear=(2 * shared, size), output_linear=(size, shared))
    return found


def _mamba(at: str, config: Config) -> Tensors:
    size, heads, taps = config["hidden_size"], config["mamba_n_heads"], config["mamba_d_conv"]
    inner = heads * config["mamba_d_head"]
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    found = plain(at, in_proj=(inner + channels + heads, size), conv1d=(channels, 1, taps))
    found |= plain(at, norm=(inner,), out_proj=(size, inner)) | {f"{at}conv1d.bias": ("BF16", (channels,))}
    return found | {f"{at}{name}": ("BF16", (heads,)) for name in ("A_log", "D", "dt_bias")}
