"""The form in which a model's weights are held in memory: as they are stored, or dequantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from raycache.checkpoint.quantisation import Quantisation
from raycache.checkpoint.stored_slice import Format

_KERNELS: Mapping[str, frozenset[Format]] = {
    "cpu": frozenset(),
    "cuda": frozenset({Format.FP8_BLOCK, Format.FP8_TENSOR, Format.FP8_CHANNEL, Format.MXFP4}),
}
"""Device type -> formats whose codes some kernel multiplies activations in bfloat16 by."""

_HOPPER = 9
"""Major compute capability of the GPUs that these kernels are for."""


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


def weights_form(quantisation: Quantisation, setting: str, *, dtype: torch.dtype, device_type: str) -> WeightsForm:
    """Decide on the form of quantised weights.

    Args:
        quantisation: what the model directory says.
        setting: `weights` of the configuration.
        dtype: of the activations.
        device_type: "cpu" or "cuda".
    """
    if setting == "bfloat16":
        return WeightsForm(frozenset(), torch.bfloat16)
    formats = {scheme.format for scheme in quantisation.schemes}
    return WeightsForm(_kernels(device_type, dtype) & formats, dtype)


def has_kernels(capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability multiplies by quantised weights."""
    return capability[0] == _HOPPER


def why_dequantised(quantisation: Quantisation, setting: str, *, dtype: torch.dtype, device_type: str) -> list[str]:
    """Formats that cannot be kept quantised, a line each; empty if all can, or none is wanted to be."""
    if setting == "bfloat16":
        return []
    formats = dict.fromkeys(scheme.format for scheme in quantisation.schemes)
    missing = [form.value for form in formats if form not in _kernels(device_type, dtype)]
    name = str(dtype).removeprefix("torch.")
    return [f"no kernel for {form} weights and activations in {name} on {device_type}" for form in missing]


def _kernels(device_type: str, dtype: torch.dtype) -> frozenset[Format]:
    return _KERNELS[device_type] if dtype == torch.bfloat16 else frozenset()
