"""Triton kernel that chooses experts from a router's logits. Imported only where it runs.

Shapes in this file: T tokens, E experts in G groups, k of them per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.layers.kernels import early


def choose(
    logits: Tensor,
    correction: Tensor | None,
    *,
    top_k: int,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalise: bool,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose as `SigmoidRouter` does, or as `SoftmaxRouter` without a correction; the first of equal ones wins.

    Args:
        logits: [T, E] in any dtype, contiguous.
        correction: [E] float32, or None for probabilities instead of independent scores.
        num_groups: G; if there are several, G and E / G are powers of two.
    Returns:
        Weights [T, k] float32 and expert ids [T, k] int64.
    """
    num_tokens, count = logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    _choose[(num_tokens,)](
        logits,
        logits if correction is None else correction,
        weights,
        ids,
        scale,
        NUM_EXPERTS=count,
        NUM_CHOSEN=top_k,
        CHOSEN=triton.next_power_of_2(top_k),
        GROUPS=num_groups,
        SIZE=triton.next_power_of_2(count // num_groups),
        NUM_TOP_GROUPS=top_groups,
        IS_SOFTMAX=correction is None,
        IS_NORMED=renormalise,
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


@triton.jit  # type: ignore[untyped-decorator]
def _choose(
    logits: tl.tensor,
    correction: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    scale: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_TOP_GROUPS: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token."""
    if IS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, GROUPS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    is_left = expert < NUM_EXPERTS
    logit = tl.load(logits + token * NUM_EXPERTS + expert, mask=is_left, other=float("-inf")).to(tl.float32)
    if IS_SOFTMAX:
        exponential = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = exponential / tl.sum(tl.sum(exponential, 1), 0)
        value = score
    else:
        score = tl.sigmoid(logit)
        value = score + tl.load(correction + expert, mask=is_left, other=0.0).to(tl.float32)
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
    at = token * NUM_CHOSEN + slot
    tl.store(weights + at, weight * scale, mask=slot < NUM_CHOSEN)
    tl.store(ids + at, chosen.to(tl.int64), mask=slot < NUM_CHOSEN)
