"""RMS norms."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from raycache.layers import fused

# Shapes in this file: T packed tokens, N features, H heads, D head size.


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467, eq. 4).

    The mean is computed in at least float32.

    Args:
        weight: [N].
        is_centered: whether the factor is 1 + weight.
    """

    def __init__(self, weight: Tensor, eps: float, *, is_centered: bool = False) -> None:
        self.weight = weight
        self._eps, self._is_centered = eps, is_centered

    def __call__(self, x: Tensor) -> Tensor:
        """[T, N] -> new [T, N]."""
        return fused.rms_norm(x, self.weight, self._eps, is_centered=self._is_centered)

    def add(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm of hidden + delta, hidden + delta), each [T, N]; may overwrite delta."""
        return fused.add_rms_norm(hidden, delta, self.weight, self._eps, is_centered=self._is_centered)


CenteredNorm = partial(RMSNorm, is_centered=True)
"""RMSNorm with the factor 1 + weight, applied in at least float32 (Gemma, Qwen3-Next)."""


class HeadNorm:
    """RMSNorm of each head with a weight per head: [T, H, D] -> [T, H, D].

    Weights per head allow query and key heads, whose weights differ, to be normalised at once.

    Args:
        weight: [H, D]; the norm is computed in its dtype or a wider one.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return fused.head_norm(x, self.weight, self.eps)


class GatedHeadNorm:
    """RMSNorm of each head, times the activated gate: [T, H, D] and [T, H, D] -> new [T, H, D].

    Args:
        weight: [D], shared by all heads, at least float32.
        activation: of the gate, "silu" or "sigmoid".
    """

    def __init__(self, weight: Tensor, eps: float, *, activation: str) -> None:
        self._weight = weight
        self._eps = eps
        self._activation = activation

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        return fused.gated_norm(x, gate, self._weight, self._eps, activation=self._activation)
