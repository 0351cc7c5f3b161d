"""Normalisation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from raycache.layers.precision import precise


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467, eq. 4).

    The mean is taken in float32 whatever the dtype.

    Args:
        weight: [N], the size of that dimension.
        eps: keeps zeros finite.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._shape = (weight.shape[0],)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._shape, self.weight, self._eps)


class CenteredNorm:
    """RMSNorm with 1 + weight, multiplied in at least float32: the stored weights lie around zero (Gemma, Qwen3-Next).

    Args:
        weight: [N], as stored.
        eps: keeps zeros finite.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = 1 + precise(weight)
        self._shape = (weight.shape[0],)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self._shape, self.weight, self._eps).to(x.dtype)


class HeadNorm:
    """RMSNorm of every head by itself, with a weight per head: [T, H, D] -> [T, H, D].

    One weight row per head lets query and key heads, whose weights differ, be normalised at once.

    Args:
        weight: [H, D]; all is computed in its dtype.
        eps: keeps zeros finite.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._shape = (weight.shape[1],)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self._shape, None, self._eps).mul_(self.weight).to(x.dtype)
