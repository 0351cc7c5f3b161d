"""A Triton kernel for long rows of recurrent layers without a delta rule: Mamba2, lightning attention.

One program per chain of rows, value head and BV columns of its state loops over the rows' chunks of C tokens. Chunks
use matrix products in half precision with float32 sums; the state stays in registers, in float32:

    out   = (q k^T * decay between the two tokens, 0 for later ones) v + (q * decay from the start) state
    state = decay of the whole chunk * state + k^T (v * decay to the end)

The kernels of flash-linear-attention support neither shared key heads nor slots: for 8192 tokens of 128 heads of 64
with 8 key heads of 128 they take 1.2 ms and 1 GiB on an H200, this one 0.36 ms and no memory.

Imports Triton: only what runs on CUDA may import this module.
"""

# Shapes in this file: T tokens of the step, N rows, Hk key heads, Hv value heads, Dk and Dv head sizes.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from raycache.attention.recurrent_triton import Scanned, side_by_side
from raycache.rounding import ceil_div, power_of_2
from raycache.step.inputs import StateRows

CHUNK = 64
MAX_KEY_DIM = 256
"""Largest Dk: a program holds Dk rows of the state. flash-linear-attention has the same limit."""
FORGOTTEN = -60.0
"""Lower limit of log decays. exp(-60) is negligible in any sum, and the limit keeps small decays precise where sums of
C decays are subtracted from each other."""

_HALVES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def scan_plain(
    states: Tensor, rows: StateRows, chains: Tensor, scanned: Scanned, *, half: torch.dtype, out: Tensor
) -> None:
    """Process the tokens of rows like `attention.recurrence.scan`.

    Args:
        states: [slots, Hv, Dk, Dv] float32, read and written.
        chains: int64 [M, 2], the first of some rows and their number; each goes on with the state of the one before.
        scanned: Dk is at most MAX_KEY_DIM, with one decay per head and without `beta` and `added`.
        half: dtype of products, bfloat16 or float16.
        out: [T, Hv, Dv] contiguous; written for the rows' tokens.
    """
    value_heads, key_dim, value_dim = states.shape[1:]
    q, k, v, g = (side_by_side(x) for x in scanned[:4])
    features = max(16, power_of_2(key_dim))
    columns = min(64 if features <= 128 else 32, max(16, power_of_2(value_dim)))
    _scan_plain[ceil_div(value_dim, columns), value_heads, len(chains)](
        states,
        rows.spans,
        rows.reads,
        rows.writes,
        chains,
        q,
        k,
        v,
        g,
        out,
        states.stride(0),
        *(stride for x in (q, k, v, g) for stride in x.stride()[:2]),
        value_heads,
        value_heads // q.shape[1],
        DK=key_dim,
        DV=value_dim,
        BK=features,
        BV=columns,
        C=CHUNK,
        HALF=_HALVES[half],
        FLOOR=FORGOTTEN,
        num_warps=4,
        num_stages=3,
    )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize_on_alignment=["spans", "reads", "writes", "chains"]
)
def _scan_plain(
    states: tl.tensor,
    spans: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    chains: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    out: tl.tensor,
    slot: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    g_token: tl.tensor,
    g_head: tl.tensor,
    num_heads: tl.tensor,
    group: tl.tensor,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    FLOOR: tl.constexpr,
) -> None:
    """Names with an underscore are strides. `group` value heads share a key head."""
    head, chain = tl.program_id(1), tl.program_id(2)
    feature = tl.arange(0, BK)
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    is_feature, is_column = (feature < DK)[None, :], (column < DV)[None, :]
    first_row, num_rows = tl.load(chains + 2 * chain), tl.load(chains + 2 * chain + 1)
    read = tl.load(reads + first_row)
    is_earlier = tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]

    place = (head * DK + feature)[:, None] * DV + column[None, :]
    is_state = (feature < DK)[:, None] & is_column
    state = tl.load(states + read * slot + place, mask=is_state & (read >= 0), other=0.0)
    for row in range(first_row, first_row + num_rows):
        start, count = tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1)
        for first in range(0, count, C):
            token = start + first + tl.arange(0, C)
            is_token = token < start + count
            keys = is_token[:, None] & is_feature
            values = is_token[:, None] & is_column
            to_query = token[:, None] * q_token + head // group * q_head + feature[None, :]
            to_key = token[:, None] * k_token + head // group * k_head + feature[None, :]
            query = tl.load(q + to_query, mask=keys, other=0.0)
            key = tl.load(k + to_key, mask=keys, other=0.0)
            value = tl.load(v + token[:, None] * v_token + head * v_head + column[None, :], mask=values, other=0.0)
            # Tokens after the last one neither decay nor write.
            decay = tl.load(g + token * g_token + head * g_head, mask=is_token, other=0.0).to(tl.float32)
            decay = tl.maximum(decay, FLOOR)
            total = tl.cumsum(decay, axis=0)
            whole = tl.sum(decay, axis=0)
            query, key, value = query.to(HALF), key.to(HALF), value.to(HALF)

            between = tl.where(is_earlier, total[:, None] - total[None, :], float("-inf"))
            scores = tl.dot(query, tl.trans(key)) * tl.exp(between)
            result = tl.dot(query, state.to(HALF)) * tl.exp(total)[:, None]
            result = tl.dot(scores.to(HALF), value, result)
            to = out + (token[:, None] * num_heads + head) * DV + column[None, :]
            tl.store(to, result.to(out.dtype.element_ty), mask=values)
            left = value.to(tl.float32) * tl.exp(whole - total)[:, None]
            state = tl.dot(tl.trans(key), left.to(HALF), state * tl.exp(whole))
        tl.store(states + tl.load(writes + start + count - 1) * slot + place, state, mask=is_state)
