"""A slow twin of MiniMax-Text-01 and -M1, in numpy's float64, one token after another.

Written from "MiniMax-01" (arXiv 2501.08313, sections 2.2 and 2.3) and the names of the tensors. It turns only the first
features of each head, in layers of full attention, where transformers turns all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float64]

# Shapes in this file: T tokens, C hidden size, H heads of D features, V vocabulary.


def minimax_logits(model_dir: Path, ids: Sequence[int], *, rotary_dim: int) -> Array:
    """What follows after every token.

    Args:
        model_dir: of a checkpoint that transformers saved.
        ids: T tokens.
        rotary_dim: features of a head that are turned.
    Returns:
        [T, V].
    """
    config = json.loads((model_dir / "config.json").read_text())
    tensors = {name: rows.astype(np.float64) for name, rows in load_file(model_dir / "model.safetensors").items()}
    hidden = tensors["model.embed_tokens.weight"][list(ids)]
    for layer, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{layer}."
        own = {name.removeprefix(at): rows for name, rows in tensors.items() if name.startswith(at)}
        is_full = kind == "full_attention"
        name = "full_attn" if is_full else "linear_attn"
        x = _norm(hidden, own["input_layernorm.weight"], config["rms_norm_eps"])
        out = _attention(x, own, config, rotary_dim) if is_full else _lightning(x, own, layer, config)
        hidden = config[f"{name}_alpha_factor"] * x + config[f"{name}_beta_factor"] * out
        x = _norm(hidden, own["post_attention_layernorm.weight"], config["rms_norm_eps"])
        hidden = config["mlp_alpha_factor"] * x + config["mlp_beta_factor"] * _experts(x, own, config)
    last = _norm(hidden, tensors["model.norm.weight"], config["rms_norm_eps"])
    return np.asarray(last @ tensors["lm_head.weight"].T)


def _lightning(x: Array, own: dict[str, Array], layer: int, config: dict[str, Any]) -> Array:
    heads, dim, layers = config["num_attention_heads"], config["head_dim"], config["num_hidden_layers"]
    qkv = _silu(x @ own["self_attn.qkv_proj.weight"].T).reshape(len(x), heads, 3, dim)
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads) * (1 - layer / (layers - 1 + 1e-5) + 1e-5)
    kept, state = np.exp(-slopes)[:, None, None], np.zeros((heads, dim, dim))
    out = np.empty((len(x), heads, dim))
    for t, (q, k, v) in enumerate(qkv.transpose(0, 2, 1, 3)):
        state = kept * state + k[:, :, None] * v[:, None, :]
        out[t] = (q[:, :, None] * state).sum(1)
    normed = _norm(out.reshape(len(x), -1), own["self_attn.norm.weight"], 1e-6)
    gate = 1 / (1 + np.exp(-x @ own["self_attn.output_gate.weight"].T))
    return (gate * normed) @ own["self_attn.out_proj.weight"].T


def _attention(x: Array, own: dict[str, Array], config: dict[str, Any], rotary_dim: int) -> Array:
    dim, theta = config["head_dim"], config["rope_parameters"]["rope_theta"]
    q, k, v = (
        (x @ own[f"self_attn.{name}_proj.weight"].T).reshape(len(x), -1, dim).transpose(1, 0, 2) for name in "qkv"
    )
    q, k = (_turned(rows, rotary_dim, theta) for rows in (q, k))
    k, v = (np.repeat(rows, q.shape[0] // k.shape[0], axis=0) for rows in (k, v))
    scores = q @ k.transpose(0, 2, 1) * dim**-0.5
    scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ v
    return out.transpose(1, 0, 2).reshape(len(x), -1) @ own["self_attn.o_proj.weight"].T


def _turned(rows: Array, rotary_dim: int, theta: float) -> Array:
    """[H, T, D]: features i and i + rotary_dim / 2 are a pair."""
    half = rotary_dim // 2
    pairs = rows[..., :half] + 1j * rows[..., half:rotary_dim]
    pairs = pairs * np.exp(1j * np.arange(rows.shape[1])[:, None] * theta ** (-np.arange(half) / half))
    return np.concatenate([pairs.real, pairs.imag, rows[..., rotary_dim:]], axis=-1)


def _experts(x: Array, own: dict[str, Array], config: dict[str, Any]) -> Array:
    logits = x @ own["block_sparse_moe.gate.weight"].T
    out = np.zeros_like(x)
    for t, row in enumerate(logits):
        chosen = np.argsort(-row)[: config["num_experts_per_tok"]]
        shares = np.exp(row[chosen] - row[chosen].max())
        for expert, share in zip(chosen, shares / shares.sum(), strict=True):
            gate, down, up = (own[f"block_sparse_moe.experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
            out[t] += share * (down @ (_silu(gate @ x[t]) * (up @ x[t])))
    return out


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))
