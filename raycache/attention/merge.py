"""Attention over parts of the keys, and merging of the parts by log-sum-exp.

Attention over a set of keys that is split into parts is the mean of the parts' results, weighted by the parts' sums of
exponentials ("Online normalizer calculation for softmax", arXiv 1805.02867):

    out = sum_p exp(lse_p - lse) * out_p        lse = log sum_p exp(lse_p)

Shapes in this file: T queries, L keys, Hq query heads, Hkv key heads, D size of queries and keys, Dv of values, P
parts. Query head h uses key head h // (Hq / Hkv). Log-sum-exps are float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

Part = tuple[Tensor, Tensor]
"""out [T, Hq, Dv] over some of the keys, and the log-sum-exp of their scores [T, Hq], -inf without keys."""

MAX_SCORES = 1 << 28  # scores held at once on devices without a fused kernel


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and log-sum-exps: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def no_keys(q: Tensor, value_dim: int) -> Part:
    """A part without keys, for queries [T, Hq, D]; new tensors, which may be filled."""
    lse = torch.full(q.shape[:2], float("-inf"), dtype=wide(q.dtype), device=q.device)
    return q.new_zeros((*q.shape[:2], value_dim)), lse


def attend_all(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Part:
    """Every query attends to every key.

    Args:
        q: [T, Hq, D], T >= 1.
        k: [L, Hkv, D], L >= 1.
        v: [L, Hkv, Dv].
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    # Fold queries that share a key head into one dimension, so that each key is read once: [Hkv, T * group, D].
    folded = q.view(tokens, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    out, lse = _softmax_attention(folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=scale)
    out = out.reshape(kv_heads, tokens, -1, out.shape[-1]).transpose(0, 1).reshape(tokens, heads, -1)
    return out, lse.reshape(kv_heads, tokens, -1).transpose(0, 1).reshape(tokens, heads)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Part:
    """Query i attends to keys 0..i; shapes as in `attend_all` with L = T."""
    keys, values = (_one_per_head(x, q.shape[1]) for x in (k, v))
    out, lse = _softmax_attention(q.transpose(0, 1)[None], keys, values, scale=scale, is_causal=True)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float) -> Part:
    """Query i attends to keys j where mask [T, L] is true, maybe none; other shapes as in `attend_all`."""
    keys, values = (_one_per_head(x, q.shape[1]) for x in (k, v))
    out, lse = _softmax_attention(q.transpose(0, 1)[None], keys, values, scale=scale, mask=mask)
    # For queries without keys, fused kernels return a log-sum-exp of 0, and the plain softmax gives NaN.
    is_blind = ~mask.any(-1)[:, None]
    return (
        out[0].transpose(0, 1).masked_fill(is_blind[..., None], 0),
        lse[0].transpose(0, 1).masked_fill(is_blind, float("-inf")),
    )


def attend_run(q: Tensor, k: Tensor, v: Tensor, run: range, *, scale: float) -> Part:
    """The queries of a run of a chunk attend to all keys of the chunk before the run, and causally to those of the run.

    Args:
        q: [len(run), Hq, D].
        k: [L, Hkv, D], of the whole chunk.
        v: [L, Hkv, Dv].
    """
    own = slice(run.start, run.stop)
    part = attend_causal(q, k[own], v[own], scale=scale)
    if run.start == 0:
        return part
    return join(part, attend_all(q, k[: run.start], v[: run.start], scale=scale))


def join(one: Part, other: Part) -> Part:
    """Merge two parts of the same queries, in the dtype of the first."""
    (out, lse), (other_out, other_lse) = one, other
    # If both parts are empty the difference is NaN, and either will do.
    weight = torch.sigmoid(other_lse - lse).nan_to_num_(nan=0.0)[..., None]
    joined = torch.lerp(out.to(lse.dtype), other_out.to(lse.dtype), weight)
    return joined.to(out.dtype), torch.logaddexp(lse, other_lse)


def merge(outs: Tensor | Sequence[Tensor], lses: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Merge all parts of the same queries.

    Args:
        outs: P times [T, Hq, Dv]; any finite values where the part has no keys (lse is -inf).
        lses: [P, T, Hq].
        sinks: [Hq], score of an additional key per head whose value is zero; or None.
    Returns:
        [T, Hq, Dv], finite where at least one part has keys.
    """
    if sinks is None:
        weights = torch.softmax(lses, dim=0)
    else:
        scores = sinks.to(lses.dtype).expand(1, *lses.shape[1:])
        weights = torch.softmax(torch.cat([lses, scores]), dim=0)[:-1]
    # Summed in the precision of the weights, so that parts are not rounded again.
    merged = outs[0] * weights[0, ..., None]
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        merged.addcmul_(out, weight[..., None])
    return merged.to(outs[0].dtype)


def _one_per_head(x: Tensor, heads: int) -> Tensor:
    """[L, Hkv, D] -> [1, Hq, L, D]."""
    if x.shape[1] < heads:
        x = x.repeat_interleave(heads // x.shape[1], dim=1)
    return x.transpose(0, 1)[None]


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool = False, mask: Tensor | None = None
) -> Part:
    """[1, H, T, D] x [1, H, L, D] -> [1, H, T, Dv] and [1, H, T]."""
    if q.device.type == "cpu":
        return _fused(q, k, v, scale=scale, is_causal=is_causal, mask=mask)
    if is_causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    rows = max(1, MAX_SCORES // (k.shape[1] * k.shape[2]))
    if q.shape[2] <= rows:
        return _spelled_out(q, k, v, scale=scale, mask=mask)
    masks = [None] * -(-q.shape[2] // rows) if mask is None else mask.split(rows)
    parts = [_spelled_out(some, k, v, scale=scale, mask=m) for some, m in zip(q.split(rows, 2), masks, strict=True)]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _fused(q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, mask: Tensor | None) -> Part:
    """The CPU kernel of scaled_dot_product_attention, called directly since it then returns log-sum-exps."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    dim, value_dim = q.shape[-1], v.shape[-1]
    # It needs queries, keys and values of the same size: pad with zeros, which do not change scores.
    if value_dim < dim:
        v = functional.pad(v, (0, dim - value_dim))
    elif value_dim > dim:
        q, k = (functional.pad(x, (0, value_dim - dim)) for x in (q, k))
    added = None if mask is None else _as_scores(mask, wide(q.dtype))
    out, lse = flash(q, k, v, 0.0, is_causal, attn_mask=added, scale=scale)
    return out[..., :value_dim], lse


def _spelled_out(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None) -> Part:
    dtype = wide(q.dtype)
    scores = torch.matmul(q.to(dtype), k.to(dtype).mT) * scale
    if mask is not None:
        scores += _as_scores(mask, dtype)
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse[..., None]).exp(), v.to(dtype)).to(q.dtype), lse


def _as_scores(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the mask is true, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
