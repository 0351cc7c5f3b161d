"""Random weights, so that a model of any size can be run with only its config.json.

Speed and memory depend on the shapes, and on how evenly tokens are distributed over experts. A tensor is generated as a
whole from a seed derived from its name and then sliced, so that ranks have slices of the same tensor for any split.
Values differ between device types and dtypes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from raycache.checkpoint.stored_slice import StoredSlice

_BIAS_SCALE = 0.01
"""Small compared with what biases are added to, or else all tokens would choose the same experts."""


class DummyWeights:
    """A weight source that has every requested tensor.

    Norms are one, matrices preserve the scale of their input, and everything else is small: activations stay finite in
    any number of layers, and logits differ.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def has(self, name: str) -> bool:
        """Return False, so that models request only required tensors, by their default names."""
        return False

    def read(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Return a new tensor on the device, in the dtype of the source."""
        if axis is None:
            return self._draw(name, shape)
        taken = range(shape[axis])[start:stop]
        if not taken:  # only checks that the tensor exists
            return torch.empty((*shape[:axis], 0, *shape[axis + 1 :]), dtype=self._dtype, device=self._device)
        return self._draw(name, shape).narrow(axis, taken.start, len(taken))

    def stored(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> StoredSlice | None:
        """Return None: no tensor is quantised."""
        return None

    def _draw(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=self._dtype, device=self._device)
        if len(shape) == 1 and "norm" in name and name.endswith("weight"):
            return tensor.fill_(1.0)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return tensor.normal_(0.0, _scale(name, shape), generator=generator)


def _scale(name: str, shape: Sequence[int]) -> float:
    """Standard deviation."""
    if len(shape) == 1 or name.endswith(("A_log", "bias")):
        return _BIAS_SCALE
    if "embed" in name:
        return 1.0  # no less than what layers add: tokens stay as different as they come
    return float(shape[-1] ** -0.5)  # [.., out, in], and [channels, 1, taps] of a convolution
