"""Part of a quantised tensor as it is stored: codes, and the scales that they are multiplied by.

    codes   [*lead, R, C] one number each (FP8), or [*lead, R, C / 2] two numbers per byte, low nibble first
    scales  [*lead, R / block rows, C / block columns], one per block of codes; rounded up at the edges

A slice may begin inside a block; `offset` is the distance to the beginning of its first block.

    block columns     |       0       |       1       |       2       |
    a slice                     [-------------------------]               offset = 10 columns, three scales
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

# Shapes in this file: R rows (output features) and C columns (input features) of the slice; lead are experts.


class Format(Enum):
    """How the numbers of a tensor are encoded, and how many of them share a scale."""

    FP8_BLOCK = "block FP8"
    """E4M3; a scale per rectangle of rows and columns."""
    FP8_TENSOR = "FP8 per tensor"
    """E4M3; one scale."""
    FP8_CHANNEL = "FP8 per channel"
    """E4M3; a scale per row."""
    MXFP4 = "MXFP4"
    """E2M1; a power of two (E8M0) per 32 columns of a row. "OCP Microscaling Formats", version 1.0."""
    NVFP4 = "NVFP4"
    """E2M1; an E4M3 scale per 16 columns of a row, and one for the whole tensor."""
    INT4 = "INT4"
    """0 to 15 for -8 to 7; a scale per group of columns of a row."""

    @property
    def per_byte(self) -> int:
        """Elements per byte of codes."""
        return 1 if self in _FP8 else 2


_FP8 = (Format.FP8_BLOCK, Format.FP8_TENSOR, Format.FP8_CHANNEL)


@dataclass(frozen=True)
class StoredSlice:
    """A slice of one quantised tensor.

    Attributes:
        format: of the codes.
        codes: [*lead, R, C] float8_e4m3fn, or uint8 with two numbers per byte. The first byte of a row can begin with a
            number that is not of the slice: skip offset[1] % format.per_byte numbers.
        scales: [*lead, rows of blocks, columns of blocks] that the slice touches, in the dtype of the file; uint8 is
            E8M0.
        shape: [*lead, R, C] of the slice.
        block: rows and columns that share a scale.
        offset: rows and columns before the slice in its first block.
        global_scale: that all scales are multiplied by.
        is_transposed: whether the model sees the transpose, [*lead, C, R].
    """

    format: Format
    codes: Tensor
    scales: Tensor
    shape: tuple[int, ...]
    block: tuple[int, int]
    offset: tuple[int, int] = (0, 0)
    global_scale: float = 1.0
    is_transposed: bool = False

    @property
    def num_bytes(self) -> int:
        """Of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def to(self, device: torch.device) -> StoredSlice:
        """The same on a device."""
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The dequantised tensor as the model sees it, rounded once: [*lead, R, C], or its transpose."""
        numbers = self.numbers().to(dtype)
        return numbers.mT if self.is_transposed else numbers

    def numbers(self) -> Tensor:
        """New [*lead, R, C] float32: codes times scales, each product rounded to float32."""
        rows, columns = self.shape[-2:]
        skip = self.offset[1] % self.format.per_byte
        numbers = decode(self.format, self.codes)[..., skip : skip + columns]
        scales = _places(self.scale_factors(), -2, rows, offset=self.offset[0], block=self.block[0])
        width = self.block[1]
        if scales.shape[-1] > 1 and self.offset[1] == 0 and columns % width == 0:
            numbers.unflatten(-1, (-1, width)).mul_(scales[..., None])
            return numbers
        return numbers.mul_(_places(scales, -1, columns, offset=self.offset[1], block=width))

    def scale_factors(self) -> Tensor:
        """Numbers that codes are multiplied by, float32, of the shape of `scales`."""
        numbers = factors(self.scales)
        return numbers if self.global_scale == 1.0 else (numbers.double() * self.global_scale).float()


def factors(scales: Tensor) -> Tensor:
    """Numbers that stored scales stand for, float32."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).to(torch.float32)


def _places(scales: Tensor, dim: int, count: int, *, offset: int, block: int) -> Tensor:
    """Scales repeated along a dimension, so that there is one for each of `count` rows or columns, or one for all."""
    if scales.shape[dim] == 1:
        return scales
    index = (torch.arange(count, device=scales.device) + offset) // block
    return scales.index_select(dim, index)


def decode(form: Format, codes: Tensor) -> Tensor:
    """Decode codes to float32 without scales; the result is new."""
    if form.per_byte == 1:
        return codes.to(torch.float32) if codes.is_cuda else _decode_e4m3(codes.view(torch.uint8))
    nibbles = torch.tensor(_INT4 if form is Format.INT4 else _E2M1, device=codes.device)
    byte = torch.arange(256, device=codes.device)
    pairs = torch.stack((nibbles[byte & 15], nibbles[byte >> 4]), dim=1)  # [256, 2]
    return torch.nn.functional.embedding(codes.to(torch.int32), pairs).flatten(-2)


def _decode_e4m3(codes: Tensor) -> Tensor:
    """Like `to(float32)`, ten times as fast on a CPU: except for the exponent, the bits are those of a float32.

    code      s eeee mmm
    float32   s 0000eeee mmm00000000000000000000      2 ** (127 - 7) times smaller
    """
    bits = codes.view(torch.int8).to(torch.int32).bitwise_left_shift_(20).bitwise_and_(~0x78000000)
    numbers = bits.view(torch.float32).mul_(2.0**120)
    is_nan = codes.bitwise_and(0x7F) == 0x7F
    return numbers.masked_fill_(is_nan, torch.nan) if is_nan.any() else numbers


_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_POSITIVE, *(-number for number in _POSITIVE))
_INT4 = tuple(float(code - 8) for code in range(16))
