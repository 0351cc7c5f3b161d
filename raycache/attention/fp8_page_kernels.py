"""Triton kernels that write latents to pages in float8, and read them. Imported only where they run.

Shapes in this file: T tokens, L tokens read, Rank features of a latent, Dr of its rotary part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.memory.component import FP8_BLOCK
from raycache.parallel.devices import early

_LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
_TINY = torch.finfo(torch.float32).tiny


def write_latents(latent: Tensor, rope: Tensor, slots: Tensor, *, to: tuple[Tensor, ...]) -> None:
    """Round latents to float8 and write them to slots, as `LatentView.write` does.

    Args:
        latent: [T, Rank], for any Rank that FP8_BLOCK divides; tokens may be apart.
        rope: [T, Dr], Dr a power of two; tokens may be apart.
        slots: int32 [T].
        to: pages of a `LatentView` with scales, contiguous.
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
        pages: as `to` of `write_latents`.
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
