"""Triton kernels for recurrent layers: short rows token by token, and short convolutions of all rows.

Both read a row's state from one slot and write it to another, or to the same, without copies in between:

    step       one program per row, value head and BV columns of its state; loops over the tokens of the row
    convolve   one program per BT tokens of a row and BF channels; that of a row's first tokens also writes the state

Kernels of other libraries need another layout: FlashInfer's Mamba kernel has states [Dv, Dk]; flash-linear-attention
has one state per row, so that slots must be gathered and scattered, which moves three times the bytes: 265 us on an
H200 for 64 rows of 32 heads of 128 x 128, against 76 us here. Slots are read from tensors, so that launches can be
captured in CUDA graphs.

Imports Triton: only what runs on CUDA may import this module.
"""

# Shapes in this file: T tokens of the step, N rows, Hk key heads, Hv value heads, Dk and Dv head sizes, H heads of D
# channels each, F = H D, K taps.

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.parallel.devices import early
from raycache.rounding import ceil_div, power_of_2
from raycache.step.inputs import StateRows

BLOCK_TOKENS = 16
"""Tokens per program of the convolution, at least K - 1; a thread has all of them in registers."""


class Scanned(NamedTuple):
    """What a scan reads beside the states.

    Attributes:
        q, k: [T, Hk, Dk].
        v: [T, Hv, Dv].
        g: [T, Hv, 1] or [T, Hv, Dk], logarithms of decays.
        beta: [T, Hv] for the delta rule, or None.
        added: [T, Hv, Dv] contiguous, to be added to the output before it is rounded; or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None = None
    added: Tensor | None = None


class Activation(NamedTuple):
    """What follows a convolution: silu, and for queries and keys a fixed length of each head.

    Attributes:
        length: of each head's output, or None to leave it.
        eps: added to its squared norm.
    """

    length: float | None = None
    eps: float = 0.0


class Blocks(NamedTuple):
    """Blocks of tokens of a convolution's rows.

    Attributes:
        table: int64 [M, 2], row and first token in the row of each block.
        size: tokens of a block.
        behind: int64 [N], how many tokens right before the row are its earlier inputs, at least K - 1, or 0 if these
            are in the state; None, for all 0, in decode steps.
    """

    table: Tensor
    size: int
    behind: Tensor | None


def step(states: Tensor, rows: StateRows, scanned: Scanned, *, out: Tensor) -> None:
    """Process the tokens of rows in float32, like `attention.recurrence.scan`.

    Args:
        states: [slots, Hv, Dk, Dv] float32, read and written.
        out: [T, Hv, Dv] contiguous; the rows' tokens are written.
    """
    value_heads, key_dim, value_dim = states.shape[1:]
    q, k, v, g = (side_by_side(x) for x in scanned[:4])
    beta, added = scanned.beta, scanned.added
    columns = min(32, power_of_2(value_dim))
    grid = (ceil_div(value_dim, columns), value_heads, len(rows.spans))
    _step[grid](
        states,
        rows.spans,
        rows.reads,
        rows.writes,
        rows.kept,
        q,
        k,
        v,
        g,
        v if beta is None else beta,
        out,
        out if added is None else added,
        states.stride(0),
        *(stride for x in (q, k, v, g, v if beta is None else beta) for stride in x.stride()[:2]),
        value_heads,
        value_heads // q.shape[1],
        DK=key_dim,
        DV=value_dim,
        BK=power_of_2(key_dim),
        BV=columns,
        IS_PER_CHANNEL=g.shape[-1] > 1,
        HAS_BETA=beta is not None,
        HAS_ADDED=added is not None,
        **early(v.device),
    )


def convolve(
    states: Tensor,
    rows: StateRows,
    blocks: Blocks,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    out: Tensor,
    activation: Activation | None = None,
) -> None:
    """Convolve each channel of rows, in float32.

    Args:
        states: [slots, H, D, K - 1], oldest input first, read and written.
        x: [T, H, D].
        weight: [H, D, K], the tap of the newest input last.
        bias: [H, D] or None.
        out: [T, H, D] contiguous; the rows' tokens are written.
    """
    x, weight = side_by_side(x), weight.contiguous()
    heads, dim, taps = weight.shape
    is_unit = activation is not None and activation.length is not None
    channels = power_of_2(dim) if is_unit else min(128, power_of_2(heads * dim))
    _convolve[heads if is_unit else ceil_div(heads * dim, channels), len(blocks.table)](
        states,
        rows.spans,
        rows.reads,
        rows.writes,
        rows.kept,
        blocks.table,
        rows.reads if blocks.behind is None else blocks.behind,
        x,
        weight,
        weight if bias is None else bias.contiguous(),
        out,
        states.stride(0),
        *x.stride()[:2],
        heads * dim,
        1.0 if activation is None or activation.length is None else activation.length,
        0.0 if activation is None else activation.eps,
        D=dim,
        HAS_GAPS=x.stride(1) != dim,
        TAPS=taps,
        SIZE=power_of_2(taps),
        BT=blocks.size,
        BF=channels,
        HAS_BIAS=bias is not None,
        IS_BEHIND=blocks.behind is not None,
        IS_ACTIVE=activation is not None,
        IS_UNIT=is_unit,
        num_warps=max(1, channels // 256),
    )


def side_by_side(x: Tensor) -> Tensor:
    """Make the last dimension contiguous, as the kernels require; others may have any stride."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


# In a static step, tables are parts of larger tensors, aligned or not; alignment must not cause recompilation.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize_on_alignment=["spans", "reads", "writes", "kept"]
)
def _step(
    states: tl.tensor,
    spans: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    kept: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    out: tl.tensor,
    added: tl.tensor,
    slot: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    g_token: tl.tensor,
    g_head: tl.tensor,
    beta_token: tl.tensor,
    beta_head: tl.tensor,
    num_heads: tl.tensor,
    group: tl.tensor,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """Names with an underscore are strides. `group` value heads share a key head."""
    head, row = tl.program_id(1), tl.program_id(2)
    feature = tl.arange(0, BK)
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    is_feature, is_column = feature < DK, column < DV
    is_state = is_feature[:, None] & is_column[None, :]
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    start, count = tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1)
    read, first_kept = tl.load(reads + row), start + count - tl.load(kept + row)

    place = (head * DK + feature)[:, None] * DV + column[None, :]
    state = tl.load(states + read * slot + place, mask=is_state & (read >= 0), other=0.0)
    for token in range(start, start + count):
        query = tl.load(q + token * q_token + head // group * q_head + feature, mask=is_feature, other=0.0)
        key = tl.load(k + token * k_token + head // group * k_head + feature, mask=is_feature, other=0.0)
        written = tl.load(v + token * v_token + head * v_head + column, mask=is_column, other=0.0).to(tl.float32)
        key = key.to(tl.float32)[:, None]
        if IS_PER_CHANNEL:
            decay = tl.load(g + token * g_token + head * g_head + feature, mask=is_feature, other=0.0)
            state *= tl.exp(decay.to(tl.float32))[:, None]
        else:
            state *= tl.exp(tl.load(g + token * g_token + head * g_head).to(tl.float32))
        if HAS_BETA:
            rate = tl.load(beta + token * beta_token + head * beta_head).to(tl.float32)
            written = rate * (written - tl.sum(state * key, axis=0))
        state += key * written[None, :]
        result = tl.sum(state * query.to(tl.float32)[:, None], axis=0)
        to = (token * num_heads + head) * DV + column
        if HAS_ADDED:
            result += tl.load(added + to, mask=is_column, other=0.0)
        tl.store(out + to, result.to(out.dtype.element_ty), mask=is_column)
        if token >= first_kept:
            tl.store(states + tl.load(writes + token) * slot + place, state, mask=is_state)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize_on_alignment=["spans", "reads", "writes", "kept", "blocks", "behind"]
)
def _convolve(
    states: tl.tensor,
    spans: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    kept: tl.tensor,
    blocks: tl.tensor,
    behind: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    slot: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    num_channels: tl.tensor,
    length: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    HAS_GAPS: tl.constexpr,
    TAPS: tl.constexpr,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
    BF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_BEHIND: tl.constexpr,
    IS_ACTIVE: tl.constexpr,
    IS_UNIT: tl.constexpr,
) -> None:
    """`source` is the index of an input in the row; negative ones are in column source + TAPS - 1 of the state.

    With IS_UNIT a program has all channels of a head. SIZE is TAPS, rounded up to a power of two.
    """
    block, part = tl.program_id(1), tl.program_id(0)  # neighbouring programs read neighbouring channels
    row, first = tl.load(blocks + 2 * block), tl.load(blocks + 2 * block + 1)
    start, count = tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1)
    read, first_kept = tl.load(reads + row), start + count - tl.load(kept + row)
    oldest = tl.zeros_like(start)  # index of the first input that is in x
    if IS_BEHIND:
        oldest -= tl.load(behind + row)
        read = tl.where(oldest < 0, -1, read)
    if IS_UNIT:
        channel = part * D + tl.arange(0, BF)
        is_channel = tl.arange(0, BF) < D
    else:
        channel = part * BF + tl.arange(0, BF)
        is_channel = channel < num_channels
    inputs = x + start * x_token + channel
    if HAS_GAPS:
        inputs += (channel // D) * (x_head - D)
    old = states + read * slot + channel * (TAPS - 1) + (TAPS - 1)

    # One load for all taps of a channel: loaded one by one, they would take longer than the inputs.
    number = tl.arange(0, SIZE)[None, :]
    factor_at = weight + channel[:, None] * TAPS + number
    factors = tl.load(factor_at, mask=is_channel[:, None] & (number < TAPS), other=0.0).to(tl.float32)
    taps, window = (), ()
    for tap in tl.static_range(TAPS):
        taps += (tl.sum(tl.where(number == tap, factors, 0.0), 1),)  # type: ignore[assignment]
    for index in tl.static_range(BT + TAPS - 1):
        source = first + index - (TAPS - 1)
        fresh = tl.load(inputs + source * x_token, mask=is_channel & (source >= oldest) & (source < count), other=0.0)
        if index < TAPS - 1:  # of this and `fresh`, one is zero
            fresh = fresh.to(tl.float32)
            fresh += tl.load(old + source, mask=is_channel & (source < 0) & (read >= 0), other=0.0).to(tl.float32)
        window += (fresh,)  # type: ignore[assignment]
    offset = tl.zeros([BF], tl.float32)
    if HAS_BIAS:
        offset += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    for index in tl.static_range(BT):
        total = offset
        for tap in tl.static_range(TAPS):
            total += window[index + tap].to(tl.float32) * taps[tap]
        if IS_ACTIVE:
            # Rounded where the separate operations round.
            total = total.to(x.dtype.element_ty).to(tl.float32)
            total = (total * tl.sigmoid(total)).to(x.dtype.element_ty).to(tl.float32)
        if IS_UNIT:
            total *= length * tl.rsqrt(tl.sum(total * total, axis=0) + eps)
        to = out + (start + first + index) * num_channels + channel
        tl.store(to, total.to(out.dtype.element_ty), mask=is_channel & (first + index < count))

    if first == 0:
        # The first token may write to the slot that the row reads: the outputs above have read all of the old state,
        # and the state after the first token is written last. Each column is read and written by the same thread below,
        # and none is read after it was written.
        tl.debug_barrier()
        for back in range(0, start + count - first_kept):
            last = count - 1 - back
            new = states + tl.load(writes + start + last) * slot + channel * (TAPS - 1)
            for column in tl.static_range(TAPS - 1):
                end = last + 1 - (TAPS - 1) + column  # index of the input for this column
                is_new = is_channel & (end >= oldest)
                late = tl.load(inputs + end * x_token, mask=is_new, other=0.0)
                early = tl.load(old + end, mask=is_channel & (end < 0) & (read >= 0), other=0.0)
                tl.store(new + column, tl.where(is_new, late, early.to(late.dtype)), mask=is_channel)
