"""Triton kernel that writes new keys and values to their pages. Imported only where it runs.

Shapes in this file: T tokens, H key heads, D head size, S slots of all pages.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.parallel.devices import early
from raycache.rounding import power_of_2


def write_rows(k: Tensor, v: Tensor, slots: Tensor, *, to: tuple[Tensor, Tensor]) -> None:
    """Write keys and values to slots.

    Args:
        k, v: [T, H, D], whose tokens may be apart.
        slots: int32 [T].
        to: of keys and values, [S, H, D] contiguous.
    """
    num_tokens, size = len(slots), k.shape[1] * k.shape[2]
    if not num_tokens:
        return
    assert k[0].is_contiguous() and v[0].is_contiguous(), "heads of a token lie beside each other"
    sizes = {"SIZE": size, "BLOCK": power_of_2(size)}
    _write_rows[(num_tokens, 2)](k, v, slots, *to, k.stride(0), v.stride(0), **sizes, **early(k.device))


@triton.jit  # type: ignore[untyped-decorator]
def _write_rows(
    k: tl.tensor,
    v: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    k_token: tl.tensor,
    v_token: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """Two programs per token, one for its key and one for its value."""
    token, feature = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_in = feature < SIZE
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + token).to(tl.int64)
    if tl.program_id(1) == 0:
        tl.store(keys + slot * SIZE + feature, tl.load(k + token * k_token + feature, mask=is_in), mask=is_in)
    else:
        tl.store(values + slot * SIZE + feature, tl.load(v + token * v_token + feature, mask=is_in), mask=is_in)
