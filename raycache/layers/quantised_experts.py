"""Mixtures of experts whose weights stay quantised on the device; see layers.experts."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from raycache.layers.activation import Activation

if TYPE_CHECKING:
    from raycache.layers.routing_kernels import Routes

# Shapes in this file: T tokens, k experts of each, P = T * k rows sorted by expert, E experts, O output and I input
# features of a product, K = I amid zeros, G = K / 128 groups of FP8, S = K / 128 spans of MXFP4.


class ExpertMatrices(Protocol):
    """One matrix [O, I] per expert."""

    def multiply(self, x: Tensor, routes: Routes, *, bias: Tensor | None, is_input: bool) -> Tensor:
        """Each row by its expert.

        Args:
            x: tokens [T, I] with `is_input`, else sorted rows [P, I]; bfloat16.
            routes: of the rows.
            bias: [E, O], or None.
            is_input: give rows sorted by expert; else in the order of the pairs.
        Returns:
            New [P, O] in bfloat16.
        """
        ...


class Fp8Matrices:
    """In FP8; see `ExpertMatrices`.

    Args:
        codes: [E, O, K] float8_e4m3fn.
        scales: [E, O / rows_per_scale rounded up, G] float32.
        rows_per_scale: output features that share a scale.
        offset: column of the codes that the first input feature has.
    """

    def __init__(self, codes: Tensor, scales: Tensor, *, rows_per_scale: int, offset: int = 0) -> None:
        self._codes = codes
        self._scales = scales
        self._rows_per_scale = rows_per_scale
        self._offset = offset

    def multiply(self, x: Tensor, routes: Routes, *, bias: Tensor | None, is_input: bool) -> Tensor:
        """Multiply with activations rounded to FP8, with a scale per row and group."""
        kernels = _kernels()
        codes, scales = kernels.quantise(x, num_rows=len(x), num_columns=self._codes.shape[2], offset=self._offset)
        product: Tensor = kernels.fp8_product(
            codes,
            scales,
            self._codes,
            self._scales,
            routes,
            rows_per_scale=self._rows_per_scale,
            bias=bias,
            is_input=is_input,
        )
        return product


class MxMatrices:
    """In MXFP4; see `ExpertMatrices`.

    Args:
        codes: [E, S, O, 32] int16, see `pack`.
        scales: [E, 4 S, O] uint8, exponents plus 127; at most 128.
        offset: number of the first span that the first input feature has.
    """

    def __init__(self, codes: Tensor, scales: Tensor, *, offset: int = 0) -> None:
        self._codes = codes
        self._scales = scales
        self._offset = offset

    def multiply(self, x: Tensor, routes: Routes, *, bias: Tensor | None, is_input: bool) -> Tensor:
        """Multiply with exact weights and bfloat16 activations."""
        kernels = _kernels()
        product: Tensor = kernels.mx_product(
            x, self._codes, self._scales, routes, offset=self._offset, bias=bias, is_input=is_input
        )
        return product

    @staticmethod
    def pack(codes: Tensor) -> Tensor:
        """[..., O, K] E2M1 codes, one per byte -> [..., S, O, 32] int16.

        Number 32 p + j of a span of 128 lies in bits 4 p to 4 p + 3 of word j: a kernel gets numbers that are
        neighbours, of one scale, by the same shift of neighbouring words.
        """
        planes = codes.unflatten(-1, (-1, 4, 32)).to(torch.int32)
        words = sum(planes[..., plane, :] << 4 * plane for plane in range(4))
        assert isinstance(words, Tensor)
        return words.to(torch.int16).transpose(-3, -2).contiguous()


class QuantisedExperts:
    """The routed experts, each on the tokens that chose it; see `Experts`.

    Args:
        up: I features outside to those in front of the activation.
        down: back.
        count: E; a rank holds a part of each.
        activation: of the rows between.
        up_bias: [E, O], or None.
        down_bias: [E, O], or None; given to one rank of those whose outputs are added up.
    """

    def __init__(
        self,
        up: ExpertMatrices,
        down: ExpertMatrices,
        *,
        count: int,
        activation: Activation,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        self._up = up
        self._down = down
        self._count = count
        self._activation = activation
        self._up_bias = up_bias
        self._down_bias = down_bias

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Run the experts; can be captured in a CUDA graph."""
        if not len(x):
            return torch.zeros_like(x)
        routing = _routing()
        routes = routing.Routes.of(ids, self._count)
        inner = self._up.multiply(x, routes, bias=self._up_bias, is_input=True)
        parts = self._down.multiply(self._activation(inner), routes, bias=self._down_bias, is_input=False)
        combined: Tensor = routing.combine(parts, weights)
        return combined


@cache
def _kernels() -> Any:
    from raycache.layers import quantised_kernels

    return quantised_kernels


@cache
def _routing() -> Any:
    from raycache.layers import routing_kernels

    return routing_kernels
