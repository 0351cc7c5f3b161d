"""Activations of feed-forward blocks.

Gated ones take gate and up stacked along the last dimension, gate first: [T, 2 I] -> [T, I]. Others take up alone:
[T, I] -> [T, I]. All may overwrite their argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from raycache.layers import fused

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """What a kernel computes in place of an activation, see `kernels.active`.

    Attributes:
        kind: name of the formula.
        alpha, limit: its numbers; of "situ" the bounds of gate and up.
    """

    kind: str
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def is_gated(self) -> bool:
        """Whether it takes gate and up."""
        return self.kind != "relu2"


def recipe(activation: Activation) -> Recipe | None:
    """The recipe of an activation of this module; None if kernels have none."""
    function: Callable[..., Tensor] = activation
    numbers: dict[str, float] = {}
    if isinstance(activation, partial):
        function, numbers = activation.func, activation.keywords
    if function not in _KINDS:
        return None
    kind, *names = _KINDS[function]
    return Recipe(kind, *(numbers[name] if name else 0.0 for name in names))


def silu_gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up ("GLU Variants Improve Transformer", arXiv 2002.05202)."""
    return fused.silu_gated(gate_up)


def silu_scaled(*, factor: float) -> Activation:
    """silu(factor * gate) * up."""
    return partial(_silu_scaled, factor=factor)


def gelu_tanh_gated(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with the tanh form of gelu (arXiv 1606.08415, section 2)."""
    return fused.gelu_tanh_gated(gate_up)


def relu2(up: Tensor) -> Tensor:
    """relu(up)^2 ("Primer", arXiv 2109.08668, section 3.1)."""
    return fused.relu2(up)


def silu_clamped(*, limit: float) -> Activation:
    """silu(gate) * up, with silu(gate) clamped to at most `limit`, and up to [-limit, limit]."""
    return partial(fused.silu_clamped, limit=limit)


def situ(*, beta: float, linear_beta: float) -> Activation:
    """silu(gate) * up, with the linear factors gate and up bounded smoothly: x becomes bound * tanh(x / bound)."""
    return partial(fused.situ, beta=beta, linear_beta=linear_beta)


def clamped_swiglu(*, alpha: float, limit: float) -> Activation:
    """gate * sigmoid(alpha * gate) * (up + 1), with gate clamped to at most `limit`, and up to [-limit, limit]."""
    return partial(fused.clamped_swiglu, alpha=alpha, limit=limit)


def _silu_scaled(gate_up: Tensor, *, factor: float) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate * factor, inplace=True).mul_(up)


_KINDS: dict[Callable[..., Tensor], tuple[str, ...]] = {
    silu_gated: ("silu",),
    gelu_tanh_gated: ("gelu_tanh",),
    relu2: ("relu2",),
    fused.silu_clamped: ("silu_clamped", "", "limit"),
    fused.clamped_swiglu: ("clamped_swiglu", "alpha", "limit"),
    fused.situ: ("situ", "beta", "linear_beta"),
}
"""Formula of `Recipe` and the arguments that are its numbers."""
