"""Stored slices with random codes, and what they stand for by the formats' definitions; shares no code with ours."""

from __future__ import annotations

import numpy as np
import torch

from raycache.checkpoint.stored_slice import Format, StoredSlice
from tests.oracle.number_formats import E2M1, E4M3, Numbers


def draw_fp8(
    rows: int, columns: int, *, seed: int, block: tuple[int, int] = (128, 128), offset: tuple[int, int] = (0, 0)
) -> tuple[StoredSlice, Numbers]:
    """(slice [rows, columns] of an FP8 tensor, its numbers); for the rest see `StoredSlice`."""
    random = np.random.default_rng(seed)
    values = np.clip(random.normal(0, 64, (rows, columns)), -448, 448)
    codes = torch.from_numpy(values).to(torch.float8_e4m3fn)
    high, wide = (-(-(start + size) // step) for start, size, step in zip(offset, (rows, columns), block, strict=True))
    scales = (random.uniform(0.2, 3, (high, wide)) * columns**-0.5 / 64).astype(np.float32)
    each = _spread(scales.astype(np.float64), (rows, columns), block, offset)
    form = Format.FP8_BLOCK if block[1] == 128 else Format.FP8_CHANNEL if block[0] == 1 else Format.FP8_TENSOR
    one = StoredSlice(form, codes, torch.from_numpy(scales), shape=(rows, columns), block=block, offset=offset)
    return one, E4M3[codes.view(torch.uint8).numpy()] * each


def draw_mxfp4(experts: int, rows: int, columns: int, *, seed: int, start: int = 0) -> tuple[StoredSlice, Numbers]:
    """(slice [experts, rows, columns] of an MXFP4 tensor, its numbers).

    Args:
        start: column of the whole tensor that the slice begins with.
    """
    random = np.random.default_rng(seed)
    first, last = start // 2 * 2, -(-(start + columns) // 2) * 2  # whole bytes
    codes = random.integers(0, 16, (experts, rows, last - first))
    packed = torch.from_numpy((codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8))
    exponents = random.integers(117, 123, (experts, rows, -(-(start + columns) // 32) - start // 32)).astype(np.uint8)
    each = _spread(2.0 ** (exponents.astype(np.float64) - 127), (experts, rows, columns), (1, 32), (0, start % 32))
    one = StoredSlice(
        Format.MXFP4,
        packed,
        torch.from_numpy(exponents),
        shape=(experts, rows, columns),
        block=(1, 32),
        offset=(0, start % 32),
    )
    return one, E2M1[codes[..., start - first : start - first + columns]] * each


def _spread(scales: Numbers, shape: tuple[int, ...], block: tuple[int, int], offset: tuple[int, int]) -> Numbers:
    rows, columns = (
        (np.arange(size) + start) // step for size, start, step in zip(shape[-2:], offset, block, strict=True)
    )
    return scales[..., rows[:, None], columns[None, :]]
