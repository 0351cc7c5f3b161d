"""What is computed in float32 at least, whatever the type of the activations: norms, gates and decays."""

from __future__ import annotations

import torch
from torch import Tensor


def precise_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 if `dtype` is."""
    return torch.promote_types(dtype, torch.float32)


def precise(x: Tensor) -> Tensor:
    """In float32, or in float64 if x is."""
    return x.to(precise_dtype(x.dtype))
