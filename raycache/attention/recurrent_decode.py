"""Triton kernels for recurrent layers of decode steps: all that a layer does before its scan, in one launch.

    prepare_state_space   Mamba2
    prepare_delta_rule    gated delta net, KDA

One program per row and head of a convolution, so that only one program reads and writes a window. It takes the tokens
of a row with drafts from the last to the first, whose window may take the place of the one that all of them read. The
programs of value heads compute the gates, too. The kernel behind may start as soon as all programs run, and waits for
their results itself.

With the scan in the same launch each program of a state would convolve its queries and keys again: on an H200, 64 rows
of a gated delta net take 133 us in such a kernel.

Results are rounded where the separate operations round: after a convolution and after its silu.

Imports Triton: only what runs on CUDA may import this module.
"""

# Shapes in this file: T tokens of N rows, H value heads, G groups of H / G value heads that share queries and keys, Dk
# and Dv head sizes, K taps.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.attention.delta_rule import L2_EPS, DeltaRule
from raycache.attention.recurrent_triton import Scanned, side_by_side
from raycache.attention.state_space import StateSpace
from raycache.memory.views import StateView
from raycache.parallel.devices import early
from raycache.rounding import power_of_2
from raycache.step.inputs import StateRows


class _Input(NamedTuple):
    """New inputs of a convolution and its windows, as an argument of kernels.

    Attributes:
        new: [T, heads, D] with these strides.
        windows: [slots, heads, D, K - 1], oldest input first, with this stride.
        weight: [heads, D, K].
        bias: [heads, D]; any tensor if there is none.
    """

    new: Tensor
    token: int
    head: int
    windows: Tensor
    slot: int
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, view: StateView, name: str, new: Tensor, weight: Tensor, bias: Tensor | None) -> _Input:
        new, windows, weight = side_by_side(new), view.conv[name], weight.contiguous()
        bias = weight if bias is None else bias.contiguous()
        return cls(new, new.stride(0), new.stride(1), windows, windows.stride(0), weight, bias)


class _TimeSteps(NamedTuple):
    """Time steps [T, H] with these strides, and what `StateSpace` has of them."""

    dt: Tensor
    token: int
    head: int
    bias: Tensor
    decay: Tensor
    skip: Tensor
    low: float
    high: float


class _Gates(NamedTuple):
    """Gates [T, H, 1 or Dk] and [T, H] with these strides, and what `DeltaRule` has of them."""

    decay: Tensor
    token: int
    head: int
    beta: Tensor
    beta_token: int
    beta_head: int
    rate: Tensor
    bias: Tensor
    bound: float


def prepare_state_space(
    view: StateView, rows: StateRows, weights: StateSpace, *, x: Tensor, b: Tensor, c: Tensor, dt: Tensor
) -> Scanned:
    """All before the scan of `StateSpace.run`; reads and writes the windows.

    Args:
        rows: of all tokens; a state is kept behind each.
    """
    num_tokens, heads, value_dim = x.shape
    ready = Scanned(
        torch.empty(c.shape, dtype=c.dtype, device=c.device),
        torch.empty(b.shape, dtype=b.dtype, device=b.device),
        v=torch.empty(x.shape, dtype=torch.float32, device=x.device),
        g=torch.empty((num_tokens, heads, 1), dtype=torch.float32, device=x.device),
        added=torch.empty(x.shape, dtype=torch.float32, device=x.device),
    )
    low, high = weights.dt_limit
    steps = _TimeSteps(dt, dt.stride(0), dt.stride(1), weights.dt_bias, weights.decay, weights.skip, low, high)
    _prepare_state_space[heads + 2 * b.shape[1], len(rows.reads)](
        rows.spans,
        rows.reads,
        rows.writes,
        _Input.of(view, "x", x, weights.x.weight, weights.x.bias),
        _Input.of(view, "b", b, weights.b.weight, weights.b.bias),
        _Input.of(view, "c", c, weights.c.weight, weights.c.bias),
        steps,
        ready.q,
        ready.k,
        ready.v,
        ready.g,
        ready.added,
        heads,
        b.shape[1],
        HAS_BIAS=weights.x.bias is not None,
        **_sizes(b.shape[2], value_dim, weights.x.weight.shape[2]),
        **early(x.device),
    )
    return ready


def prepare_delta_rule(
    view: StateView,
    rows: StateRows,
    weights: DeltaRule,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
) -> Scanned:
    """All before the scan of `DeltaRule.run`; reads and writes the windows.

    Args:
        rows: of all tokens; a state is kept behind each.
    """
    (num_tokens, groups, key_dim), (_, heads, value_dim) = q.shape, v.shape
    ready = Scanned(
        torch.empty(q.shape, dtype=torch.float32, device=v.device),
        torch.empty(k.shape, dtype=torch.float32, device=v.device),
        v=torch.empty(v.shape, dtype=v.dtype, device=v.device),
        g=torch.empty(decay.shape, dtype=torch.float32, device=v.device),
        beta=torch.empty((num_tokens, heads), dtype=torch.float32, device=v.device),
    )
    decay = side_by_side(decay)
    gates = _Gates(
        decay,
        decay.stride(0),
        decay.stride(1),
        beta,
        beta.stride(0),
        beta.stride(1),
        weights.rate,
        weights.dt_bias.contiguous(),
        0.0 if weights.bound is None else weights.bound,
    )
    _prepare_delta_rule[heads + 2 * groups, len(rows.reads)](
        rows.spans,
        rows.reads,
        rows.writes,
        _Input.of(view, "q", q, weights.q, None),
        _Input.of(view, "k", k, weights.k, None),
        _Input.of(view, "v", v, weights.v, None),
        gates,
        ready.q,
        ready.k,
        ready.v,
        ready.g,
        ready.beta,
        heads,
        groups,
        key_dim**-0.5,
        L2_EPS,
        IS_PER_CHANNEL=decay.shape[2] > 1,
        IS_BOUNDED=weights.bound is not None,
        **_sizes(key_dim, value_dim, weights.v.shape[2]),
        **early(v.device),
    )
    return ready


def _sizes(key_dim: int, value_dim: int, taps: int) -> dict[str, int]:
    return {
        "DK": key_dim,
        "DV": value_dim,
        "TAPS": taps,
        "BK": power_of_2(key_dim),
        "BV": power_of_2(value_dim),
        "BT": power_of_2(taps),
        "num_warps": 1,  # sums over a head stay within a warp
    }


# In a static step, tables are parts of larger tensors, aligned or not; alignment must not cause recompilation.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize_on_alignment=["spans", "reads", "writes"]
)
def _prepare_state_space(
    spans: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    x: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    steps: tl.tensor,
    to_q: tl.tensor,
    to_k: tl.tensor,
    to_v: tl.tensor,
    to_g: tl.tensor,
    to_added: tl.tensor,
    num_heads: tl.tensor,
    num_groups: tl.tensor,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TAPS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """Value heads first, then groups of keys, then groups of queries."""
    head, row = tl.program_id(0), tl.program_id(1)
    feature, column = tl.arange(0, BK), tl.arange(0, BV)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    start, count, read = tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1), tl.load(reads + row)
    for back in range(0, count):
        token = start + count - 1 - back
        write = tl.load(writes + token)
        if head < num_heads:
            value = _convolved(x, start, token, read, write, head, column, DV, TAPS, BT, HAS_BIAS)
            step = tl.load(steps.dt + token * steps.token + head * steps.head).to(tl.float32)
            step = softplus(step + tl.load(steps.bias + head))
            step = tl.where(step < steps.low, steps.low, tl.where(step > steps.high, steps.high, step))
            tl.store(to_g + token * num_heads + head, step * tl.load(steps.decay + head))
            to = (token * num_heads + head) * DV + column
            tl.store(to_v + to, step * value, mask=column < DV)
            tl.store(to_added + to, value * tl.load(steps.skip + head), mask=column < DV)
        elif head < num_heads + num_groups:
            group = head - num_heads
            key = _convolved(b, start, token, read, write, group, feature, DK, TAPS, BT, HAS_BIAS)
            tl.store(
                to_k + (token * num_groups + group) * DK + feature, key.to(to_k.dtype.element_ty), mask=feature < DK
            )
        else:
            group = head - num_heads - num_groups
            query = _convolved(c, start, token, read, write, group, feature, DK, TAPS, BT, HAS_BIAS)
            tl.store(
                to_q + (token * num_groups + group) * DK + feature, query.to(to_q.dtype.element_ty), mask=feature < DK
            )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize_on_alignment=["spans", "reads", "writes"]
)
def _prepare_delta_rule(
    spans: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    gates: tl.tensor,
    to_q: tl.tensor,
    to_k: tl.tensor,
    to_v: tl.tensor,
    to_g: tl.tensor,
    to_beta: tl.tensor,
    num_heads: tl.tensor,
    num_groups: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TAPS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """Value heads first, then groups of keys, then groups of queries."""
    head, row = tl.program_id(0), tl.program_id(1)
    feature, column = tl.arange(0, BK), tl.arange(0, BV)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    start, count, read = tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1), tl.load(reads + row)
    for back in range(0, count):
        token = start + count - 1 - back
        write = tl.load(writes + token)
        if head < num_heads:
            value = _convolved(v, start, token, read, write, head, column, DV, TAPS, BT, False)
            place = token * num_heads + head
            tl.store(to_v + place * DV + column, value.to(to_v.dtype.element_ty), mask=column < DV)
            if IS_PER_CHANNEL:
                log_decay = _log_decay(gates, token, head, feature, feature < DK, DK, IS_BOUNDED)
                tl.store(to_g + place * DK + feature, log_decay, mask=feature < DK)
            else:
                tl.store(to_g + place, _log_decay(gates, token, head, 0, True, 1, IS_BOUNDED))
            beta = tl.load(gates.beta + token * gates.beta_token + head * gates.beta_head).to(tl.float32)
            tl.store(to_beta + place, tl.sigmoid(beta))
        elif head < num_heads + num_groups:
            group = head - num_heads
            key = _unit_length(_convolved(k, start, token, read, write, group, feature, DK, TAPS, BT, False), eps)
            tl.store(to_k + (token * num_groups + group) * DK + feature, key, mask=feature < DK)
        else:
            group = head - num_heads - num_groups
            query = _unit_length(_convolved(q, start, token, read, write, group, feature, DK, TAPS, BT, False), eps)
            tl.store(to_q + (token * num_groups + group) * DK + feature, query * scale, mask=feature < DK)


@triton.jit  # type: ignore[untyped-decorator]
def _convolved(
    part: tl.tensor,
    start: tl.tensor,
    token: tl.tensor,
    read: tl.tensor,
    write: tl.tensor,
    head: tl.tensor,
    feature: tl.tensor,
    D: tl.constexpr,
    TAPS: tl.constexpr,
    BT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """silu of the convolution of a head, float32 [features] rounded to the dtype of its inputs; moves its window on."""
    window = _window(part, start, token, read, head, feature, D, TAPS, BT)
    tl.debug_barrier()  # all threads have read before one writes: windows may be updated in place
    _keep(part, window, write, head, feature, D, TAPS, BT)
    return _activated(part, window, head, feature, D, TAPS, BT, HAS_BIAS)


@triton.jit  # type: ignore[untyped-decorator]
def _window(
    part: tl.tensor,
    start: tl.tensor,
    token: tl.tensor,
    read: tl.tensor,
    head: tl.tensor,
    feature: tl.tensor,
    D: tl.constexpr,
    TAPS: tl.constexpr,
    BT: tl.constexpr,
) -> tl.tensor:
    """The last TAPS inputs of some channels, float32 [features, BT], the new one in column TAPS - 1."""
    tap = tl.arange(0, BT)[None, :]
    source = token - start + tap - (TAPS - 1)  # in the row; negative ones are in column source + TAPS - 1 of the window
    is_input = (feature < D)[:, None] & (tap < TAPS)
    stored = part.windows + read * part.slot + (head * D + feature)[:, None] * (TAPS - 1) + source + TAPS - 1
    old = tl.load(stored, mask=is_input & (source < 0) & (read >= 0), other=0.0)
    inputs = part.new + (start + source) * part.token + head * part.head + feature[:, None]
    new = tl.load(inputs, mask=is_input & (source >= 0), other=0.0)
    return tl.where(source < 0, old.to(tl.float32), new.to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _activated(
    part: tl.tensor,
    window: tl.tensor,
    head: tl.tensor,
    feature: tl.tensor,
    D: tl.constexpr,
    TAPS: tl.constexpr,
    BT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """silu of the convolution, float32 [features] rounded to the dtype of its inputs."""
    tap, channel = tl.arange(0, BT)[None, :], head * D + feature
    is_tap = (feature < D)[:, None] & (tap < TAPS)
    factor = tl.load(part.weight + channel[:, None] * TAPS + tap, mask=is_tap, other=0.0)
    total = tl.sum(window * factor.to(tl.float32), axis=1)
    if HAS_BIAS:
        total += tl.load(part.bias + channel, mask=feature < D, other=0.0).to(tl.float32)
    total = total.to(part.new.dtype.element_ty).to(tl.float32)
    return (total * tl.sigmoid(total)).to(part.new.dtype.element_ty).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _keep(
    part: tl.tensor,
    window: tl.tensor,
    write: tl.tensor,
    head: tl.tensor,
    feature: tl.tensor,
    D: tl.constexpr,
    TAPS: tl.constexpr,
    BT: tl.constexpr,
) -> None:
    """Store all but the oldest input of `_window`."""
    tap = tl.arange(0, BT)[None, :]
    to = part.windows + write * part.slot + (head * D + feature)[:, None] * (TAPS - 1) + tap - 1
    is_kept = (feature < D)[:, None] & (tap >= 1) & (tap < TAPS)
    tl.store(to, window.to(part.windows.dtype.element_ty), mask=is_kept)


@triton.jit  # type: ignore[untyped-decorator]
def _log_decay(
    gates: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    feature: tl.tensor,
    is_in: tl.tensor,
    D: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
) -> tl.tensor:
    """`DeltaRule.log_decay` of one token and some of the D features of a head."""
    decay = tl.load(gates.decay + token * gates.token + head * gates.head + feature, mask=is_in, other=0.0)
    shifted = decay.to(tl.float32) + tl.load(gates.bias + head * D + feature, mask=is_in, other=0.0)
    rate = tl.load(gates.rate + head)
    if IS_BOUNDED:
        return gates.bound * tl.sigmoid(rate * shifted)
    else:
        return -rate * softplus(shifted)


@triton.jit  # type: ignore[untyped-decorator]
def _unit_length(x: tl.tensor, eps: tl.tensor) -> tl.tensor:
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + eps)


@triton.jit  # type: ignore[untyped-decorator]
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), precise also where exp(x) is small."""
    small = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + small
    # What was lost in rounding 1 + exp(x) is made up for by the ratio of exp(x) to what was added.
    precise = tl.where(total == 1.0, small, tl.log(total) * (small / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.where(x > 20.0, x, precise)
