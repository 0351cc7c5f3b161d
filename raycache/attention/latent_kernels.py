"""Triton kernels for absorbed attention to latents. Imported only where they run.

A latent is 4 blocks of 128 numbers, in float8 with a scale each. These numbers are exact in bfloat16, so scores and
weights are scaled instead of latents:

    score = q_rope . rope + sum over blocks of scale_b (q_b . small_b)
    out_b = sum over keys of (weight scale_b) small_b

A program takes some keys of a query: an item of `Work`, planned on the host, or a share of what was selected for it,
whose number only the device knows. Results of queries with one program are final, those of others are merged.

Shapes in this file: T queries, H heads, K slots per query, P pages, R tokens of a page, Rank features of a latent, Dr
of its rotary part.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.attention.fp8_latent import FEWEST_KEYS, Programs, TileShape, Work, num_splits
from raycache.memory.component import FP8_BLOCK
from raycache.parallel.devices import early
from raycache.rounding import ceil_div

RANK = 4 * FP8_BLOCK
"""The size of latents that there is attention for."""

_LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
_LN_2 = tl.constexpr(math.log(2))
_PART_LEN = RANK + 4  # numbers of a partial result with its log-sum-exp, of a length for wide stores
_PART = tl.constexpr(_PART_LEN)
_FEWEST = tl.constexpr(FEWEST_KEYS)
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
    shape, (num_tokens, num_heads, _) = work.shape, q.shape
    out, lse = _results(q)
    tiles = ceil_div(num_heads, shape.heads)
    sizes = _sizes(q, pages, shape) | {"PAGE": pages[0].shape[1], "IS_SELECTED": False}
    _attend[(tiles * len(work.items),)](
        q,
        q_rope,
        *_with_scales(pages),
        work.items,
        work.ids,
        out,
        lse,
        work.partial,
        num_heads,
        scale * _LOG2_E,
        *q.stride()[:2],
        *q_rope.stride()[:2],
        0,
        1,
        **sizes,
    )
    if work.spans is not None:
        sizes = {"SIZE": RANK, "KEYS": shape.keys, "IS_SELECTED": False}
        _merge[(num_tokens, num_heads)](work.partial, work.spans, out, lse, num_heads, 1, **sizes, **early(q.device))
    return out, lse


def attend_selected(
    q: Tensor,
    q_rope: Tensor,
    pages: tuple[Tensor, ...],
    slots: Tensor,
    lengths: Tensor,
    *,
    programs: Programs,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Absorbed attention of each query to the latents at its slots. What it launches depends on shapes only.

    Args:
        q: [T, H, Rank].
        q_rope: [T, H, Dr], where Dr is a power of two from 16 on.
        pages: latents [P, R, Rank] and rotary parts [P, R, Dr] in the dtype of q; or as those of `attend`.
        slots: int32 [T, K], contiguous in the last dimension; what is behind the length is not read.
        lengths: int32 [T], 0 to K.
        programs: slots are split so that programs that run at once end together.
        scale: of the scores.
    Returns:
        As `attend`.
    """
    shape, partial, (num_tokens, num_heads, _) = programs.shape, programs.partial, q.shape
    out, lse = _results(q)
    tiles = ceil_div(num_heads, shape.heads)
    splits = num_splits(tiles * num_tokens, at_once=programs.at_once, most_keys=slots.shape[1])
    assert splits == 1 or partial.numel() >= num_tokens * splits * num_heads * _PART_LEN, "no room for results"
    sizes = _sizes(q, pages, shape) | {"PAGE": 1, "IS_SELECTED": True}
    _attend[(tiles * num_tokens * splits,)](
        q,
        q_rope,
        *_with_scales(pages),
        lengths,
        slots,
        out,
        lse,
        partial,
        num_heads,
        scale * _LOG2_E,
        *q.stride()[:2],
        *q_rope.stride()[:2],
        slots.stride(0),
        splits,
        **sizes,
    )
    if splits > 1:
        sizes = {"SIZE": RANK, "KEYS": shape.keys, "IS_SELECTED": True}
        _merge[(num_tokens, num_heads)](partial, lengths, out, lse, num_heads, splits, **sizes, **early(q.device))
    return out, lse


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    assert q.shape[2] == RANK, "kernels name the blocks one by one"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def _with_scales(pages: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Latents, rotary parts, and scales or something in their place."""
    return pages if len(pages) > 2 else (*pages, pages[0])


def _sizes(q: Tensor, pages: tuple[Tensor, ...], shape: TileShape) -> dict[str, Any]:
    return {
        "DIM": pages[1].shape[2],
        "HEADS": shape.heads,
        "KEYS": shape.keys,
        "HAS_SCALES": len(pages) > 2,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
        **early(q.device),
    }


@triton.jit(do_not_specialize=["splits", "slots_token"])  # type: ignore[untyped-decorator]
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
    slots_token: tl.tensor,
    splits: tl.tensor,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_SELECTED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per item and HEADS heads; `scale` is for scores to base 2. With IS_SELECTED see `_share`."""
    tiles = tl.cdiv(num_heads, HEADS)
    number, head = tl.program_id(0) // tiles, tl.program_id(0) % tiles * HEADS + tl.arange(0, HEADS)
    feature, turned = tl.arange(0, 128)[None, :], tl.arange(0, DIM)[None, :]
    is_head = (head < num_heads)[:, None]
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token, first_id, begin, end, part = _work(items, number, splits, slots_token, KEYS, IS_SELECTED)
    if token < 0:
        return
    q0, q1, q2, q3 = _queries(q + token * q_token + (head * q_head)[:, None] + feature, is_head)
    q4 = tl.load(q_rope + token * rope_token + (head * rope_head)[:, None] + turned, mask=is_head, other=0.0)
    out0, out1, out2, out3 = _zeros(HEADS), _zeros(HEADS), _zeros(HEADS), _zeros(HEADS)
    largest, total = tl.full((HEADS,), float("-inf"), tl.float32), tl.zeros((HEADS,), tl.float32)
    for start in range(begin, end, KEYS):
        slot, is_in = _slots(ids + first_id, start + tl.arange(0, KEYS), end, PAGE)
        k0, k1, k2, k3 = _keys(latents + slot[:, None] * 512 + feature, q0)
        k4 = tl.load(ropes + slot[:, None] * DIM + turned).to(q0.dtype)
        s0, s1, s2, s3 = _scales(scales + slot * 4, HAS_SCALES)
        score = tl.dot(q4, tl.trans(k4))
        score += tl.dot(q0, tl.trans(k0)) * s0 + tl.dot(q1, tl.trans(k1)) * s1
        score += tl.dot(q2, tl.trans(k2)) * s2 + tl.dot(q3, tl.trans(k3)) * s3
        score = tl.where(is_in[None, :], score * scale, float("-inf"))
        weight, shrink, largest, total = _soften(score, largest, total)
        out0, out1 = _more(out0, shrink, weight * s0, k0), _more(out1, shrink, weight * s1, k1)
        out2, out3 = _more(out2, shrink, weight * s2, k2), _more(out3, shrink, weight * s3, k3)
    if part < 0:
        place = token * num_heads + head
        _store(out + place * 512, lse + place, out0, out1, out2, out3, largest, total, head < num_heads)
    else:
        to = parts + (part.to(tl.int64) * num_heads + head) * _PART
        _store(to, to + 512, out0, out1, out2, out3, largest, total, head < num_heads)


@triton.jit  # type: ignore[untyped-decorator]
def _work(
    items: tl.tensor,
    number: tl.tensor,
    splits: tl.tensor,
    slots_token: tl.tensor,
    KEYS: tl.constexpr,
    IS_SELECTED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The first columns of an item of `Work`: query, where its ids begin, first key, end of keys, partial result."""
    if IS_SELECTED:
        token, first_id, begin, end, part = _share(items, number, splits, slots_token, KEYS)
    else:
        item = items + number * 8
        token, first_id = tl.load(item).to(tl.int64), tl.load(item + 1).to(tl.int64)
        begin, end, part = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    return token, first_id, begin, end, part


@triton.jit  # type: ignore[untyped-decorator]
def _share(
    lengths: tl.tensor, number: tl.tensor, splits: tl.tensor, slots_token: tl.tensor, KEYS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The same for one of `splits` shares of a query's slots; the first one is there even if there are none."""
    token, split = (number // splits).to(tl.int64), number % splits
    length = tl.load(lengths + token)
    size = _share_len(length, splits, KEYS)
    begin = split * size
    part = tl.where(length > size, number, -1)
    end = tl.minimum(begin + size, length)
    return tl.where((begin < length) | (split == 0), token, -1), token * slots_token, begin, end, part


@triton.jit  # type: ignore[untyped-decorator]
def _share_len(length: tl.tensor, splits: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """How many keys a program takes of a query."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, splits), KEYS) * KEYS, _FEWEST)


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
def _scales(at: tl.tensor, HAS_SCALES: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The scales of the four blocks, each [1, keys]; or 1."""
    if HAS_SCALES:
        first, second = tl.load(at)[None, :], tl.load(at + 1)[None, :]
        third, fourth = tl.load(at + 2)[None, :], tl.load(at + 3)[None, :]
    else:
        one = tl.full((1, 1), 1.0, tl.float32)
        first, second, third, fourth = one, one, one, one
    return first, second, third, fourth


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


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]
def _merge(
    parts: tl.tensor,
    spans: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_heads: tl.tensor,
    splits: tl.tensor,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_SELECTED: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per query and head. Every partial result has keys. With IS_SELECTED, `spans` are lengths."""
    token, head, feature = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, SIZE)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if IS_SELECTED:
        length = tl.load(spans + token)
        size = _share_len(length, splits, KEYS)
        begin = token * splits
        end = begin + tl.where(length > size, tl.cdiv(length, size), 0)
    else:
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
