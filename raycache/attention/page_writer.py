"""Writes new rows to pages, with Triton where it works, else with FlashInfer.

Shapes in this file: T new tokens, H heads, D head size, P pages, R tokens of a page.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raycache.attention.flashinfer_kernels import KernelCache
from raycache.attention.triton_works import triton_works


class Writer:
    """Writes new rows of one component space to its pages, in one launch per layer.

    Keys, values and float8 latents are written by Triton kernels. FlashInfer's functions, which write other latents,
    append to sequences of pages: here every slot is a page of one token in its own sequence.

    Args:
        slots: int64 [T].
    Attributes:
        slots: the same as int32, at a fixed address.
    """

    def __init__(self, kernels: KernelCache, slots: Tensor) -> None:
        self._lib = kernels.lib
        self._indptr = torch.arange(len(slots) + 1, dtype=torch.int32, device=kernels.device)
        self._rows = self._indptr[:-1]
        self._zeros = torch.zeros(len(slots), dtype=torch.int32, device=kernels.device)
        self._ones = torch.ones(len(slots), dtype=torch.int32, device=kernels.device)
        self.slots = slots.to(torch.int32)

    def refresh(self, slots: Tensor) -> None:
        """Change the slots; their number stays the same."""
        self.slots.copy_(slots)

    def write_kv(self, owned: Tensor, k: Tensor, v: Tensor, *, to: tuple[Tensor, Tensor]) -> None:
        """Write the `owned` ones of k, v [T, Hkv, D] to pages [P, R, Hkv, D] each."""
        if triton_works():
            # It needs Triton, which is there on GPU machines only.
            from raycache.attention.page_kernels import write_rows

            if len(owned) < len(k):
                k, v = k[owned], v[owned]
            write_rows(k, v, self.slots, to=(to[0].flatten(0, 1), to[1].flatten(0, 1)))
        else:
            self._write(self._lib.append_paged_kv_cache, owned, k, v, to)

    def write_latents(self, owned: Tensor, latent: Tensor, rope: Tensor, *, to: tuple[Tensor, ...]) -> None:
        """Write the `owned` ones of latent [T, Rank], rope [T, Dr] to pages, see `LatentView`."""
        if len(to) == 2:
            self._write(self._lib.append_paged_mla_kv_cache, owned, latent, rope, to)
            return
        from raycache.attention.fp8_page_kernels import write_latents

        if len(owned) < len(latent):
            latent, rope = latent[owned], rope[owned]
        write_latents(latent, rope, self.slots, to=to)

    def _write(self, append: Any, owned: Tensor, one: Tensor, other: Tensor, to: tuple[Tensor, ...]) -> None:
        if not len(owned):
            return
        # If all tokens are owned, they are in order.
        if len(owned) < len(one):
            one, other = one[owned], other[owned]
        pages = tuple(x.flatten(0, 1)[:, None] for x in to)
        if len(one.shape) == 2:
            append(one, other, self._rows, self._zeros, *pages, self.slots, self._indptr, self._ones)
        else:
            append(one, other, self._rows, self._zeros, pages, self.slots, self._indptr, self._ones)
