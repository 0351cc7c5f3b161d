"""Falcon-H1-0.5B."""

from __future__ import annotations

from typing import Any

from tests.published.tensors import Config, Tensors, gqa, mlp, norms, outside, plain

CONFIG: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "bos_token_id": 1,
    "embedding_multiplier": 5.656854249492381,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "key_multiplier": 0.39062499999999994,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 96,
    "mamba_d_state": 32,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 6,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 16384,
    "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "model_type": "falcon_h1",
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.0.dev0",
    "use_cache": True,
    "vocab_size": 128,
}


def tensors(config: Config) -> Tensors:
    size, heads, inner = config["hidden_size"], config["mamba_n_heads"], config["mamba_d_ssm"]
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    found = outside(config)
    found["model.final_layernorm.weight"] = found.pop("model.norm.weight")
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= norms(at, size, "input_layernorm", "pre_ff_layernorm") | gqa(f"{at}self_attn.", config)
        found |= mlp(f"{at}feed_forward.", size, config["intermediate_size"])
        at = f"{at}mamba."
        found |= plain(at, in_proj=(inner + channels + heads, size), conv1d=(channels, 1, config["mamba_d_conv"]))
        found |= plain(at, out_proj=(size, inner)) | {f"{at}conv1d.bias": ("BF16", (channels,))}
        found |= {f"{at}{name}": ("BF16", (heads,)) for name in ("A_log", "D", "dt_bias")}
    return found
