"""Triton kernels that make a router's logits and choose experts. Imported only where they run.

Shapes in this file: T tokens, C hidden size, E experts in G groups, k of them per token, S shared experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.layers.router import Choice
from raycache.parallel.devices import early
from raycache.rounding import ceil_div, power_of_2

MOST_TOKENS = 1024
"""Most tokens whose logits of a float32 weight a kernel makes; for more a plain product takes little of the time."""
_MOST_ROUNDED = 1 << 13
"""Most logits of a bfloat16 weight that the kernel makes. On an H200 it was faster than cuBLAS for 4 tokens and 32 or
512 experts, and for 64 tokens and 32 experts, but not for 64 and 512."""
_PARTS = 8
"""Parts of the input features, summed in float32: matrix units lose digits of long sums. Logits around 1 of 2,688
features are wrong by up to 4e-5 in one sum, by less than 1e-5 in eight."""


@dataclass(frozen=True)
class _Tile:
    """Tile of a program for up to `most` tokens: `experts` by `tokens`, `depth` input features at a time."""

    most: int
    experts: int
    tokens: int
    depth: int


_TILES = (_Tile(64, 16, 16, 128), _Tile(MOST_TOKENS, 64, 64, 64))


def choose_by_scores(x: Tensor, weight: Tensor, correction: Tensor, how: Choice) -> tuple[Tensor, Tensor]:
    """Choose as `SigmoidRouter` does.

    Args:
        x: [T, C] in bfloat16, at most MOST_TOKENS, contiguous in the last dimension.
        weight: [E, C] in float32, contiguous.
        correction, how: see `choose`.
    """
    _compile(tuple(weight.shape), weight.device, how)
    return choose(logits(x, weight), correction, how)


def are_few(num_tokens: int, num_experts: int) -> bool:
    """Whether logits of a bfloat16 weight are so few that `choose_by_probabilities` is faster than a plain product."""
    return num_tokens <= _TILES[0].most and num_tokens * num_experts <= _MOST_ROUNDED


def choose_by_probabilities(x: Tensor, weight: Tensor, bias: Tensor | None, how: Choice) -> tuple[Tensor, Tensor]:
    """Choose as `SoftmaxRouter` does.

    Args:
        x: [T, C] in bfloat16, contiguous in the last dimension.
        weight: [E or more, C] in bfloat16, contiguous.
        bias: [E] in bfloat16, contiguous, or None.
    """
    return choose(logits(x, weight), None, how, bias=bias)


@cache
def _compile(shape: tuple[int, ...], device: torch.device, how: Choice) -> None:
    """Compile all kernels, so that none is compiled behind a request."""
    weight = torch.zeros(shape, device=device)
    for tile in _TILES:
        x = torch.zeros(tile.most, shape[1], dtype=torch.bfloat16, device=device)
        choose(logits(x, weight), weight[:, 0].contiguous(), how)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """Products of bfloat16 tokens with a weight, exact but for the sum in float32.

    A float32 number is the sum of three in bfloat16, whose products are exact in float32.

    Args:
        x: [T, C], contiguous in the last dimension.
        weight: [E, C] in float32 or bfloat16, contiguous.
    Returns:
        [parts, T, E] float32; their sum over parts are the logits.
    """
    (num_tokens, size), count = x.shape, len(weight)
    tile = next(tile for tile in _TILES if num_tokens <= tile.most)
    grid = ceil_div(count, tile.experts), ceil_div(num_tokens, tile.tokens), _PARTS
    out = torch.empty(_PARTS, num_tokens, count, dtype=torch.float32, device=x.device)
    sizes = {"NUM_EXPERTS": count, "NUM_FEATURES": size, "CHUNK": ceil_div(size, _PARTS * tile.depth) * tile.depth}
    tiles = {"BE": tile.experts, "BT": tile.tokens, "BK": tile.depth}
    _logits[grid](x, weight, out, num_tokens, x.stride(0), **sizes, **tiles, num_stages=4, **early(x.device))
    return out


def choose(
    logits: Tensor, correction: Tensor | None, how: Choice, *, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose as `SigmoidRouter` does, or as `SoftmaxRouter` without a correction; the first of equal ones wins.

    Args:
        logits: [T, E or more] in any dtype, or [parts, T, E or more] to be summed; contiguous. Sums for `SoftmaxRouter`
            are rounded to bfloat16, as products of a larger batch are.
        correction: [E] float32, or None for probabilities instead of independent scores.
        bias: [E], added to sums before they are rounded; or None.
        how: if there are several groups, G and E / G are powers of two.
    Returns:
        Weights [T, k + S] float32 and expert ids [T, k + S] int64.
    """
    num_tokens, width = logits.shape[-2:]
    num_chosen, addend = how.top_k + how.num_shared, correction if bias is None else bias
    num_parts, is_softmax = logits.numel() // (num_tokens * width), correction is None
    weights = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, num_chosen, dtype=torch.int64, device=logits.device)
    _choose[(num_tokens,)](
        logits,
        logits if addend is None else addend,
        weights,
        ids,
        how.scale,
        num_tokens,
        NUM_PARTS=num_parts,
        NUM_LOGITS=width,
        NUM_EXPERTS=how.count,
        NUM_CHOSEN=how.top_k,
        NUM_SHARED=how.num_shared,
        CHOSEN=power_of_2(num_chosen),
        GROUPS=how.num_groups,
        SIZE=power_of_2(how.count // how.num_groups),
        NUM_TOP_GROUPS=how.top_groups,
        IS_SOFTMAX=is_softmax,
        HAS_BIAS=bias is not None,
        IS_ROUNDED=is_softmax and num_parts > 1,
        IS_NORMED=how.renormalise,
        HAS_GATE=how.has_gate,
        num_warps=1,
        **early(logits.device),
    )
    return weights, ids


# Names that begin with NUM are exact; other sizes in capitals are powers of two, as Triton requires.


@triton.jit  # type: ignore[untyped-decorator]
def _limit(
    values: tl.tensor, is_left: tl.tensor, GROUPS: tl.constexpr, SIZE: tl.constexpr, NUM_TOP: tl.constexpr
) -> tl.tensor:
    """is_left [GROUPS, SIZE] in the best groups by the sum of two values, else False."""
    group, place = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    best = tl.max(values, 1)
    where = tl.min(tl.where(values == best[:, None], place[None, :], SIZE), 1)
    second = tl.max(tl.where(place[None, :] == where[:, None], float("-inf"), values), 1)
    total = best + second
    # Of each group, itself along the first axis, the number of better ones along the second one.
    other = tl.sum(tl.where(group[:, None] == group[None, :], total[:, None], 0.0), 0)
    is_better = (other[None, :] > total[:, None]) | (
        (other[None, :] == total[:, None]) & (group[None, :] < group[:, None])
    )
    return is_left & (tl.sum(is_better.to(tl.int32), 1) < NUM_TOP)[:, None]


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _logits(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    x_stride: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_FEATURES: tl.constexpr,
    CHUNK: tl.constexpr,
    BE: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per BE experts, BT tokens and CHUNK features."""
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert = (tl.program_id(0) * BE + tl.arange(0, BE))[:, None]
    token = (tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT))[None, :]
    part = tl.program_id(2)
    total = tl.zeros((BE, BT), tl.float32)
    for start in range(0, CHUNK, BK):
        k = part * CHUNK + start + tl.arange(0, BK)
        is_left = (expert < NUM_EXPERTS) & (k < NUM_FEATURES)[None, :]
        left = tl.load(weight + expert * NUM_FEATURES + k[None, :], mask=is_left, other=0.0)
        is_right = (token < num_tokens) & (k < NUM_FEATURES)[:, None]
        right = tl.load(x + token * x_stride + k[:, None], mask=is_right, other=0.0)
        if left.dtype == tl.bfloat16:
            total = tl.dot(left, right, total)
        else:
            high = left.to(tl.bfloat16)
            left -= high.to(tl.float32)
            middle = left.to(tl.bfloat16)
            low = (left - middle.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(high, right, tl.dot(middle, right, tl.dot(low, right, total)))
    at = (part * num_tokens + token) * NUM_EXPERTS + expert
    tl.store(out + at, total, mask=(expert < NUM_EXPERTS) & (token < num_tokens))


@triton.jit  # type: ignore[untyped-decorator]
def _scores(
    logit: tl.tensor, correction: tl.tensor, is_left: tl.tensor, IS_SOFTMAX: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Scores and what the choice compares, of the same shape as the logits."""
    if IS_SOFTMAX:
        exponential = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = exponential / tl.sum(tl.sum(exponential, 1), 0)
        value = score
    else:
        score = tl.sigmoid(logit)
        value = score + tl.load(correction, mask=is_left, other=0.0).to(tl.float32)
    return score, value


@triton.jit  # type: ignore[untyped-decorator]
def _sum_parts(
    at: tl.tensor,
    bias_at: tl.tensor,
    is_left: tl.tensor,
    step: tl.tensor,
    NUM_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
) -> tl.tensor:
    """Logits, whose parts are `step` apart; -inf for those that are not left."""
    logit = tl.load(at, mask=is_left, other=float("-inf")).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTS):
        logit += tl.load(at + part * step, mask=is_left, other=0.0).to(tl.float32)
    if HAS_BIAS:
        logit += tl.load(bias_at, mask=is_left, other=0.0).to(tl.float32)
    return logit.to(tl.bfloat16).to(tl.float32) if IS_ROUNDED else logit


@triton.jit  # type: ignore[untyped-decorator]
def _shared_weight(
    at: tl.tensor, step: tl.tensor, NUM_PARTS: tl.constexpr, IS_ROUNDED: tl.constexpr, HAS_GATE: tl.constexpr
) -> tl.tensor:
    """The weight of shared experts; `at` is their logit if there is one."""
    if HAS_GATE:
        return tl.sigmoid(_sum_parts(at, at, True, step, NUM_PARTS, False, IS_ROUNDED))
    return 1.0


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _choose(
    logits: tl.tensor,
    addend: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    scale: tl.tensor,
    num_tokens: tl.tensor,
    NUM_PARTS: tl.constexpr,
    NUM_LOGITS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_TOP_GROUPS: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    IS_NORMED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token."""
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, GROUPS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    is_left = expert < NUM_EXPERTS
    step = num_tokens * NUM_LOGITS
    logit = _sum_parts(
        logits + token * NUM_LOGITS + expert, addend + expert, is_left, step, NUM_PARTS, HAS_BIAS, IS_ROUNDED
    )
    score, value = _scores(logit, addend + expert, is_left, IS_SOFTMAX)
    if NUM_TOP_GROUPS < GROUPS:
        is_left = _limit(value, is_left, GROUPS, SIZE, NUM_TOP_GROUPS)
    # Integers of the same order as the values, then lower experts first. NaN comes first, as in torch.
    bits = value.to(tl.int32, bitcast=True)
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (GROUPS * SIZE - 1 - expert).to(tl.int64)
    slot = tl.arange(0, CHOSEN)
    chosen, weight = tl.zeros((CHOSEN,), tl.int32), tl.zeros((CHOSEN,), tl.float32)
    for choice in range(NUM_CHOSEN):
        best = tl.max(tl.max(tl.where(is_left, key, -0x7FFFFFFFFFFFFFFF), 1), 0)
        index = GROUPS * SIZE - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        found = tl.sum(tl.sum(tl.where(expert == index, score, 0.0), 1), 0)
        is_left = is_left & (expert != index)
        chosen = tl.where(slot == choice, index, chosen)
        weight = tl.where(slot == choice, found, weight)
    if IS_NORMED:
        # All scores of a token can be zero; checkpoints were trained with this epsilon.
        weight = weight / (tl.sum(weight, 0) + (0.0 if IS_SOFTMAX else 1e-20))
    share = _shared_weight(logits + token * NUM_LOGITS + NUM_EXPERTS, step, NUM_PARTS, IS_ROUNDED, HAS_GATE)
    weight = tl.where(slot < NUM_CHOSEN, weight * scale, share)
    chosen = tl.where(slot < NUM_CHOSEN, chosen, NUM_EXPERTS + slot - NUM_CHOSEN)
    at = token * (NUM_CHOSEN + NUM_SHARED) + slot
    tl.store(weights + at, weight, mask=slot < NUM_CHOSEN + NUM_SHARED)
    tl.store(ids + at, chosen.to(tl.int64), mask=slot < NUM_CHOSEN + NUM_SHARED)
