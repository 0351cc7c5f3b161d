"""Norms, gates and decays are computed in at least float32, whatever the dtype of the activations."""

from __future__ import annotations

import torch
from torch import Tensor


def precise_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32; float64 if `dtype` is float64."""
    return torch.promote_types(dtype, torch.float32)


def precise(x: Tensor) -> Tensor:
    """Convert to float32; float64 is left as it is."""
    return x.to(precise_dtype(x.dtype))
