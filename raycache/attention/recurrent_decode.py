"""Triton kernels for recurrent layers of decode steps: all that a layer does between its projections, in one launch.

    state_space   Mamba2
    delta_rule    gated delta net, KDA

One program per row, value head and BV columns of its state. Each convolves what it needs of the new token itself: the
columns of its values, and all of the queries and keys of its group of heads, again and again where rows are many.
The last program of a group that has read their windows writes the new ones, since windows may be updated in place.

The kernel behind may start as soon as all programs run, and waits for their results itself.

Results are rounded where the separate operations round: after a convolution, after its silu, and at the end.

Imports Triton: only what runs on CUDA may import this module.
"""

# Shapes in this file: N rows of one token, H value heads, G groups of H / G value heads that share queries and keys, Dk
# and Dv head sizes, K taps.

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.attention.delta_rule import L2_EPS, DeltaRule
from raycache.attention.recurrent_triton import early, side_by_side
from raycache.attention.state_space import StateSpace
from raycache.memory.views import StateView

STATE_SPACE_TILE, DELTA_RULE_TILE = (32, 4), (8, 1)
"""Columns of a state and warps per program, chosen by measurement. A delta rule reduces its tile four times in a row:
within a warp this needs no barriers, which is 15 % faster for 64 rows and 20 % for one."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Rows of a decode step, on the device. No row reads what another one writes, except for padding.

    Attributes:
        reads: int64 [N], slots of the states before; negative for a state of zeros.
        writes: int64 [N], slots of the states after.
        arrived: int32, at least N G; zeros between launches.
    """

    reads: Tensor
    writes: Tensor
    arrived: Tensor


class _Input(NamedTuple):
    """New inputs of a convolution and its windows, as an argument of kernels.

    Attributes:
        new: [N, heads, D] with these strides.
        windows: [slots, heads, D, K - 1], oldest input first, with this stride.
        weight: [heads, D, K].
        bias: [heads, D]; any tensor if there is none.
    """

    new: Tensor
    row: int
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
    """Time steps [N, H] with these strides, and what `StateSpace` has of them."""

    dt: Tensor
    row: int
    head: int
    bias: Tensor
    decay: Tensor
    skip: Tensor
    low: float
    high: float


class _Gates(NamedTuple):
    """Gates [N, H, 1 or Dk] and [N, H] with these strides, and what `DeltaRule` has of them."""

    decay: Tensor
    row: int
    head: int
    beta: Tensor
    beta_row: int
    beta_head: int
    rate: Tensor
    bias: Tensor
    bound: float


def state_space(
    view: StateView, rows: Tokens, weights: StateSpace, *, x: Tensor, b: Tensor, c: Tensor, dt: Tensor
) -> Tensor:
    """Kernel of `RecurrentStep.state_space`."""
    heads, key_dim, value_dim = view.state.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    low, high = weights.dt_limit
    steps = _TimeSteps(dt, dt.stride(0), dt.stride(1), weights.dt_bias, weights.decay, weights.skip, low, high)
    _state_space[_grid(view, rows, STATE_SPACE_TILE)](
        view.state,
        view.state.stride(0),
        rows.reads,
        rows.writes,
        rows.arrived,
        _Input.of(view, "x", x, weights.x.weight, weights.x.bias),
        _Input.of(view, "b", b, weights.b.weight, weights.b.bias),
        _Input.of(view, "c", c, weights.c.weight, weights.c.bias),
        steps,
        out,
        heads // b.shape[1],
        HAS_BIAS=weights.x.bias is not None,
        **_sizes(key_dim, value_dim, weights.x.weight.shape[2], STATE_SPACE_TILE),
        **early(x.device),
    )
    return out


def delta_rule(
    view: StateView,
    rows: Tokens,
    weights: DeltaRule,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
) -> Tensor:
    """Kernel of `RecurrentStep.delta_rule`."""
    heads, key_dim, value_dim = view.state.shape[1:]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
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
    _delta_rule[_grid(view, rows, DELTA_RULE_TILE)](
        view.state,
        view.state.stride(0),
        rows.reads,
        rows.writes,
        rows.arrived,
        _Input.of(view, "q", q, weights.q, None),
        _Input.of(view, "k", k, weights.k, None),
        _Input.of(view, "v", v, weights.v, None),
        gates,
        key_dim**-0.5,
        L2_EPS,
        out,
        heads // q.shape[1],
        IS_PER_CHANNEL=decay.shape[2] > 1,
        IS_BOUNDED=weights.bound is not None,
        **_sizes(key_dim, value_dim, weights.v.shape[2], DELTA_RULE_TILE),
        **early(v.device),
    )
    return out


def _grid(view: StateView, rows: Tokens, tile: tuple[int, int]) -> tuple[int, int, int]:
    _, heads, _, value_dim = view.state.shape
    return triton.cdiv(value_dim, _columns(value_dim, tile)), heads, len(rows.reads)


def _sizes(key_dim: int, value_dim: int, taps: int, tile: tuple[int, int]) -> dict[str, int]:
    return {
        "DK": key_dim,
        "DV": value_dim,
        "TAPS": taps,
        "BK": triton.next_power_of_2(key_dim),
        "BV": _columns(value_dim, tile),
        "BT": triton.next_power_of_2(taps),
        "num_warps": tile[1],
    }


def _columns(value_dim: int, tile: tuple[int, int]) -> int:
    columns: int = min(tile[0], triton.next_power_of_2(value_dim))
    return columns


# In a static step, tables are parts of larger tensors, aligned or not; alignment must not cause recompilation.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize_on_alignment=["reads", "writes", "arrived"]
)
def _state_space(
    states: tl.tensor,
    slot: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    arrived: tl.tensor,
    x: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    steps: tl.tensor,
    out: tl.tensor,
    num_shared: tl.tensor,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TAPS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """`num_shared` value heads are a group."""
    head, row = tl.program_id(1), tl.program_id(2)
    group = head // num_shared
    feature, column = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    place = (head * DK + feature)[:, None] * DV + column[None, :]
    is_state = (feature < DK)[:, None] & (column < DV)[None, :]
    if IS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    read, write = tl.load(reads + row), tl.load(writes + row)
    state = tl.load(states + read * slot + place, mask=is_state & (read >= 0), other=0.0)
    values = _window(x, row, read, head, column, DV, TAPS, BT)
    keys = _window(b, row, read, group, feature, DK, TAPS, BT)
    queries = _window(c, row, read, group, feature, DK, TAPS, BT)
    step = tl.load(steps.dt + row * steps.row + head * steps.head).to(tl.float32)
    step = _softplus(step + tl.load(steps.bias + head))
    step = tl.where(step < steps.low, steps.low, tl.where(step > steps.high, steps.high, step))

    value = _activated(x, values, head, column, DV, TAPS, BT, HAS_BIAS)
    key = _activated(b, keys, group, feature, DK, TAPS, BT, HAS_BIAS)
    query = _activated(c, queries, group, feature, DK, TAPS, BT, HAS_BIAS)
    state = state * tl.exp(step * tl.load(steps.decay + head)) + key[:, None] * (step * value)[None, :]
    result = tl.sum(state * query[:, None], axis=0) + value * tl.load(steps.skip + head)
    to = out + (row * tl.num_programs(1) + head) * DV + column
    tl.store(to, result.to(out.dtype.element_ty), mask=column < DV)

    is_last = _has_read(arrived, row, group, num_shared)
    tl.store(states + write * slot + place, state, mask=is_state)
    _keep(x, values, write, head, column, DV, TAPS, BT)
    if is_last:
        _keep(b, keys, write, group, feature, DK, TAPS, BT)
        _keep(c, queries, write, group, feature, DK, TAPS, BT)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize_on_alignment=["reads", "writes", "arrived"]
)
def _delta_rule(
    states: tl.tensor,
    slot: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    arrived: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    gates: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    out: tl.tensor,
    num_shared: tl.tensor,
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
    """`num_shared` value heads are a group."""
    head, row = tl.program_id(1), tl.program_id(2)
    group = head // num_shared
    feature, column = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    place = (head * DK + feature)[:, None] * DV + column[None, :]
    is_state = (feature < DK)[:, None] & (column < DV)[None, :]
    if IS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    read, write = tl.load(reads + row), tl.load(writes + row)
    state = tl.load(states + read * slot + place, mask=is_state & (read >= 0), other=0.0)
    keys = _window(k, row, read, group, feature, DK, TAPS, BT)
    values = _window(v, row, read, head, column, DV, TAPS, BT)
    queries = _window(q, row, read, group, feature, DK, TAPS, BT)
    log_decay = _log_decay(gates, row, head, DK, BK, IS_PER_CHANNEL, IS_BOUNDED)
    beta = tl.sigmoid(tl.load(gates.beta + row * gates.beta_row + head * gates.beta_head).to(tl.float32))

    state *= tl.exp(log_decay)
    key = _unit_length(_activated(k, keys, group, feature, DK, TAPS, BT, False), eps)[:, None]
    value = _activated(v, values, head, column, DV, TAPS, BT, False)
    state += key * (beta * (value - tl.sum(state * key, axis=0)))[None, :]
    query = _unit_length(_activated(q, queries, group, feature, DK, TAPS, BT, False), eps) * scale
    result = tl.sum(state * query[:, None], axis=0)
    to = out + (row * tl.num_programs(1) + head) * DV + column
    tl.store(to, result.to(out.dtype.element_ty), mask=column < DV)

    is_last = _has_read(arrived, row, group, num_shared)
    tl.store(states + write * slot + place, state, mask=is_state)
    _keep(v, values, write, head, column, DV, TAPS, BT)
    if is_last:
        _keep(q, queries, write, group, feature, DK, TAPS, BT)
        _keep(k, keys, write, group, feature, DK, TAPS, BT)


@triton.jit  # type: ignore[untyped-decorator]
def _window(
    part: tl.tensor,
    row: tl.tensor,
    read: tl.tensor,
    head: tl.tensor,
    feature: tl.tensor,
    D: tl.constexpr,
    TAPS: tl.constexpr,
    BT: tl.constexpr,
) -> tl.tensor:
    """The last TAPS inputs of some channels, float32 [features, BT], the new one in column TAPS - 1."""
    tap = tl.arange(0, BT)[None, :]
    stored = part.windows + read * part.slot + (head * D + feature)[:, None] * (TAPS - 1) + tap
    old = tl.load(stored, mask=(feature < D)[:, None] & (tap < TAPS - 1) & (read >= 0), other=0.0)
    new = tl.load(part.new + row * part.row + head * part.head + feature, mask=feature < D, other=0.0)
    return tl.where(tap == TAPS - 1, new.to(tl.float32)[:, None], old.to(tl.float32))


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
def _has_read(arrived: tl.tensor, row: tl.tensor, group: tl.tensor, num_shared: tl.tensor) -> tl.tensor:
    """Count the programs of a group that have read their part of the states; whether this is the last one.

    All threads of a program have read before one counts it, and the last one writes after it has counted.
    """
    tl.debug_barrier()
    index = row * (tl.num_programs(1) // num_shared) + group
    is_last = tl.atomic_add(arrived + index, 1, sem="acq_rel") == num_shared * tl.num_programs(0) - 1
    if is_last:
        tl.store(arrived + index, 0)
    return is_last


@triton.jit  # type: ignore[untyped-decorator]
def _log_decay(
    gates: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    DK: tl.constexpr,
    BK: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
) -> tl.tensor:
    """`DeltaRule.log_decay` of one token and head: [BK, 1], or one number."""
    decay = gates.decay + row * gates.row + head * gates.head
    if IS_PER_CHANNEL:
        feature = tl.arange(0, BK)[:, None]
        shift = tl.load(gates.bias + head * DK + feature, mask=feature < DK, other=0.0)
        shifted = tl.load(decay + feature, mask=feature < DK, other=0.0).to(tl.float32) + shift
    else:
        shifted = tl.load(decay).to(tl.float32) + tl.load(gates.bias + head)
    rate = tl.load(gates.rate + head)
    if IS_BOUNDED:
        return gates.bound * tl.sigmoid(rate * shifted)
    else:
        return -rate * _softplus(shifted)


@triton.jit  # type: ignore[untyped-decorator]
def _unit_length(x: tl.tensor, eps: tl.tensor) -> tl.tensor:
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + eps)


@triton.jit  # type: ignore[untyped-decorator]
def _softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), precise also where exp(x) is small."""
    small = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + small
    # What was lost in rounding 1 + exp(x) is made up for by the ratio of exp(x) to what was added.
    precise = tl.where(total == 1.0, small, tl.log(total) * (small / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.where(x > 20.0, x, precise)
