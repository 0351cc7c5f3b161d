"""What is computed in float32 at least, whatever the type of the activations: norms, gates and decays."""

from __future__ import annotations

import torch
from torch import Tensor


def precise(x: Tensor) -> Tensor:
    """In float32, or in float64 if x is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
