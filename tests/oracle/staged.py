"""Splits with even pipeline stages, for tests that choose no others."""

from __future__ import annotations

from dataclasses import replace

from raycache.parallel.sharding import Split
from raycache.parallel.stages import even_stages


def staged(split: Split, num_layers: int) -> Split:
    """The same split with even stages, if it has none yet."""
    return split if split.stages else replace(split, stages=even_stages(num_layers, split.pp))
