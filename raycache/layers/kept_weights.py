"""Weights that stay quantised on the device: codes and scales of a checkpoint in the layout of the kernels.

For weights without a kernel None is returned, and the caller reads them dequantised; each reason is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.checkpoint.stored_slice import Format, StoredSlice
from raycache.checkpoint.tensor_files import WeightSource
from raycache.errors import CheckpointError
from raycache.layers import mx_packing
from raycache.layers.quantised import GROUP, Fp8Matrix
from raycache.layers.quantised_experts import ExpertMatrices, Fp8Matrices, MxMatrices

_log = logging.getLogger(__name__)

_FP8 = (Format.FP8_BLOCK, Format.FP8_TENSOR, Format.FP8_CHANNEL)
_MX_GROUP = 32
_LARGEST_EXPONENT = 128
"""Of MXFP4 scales, plus 127: the kernel multiplies scales by 2^126 in bfloat16."""

# Shapes in this file: O output and I input features of a cut, K = I padded with zeros to whole groups of 128,
# G = K / 128, E experts.


@dataclass(frozen=True)
class Cut:
    """The slice `taken` along an axis of a tensor of `shape`."""

    name: str
    shape: tuple[int, ...]
    axis: int
    taken: range


class KeptWeights:
    """Reads matrices that stay quantised.

    Args:
        source: its `stored` returns None for tensors that are not quantised or are to be dequantised.
        dtype: of the activations.
    """

    def __init__(self, source: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
        self._source = source
        self._device = device
        self._dtype = dtype
        self._logged: set[str] = set()

    def matrix(self, cuts: Sequence[Cut]) -> Fp8Matrix | None:
        """Stack cuts with the same input features along their output features; None if they must be dequantised."""
        slices = self._slices(cuts)
        if slices is None:
            return None
        obstacle = fp8_obstacle(slices) or Fp8Matrix.obstacle(sum(one.shape[-2] for one in slices))
        if obstacle:
            self._refuse(cuts[0], obstacle)
            return None
        return fp8_matrix([one.to(self._device) for one in slices])

    def experts(self, groups: Sequence[Sequence[Cut]], *, rows: Sequence[int] | None = None) -> ExpertMatrices | None:
        """Matrices of experts; None if they must be dequantised.

        Args:
            groups: cuts of each expert, to be stacked along their output features; or a single group of cuts of
                tensors with a dimension of experts.
            rows: order of the output features; None for that of the cuts.
        """
        first = self._slices(groups[0])
        if first is None:
            return None
        is_mx = all(one.format is Format.MXFP4 for one in first)
        find_obstacle = mx_obstacle if is_mx else fp8_obstacle
        if obstacle := find_obstacle(first):
            self._refuse(groups[0][0], obstacle)
            return None
        count = first[0].shape[0] if len(first[0].shape) == 3 else len(groups)
        own = self._experts(groups, first, find_obstacle)
        return mx_matrices(own, count, rows=rows) if is_mx else fp8_matrices(own, count, rows=rows)

    def _experts(
        self,
        groups: Sequence[Sequence[Cut]],
        first: list[StoredSlice],
        find_obstacle: Callable[[Sequence[StoredSlice]], str],
    ) -> Iterator[list[StoredSlice]]:
        """Slices of each expert, on the device.

        Raises:
            CheckpointError: the first expert can stay quantised but another cannot.
        """
        for number, group in enumerate(groups):
            slices = first if number == 0 else self._slices(group)
            obstacle = "" if number == 0 else "it is not quantised" if slices is None else find_obstacle(slices)
            if slices is None or obstacle:
                raise CheckpointError(
                    f"{group[0].name} cannot stay quantised like {groups[0][0].name}: {obstacle}; pass "
                    "--weights bfloat16"
                )
            for expert in each_expert(slices):
                yield [one.to(self._device) for one in expert]

    def _slices(self, cuts: Sequence[Cut]) -> list[StoredSlice] | None:
        if self._device.type != "cuda" or self._dtype != torch.bfloat16:
            return None
        slices = []
        for cut in cuts:
            one = self._source.stored(
                cut.name, shape=cut.shape, axis=cut.axis, start=cut.taken.start, stop=cut.taken.stop
            )
            if one is None:
                return None
            slices.append(one)
        return slices

    def _refuse(self, cut: Cut, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            _log.warning("%s and others like it are dequantised to bfloat16: %s", cut.name, reason)


def fp8_obstacle(slices: Sequence[StoredSlice]) -> str:
    """Why slices of one matrix cannot stay in FP8, or ""."""
    for one in slices:
        if one.format not in _FP8:
            return f"no kernel for {one.format.value} weights here"
        if one.is_transposed:
            return f"no kernel for transposed {one.format.value} weights"
        if one.scales.shape[-1] > 1 and one.block[1] != GROUP:
            return f"no kernel for blocks of {one.block[1]} columns"
    return _misfit(slices)


def mx_obstacle(slices: Sequence[StoredSlice]) -> str:
    """Why slices of one matrix cannot stay in MXFP4, or ""."""
    for one in slices:
        if one.format is not Format.MXFP4:
            return f"no kernel for {one.format.value} beside MXFP4"
        if one.block != (1, _MX_GROUP):
            return f"no kernel for MXFP4 in blocks of {one.block[0]} x {one.block[1]}"
        if int(one.scales.view(torch.uint8).max()) > _LARGEST_EXPONENT:
            return "no kernel for MXFP4 with scales above 2"
    if sum(one.shape[-2] for one in slices) % 2:
        return "no kernel for MXFP4 with an odd number of output features"
    return _misfit(slices)


def each_expert(slices: Sequence[StoredSlice]) -> Iterator[list[StoredSlice]]:
    """Split slices with a dimension of experts by expert; others belong to one expert."""
    if len(slices[0].shape) == 2:
        yield list(slices)
        return
    for expert in range(slices[0].shape[0]):
        yield [replace(one, codes=one.codes[expert], scales=one.scales[expert], shape=one.shape[1:]) for one in slices]


def fp8_matrix(slices: Sequence[StoredSlice]) -> Fp8Matrix:
    """Stack FP8 slices with the same input features."""
    codes, scales = _stacked(map(_fp8_rows, slices), None)
    blocks = _per_block(scales)
    if blocks is not None:
        blocks = F.pad(blocks, (0, -blocks.shape[1] % 4))
    return Fp8Matrix(
        codes.view(torch.float8_e4m3fn),
        scales.mT.contiguous(),
        blocks,
        num_inputs=slices[0].shape[-1],
        offset=_offset(slices[0]),
    )


def fp8_matrices(experts: Iterator[list[StoredSlice]], count: int, *, rows: Sequence[int] | None = None) -> Fp8Matrices:
    """Stack the FP8 slices of each expert, with output features in the order of `rows`."""

    def arranged(slices: list[StoredSlice]) -> tuple[Tensor, Tensor]:
        return _stacked(map(_fp8_rows, slices), rows)

    (codes, scales), one = _for_each(experts, count, arranged)
    blocks = _per_block(scales)
    return Fp8Matrices(
        codes.view(torch.float8_e4m3fn),
        scales if blocks is None else blocks,
        rows_per_scale=1 if blocks is None else GROUP,
        offset=_offset(one),
    )


def mx_matrices(experts: Iterator[list[StoredSlice]], count: int, *, rows: Sequence[int] | None = None) -> MxMatrices:
    """Stack the MXFP4 slices of each expert, with output features in the order of `rows`."""

    def arranged(slices: list[StoredSlice]) -> tuple[Tensor, Tensor]:
        codes, exponents = _stacked(map(_mx_rows, slices), rows)
        return mx_packing.pack(codes), mx_packing.pack_scales(exponents)

    (codes, scales), one = _for_each(experts, count, arranged)
    return MxMatrices(codes, scales, offset=_offset(one))


def _for_each(
    experts: Iterator[list[StoredSlice]], count: int, arranged: Callable[[list[StoredSlice]], tuple[Tensor, Tensor]]
) -> tuple[tuple[Tensor, Tensor], StoredSlice]:
    """Codes and scales of all experts, [E, ...] each, and a slice of the last expert."""
    codes, scales = torch.empty(0), torch.empty(0)
    for number, slices in enumerate(experts):
        own = arranged(slices)
        if number == 0:
            codes, scales = (part.new_empty(count, *part.shape) for part in own)
        codes[number], scales[number] = own
    return (codes, scales), slices[0]


def _stacked(parts: Iterator[tuple[Tensor, Tensor]], rows: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """Concatenate codes and scales along output features."""
    codes, scales = (torch.cat(own) for own in zip(*parts, strict=True))
    if rows is None:
        return codes, scales
    index = torch.tensor(rows, device=codes.device)
    return codes.index_select(0, index), scales.index_select(0, index)


def _fp8_rows(one: StoredSlice) -> tuple[Tensor, Tensor]:
    """Codes [O, K] as bytes, and scales [O, G]."""
    num_rows, num_columns = one.shape
    offset = _offset(one)
    num_groups = -(-(offset + num_columns) // GROUP)
    codes = F.pad(one.codes.view(torch.uint8), (offset, num_groups * GROUP - offset - num_columns))
    scales = one.scale_factors()
    if scales.shape[0] > 1:
        index = (torch.arange(num_rows, device=scales.device) + one.offset[0]) // one.block[0]
        scales = scales.index_select(0, index)
    return codes, scales.expand(num_rows, num_groups).contiguous()


def _mx_rows(one: StoredSlice) -> tuple[Tensor, Tensor]:
    """Codes [O, K], one per byte, and exponents [O, K / 32]."""
    num_columns, offset = one.shape[1], _offset(one)
    size = -(-(offset + num_columns) // GROUP) * GROUP
    skip = one.offset[1] % one.format.per_byte
    codes = torch.stack((one.codes & 15, one.codes >> 4), dim=-1).flatten(1)[:, skip : skip + num_columns]
    exponents = one.scales.view(torch.uint8)
    codes = F.pad(codes, (offset, size - offset - num_columns))
    return codes, F.pad(exponents, (0, size // _MX_GROUP - exponents.shape[1]))


def _per_block(scales: Tensor) -> Tensor | None:
    """[..., O, G] -> [..., O / 128 rounded up, G] if scales are the same within 128 rows, else None."""
    blocks = scales[..., ::GROUP, :].clone(memory_format=torch.contiguous_format)  # regular strides even for one row
    is_same = torch.equal(blocks.repeat_interleave(GROUP, -2)[..., : scales.shape[-2], :], scales)
    return blocks if is_same else None


def _offset(one: StoredSlice) -> int:
    """Columns of zeros before a slice, so that its groups begin where those of the tensor do."""
    return 0 if one.scales.shape[-1] == 1 and one.block[1] not in (GROUP, _MX_GROUP) else one.offset[1]


def _misfit(slices: Sequence[StoredSlice]) -> str:
    return "" if len({_offset(one) for one in slices}) == 1 else "its parts begin in different columns"
