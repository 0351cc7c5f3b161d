"""Matrices that stay FP8 on the device, and products with them by torch's scaled products (cuBLAS, Hopper)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

GROUP = 128
"""Input features that share a scale."""

_FEW_TOKENS = 128
"""Up to so many cuBLAS is faster with a scale per row of the weights, above with one per 128 rows."""

_TOKENS = 8
"""Scales of activations are aligned to 16 bytes: tokens are padded to a multiple of this."""

# Shapes in this file: T tokens, O output and I input features, K = I amid zeros, so that groups begin where those of
# the whole matrix do, G = K / GROUP.


class Fp8Matrix:
    """A matrix [O, I] of which codes and scales are kept.

    Activations are rounded to FP8, with a scale per token and group: the products are those of the format, whose
    models are published for it.

    Args:
        codes: [O, K] float8_e4m3fn.
        scales: [G, O] float32, of each row.
        block_scales: [O / 128 rounded up, G rounded up to a multiple of four] float32, where blocks begin with the
            first row; None where they do not.
        num_inputs: I.
        offset: column of the codes that the first input feature has.
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
        """Why there is no product with a matrix of so many output features, or ""."""
        return "" if num_outputs % 16 == 0 else f"{num_outputs} output features are no multiple of 16"

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, I] -> new [T, O], both in bfloat16.

        Args:
            x: the input.
            bias: [O], or None.
        """
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
