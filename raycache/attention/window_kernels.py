"""Triton kernel for one query per row that attends to a short window. Imported only where it runs.

With so few keys, one program per row and key head takes all of them at once. Nothing is planned on the host, there are
no parts to be merged, and attention sinks are part of the same launch.

Shapes in this file: T rows, H query heads, Hkv key heads, D head size, P pages, R tokens of a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.attention.flashinfer_replans import StaticTable
from raycache.parallel.devices import early


def attend_window(
    q: Tensor, k: Tensor, v: Tensor, table: StaticTable, *, window: int, scale: float, sinks: Tensor | None
) -> Tensor:
    """Attention of the last token of each row to the last keys of its pages.

    Args:
        q: [T, H, D], contiguous in the last dimension.
        k, v: [P, R, Hkv, D], contiguous.
        table: on the device; rows without keys get zeros.
        window: number of keys that a query attends to, including itself.
        sinks: [H], scores of the sinks; None for none.
    Returns:
        New [T, H, D].
    """
    (num_rows, num_heads, dim), (_, page, num_keys, _) = q.shape, k.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = num_heads // num_keys
    sizes = {
        "DIM": dim,
        "PAGE": page,
        "NUM_KEY_HEADS": num_keys,
        "NUM_QUERIES": group,
        "QUERIES": max(16, triton.next_power_of_2(group)),
        "WINDOW": window,
        "KEYS": max(16, triton.next_power_of_2(window)),
        "HAS_SINKS": sinks is not None,
    }
    tensors = q, k, v, q if sinks is None else sinks, out, table.indptr, table.lens, table.ids
    _attend_window[(num_rows, num_keys)](*tensors, scale, *q.stride()[:2], **sizes, **early(q.device))
    return out


# Names that begin with NUM are exact, like WINDOW; other sizes in capitals are powers of two, as Triton requires.


@triton.jit  # type: ignore[untyped-decorator]
def _attend_window(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    indptr: tl.tensor,
    lens: tl.tensor,
    ids: tl.tensor,
    scale: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per row and key head, with all its query heads."""
    row, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query, feature = tl.arange(0, QUERIES), tl.arange(0, DIM)
    head, is_query = key_head * NUM_QUERIES + query, query < NUM_QUERIES
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * 1.4426950408889634
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    length, pages = tl.load(lens + row), tl.load(indptr + row)
    place = tl.maximum(length - WINDOW, 0) + tl.arange(0, KEYS)
    is_key = place < length
    page = tl.load(ids + pages + place // PAGE, mask=is_key, other=0).to(tl.int64)
    at = ((page * PAGE + place % PAGE) * NUM_KEY_HEADS + key_head)[:, None] * DIM + feature[None, :]
    keys = tl.load(k + at, mask=is_key[:, None], other=0.0)
    values = tl.load(v + at, mask=is_key[:, None], other=0.0)
    from_ = q + row * q_token + head[:, None] * q_head + feature[None, :]
    scores = tl.dot(tl.load(from_, mask=is_query[:, None], other=0.0), tl.trans(keys)) * (scale * 1.4426950408889634)
    scores = tl.where(is_key[None, :], scores, float("-inf"))
    most = tl.max(scores, 1)
    most = tl.maximum(most, sink) if HAS_SINKS else tl.where(length > 0, most, 0.0)
    shares = tl.exp2(scores - most[:, None])
    total = tl.sum(shares, 1)
    if HAS_SINKS:
        total += tl.exp2(sink - most)
    else:
        total = tl.where(length > 0, total, 1.0)
    result = tl.dot(shares.to(values.dtype), values) / total[:, None]
    to = out + (row * NUM_KEY_HEADS * NUM_QUERIES + head[:, None]) * DIM + feature[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=is_query[:, None])
