"""The cache of a twin of a model that transformers does not have."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class TwinCache:
    """What each layer keeps of the tokens before, by layer and name; the names are those of golden.cache_contents."""

    kept: dict[tuple[int, str], Tensor] = field(default_factory=dict)
