"""The form in which a model's weights are held in memory: as they are stored, or dequantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from raycache.checkpoint.quantisation import Quantisation
from raycache.checkpoint.stored_slice import Format

_KERNELS: Mapping[str, frozenset[Format]] = {"cpu": frozenset(), "cuda": frozenset()}
"""Device type -> formats whose codes some kernel multiplies by."""


@dataclass(frozen=True)
class WeightsForm:
    """How quantised weights are held.

    Attributes:
        stored: formats whose codes and scales are kept, where a kernel takes the layer's shape.
        dtype: that all others are dequantised to.
    """

    stored: frozenset[Format]
    dtype: torch.dtype

    def __str__(self) -> str:
        """As in the cache's identity: what numbers come out depends on it."""
        name = str(self.dtype).removeprefix("torch.")
        return f"stored, else {name}" if self.stored else f"dequantised to {name}"


def weights_form(quantisation: Quantisation, wish: str, *, dtype: torch.dtype, device_type: str) -> WeightsForm:
    """Decide on the form of quantised weights.

    Args:
        quantisation: what the model directory says.
        wish: the setting `weights`.
        dtype: of the activations.
        device_type: "cpu" or "cuda".
    """
    if wish == "bfloat16":
        return WeightsForm(frozenset(), torch.bfloat16)
    formats = {scheme.format for scheme in quantisation.schemes}
    return WeightsForm(_KERNELS[device_type] & formats, dtype)


def why_dequantised(quantisation: Quantisation, wish: str, *, device_type: str) -> list[str]:
    """What of `weights=stored` cannot be kept, a line each; empty where nothing is missing or nothing was wished."""
    if wish != "stored":
        return []
    formats = dict.fromkeys(scheme.format for scheme in quantisation.schemes)
    missing = [form.value for form in formats if form not in _KERNELS[device_type]]
    return [f"no kernel for {name} weights on {device_type}" for name in missing]
