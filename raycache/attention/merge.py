"""Attention over a part of the keys, and joining the parts by log-sum-exp.

The softmax over a set of keys that is split into parts is the mean of the parts' results, weighted by the parts'
sums of
exponentials ("Online normalizer calculation for softmax", arXiv 1805.02867):

    out = sum_p exp(lse_p - lse) * out_p        lse = log sum_p exp(lse_p)

Shapes in this file: T queries, L keys, Hq query heads, Hkv key heads, D head size, P parts. Query head h reads key head
h // (Hq / Hkv).
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_all(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Every query sees every key.

    Args:
        q: [T, Hq, D].
        k, v: [L, Hkv, D], L >= 1.
    Returns:
        out [T, Hq, D] in q's dtype, and the log-sum-exp of the scores [T, Hq] in float32 (float64 for float64).
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    # The queries that share a key head go into one row of queries, so that each key is read once: [Hkv, T * group, D].
    folded = q.view(tokens, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    out, lse = _softmax_attention(folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None], causal=False, scale=scale)
    out = out.reshape(kv_heads, tokens, -1, dim).transpose(0, 1).reshape(tokens, heads, dim)
    return out, lse.reshape(kv_heads, tokens, -1).transpose(0, 1).reshape(tokens, heads)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Query i sees keys 0..i; shapes as in `attend_all` with L = T."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1)[None] for x in (k, v))
    out, lse = _softmax_attention(q.transpose(0, 1)[None], keys, values, causal=True, scale=scale)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def merge(outs: Tensor, lses: Tensor) -> Tensor:
    """Join parts of the same queries.

    Args:
        outs: [P, T, Hq, D]; where lse is -inf the part holds no key, and its out may be anything finite.
        lses: [P, T, Hq].
    Returns:
        [T, Hq, D], finite wherever one part holds a key.
    """
    # In the precision of the weights: summed in half precision, each part would round once more.
    merged = torch.einsum("pthd,pth->thd", outs.to(lses.dtype), torch.softmax(lses, dim=0))
    return merged.to(outs.dtype)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """[1, H, T, D] x [1, H, L, D] -> [1, H, T, D] and [1, H, T]."""
    if q.device.type == "cpu":
        # The kernel behind scaled_dot_product_attention on CPU; called directly because only it returns the
        # log-sum-exp.
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q, k, v, 0.0, causal, attn_mask=None, scale=scale)
        return out, lse
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(future, float("-inf"))
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse[..., None]).exp(), v.float()).to(q.dtype), lse
