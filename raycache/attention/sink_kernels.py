"""Triton kernel that applies attention sinks. Imported only where it runs.

Shapes in this file: T tokens, H heads, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.parallel.devices import early
from raycache.rounding import ceil_div

_BLOCK = 1024
"""Features per program: 16 bytes per load of each of 128 threads."""


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Kernel of `sinks.apply_sinks`: out [T, H, D] contiguous, lse [T, H], sinks [H]."""
    num_tokens, num_heads, dim = out.shape
    grid = num_tokens, ceil_div(num_heads * dim, _BLOCK)
    strides, sizes = lse.stride(), {"SIZE": num_heads * dim, "DIM": dim, "BLOCK": _BLOCK}
    _apply_sinks[grid](out, lse, sinks, *strides, **sizes, **early(out.device))


@triton.jit  # type: ignore[untyped-decorator]
def _apply_sinks(
    out: tl.tensor,
    lse: tl.tensor,
    sinks: tl.tensor,
    lse_token: tl.tensor,
    lse_head: tl.tensor,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per token and BLOCK features."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in, head = feature < SIZE, feature // DIM
    sink = tl.load(sinks + head, mask=is_in, other=0.0).to(tl.float32)
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    found = tl.load(lse + token * lse_token + head * lse_head, mask=is_in, other=0.0)
    at = out + token * SIZE + feature
    value = tl.load(at, mask=is_in, other=0.0).to(tl.float32)
    value *= tl.sigmoid(found * 0.6931471805599453 - sink)
    tl.store(at, value.to(out.dtype.element_ty), mask=is_in)
