"""Mixtures of experts with quantised weights on the device; see experts.py for the plain ones."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from raycache.layers.activation import Activation, recipe
from raycache.layers.cp_split import CpSplit, NotSplitError

if TYPE_CHECKING:
    from raycache.layers.routing_kernels import Routes

# Shapes in this file: T tokens, k experts per token, P = T * k rows sorted by expert, E experts, O output and I input
# features, K = I padded with zeros on both sides, G = K / 128 groups of FP8, S = K / 128 spans of MXFP4.


class ExpertMatrices(Protocol):
    """One matrix [O, I] per expert."""

    def multiply(
        self, x: Tensor, routes: Routes, *, bias: Tensor | None, activation: Activation | None, is_input: bool
    ) -> Tensor:
        """Multiply each row with the matrix of its expert.

        Args:
            x: tokens [T, I] with `is_input`, else rows sorted by expert [P, I]; bfloat16.
            bias: [E, O], or None.
            activation: of the product with its bias; None for none.
            is_input: return rows sorted by expert; else in the order of (token, choice) pairs.
        Returns:
            New [P, O] in bfloat16, [P, O / 2] after a gated activation; or n float32 summands of each [P, n, O].
        """
        ...


class Fp8Matrices:
    """Matrices in FP8.

    Args:
        codes: [E, O, K] float8_e4m3fn.
        scales: [E, O / rows_per_scale rounded up, G] float32.
        rows_per_scale: number of output features that share a scale.
        offset: column of `codes` that holds the first input feature.
    """

    def __init__(self, codes: Tensor, scales: Tensor, *, rows_per_scale: int, offset: int = 0) -> None:
        self._codes = codes
        self._scales = scales
        self._rows_per_scale = rows_per_scale
        self._offset = offset

    def multiply(
        self, x: Tensor, routes: Routes, *, bias: Tensor | None, activation: Activation | None, is_input: bool
    ) -> Tensor:
        """Multiply, with activations rounded to FP8 with a scale per row and group."""
        kernels = _fp8_kernels()
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
        return product if activation is None else activation(product)


class MxMatrices:
    """Matrices in MXFP4.

    Args:
        codes: [E, S, O, 32] int16, see `mx_packing.pack`.
        scales: [E, S, O] int32, see `mx_packing.pack_scales`.
        offset: position of the first input feature in the first span.
    """

    def __init__(self, codes: Tensor, scales: Tensor, *, offset: int = 0) -> None:
        self._codes = codes
        self._scales = scales
        self._offset = offset

    def multiply(
        self, x: Tensor, routes: Routes, *, bias: Tensor | None, activation: Activation | None, is_input: bool
    ) -> Tensor:
        """Multiply, with weights converted exactly to bfloat16; activations that kernels know are part of it."""
        known = None if activation is None else recipe(activation)
        product: Tensor = _mx_kernels().mx_product(
            x, self._codes, self._scales, routes, offset=self._offset, bias=bias, recipe=known, is_input=is_input
        )
        return product if activation is None or known is not None else activation(product)


class QuantisedExperts:
    """Routed experts; like `Experts`.

    Args:
        count: E; each rank holds a share of every expert.
        up_bias: [E, O], or None.
        down_bias: [E, O], or None; on one tp rank only, since outputs are summed.
    """

    num_shared = 0

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
        is_pairs = len(x) == 1 and isinstance(self._up, MxMatrices) and isinstance(self._down, MxMatrices)
        routes = routing.Routes.of_token(ids) if is_pairs else routing.Routes.of(ids, self._count)
        inner = self._up.multiply(x, routes, bias=self._up_bias, activation=self._activation, is_input=True)
        parts = self._down.multiply(inner, routes, bias=self._down_bias, activation=None, is_input=False)
        combined: Tensor = routing.combine(parts, weights, ids, self._count)
        return combined

    def over_cp(self, split: CpSplit) -> QuantisedExperts:
        """Not supported: the kernels take whole matrices."""
        raise NotSplitError("experts stay quantised on the device")


@cache
def _fp8_kernels() -> Any:
    from raycache.layers import quantised_kernels

    return quantised_kernels


@cache
def _mx_kernels() -> Any:
    from raycache.layers import mx_kernels

    return mx_kernels


@cache
def _routing() -> Any:
    from raycache.layers import routing_kernels

    return routing_kernels
