"""Configuration of rotary embedding (computed by layers/rope.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
"""Values of `rope_type` supported for all families."""


@dataclass(frozen=True)
class RopeConfig:
    """Configuration of rotary embedding.

    Attributes:
        kind: one of `ROPE_KINDS`, or "proportional".
        theta: base of the frequencies.
        factor: extension of the context (all kinds but default).
        original_max_position: context length of pretraining, in tokens (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3: pairs with fewer than `low` rotations over the original context have
            their frequency divided by the factor, those with more than `high` keep it.
        beta_fast, beta_slow: yarn: the same limits, in rotations over the original context.
        attention_factor: yarn: multiplied to cos and sin.
        score_factor: yarn: multiplied to the scores of latent attention, where only a part of a head is rotated.
        truncate: yarn: round the ends of the ramp to whole pairs.
        query_growth: if not 0, queries are multiplied by 1 + query_growth * log(1 + position // original_max_position).
        share: proportional: share of the pairs that are rotated.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    score_factor: float = 1.0
    truncate: bool = True
    query_growth: float = 0.0
    share: float = 1.0


def yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Default attention factor of yarn (arXiv 2309.00071, eq. 22; the mscales are from DeepSeek-V2).

    Args:
        factor: extension of the context.
        mscale, mscale_all_dim: weights in numerator and denominator; 0 for none.
    """
    if mscale and mscale_all_dim:
        return _sharpness(factor, mscale) / _sharpness(factor, mscale_all_dim)
    return _sharpness(factor, 1.0)


def yarn_score_factor(factor: float, mscale_all_dim: float) -> float:
    """Factor of the scores of latent attention with yarn (DeepSeek-V2); arguments as above."""
    return _sharpness(factor, mscale_all_dim) ** 2


def _sharpness(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0
