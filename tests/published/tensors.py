"""Parts that published checkpoints of several families have in common: name -> (type, shape)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tensors = dict[str, tuple[str, tuple[int, ...]]]
Config = Mapping[str, Any]


def plain(at: str = "", *, dtype: str = "BF16", **shapes: tuple[int, ...]) -> Tensors:
    """`{at}{name}.weight` of each shape; "__" in a name stands for a dot."""
    return {f"{at}{name.replace('__', '.')}.weight": (dtype, shape) for name, shape in shapes.items()}


def outside(config: Config, *, at: str = "model.", has_head: bool = True) -> Tensors:
    """Embedding, last norm and head."""
    vocab, size = config["vocab_size"], config["hidden_size"]
    head = plain(lm_head=(vocab, size)) if has_head else {}
    return plain(at, embed_tokens=(vocab, size), norm=(size,)) | head


def norms(at: str, size: int, *names: str) -> Tensors:
    """Of a layer; without names those before attention and before the feed-forward part."""
    return plain(at, **dict.fromkeys(names or ("input_layernorm", "post_attention_layernorm"), (size,)))


def gqa(at: str, config: Config, *, has_qk_norm: bool = False, gates: int = 1) -> Tensors:
    """Grouped-query attention; `gates` is 2 where queries and their gates are one matrix."""
    size, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or size // heads
    inner, kv = heads * dim, config["num_key_value_heads"] * dim
    found = plain(at, q_proj=(gates * inner, size), k_proj=(kv, size), v_proj=(kv, size), o_proj=(size, inner))
    return found | plain(at, q_norm=(dim,), k_norm=(dim,)) if has_qk_norm else found


def mla(at: str, config: Config, *, out: str = "o_proj") -> Tensors:
    """Latent attention."""
    size, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value, rank = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    query, inner = config.get("q_lora_rank"), heads * (nope + rope)
    if query:
        found = plain(at, q_a_proj=(query, size), q_a_layernorm=(query,), q_b_proj=(inner, query))
    else:
        found = plain(at, q_proj=(inner, size))
    found |= plain(at, kv_a_proj_with_mqa=(rank + rope, size), kv_a_layernorm=(rank,))
    return found | plain(at, kv_b_proj=(heads * (nope + value), rank), **{out: (size, heads * value)})


def inside(name: str, at: str) -> str:
    """The name of a model's tensor inside of another model, whose head is outside."""
    return name.replace("model.", at, 1) if name.startswith("model.") else name


def mlp(at: str, size: int, inner: int) -> Tensors:
    """A gated feed-forward part."""
    return plain(at, gate_proj=(inner, size), up_proj=(inner, size), down_proj=(size, inner))


def mixtral(at: str, size: int, inner: int) -> Tensors:
    """The same under Mixtral's names."""
    return plain(at, w1=(inner, size), w3=(inner, size), w2=(size, inner))


def block_fp8(tensors: Tensors, *, kept: tuple[str, ...], block: int = 128) -> Tensors:
    """Matrices in FP8 with a scale per block, but for those with one of `kept` in their name."""
    found: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        if len(shape) != 2 or any(part in name for part in kept):
            found[name] = dtype, shape
            continue
        found[name] = "F8_E4M3", shape
        found[f"{name}_scale_inv"] = "F32", (-(-shape[0] // block), -(-shape[1] // block))
    return found
