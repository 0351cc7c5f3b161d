"""FP8 weights on the device, multiplied by torch's scaled matrix product (cuBLAS, Hopper)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

GROUP = 128
"""Input features that share a scale."""

_FEW_TOKENS = 128
"""Up to this many tokens cuBLAS is faster with a scale per row of the weights, above with one per 128 rows."""

_TOKENS = 8
"""Tokens are padded to a multiple of this, since scales of activations must be aligned to 16 bytes."""

# Shapes in this file: T tokens, O output and I input features, K = I padded with zeros on both sides, so that groups
# begin where those of the whole matrix do, G = K / GROUP.


class Fp8Matrix:
    """A matrix [O, I] in FP8, with scales.

    Activations are rounded to FP8 as well, with a scale per token and group, as models in this format expect.

    Args:
        codes: [O, K] float8_e4m3fn.
        scales: [G, O] float32, a scale per row.
        block_scales: [O / 128 rounded up, G rounded up to a multiple of four] float32, a scale per 128 rows; None if
            the checkpoint's blocks do not begin with the first row.
        num_inputs: I.
        offset: column of `codes` that holds the first input feature.
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, block_scales: Tensor | None, *, num_inputs: int, offset: int = 0
    ) -> None:
        self.shape = (codes.shape[0], num_inputs)
        self._codes = codes
        self._scales = scales
        self._block_scales = block_scales
        self._offset = offset

    @staticmethod
    def obstacle(num_outputs: int) -> str:
        """Why a matrix with this many output features is not supported, or ""."""
        return "" if num_outputs % 16 == 0 else f"{num_outputs} output features are not a multiple of 16"

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, I] -> new [T, O], both in bfloat16; `bias` is [O], or None."""
        num_tokens = len(x)
        if not num_tokens:
            return x.new_empty(0, self.shape[0])
        rows = -(-num_tokens // _TOKENS) * _TOKENS
        columns = self._codes.shape[1]
        codes, scales = _kernels().quantise(x, num_rows=rows, num_columns=columns, offset=self._offset)
        if rows <= _FEW_TOKENS or self._block_scales is None:
            own, recipe = self._scales.mT, ScalingType.BlockWise1x128
        else:
            own, recipe = self._block_scales.mT, ScalingType.BlockWise128x128
        product = scaled_mm(
            codes, self._codes.mT, scales.mT, ScalingType.BlockWise1x128, own, recipe, output_dtype=torch.bfloat16
        )
        own_rows: Tensor = product[:num_tokens]
        return own_rows if bias is None else own_rows.add_(bias)


@cache
def _kernels() -> Any:
    from raycache.layers import quantised_kernels

    return quantised_kernels
