"""Rotary position embedding and its extensions to longer contexts.

Pairs of features of a head are rotated by position * frequency[i] ("RoFormer", arXiv 2104.09864). Pair i consists of

    halves        features i and i + D/2
    interleaved   features 2i and 2i + 1; written as halves, in queries and keys alike, which leaves scores unchanged

and has the frequency

    default       theta^(-2i/D)
    linear        default / `factor` (arXiv 2306.15595)
    llama3        default / `factor` for low frequencies, default for high ones, a ramp between (Llama 3.1)
    yarn          the same with a ramp over the pair's index, attention sharpened by a factor (arXiv 2309.00071)
    proportional  default / `factor` for the first pairs, 0 (not rotated) for the others (Gemma 4)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raycache.checkpoint.rope_config import RopeConfig
from raycache.layers import fused
from raycache.layers.norm import HeadNorm

# Shapes in this file: T packed tokens, H heads, D head size.


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair: [D / 2] float32 on the CPU."""
    period = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / period
    match config.kind:
        case "default":
            return plain
        case "linear":
            return plain / config.factor
        case "proportional":
            turned = int(config.share * head_dim // 2)
            return torch.where(torch.arange(head_dim // 2) < turned, plain / config.factor, 0.0)
        case "llama3":
            return _llama3(plain, config)
        case "yarn":
            return _yarn(period, config, head_dim)
    raise AssertionError(f"rope kind {config.kind!r} should have been rejected when the config was read")


def _llama3(plain: Tensor, config: RopeConfig) -> Tensor:
    turns = config.original_max_position / (2 * math.pi / plain)
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * plain / config.factor + keep * plain


def _yarn(period: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    def pair_that_turns(times: float) -> float:
        wavelength = config.original_max_position / (times * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(config.theta))

    first, last = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The upper limit counts features, not pairs: checkpoints were trained with it.
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    # This order of operations is bit-equal to transformers, which matters at large positions.
    keep = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return 1.0 / (config.factor * period) * (1 - keep) + 1.0 / period * keep


class Rotation:
    """Rotation of T tokens, computed once per step and applied in every layer.

    Args:
        cos, sin: [T, 1, D] contiguous; sin is negated in its first half, so that one product rotates both halves.
    Attributes:
        query_scale: [T, 1, 1], to be multiplied to queries by the caller, or None.
    """

    def __init__(
        self, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False, query_scale: Tensor | None = None
    ) -> None:
        self._cos = cos
        self._sin = sin
        self._is_interleaved = is_interleaved
        self.query_scale = query_scale

    def __call__(self, x: Tensor, *, norm: HeadNorm | None = None, out: Tensor | None = None) -> Tensor:
        """Rotate the first D features of every head.

        Args:
            x: [T, H, D or more].
            norm: applied to whole heads before, or None.
            out: where to write, may be x; None for a new tensor.
        """
        return fused.rotate_heads(
            x,
            self._cos,
            self._sin,
            is_interleaved=self._is_interleaved,
            weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            out=out,
        )


class Rotary:
    """Makes rotations from positions.

    Angles are computed once per step for all layers, in one small kernel; a table would take 64 MiB or more for a
    context of 128 Ki tokens.

    Args:
        head_dim: D, even.
        is_interleaved: whether features 2i and 2i + 1 are pairs, instead of i and i + D/2.
    """

    def __init__(
        self, config: RopeConfig, head_dim: int, device: torch.device, *, is_interleaved: bool = False
    ) -> None:
        self._inverse = inverse_frequencies(config, head_dim).to(device)
        self._scale = config.attention_factor
        self._is_interleaved = is_interleaved
        self._growth, self._original = config.query_growth, config.original_max_position

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Rotation for positions [T] of any integer dtype; cos and sin are computed in float32, rounded to `dtype`."""
        cos, sin = fused.angles(positions, self._inverse, scale=self._scale, dtype=dtype)
        scale = self._query_scale(positions, dtype) if self._growth else None
        return Rotation(cos, sin, is_interleaved=self._is_interleaved, query_scale=scale)

    def _query_scale(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        times = torch.log1p((positions // self._original).to(torch.float32))
        return (1 + self._growth * times).to(dtype)[:, None, None]
