"""Experts of bfloat16 weights in a few launches of kernels on Hopper; see experts.py for those of plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from raycache.layers import fused
from raycache.layers.activation import Activation, Recipe, recipe

# Shapes in this file: T tokens, C hidden size, E experts, k experts per token, I inner features of one expert.


@dataclass(frozen=True)
class FusedExperts:
    """Matrices of experts as the kernels take them.

    Attributes:
        gate: [E, I, C], of experts without a gate the only matrix.
        up: [E, I, C], of the same strides; for experts without a gate the same as `gate`.
        down: [E, C, I].
        up_bias: [E, 2 I], or [E, I] without a gate, contiguous; or None.
        down_bias: [E, C], contiguous; or None.
        recipe: of the activation.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    recipe: Recipe

    @classmethod
    def of(
        cls,
        up: Sequence[Tensor],
        down: Tensor,
        *,
        activation: Activation,
        **biases: Tensor | None,
    ) -> FusedExperts | None:
        """The matrices of `Experts`, with the same arguments; None if the kernels do not take them."""
        found = recipe(activation)
        if found is None:
            return None
        parts = up[0].chunk(2, dim=1) if found.is_gated and len(up) == 1 else tuple(up)
        if len(parts) != 1 + found.is_gated or len({(part.shape, part.stride()) for part in parts}) != 1:
            return None
        if any(each.dtype != torch.bfloat16 or each.stride(2) != 1 for each in (*parts, down)):
            return None
        biases = {name: bias if bias is None else bias.contiguous() for name, bias in biases.items()}
        return cls(parts[0], parts[-1], down, recipe=found, **biases)

    def takes(self, x: Tensor) -> bool:
        """Whether the kernels run for tokens [T, C]."""
        return fused.has_kernels(x) and has_kernels(x.dtype, x.device)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Like `RoutedExperts`; choices of experts from E on contribute nothing. Can be captured in a CUDA graph."""
        out: Tensor = _kernels().run_experts(x, weights, ids, self)
        return out


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for experts of this dtype on this device."""
    return dtype == torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def _kernels() -> Any:
    from raycache.layers import expert_kernels

    return expert_kernels
