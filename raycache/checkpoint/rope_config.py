"""What config.json says about positions (layers/rope.py computes with it)."""

from __future__ import annotations

import math
from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
"""Values of `rope_type` that are implemented for all families."""


@dataclass(frozen=True)
class RopeConfig:
    """What config.json says about positions.

    Attributes:
        kind: one of `ROPE_KINDS`, or "proportional".
        theta: base of the frequencies.
        factor: how many times longer the context became (all but default).
        original_max_position: context of the pretraining, in tokens (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3: pairs that turn less than `low` times over the original context are
            slowed down, those that turn more than `high` times are kept.
        beta_fast, beta_slow: yarn: the same limits, in turns over the original context.
        attention_factor: yarn: multiplies cos and sin.
        score_factor: yarn: multiplies the scores of latent attention, where only a part of a head is turned.
        truncate: yarn: round the ends of the ramp to whole pairs.
        share: proportional: of the pairs, those that are turned.
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
    """The attention factor of a yarn config that gives none (arXiv 2309.00071, eq. 22; DeepSeek-V2 adds the mscales).

    Args:
        factor: how many times longer the context became.
        mscale, mscale_all_dim: weights above and below the fraction line; 0 for none.
    """
    if mscale and mscale_all_dim:
        return _sharpness(factor, mscale) / _sharpness(factor, mscale_all_dim)
    return _sharpness(factor, 1.0)


def yarn_score_factor(factor: float, mscale_all_dim: float) -> float:
    """What a yarn config multiplies the scores of latent attention with (DeepSeek-V2); arguments as above."""
    return _sharpness(factor, mscale_all_dim) ** 2


def _sharpness(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0
