"""Triton kernel that scores index keys; launched by sparse_kernels.py, which describes the scheme."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first", "stop", "more_than"])  # type: ignore[untyped-decorator]
def score_keys(
    q: tl.tensor,
    weights: tl.tensor,
    keys: tl.tensor,
    ids: tl.tensor,
    begins: tl.tensor,
    lens: tl.tensor,
    scores: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    more_than: tl.tensor,
    width: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    """One program per block of queries of one row and group of key tiles. The longest blocks come first."""
    begin_query = first + (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_QUERIES
    query = begin_query + tl.arange(0, BLOCK_QUERIES)
    seen = tl.load(lens + query, mask=query < stop, other=0)
    limit = tl.max(seen, 0)
    if limit > more_than:
        column = tl.arange(0, BLOCK_QUERIES * BLOCK_HEADS)
        owner, head = begin_query + column // BLOCK_HEADS, column % BLOCK_HEADS
        is_real = (owner < stop) & (head < HEADS)
        row = owner.to(tl.int64) * HEADS + head
        dim = tl.arange(0, BLOCK_DIM)
        queries = tl.load(
            q + row[:, None] * DIM + dim[None, :], mask=is_real[:, None] & (dim < DIM)[None, :], other=0.0
        )
        weight = tl.load(weights + row, mask=is_real, other=0.0).to(tl.float32)
        pages = ids + tl.load(begins + begin_query)
        place = scores + (query - first).to(tl.int64) * width
        step = tl.num_programs(1) * BLOCK_KEYS
        for start in tl.range(tl.program_id(1) * BLOCK_KEYS, limit, step, num_stages=NUM_STAGES):
            key = start + tl.arange(0, BLOCK_KEYS)
            page = tl.load(pages + key // SHARE, mask=key < limit, other=0)
            slot = page.to(tl.int64) * SHARE + key % SHARE
            is_key = (key < limit)[:, None] & (dim < DIM)[None, :]
            tile = tl.load(keys + slot[:, None] * DIM + dim[None, :], mask=is_key, other=0.0)
            product = tl.maximum(tl.dot(tile, tl.trans(queries)), 0.0, propagate_nan=tl.PropagateNan.ALL)
            parts = tl.reshape(product * weight[None, :], (BLOCK_KEYS, BLOCK_QUERIES, BLOCK_HEADS))
            score = tl.sum(parts, axis=2)
            score = tl.where(score == score, score, float("-inf"))
            # Equal scores must have equal bits: -0.0 becomes 0.0.
            score = tl.where(score == 0.0, 0.0, score)
            tl.store(place[None, :] + key[:, None], score, mask=key[:, None] < seen[None, :])
