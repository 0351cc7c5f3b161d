"""Triton kernels for small operations between matrix products. Imported only where they run.

All compute in float32 and round once. The last dimension of tensors must be contiguous, others may have any stride;
tensors must not be empty.

From Hopper on, kernels with IS_EARLY use programmatic dependent launch. Such a kernel begins when all programs of an
early kernel in front of it have begun, else when that one has ended; so several can be waiting, one behind the other.
Before `gdc_wait` they write nothing and read only what no kernel of the same step writes, such as weights. It returns
when the kernel in front has ended, and as that one has waited, too, so have all before it: each program must come to
it. FlashInfer's kernels read plans and tables before they wait, so no early kernel may write these.

Shapes in this file: T packed tokens, N features, H heads, D head size, R rotated features of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.parallel.devices import early
from raycache.rounding import ceil_div, power_of_2

_FEATURES_PER_PROGRAM = 1024  # 16 bytes per load of each of 128 threads


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, is_centered: bool
) -> tuple[Tensor, Tensor]:
    """Kernel of `fused.add_rms_norm`; of `fused.rms_norm` if delta is None."""
    num_tokens, size = x.shape
    normed = x.new_empty(x.shape)
    total = x if delta is None else x.new_empty(x.shape)
    block = power_of_2(size)
    _add_norm[(num_tokens,)](
        x,
        x if delta is None else delta,
        weight,
        normed,
        total,
        eps,
        x.stride(0),
        0 if delta is None else delta.stride(0),
        SIZE=size,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        IS_CENTERED=is_centered,
        num_warps=min(max(block // 1024, 4), 32),
        **early(x.device),
    )
    return normed, total


def gated(gate_up: Tensor, kind: str, *, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
    """Kernel of activations: [T, 2 N], gate first, or of "relu2" [T, N] -> new [T, N].

    Args:
        kind: "silu", "silu_clamped", "gelu_tanh", "clamped_swiglu", "situ" or "relu2", see fused.py.
        alpha, limit: of the clamped kinds; of "situ" the bounds of gate and up.
    """
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // (1 if kind == "relu2" else 2)
    out = gate_up.new_empty((num_tokens, size))
    grid = (num_tokens, ceil_div(size, _FEATURES_PER_PROGRAM))
    sizes = {"SIZE": size, "BLOCK": _FEATURES_PER_PROGRAM}
    _gated[grid](gate_up, out, alpha, limit, gate_up.stride(0), **sizes, KIND=kind, **early(gate_up.device))
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, activation: str, is_gated_first: bool) -> Tensor:
    """Kernel of `fused.gated_norm`: [T, G, N] -> new [T, G, N]; weight is contiguous."""
    num_tokens, num_groups, size = x.shape
    out = gate.new_empty(x.shape)
    block = power_of_2(size)
    groups = power_of_2(min(num_groups, max(1, _FEATURES_PER_PROGRAM // block)))
    _gated_norm[(num_tokens, ceil_div(num_groups, groups))](
        x,
        gate,
        weight,
        out,
        eps,
        num_groups,
        size if weight.numel() > size else 0,
        *x.stride()[:2],
        *gate.stride()[:2],
        SIZE=size,
        BLOCK=block,
        GROUPS=groups,
        IS_SILU=activation == "silu",
        IS_GATED_FIRST=is_gated_first,
        num_warps=min(max(groups * block // 512, 1), 16),
        **early(x.device),
    )
    return out


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """Kernel of `fused.sigmoid_gated`: [T, H, D] -> new [T, H, D]; x is contiguous, and so are the gates of a token."""
    num_tokens, size = x.shape[0], x.shape[1] * x.shape[2]
    out = x.new_empty(x.shape)
    grid = (num_tokens, ceil_div(size, _FEATURES_PER_PROGRAM))
    _sigmoid_gated[grid](x, gate, out, gate.stride(0), SIZE=size, BLOCK=_FEATURES_PER_PROGRAM, **early(x.device))
    return out


def angles(positions: Tensor, inverse: Tensor, cos: Tensor, sin: Tensor, *, scale: float) -> None:
    """Kernel of `fused.angles`; writes to cos and sin. All tensors are contiguous."""
    num_pairs = len(inverse)
    pairs = power_of_2(num_pairs)
    _angles[(len(positions),)](positions, inverse, cos, sin, scale, NUM_PAIRS=num_pairs, PAIRS=pairs, num_warps=1)


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    *,
    weight: Tensor | None,
    eps: float,
    is_interleaved: bool,
) -> None:
    """Kernel of `fused.rotate_heads`.

    Args:
        x, out: [T, H, D]; the same tensor or without overlap.
        cos, sin: [T, 1, R] contiguous.
        weight: [H, D] contiguous, or None for no norm.
    """
    num_tokens, num_heads, dim = x.shape
    num_pairs = cos.shape[-1] // 2
    pairs = power_of_2(num_pairs)
    rest = dim - 2 * num_pairs
    heads, num_warps = power_of_2(min(num_heads, max(1, _FEATURES_PER_PROGRAM // pairs))), 4
    if rest:
        # Both parts of a head are padded; one warp for four heads of 256 takes a third of the time of four for 18.
        width = 2 * pairs + power_of_2(rest)
        heads, num_warps = min(heads, max(1, power_of_2(1280 // width + 1) // 2)), 1
    _rotate[(num_tokens, ceil_div(num_heads, heads))](
        x,
        cos,
        sin,
        out,
        x if weight is None else weight,
        eps,
        num_heads,
        *x.stride()[:2],
        *out.stride()[:2],
        NUM_PAIRS=num_pairs,
        PAIRS=pairs,
        NUM_REST=rest,
        REST=power_of_2(max(rest, 1)),
        HEADS=heads,
        HAS_NORM=weight is not None,
        IS_INTERLEAVED=is_interleaved,
        num_warps=num_warps,
        **early(x.device),
    )


# SIZE and names that begin with NUM are exact; other sizes in capitals are powers of two, as Triton requires.


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    eps: tl.tensor,
    x_token: tl.tensor,
    delta_token: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    IS_CENTERED: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, BLOCK)
    is_in = feature < SIZE
    factor = tl.load(weight + feature, mask=is_in, other=0.0).to(tl.float32)
    if IS_CENTERED:
        factor += 1.0
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + token * x_token + feature, mask=is_in, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + token * delta_token + feature, mask=is_in, other=0.0).to(tl.float32)
        # Normalise the rounded sum, so that results do not depend on whether a pipeline stage ends between the two.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + token * SIZE + feature, rounded, mask=is_in)
        value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    tl.store(normed + token * SIZE + feature, value * inverse * factor, mask=is_in)


@triton.jit  # type: ignore[untyped-decorator]
def active(gate: tl.tensor, up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Activation of float32 values, see activation.py; those without a gate take `gate` alone."""
    # Clamped with `where`, since minimum and maximum lose NaNs.
    if KIND == "relu2":
        value = tl.where(gate < 0.0, 0.0, gate)
        return value * value
    if KIND == "silu_clamped" or KIND == "clamped_swiglu":
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if KIND == "gelu_tanh":
        # (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    elif KIND == "clamped_swiglu":
        gate = tl.where(gate > limit, limit, gate)
        up += 1.0
        slope = alpha * gate
    else:
        slope = gate
    if KIND == "situ":
        # tanh(z) = 2 sigmoid(2 z) - 1
        gate = alpha * (2.0 * tl.sigmoid(2.0 * gate / alpha) - 1.0)
        up = limit * (2.0 * tl.sigmoid(2.0 * up / limit) - 1.0)
    value = gate * tl.sigmoid(slope)
    if KIND == "silu_clamped":
        value = tl.where(value > limit, limit, value)
    return value * up


@triton.jit  # type: ignore[untyped-decorator]
def _gated(
    gate_up: tl.tensor,
    out: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    gate_up_token: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token and BLOCK features."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = feature < SIZE
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = gate_up + token * gate_up_token + feature
    gate = tl.load(row, mask=is_in, other=0.0).to(tl.float32)
    up = gate
    if KIND != "relu2":
        up = tl.load(row + SIZE, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + feature, active(gate, up, alpha, limit, KIND), mask=is_in)


@triton.jit  # type: ignore[untyped-decorator]
def _sigmoid_gated(
    x: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    gate_token: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token and BLOCK features."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = feature < SIZE
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.load(gate + token * gate_token + feature, mask=is_in, other=0.0).to(tl.float32)
    value = tl.load(x + token * SIZE + feature, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + feature, value * tl.sigmoid(number), mask=is_in)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_norm(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    num_groups: tl.tensor,
    weight_group: tl.tensor,
    x_token: tl.tensor,
    x_group: tl.tensor,
    gate_token: tl.tensor,
    gate_group: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_SILU: tl.constexpr,
    IS_GATED_FIRST: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token and GROUPS groups."""
    token = tl.program_id(0).to(tl.int64)
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None]
    feature = tl.arange(0, BLOCK)[None, :]
    is_in = (group < num_groups) & (feature < SIZE)
    factor = tl.load(weight + group * weight_group + feature, mask=is_in, other=0.0).to(tl.float32)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + token * x_token + group * x_group + feature, mask=is_in, other=0.0).to(tl.float32)
    number = tl.load(gate + token * gate_token + group * gate_group + feature, mask=is_in, other=0.0).to(tl.float32)
    active = tl.sigmoid(number)
    if IS_SILU:
        active *= number
    if IS_GATED_FIRST:
        value *= active
    value *= tl.rsqrt(tl.sum(value * value, axis=1) / SIZE + eps)[:, None] * factor
    if not IS_GATED_FIRST:
        value *= active
    to = out + (token * num_groups + group) * SIZE + feature
    tl.store(to, value.to(out.dtype.element_ty), mask=is_in)


@triton.jit  # type: ignore[untyped-decorator]
def _angles(
    positions: tl.tensor,
    inverse: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    scale: tl.tensor,
    NUM_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    is_pair = pair < NUM_PAIRS
    radians = tl.load(positions + token).to(tl.float32) * tl.load(inverse + pair, mask=is_pair, other=0.0)
    c, s = tl.cos(radians) * scale, tl.sin(radians) * scale
    low = token * 2 * NUM_PAIRS + pair
    tl.store(cos + low, c, mask=is_pair)
    tl.store(cos + low + NUM_PAIRS, c, mask=is_pair)
    tl.store(sin + low, -s, mask=is_pair)
    tl.store(sin + low + NUM_PAIRS, s, mask=is_pair)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    num_heads: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    NUM_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    NUM_REST: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token and HEADS heads."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    other = 2 * NUM_PAIRS + tl.arange(0, REST)[None, :]
    is_pair = (head < num_heads) & (pair < NUM_PAIRS)
    is_other = (head < num_heads) & (other < 2 * NUM_PAIRS + NUM_REST)
    if IS_INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + NUM_PAIRS

    if HAS_NORM:
        factor = weight + head * (2 * NUM_PAIRS + NUM_REST)
        low_factor = tl.load(factor + first, mask=is_pair, other=0.0).to(tl.float32)
        high_factor = tl.load(factor + second, mask=is_pair, other=0.0).to(tl.float32)
        rest_factor = tl.load(factor + other, mask=is_other, other=0.0).to(tl.float32)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = x + token * x_token + head * x_head
    low = tl.load(row + first, mask=is_pair, other=0.0).to(tl.float32)
    high = tl.load(row + second, mask=is_pair, other=0.0).to(tl.float32)
    rest = tl.load(row + other, mask=is_other, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(low * low + high * high, axis=1) + tl.sum(rest * rest, axis=1)
        inverse = tl.rsqrt(squares / (2 * NUM_PAIRS + NUM_REST) + eps)[:, None]
        low *= inverse * low_factor
        high *= inverse * high_factor
        rest *= inverse * rest_factor

    angle = token * 2 * NUM_PAIRS + pair
    c = tl.load(cos + angle, mask=pair < NUM_PAIRS, other=0.0).to(tl.float32)
    s = tl.load(sin + angle + NUM_PAIRS, mask=pair < NUM_PAIRS, other=0.0).to(tl.float32)
    # If out is x, a thread may overwrite what another one reads.
    tl.debug_barrier()
    row = out + token * out_token + head * out_head
    tl.store(row + pair, low * c - high * s, mask=is_pair)
    tl.store(row + pair + NUM_PAIRS, high * c + low * s, mask=is_pair)
    tl.store(row + other, rest, mask=is_other)
