"""Form of a model's weights in memory: as stored, or dequantised."""

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
"""Device type -> formats with kernels for activations in bfloat16."""

_HOPPER = 9
"""Major compute capability of the GPUs that these kernels support."""


@dataclass(frozen=True)
class WeightsForm:
    """How quantised weights are held in memory.

    Attributes:
        stored: formats that stay quantised, if there is a kernel for the layer's shape.
        dtype: to which all others are dequantised.
    """

    stored: frozenset[Format]
    dtype: torch.dtype

    def __str__(self) -> str:
        """Description, part of the cache's identity, since results depend on it."""
        name = str(self.dtype).removeprefix("torch.")
        return f"stored, else {name}" if self.stored else f"dequantised to {name}"


def weights_form(quantisation: Quantisation, setting: str, *, dtype: torch.dtype, device_type: str) -> WeightsForm:
    """Choose the form of quantised weights; `setting` is `weights` of the configuration, `dtype` of the activations."""
    if setting == "bfloat16":
        return WeightsForm(frozenset(), torch.bfloat16)
    formats = {scheme.format for scheme in quantisation.schemes}
    return WeightsForm(_kernels(device_type, dtype) & formats, dtype)


def has_kernels(capability: tuple[int, int]) -> bool:
    """Whether GPUs of this compute capability have kernels for quantised weights."""
    return capability[0] == _HOPPER


def why_dequantised(quantisation: Quantisation, setting: str, *, dtype: torch.dtype, device_type: str) -> list[str]:
    """Why formats are dequantised, a line each; empty if none is, or if the setting asks for it."""
    if setting == "bfloat16":
        return []
    formats = dict.fromkeys(scheme.format for scheme in quantisation.schemes)
    missing = [form.value for form in formats if form not in _kernels(device_type, dtype)]
    name = str(dtype).removeprefix("torch.")
    return [f"no kernel for {form} weights and activations in {name} on {device_type}" for form in missing]


def _kernels(device_type: str, dtype: torch.dtype) -> frozenset[Format]:
    return _KERNELS[device_type] if dtype == torch.bfloat16 else frozenset()
