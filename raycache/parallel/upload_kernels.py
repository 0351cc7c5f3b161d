"""Copies between pinned memory of the host and the device by a kernel, which reads or writes over the link.

Imports Triton: only what runs on CUDA may import this module.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from raycache.rounding import ceil_div

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_BLOCK = 1024


def copy_words(source: Tensor, to: Tensor) -> None:
    """Copy on the current stream.

    Args:
        source, to: of the same shape and dtype, contiguous; each on the device, or in pinned memory that stays as it is
            until the kernel has run.
    """
    assert (source.shape, source.dtype) == (to.shape, to.dtype), "a kernel would write beside it"
    word = _WORDS[source.itemsize]
    if source.numel():
        grid = (ceil_div(source.numel(), _BLOCK),)
        _copy_words[grid](source.view(-1).view(word), to.view(-1).view(word), source.numel(), BLOCK=_BLOCK)


# Not specialised for values of its arguments: no step may wait for a compiler.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["count"], do_not_specialize_on_alignment=["source", "to"]
)
def _copy_words(source: tl.tensor, to: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + place, tl.load(source + place, place < count), place < count)
