"""A slow twin of models that are Mamba2 layers only, in numpy's float64, one token after another.

Written from the equations of "Transformers are SSMs" (arXiv 2405.21060, section 3) and the names of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float64]

# Shapes in this file: T tokens, C hidden size, H heads of P features, G groups of N state features, V vocabulary.


def mamba_logits(model_dir: Path, ids: Sequence[int], *, limit: tuple[float, float] = (0.0, np.inf)) -> Array:
    """What follows after every token, by a `nemotron_h` of Mamba2 layers.

    Args:
        model_dir: of the checkpoint.
        ids: T tokens.
        limit: smallest and largest step of time.
    Returns:
        [T, V].
    """
    config = json.loads((model_dir / "config.json").read_text())
    tensors = {name: rows.astype(np.float64) for name, rows in load_file(model_dir / "model.safetensors").items()}
    hidden = tensors["backbone.embeddings.weight"][list(ids)]
    for layer in range(len(config["layers_block_type"])):
        at = f"backbone.layers.{layer}."
        own = {name.removeprefix(at): rows for name, rows in tensors.items() if name.startswith(at)}
        hidden = hidden + _mamba2(_norm(hidden) * own["norm.weight"], own, config, limit)
    return np.asarray(_norm(hidden) * tensors["backbone.norm_f.weight"] @ tensors["lm_head.weight"].T)


def _mamba2(u: Array, own: dict[str, Array], config: dict[str, int], limit: tuple[float, float]) -> Array:
    heads, dim, groups, size = (
        config[key] for key in ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
    )
    inner, shared = heads * dim, groups * size
    z, xbc, dt = np.split(u @ own["mixer.in_proj.weight"].T, [inner, 2 * inner + 2 * shared], axis=1)
    taps = own["mixer.conv1d.weight"][:, 0]  # [channels, K], the newest input's last
    padded = np.concatenate([np.zeros((taps.shape[1] - 1, xbc.shape[1])), xbc])
    convolved = np.stack([(padded[t : t + taps.shape[1]].T * taps).sum(1) for t in range(len(u))])
    x, b, c = np.split(_silu(convolved + own["mixer.conv1d.bias"]), [inner, inner + shared], axis=1)
    x, b, c = x.reshape(-1, heads, dim), b.reshape(-1, groups, size), c.reshape(-1, groups, size)
    dt = np.clip(np.logaddexp(dt + own["mixer.dt_bias"], 0.0), *limit)
    rate, state, y = -np.exp(own["mixer.A_log"]), np.zeros((heads, dim, size)), np.empty((len(u), heads, dim))
    group = np.arange(heads) // (heads // groups)
    for t in range(len(u)):
        kept = np.exp(dt[t] * rate)[:, None, None]
        state = kept * state + (dt[t][:, None] * x[t])[:, :, None] * b[t, group][:, None, :]
        y[t] = (state * c[t, group][:, None, :]).sum(-1) + own["mixer.D"][:, None] * x[t]
    gated = y.reshape(-1, inner) * _silu(z)
    normed = _norm(gated.reshape(-1, groups, inner // groups)).reshape(-1, inner) * own["mixer.norm.weight"]
    return normed @ own["mixer.out_proj.weight"].T


def _norm(x: Array) -> Array:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5)


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))
