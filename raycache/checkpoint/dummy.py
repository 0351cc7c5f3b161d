"""Random quantised weights in place of those of a checkpoint; plain ones are in dummy_weights.py."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import torch

from raycache.checkpoint.dummy_weights import DummyWeights
from raycache.checkpoint.layout import QuantisedTensor
from raycache.checkpoint.quantisation import Quantisation
from raycache.checkpoint.slices import cut
from raycache.checkpoint.stored_slice import Format, StoredSlice

_E2M1_SPREAD = 2.93
"""Standard deviation of what evenly drawn codes stand for."""

_E4M3_SPREAD = 64.0
"""The same of the codes that are drawn here, well inside of 448."""


class QuantisedDummyWeights(DummyWeights):
    """A weight source that has every tensor, quantised as a model directory says where the format is to be kept.

    Args:
        device: that tensors are drawn on.
        dtype: of plain tensors.
        quantisation: what the model directory says. Its first scheme is that of all matrices that it does not exclude.
        kept: formats that are drawn as codes.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, quantisation: Quantisation, *, kept: Collection[Format]
    ) -> None:
        super().__init__(device, dtype)
        self._quantisation = quantisation
        self._kept = kept

    def stored(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> StoredSlice | None:
        """Return the stored form on the device."""
        scheme = self._quantisation.schemes[0]
        if scheme.format not in self._kept or self._quantisation.excludes(name.removesuffix(".weight")):
            return None
        is_transposed = scheme.format is Format.MXFP4 and len(shape) == 3  # gpt-oss, see checkpoint.layout
        own = (*shape[:-2], *shape[:-3:-1]) if is_transposed else tuple(shape)
        rows, columns = (size or whole for size, whole in zip(scheme.block, own[-2:], strict=True))
        tensor = QuantisedTensor(scheme.format, own, (rows, columns), name, name, is_transposed=is_transposed)
        codes, scales = self._draw_codes(tensor)
        *lead, high, wide = cut(tensor, axis=axis, start=start, stop=stop)
        per_byte = scheme.format.per_byte
        experts = tuple(slice(run.start, run.stop) for run in lead)
        return StoredSlice(
            scheme.format,
            codes[(*experts, slice(high.start, high.stop), slice(wide.start // per_byte, -(-wide.stop // per_byte)))],
            scales[(*experts, _blocks(high, rows), _blocks(wide, columns))],
            shape=(*map(len, lead), len(high), len(wide)),
            block=(rows, columns),
            offset=(high.start % rows, wide.start % columns),
            is_transposed=is_transposed,
        )

    def _draw_codes(self, tensor: QuantisedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the whole tensor; the numbers have the spread that keeps the size of what they multiply."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(tensor.codes.encode()))
        spread = tensor.shape[-1] ** -0.5
        if tensor.format is Format.MXFP4:
            size = (*tensor.shape[:-1], tensor.shape[-1] // 2)
            codes = torch.randint(256, size, generator=generator, device=self._device, dtype=torch.uint8)
            exponent = 127 + round(torch.tensor(spread / _E2M1_SPREAD).log2().item())
            return codes, torch.full(tensor.grid, exponent, dtype=torch.uint8, device=self._device)
        numbers = torch.empty(tensor.shape, dtype=torch.bfloat16, device=self._device)
        numbers.normal_(0.0, _E4M3_SPREAD, generator=generator)
        scales = torch.full(tensor.grid, spread / _E4M3_SPREAD, device=self._device)
        return numbers.clamp_(-448, 448).to(torch.float8_e4m3fn), scales


def _blocks(run: range, size: int) -> slice:
    return slice(run.start // size, -(-run.stop // size))
