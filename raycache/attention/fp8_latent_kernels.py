"""Triton kernels for latents in float8: absorbed attention, writes and reads. Imported only where they run.

A latent is 4 blocks of 128 numbers with a scale each. Its numbers are exact in bfloat16, so scores and weights are
scaled instead of latents:

    score = q_rope . rope + sum over blocks of scale_b (q_b . small_b)
    out_b = sum over keys of (weight scale_b) small_b

A program takes an item of `Work`; results of queries with one item are final, those of others are merged.

Shapes in this file: T queries, H heads, P pages, R tokens of a page, Rank features of a latent, Dr of its rotary part.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.attention.fp8_latent import Work
from raycache.memory.component import FP8_BLOCK
from raycache.parallel.devices import early

RANK = 4 * FP8_BLOCK
"""The size of latents that `attend` is for."""

_LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
_LN_2 = tl.constexpr(math.log(2))
_PART = tl.constexpr(RANK + 4)  # numbers of a partial result with its log-sum-exp, of a length for wide stores
_TINY = torch.finfo(torch.float32).tiny
_LOG2_E = math.log2(math.e)


def attend(q: Tensor, q_rope: Tensor, pages: tuple[Tensor, ...], work: Work, *, scale: float) -> tuple[Tensor, Tensor]:
    """Absorbed attention of queries to the latents of their pages.

    Args:
        q: [T, H, Rank].
        q_rope: [T, H, Dr], where Dr is a power of two from 16 on.
        pages: float8 latents [P, R, Rank], rotary parts [P, R, Dr], float32 scales [P, R, Rank / FP8_BLOCK].
        work: every query has an item, of no keys if it has none.
        scale: of the scores.
    Returns:
        [T, H, Rank] contiguous, and the log-sum-exp of the scores, float32 [T, H]; 0 and -inf for a query without keys.
    """
    latent, rope, scales = pages
    (num_tokens, num_heads, rank), shape = q.shape, work.shape
    assert rank == RANK, "it names the blocks one by one"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    _attend[(triton.cdiv(num_heads, shape.heads) * len(work.items),)](
        q,
        q_rope,
        latent,
        rope,
        scales,
        work.items,
        work.ids,
        out,
        lse,
        work.partial,
        num_heads,
        scale * _LOG2_E,
        *q.stride()[:2],
        *q_rope.stride()[:2],
        PAGE=latent.shape[1],
        DIM=rope.shape[2],
        HEADS=shape.heads,
        KEYS=shape.keys,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **early(q.device),
    )
    if work.spans is not None:
        grid = (num_tokens, num_heads)
        _merge[grid](work.partial, work.spans, out, lse, num_heads, SIZE=RANK, **early(q.device))
    return out, lse


def write_latents(latent: Tensor, rope: Tensor, slots: Tensor, *, to: tuple[Tensor, ...]) -> None:
    """Round latents to float8 and write them to slots, as `LatentView.write` does.

    Args:
        latent: [T, Rank], for any Rank that FP8_BLOCK divides; tokens may be apart.
        rope: [T, Dr], Dr a power of two; tokens may be apart.
        slots: int32 [T].
        to: pages as in `attend`, contiguous.
    """
    if not len(slots):
        return
    size, dim = latent.shape[1], rope.shape[1]
    sizes = {"NUM_BLOCKS": size // FP8_BLOCK, "BLOCK": FP8_BLOCK, "DIM": dim, "TINY": _TINY}
    grid = (len(slots), size // FP8_BLOCK)
    _write[grid](
        latent, rope, slots, *to, latent.stride(0), rope.stride(0), **sizes, num_warps=1, **early(latent.device)
    )


def read_latents(slots: Tensor, *, pages: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Read what is at slots, as `LatentView.take` does.

    Args:
        slots: int64 [L].
        pages: as in `attend`; Rank as in `write_latents`.
    Returns:
        latent [L, Rank] and rope [L, Dr] in `dtype`.
    """
    size, dim = (each.shape[-1] for each in pages[:2])
    latent, rope = (torch.empty((len(slots), each), dtype=dtype, device=slots.device) for each in (size, dim))
    if len(slots):
        sizes = {"NUM_BLOCKS": size // FP8_BLOCK, "BLOCK": FP8_BLOCK, "DIM": dim}
        _read[(len(slots), size // FP8_BLOCK)](slots, *pages, latent, rope, **sizes, num_warps=1, **early(slots.device))
    return latent, rope


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    q: tl.tensor,
    q_rope: tl.tensor,
    latents: tl.tensor,
    ropes: tl.tensor,
    scales: tl.tensor,
    items: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    parts: tl.tensor,
    num_heads: tl.tensor,
    scale: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    rope_token: tl.tensor,
    rope_head: tl.tensor,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per item and HEADS heads. `scale` is for scores to base 2."""
    num_tiles = tl.cdiv(num_heads, HEADS)
    head = tl.program_id(0) % num_tiles * HEADS + tl.arange(0, HEADS)
    item = items + tl.program_id(0) // num_tiles * 8
    feature, turned = tl.arange(0, 128)[None, :], tl.arange(0, DIM)[None, :]
    is_head = (head < num_heads)[:, None]
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.load(item).to(tl.int64)
    if token < 0:
        return
    first_id, begin, end, part = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    q0, q1, q2, q3 = _queries(q + token * q_token + (head * q_head)[:, None] + feature, is_head)
    q4 = tl.load(q_rope + token * rope_token + (head * rope_head)[:, None] + turned, mask=is_head, other=0.0)
    out0, out1, out2, out3 = _zeros(HEADS), _zeros(HEADS), _zeros(HEADS), _zeros(HEADS)
    largest, total = tl.full((HEADS,), float("-inf"), tl.float32), tl.zeros((HEADS,), tl.float32)
    for start in range(begin, end, KEYS):
        slot, is_in = _slots(ids + first_id, start + tl.arange(0, KEYS), end, PAGE)
        k0, k1, k2, k3 = _keys(latents + slot[:, None] * 512 + feature, q0)
        k4 = tl.load(ropes + slot[:, None] * DIM + turned).to(q0.dtype)
        s0, s1, s2, s3 = _scales(scales + slot * 4)
        score = tl.dot(q4, tl.trans(k4))
        score += tl.dot(q0, tl.trans(k0)) * s0 + tl.dot(q1, tl.trans(k1)) * s1
        score += tl.dot(q2, tl.trans(k2)) * s2 + tl.dot(q3, tl.trans(k3)) * s3
        score = tl.where(is_in[None, :], score * scale, float("-inf"))
        weight, shrink, largest, total = _soften(score, largest, total)
        out0 = _more(out0, shrink, weight * s0, k0)
        out1 = _more(out1, shrink, weight * s1, k1)
        out2 = _more(out2, shrink, weight * s2, k2)
        out3 = _more(out3, shrink, weight * s3, k3)
    if part < 0:
        place = token * num_heads + head
        _store(out + place * 512, lse + place, out0, out1, out2, out3, largest, total, head < num_heads)
    else:
        to = parts + (part.to(tl.int64) * num_heads + head) * _PART
        _store(to, to + 512, out0, out1, out2, out3, largest, total, head < num_heads)


@triton.jit  # type: ignore[untyped-decorator]
def _slots(ids: tl.tensor, key: tl.tensor, end: tl.tensor, PAGE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Slots of a row's keys, and which of them are in front of the end. Behind it, the last one is read again."""
    near = tl.minimum(key, end - 1)
    return tl.load(ids + near // PAGE).to(tl.int64) * PAGE + near % PAGE, key < end


@triton.jit  # type: ignore[untyped-decorator]
def _soften(
    score: tl.tensor, largest: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Go on with a softmax to base 2: weights of these scores, factor of earlier ones; largest score and total so far.

    Weights are multiplied by the largest float8: together with a scale, by the largest number of its block, which has
    room in any dtype.
    """
    higher = tl.maximum(largest, tl.max(score, axis=1))
    shrink, weight = tl.exp2(largest - higher), tl.exp2(score - higher[:, None])
    return weight * _LARGEST, shrink, higher, total * shrink + tl.sum(weight, axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def _queries(at: tl.tensor, is_in: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The four blocks of queries, 0 where there are none."""
    first = tl.load(at, mask=is_in, other=0.0)
    second = tl.load(at + 128, mask=is_in, other=0.0)
    third = tl.load(at + 256, mask=is_in, other=0.0)
    return first, second, third, tl.load(at + 384, mask=is_in, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _keys(at: tl.tensor, like: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The four blocks of latents without their scales, exactly, in the dtype of `like`."""
    first, second = tl.load(at).to(like.dtype), tl.load(at + 128).to(like.dtype)
    return first, second, tl.load(at + 256).to(like.dtype), tl.load(at + 384).to(like.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _scales(at: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The scales of the four blocks, each [1, keys]."""
    first, second = tl.load(at)[None, :], tl.load(at + 1)[None, :]
    return first, second, tl.load(at + 2)[None, :], tl.load(at + 3)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _zeros(HEADS: tl.constexpr) -> tl.tensor:
    return tl.zeros((HEADS, 128), tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _more(out: tl.tensor, shrink: tl.tensor, weight: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """Add the weighted sum of a block of latents."""
    return tl.dot(weight.to(keys.dtype), keys, out * shrink[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    to: tl.tensor,
    to_lse: tl.tensor,
    out0: tl.tensor,
    out1: tl.tensor,
    out2: tl.tensor,
    out3: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    is_in: tl.tensor,
) -> None:
    """Store the four blocks of results and their log-sum-exps."""
    # NaNs stay; a total of 0 is a query without keys.
    factor = tl.where(total == 0.0, 0.0, 1.0 / (total * _LARGEST))[:, None]
    at, mask = to[:, None] + tl.arange(0, 128)[None, :], is_in[:, None]
    tl.store(at, (out0 * factor).to(at.dtype.element_ty), mask=mask)
    tl.store(at + 128, (out1 * factor).to(at.dtype.element_ty), mask=mask)
    tl.store(at + 256, (out2 * factor).to(at.dtype.element_ty), mask=mask)
    tl.store(at + 384, (out3 * factor).to(at.dtype.element_ty), mask=mask)
    tl.store(to_lse, (largest + tl.log2(total)) * _LN_2, mask=is_in)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    parts: tl.tensor,
    spans: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_heads: tl.tensor,
    SIZE: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per query and head. Every partial result has keys."""
    token, head, feature = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, SIZE)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    begin, end = tl.load(spans + token), tl.load(spans + token + 1)
    if begin == end:
        return
    merged = tl.zeros((SIZE,), tl.float32)
    largest, total = float("-inf"), 0.0
    for part in range(begin, end):
        at = parts + (tl.cast(part, tl.int64) * num_heads + head) * _PART
        one = tl.load(at + SIZE)
        higher = tl.maximum(largest, one)
        shrink, weight = tl.exp(largest - higher), tl.exp(one - higher)
        merged = merged * shrink + tl.load(at + feature) * weight
        total = total * shrink + weight
        largest = higher
    place = token * num_heads + head
    tl.store(out + place * SIZE + feature, (merged / total).to(out.dtype.element_ty))
    tl.store(lse + place, largest + tl.log(total))


@triton.jit  # type: ignore[untyped-decorator]
def _write(
    latent: tl.tensor,
    rope: tl.tensor,
    slots: tl.tensor,
    latents: tl.tensor,
    ropes: tl.tensor,
    scales: tl.tensor,
    latent_token: tl.tensor,
    rope_token: tl.tensor,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    TINY: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token and block; the first one also writes the rotary part."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    feature, turned = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + token).to(tl.int64)
    value = tl.load(latent + token * latent_token + feature).to(tl.float32)
    # A maximum loses NaNs, a sum does not.
    scale = tl.div_rn(tl.max(tl.abs(value), axis=0) + tl.sum(value * 0.0, axis=0), _LARGEST)
    scale = tl.where(scale < TINY, TINY, scale)
    small = tl.div_rn(value, tl.zeros_like(value) + scale)
    # Clamped with `where`, since minimum and maximum lose NaNs.
    small = tl.where(small > _LARGEST, _LARGEST, tl.where(small < -_LARGEST, -_LARGEST, small))
    tl.store(latents + slot * NUM_BLOCKS * BLOCK + feature, small.to(latents.dtype.element_ty))
    tl.store(scales + slot * NUM_BLOCKS + block, scale)
    if block == 0:
        tl.store(ropes + slot * DIM + turned, tl.load(rope + token * rope_token + turned).to(ropes.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _read(
    slots: tl.tensor,
    latents: tl.tensor,
    ropes: tl.tensor,
    scales: tl.tensor,
    latent: tl.tensor,
    rope: tl.tensor,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token and block; the first one also reads the rotary part."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    feature, turned = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + token)
    value = tl.load(latents + slot * NUM_BLOCKS * BLOCK + feature).to(tl.float32)
    value *= tl.load(scales + slot * NUM_BLOCKS + block)
    tl.store(latent + token * NUM_BLOCKS * BLOCK + feature, value.to(latent.dtype.element_ty))
    if block == 0:
        tl.store(rope + token * DIM + turned, tl.load(ropes + slot * DIM + turned).to(rope.dtype.element_ty))
