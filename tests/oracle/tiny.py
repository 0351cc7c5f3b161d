"""Tiny random checkpoints in Hugging Face's format, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 515,  # no multiple of 2, 3 or 4
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def make_tiny(
    model_dir: Path, model_type: str = "llama", *, seed: int = 0, max_shard_size: str = "1GB", **settings: Any
) -> Path:
    """Write config.json and the float32 weights of a random model of 4 layers.

    Args:
        model_dir: made if needed.
        model_type: "llama" or "qwen3".
        seed: of the weights.
        max_shard_size: of one safetensors file.
        settings: keys of config.json that differ from `SIZES`.
    """
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config_class, model_class = kinds[model_type]
    model = model_class(config_class(**{**SIZES, **settings}))
    heat(model, seed=seed)
    model.save_pretrained(model_dir, max_shard_size=max_shard_size)
    return model_dir


@torch.no_grad()
def heat(model: torch.nn.Module, *, seed: int) -> None:
    """Redraw all weights so that every path matters: the usual 0.02 gives a tiny model that ignores its context."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            weight.add_(0.1 * noise)
        elif "embed_tokens" in name:
            weight.copy_(noise)
        else:
            weight.copy_(noise / weight.shape[1] ** 0.5)


@torch.no_grad()
def oracle_logits(model_dir: Path, ids: Tensor) -> Tensor:
    """What transformers computes after every token: [T] -> [T, V] float32."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    logits: Tensor = model(input_ids=ids[None]).logits[0]
    return logits
