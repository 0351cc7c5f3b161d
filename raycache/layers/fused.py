"""Small operations between matrix products, fused into one kernel launch each where possible.

In a decode step, launching such an operation costs more than running it. On CUDA in bfloat16 and float16 they are
therefore Triton kernels (kernels.py), which compute in float32 and round once. Everywhere else they are plain torch,
which rounds after every operation. They never wait for the device or depend on values, so they can be captured in CUDA
graphs once the kernels have been compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from subprocess import SubprocessError
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.layers.precision import precise

_log = logging.getLogger(__name__)

_HALVES = (torch.bfloat16, torch.float16)

# Shapes in this file: T packed tokens, N features, H heads, D head size, R rotated features of a head.


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_centered: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, the mean in float32: new, of x's shape and dtype.

    Args:
        x: [T, N].
        weight: [N].
        is_centered: the factor is 1 + weight, in at least float32.
    """
    if kernels := _kernels_for(x):
        normed: Tensor = kernels.add_norm(x, None, weight, eps, is_centered=is_centered)[0]
        return normed
    if not is_centered:
        return F.rms_norm(x, weight.shape, weight, eps)
    factor = 1 + precise(weight)
    return F.rms_norm(x.to(factor.dtype), factor.shape, factor, eps).to(x.dtype)


def add_rms_norm(
    hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, *, is_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Add, then normalise as `rms_norm` does.

    Args:
        hidden, delta: [T, N]; delta may be overwritten.
    Returns:
        (norm of hidden + delta, hidden + delta); the sum is new, or delta itself.
    """
    if (kernels := _kernels_for(hidden)) and delta.stride(-1) == 1:
        both: tuple[Tensor, Tensor] = kernels.add_norm(hidden, delta, weight, eps, is_centered=is_centered)
        return both
    total = delta.add_(hidden)
    return rms_norm(total, weight, eps, is_centered=is_centered), total


def silu_gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [T, 2 N], gate first -> [T, N]. Like the next four, it may overwrite its argument."""
    if kernels := _kernels_for(gate_up):
        product: Tensor = kernels.gated(gate_up, "silu")
        return product
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


def silu_clamped(gate_up: Tensor, *, limit: float) -> Tensor:
    """silu(gate) * up, with silu(gate) clamped to at most `limit`, and up to [-limit, limit]."""
    if kernels := _kernels_for(gate_up):
        product: Tensor = kernels.gated(gate_up, "silu_clamped", limit=limit)
        return product
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).clamp_(max=limit).mul_(up.clamp(-limit, limit))


def gelu_tanh_gated(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with the tanh approximation of gelu."""
    if kernels := _kernels_for(gate_up):
        product: Tensor = kernels.gated(gate_up, "gelu_tanh")
        return product
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), with gate clamped to at most `limit`, and up to [-limit, limit]."""
    if kernels := _kernels_for(gate_up):
        product: Tensor = kernels.gated(gate_up, "clamped_swiglu", alpha=alpha, limit=limit)
        return product
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.add_(1))


def situ(gate_up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)."""
    if kernels := _kernels_for(gate_up):
        product: Tensor = kernels.gated(gate_up, "situ", alpha=beta, limit=linear_beta)
        return product
    gate, up = precise(gate_up).chunk(2, dim=-1)
    active = torch.tanh(gate / beta).mul_(beta).mul_(gate.sigmoid())
    return active.mul_(torch.tanh(up / linear_beta).mul_(linear_beta)).to(gate_up.dtype)


def relu2(up: Tensor) -> Tensor:
    """relu(up)^2: [T, N] -> [T, N]; may overwrite its argument."""
    if kernels := _kernels_for(up):
        square: Tensor = kernels.gated(up, "relu2")
        return square
    return F.relu(up, inplace=True).square_()


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head: [T, H, D] -> new [T, H, D]; computed in the dtype of `weight`, [H, D]."""
    return F.rms_norm(x.to(weight.dtype), weight.shape[1:], None, eps).mul_(weight).to(x.dtype)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, activation: str, is_gated_first: bool = False
) -> Tensor:
    """RMSNorm of each group of features and a gate, in at least float32: norm(x) * weight * act(gate).

    Args:
        x, gate: [T, G, N], G groups of N features.
        weight: [N], or [G N].
        activation: "silu" or "sigmoid".
        is_gated_first: norm(x * act(gate)) * weight instead.
    Returns:
        New [T, G, N] in gate's dtype.
    """
    if (kernels := _kernels_for(x)) and gate.stride(-1) == 1:
        product: Tensor = kernels.gated_norm(x, gate, weight, eps, activation=activation, is_gated_first=is_gated_first)
        return product
    number, factor = precise(x), _GATES[activation](precise(gate))
    if is_gated_first:
        number = factor * number
    normed = F.rms_norm(number, number.shape[2:], None, eps) * weight.view(-1, number.shape[2])
    return (normed if is_gated_first else normed.mul_(factor)).to(gate.dtype)


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate): [T, H, D] -> new [T, H, D]."""
    is_dense = x.shape == gate.shape and x.is_contiguous() and gate.stride()[1:] == (x.shape[2], 1)
    if is_dense and (kernels := _kernels_for(x)):
        product: Tensor = kernels.sigmoid_gated(x, gate)
        return product
    return x * gate.sigmoid()


_GATES: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def angles(positions: Tensor, inverse: Tensor, *, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """scale * cos and scale * sin of position * inverse for `rotate_heads`, computed in float32 and rounded once.

    Args:
        positions: integers [T].
        inverse: [R / 2] float32, radians per position of each pair.
    Returns:
        cos and sin, [T, 1, R] each, with equal halves, except that sin is negated in the first.
    """
    if kernels := _kernels_for(positions, dtype):
        cos, sin = torch.empty((2, len(positions), 1, 2 * len(inverse)), dtype=dtype, device=positions.device)
        kernels.angles(positions, inverse, cos, sin, scale=scale)
        return cos, sin
    radians = (positions.to(torch.float32)[:, None] * inverse)[:, None, :]
    cos, sin = radians.cos(), radians.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate_heads(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    is_interleaved: bool,
    weight: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate the first R features of every head, after `head_norm` if there is a weight.

    Args:
        x: [T, H, D].
        cos, sin: [T, 1, R] contiguous, see `angles`.
        is_interleaved: pairs are features 2i and 2i + 1, written to i and i + R / 2; else i and i + R / 2.
        weight, eps: of the norm; None for no norm.
        out: [T, H, D] to write to, may be x; None for a new tensor.
    """
    if (kernels := _kernels_for(x)) and (out is None or out.stride(-1) == 1):
        out = x.new_empty(x.shape) if out is None else out
        kernels.rotate(x, cos, sin, out, weight=weight, eps=eps, is_interleaved=is_interleaved)
        return out
    if weight is not None:
        x = head_norm(x, weight, eps)
    size = cos.shape[-1]
    rotated = _rotated(x[..., :size], cos, sin, is_interleaved=is_interleaved)
    if size < x.shape[-1]:
        rotated = torch.cat((rotated, x[..., size:]), dim=-1)
    return rotated if out is None else out.copy_(rotated)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> Tensor:
    """[T, H, R] -> new [T, H, R]."""
    if is_interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((high, low), dim=-1).mul_(sin).addcmul_(x, cos)


def has_kernels(x: Tensor) -> bool:
    """Whether operations on x are kernels, so that Triton works."""
    return _kernels_for(x) is not None


def vocab_kernels_for(x: Tensor) -> Any:
    """The kernels for a vocabulary over ranks (vocab_kernels.py) if they support x, else None."""
    if _kernels_for(x) is None:
        return None
    # It needs Triton, which is there on GPU machines only.
    from raycache.layers import vocab_kernels

    return vocab_kernels


def _kernels_for(x: Tensor, dtype: torch.dtype | None = None) -> Any:
    """The kernels if they support x and results of `dtype` (by default that of x), else None."""
    has_kernels = x.is_cuda and (dtype or x.dtype) in _HALVES and x.numel() > 0 and x.stride(-1) == 1
    return _kernels() if has_kernels else None


@cache
def _kernels() -> Any:
    """The kernels, or None where Triton or its compiler is missing, which is logged once."""
    try:
        from raycache.layers import kernels

        # Compiling one kernel shows whether Triton works. This must not first happen while a graph is captured.
        kernels.gated(torch.ones(1, 16, dtype=torch.bfloat16, device="cuda"), "silu")
    except (ImportError, OSError, RuntimeError, SubprocessError) as cause:
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        _log.warning("small operations between matrix products use torch, which is slower: Triton: %s", lines[0])
        return None
    return kernels
