"""Quantised number formats in plain numpy, from their definitions: what is encoded, and what the codes stand for.

E4M3   1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinities, S.1111.111 is NaN   ("FP8 Formats", 2209.05433)
E2M1   1 sign, 2 exponent (bias 1), 1 mantissa bit; no infinities, no NaN   ("OCP Microscaling Formats", 1.0)
E8M0   8 exponent bits (bias 127); 255 is NaN
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]
Numbers = NDArray[np.float64]


def float_table(exponent_bits: int, mantissa_bits: int) -> Numbers:
    """What every code of a small floating-point format stands for, if none were special."""
    codes = np.arange(2 ** (1 + exponent_bits + mantissa_bits))
    mantissa = codes % 2**mantissa_bits / 2**mantissa_bits
    exponent = codes // 2**mantissa_bits % 2**exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    size = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    return np.where(codes < len(codes) // 2, size, -size)


E4M3 = float_table(4, 3)
E4M3[[0x7F, 0xFF]] = np.nan
E2M1 = float_table(2, 1)
INT4 = np.arange(16) - 8.0


def encode(numbers: Numbers, table: Numbers) -> Codes:
    """The code of the nearest number of a table, in the shape of `numbers`."""
    order = np.argsort(table)
    order = order[np.isfinite(table[order])]
    known = table[order]
    middles = (known[1:] + known[:-1]) / 2
    return order[np.searchsorted(middles, numbers)].astype(np.uint8)


def pack_nibbles(codes: Codes) -> Codes:
    """[..., n] codes below 16 -> [..., n / 2] bytes, the first of two in the low half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def spread(scales: Numbers, shape: tuple[int, int], block: tuple[int, int]) -> Numbers:
    """A scale per block of a matrix -> one per number."""
    return scales.repeat(block[0], 0)[: shape[0]].repeat(block[1], 1)[:, : shape[1]]


def block_max(numbers: Numbers, block: tuple[int, int]) -> Numbers:
    """Largest size in each block of a matrix; blocks at the edges can be cut short."""
    rows = np.maximum.reduceat(np.abs(numbers), np.arange(0, numbers.shape[0], block[0]), axis=0)
    return np.maximum.reduceat(rows, np.arange(0, numbers.shape[1], block[1]), axis=1)
