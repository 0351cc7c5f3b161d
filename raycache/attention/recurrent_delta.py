"""Triton kernels for long rows of recurrent layers with a delta rule: what is not computed within chunks of 64 tokens.

    decays        log decays, summed up within each chunk; one program per chunk, head and BK channels
    pass_states   from one chunk to the next; one program per chain of rows, value head and BV columns of its state

The state stays in registers from the first token of a chain to its last, in float32, is read from a slot and written to
one after each row. Per chunk:

    new   = u - w state                                             what its tokens write
    state = decay of the whole chunk * state + k^T (new * decay to the end)

Imports Triton: only what runs on CUDA may import this module.
"""

# Shapes in this file: L tokens of long rows, n chunks, Hk key heads, Hv value heads, Dk and Dv head sizes.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from raycache.attention.delta_rule import DeltaRule
from raycache.attention.recurrent_decode import softplus
from raycache.attention.recurrent_plain import CHUNK, FORGOTTEN
from raycache.attention.recurrent_triton import side_by_side
from raycache.rounding import ceil_div, power_of_2

_PER_LN2 = 1.4426950408889634


class Chunks(NamedTuple):
    """Chunks of long rows, int64 [n, 3]: first token of the step, first among all L, number of tokens."""

    table: Tensor
    num_tokens: int


class Chains(NamedTuple):
    """Rows of a launch.

    Attributes:
        rows: int64 [N, 4]: first token among all L, number of tokens, index of the first chunk, slot that is written.
        chains: int64 [M, 3]: first of its rows, number of rows, slot that is read or -1.
    """

    rows: Tensor
    chains: Tensor


def decays(chunks: Chunks, g: Tensor, *, gates: DeltaRule | None) -> Tensor:
    """Sums of the log decays from the start of its chunk to each token, in powers of two.

    Args:
        g: [T, Hv, 1 or Dk], log decays, or what `gates` makes them of.
    Returns:
        float32 [1, L, Hv, 1 or Dk].
    """
    g = side_by_side(g)
    _, heads, channels = g.shape
    out = torch.empty((1, chunks.num_tokens, heads, channels), dtype=torch.float32, device=g.device)
    block = min(64, power_of_2(channels))
    _decays[len(chunks.table), heads, ceil_div(channels, block)](
        chunks.table,
        g,
        g if gates is None else gates.rate,
        g if gates is None else gates.dt_bias.contiguous(),
        out,
        *g.stride()[:2],
        heads,
        1.0 if gates is None or gates.bound is None else gates.bound,
        D=channels,
        BK=block,
        C=CHUNK,
        FLOOR=FORGOTTEN,
        SCALE=_PER_LN2,
        IS_RAW=gates is not None,
        IS_BOUNDED=gates is not None and gates.bound is not None,
        num_warps=4 if block > 1 else 1,
    )
    return out


def pass_states(
    states: Tensor,
    rows: Chains,
    *,
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor,
    to: tuple[Tensor, Tensor],
) -> None:
    """Compute the states at the start of each chunk, what the chunks' tokens write, and the states after rows.

    Args:
        states: [slots, Hv, Dk, Dv] float32, read and written.
        k: [1, L, Hk, Dk]; with a decay per channel already decayed to the end of the chunk, [1, L, Hv, Dk].
        w, u: [1, L, Hv, Dk] and [1, L, Hv, Dv].
        g: [1, L, Hv, 1 or Dk], from `decays`.
        to: where the states are written in half precision, [1, n, Hv, Dk, Dv], and what tokens write, shaped like u.
    """
    value_heads, key_dim, value_dim = states.shape[1:]
    columns = min(32, max(16, power_of_2(value_dim)))
    _pass_states[ceil_div(value_dim, columns), value_heads, len(rows.chains)](
        states,
        rows.rows,
        rows.chains,
        k,
        w,
        u,
        g,
        *to,
        states.stride(0),
        value_heads,
        value_heads // k.shape[2],
        DK=key_dim,
        DV=value_dim,
        BK=max(16, power_of_2(key_dim)),
        BV=columns,
        C=CHUNK,
        IS_PER_CHANNEL=g.shape[-1] > 1,
        num_warps=4,
        num_stages=3 if key_dim <= 128 else 2,
    )


@triton.jit(do_not_specialize_on_alignment=["table"])  # type: ignore[untyped-decorator]
def _decays(
    table: tl.tensor,
    g: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    g_token: tl.tensor,
    g_head: tl.tensor,
    num_heads: tl.tensor,
    bound: tl.tensor,
    D: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    FLOOR: tl.constexpr,
    SCALE: tl.constexpr,
    IS_RAW: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
) -> None:
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, to = tl.load(table + 3 * chunk), tl.load(table + 3 * chunk + 1)
    token = tl.arange(0, C)
    channel = tl.program_id(2) * BK + tl.arange(0, BK)
    is_in = (token < tl.load(table + 3 * chunk + 2))[:, None] & (channel < D)[None, :]
    source = g + (start + token)[:, None] * g_token + head * g_head + channel[None, :]
    decay = tl.load(source, mask=is_in, other=0.0).to(tl.float32)
    if IS_RAW:
        decay += tl.load(bias + head * D + channel, mask=channel < D, other=0.0)[None, :]
        if IS_BOUNDED:
            decay = bound * tl.sigmoid(decay * tl.load(rate + head))
        else:
            decay = -tl.load(rate + head) * softplus(decay)
    total = tl.cumsum(tl.maximum(decay, FLOOR), axis=0) * SCALE
    tl.store(out + ((to + token)[:, None] * num_heads + head) * D + channel[None, :], total, mask=is_in)


@triton.jit(do_not_specialize_on_alignment=["rows", "chains"])  # type: ignore[untyped-decorator]
def _pass_states(
    states: tl.tensor,
    rows: tl.tensor,
    chains: tl.tensor,
    k: tl.tensor,
    w: tl.tensor,
    u: tl.tensor,
    g: tl.tensor,
    to_states: tl.tensor,
    to_new: tl.tensor,
    slot: tl.tensor,
    num_heads: tl.tensor,
    group: tl.tensor,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
) -> None:
    """`group` value heads share a key head."""
    head, chain = tl.program_id(1), tl.program_id(2)
    feature = tl.arange(0, BK)
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    is_feature, is_column = feature < DK, column < DV
    is_state = is_feature[:, None] & is_column[None, :]
    first_row, num_rows = tl.load(chains + 3 * chain), tl.load(chains + 3 * chain + 1)
    read = tl.load(chains + 3 * chain + 2)
    place = (head * DK + feature)[:, None] * DV + column[None, :]
    state = tl.load(states + read * slot + place, mask=is_state & (read >= 0), other=0.0)
    for row in range(first_row, first_row + num_rows):
        start, count = tl.load(rows + 4 * row), tl.load(rows + 4 * row + 1)
        chunk, write = tl.load(rows + 4 * row + 2), tl.load(rows + 4 * row + 3)
        for first in range(0, count, C):
            token = first + tl.arange(0, C)
            is_token = token < count
            at = (start + token) * num_heads + head
            rounded = state.to(to_states.dtype.element_ty)
            to = to_states + (chunk + first // C) * num_heads * DK * DV + place
            tl.store(to, rounded, mask=is_state)
            is_key, is_value = is_token[:, None] & is_feature[None, :], is_token[:, None] & is_column[None, :]
            reader = tl.load(w + at[:, None] * DK + feature[None, :], mask=is_key, other=0.0)
            new = tl.load(u + at[:, None] * DV + column[None, :], mask=is_value, other=0.0).to(tl.float32)
            new -= tl.dot(reader, rounded)
            tl.store(to_new + at[:, None] * DV + column[None, :], new.to(to_new.dtype.element_ty), mask=is_value)

            last = (start + tl.minimum(first + C, count) - 1) * num_heads + head
            if IS_PER_CHANNEL:
                state *= tl.exp2(tl.load(g + last * DK + feature, mask=is_feature, other=0.0))[:, None]
            else:
                end = tl.load(g + last)
                left = tl.exp2(end - tl.load(g + at, mask=is_token, other=0.0))
                new *= tl.where(is_token, left, 0.0)[:, None]
                state *= tl.exp2(end)
            source = k + ((start + token) * (num_heads // group) + head // group)[None, :] * DK + feature[:, None]
            key = tl.load(source, mask=is_feature[:, None] & is_token[None, :], other=0.0)
            state = tl.dot(key, new.to(key.dtype), state)
        tl.store(states + write * slot + place, state, mask=is_state)
