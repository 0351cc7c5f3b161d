"""Reads the codes and scales of a slice of a quantised tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from raycache.checkpoint.layout import QuantisedTensor
from raycache.checkpoint.stored_slice import Format, StoredSlice, factors
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError

Box = tuple[range, ...]
"""A range of each dimension of a stored tensor."""

CHUNK = 1 << 21
"""Elements dequantised at a time, at least a row, so that intermediate results fit the processor's caches."""


def cut(tensor: QuantisedTensor, *, axis: int | None, start: int, stop: int | None) -> Box:
    """The box of a slice along an axis of the tensor as the model sees it."""
    box = [range(size) for size in tensor.shape]
    if axis is not None:
        axis %= len(box)
        if tensor.is_transposed and axis >= len(box) - 2:
            axis = 2 * len(box) - 3 - axis
        box[axis] = box[axis][start:stop]
    return tuple(box)


def chunks(box: Box) -> Iterator[Box]:
    """Split a non-empty box into boxes of at most `CHUNK` elements, or of one row."""
    first, *others = box
    size = math.prod(map(len, others))
    if size > CHUNK and len(others) > 1:
        for place in range(len(first)):
            yield from ((first[place : place + 1], *inner) for inner in chunks(tuple(others)))
        return
    step = max(1, CHUNK // size)
    for begin in range(0, len(first), step):
        yield (first[begin : begin + step], *others)


def within(part: Box, box: Box) -> tuple[slice, ...]:
    """Slices of a part of a box in a tensor that holds the box."""
    return tuple(
        slice(inner.start - outer.start, inner.stop - outer.start) for inner, outer in zip(part, box, strict=True)
    )


def read_slice(checkpoint: Checkpoint, tensor: QuantisedTensor, box: Box) -> StoredSlice:
    """Read a part of a tensor.

    Raises:
        CheckpointError: a scale is not finite, or the file cannot be read.
    """
    *lead, rows, columns = box
    high, wide = tensor.block
    return StoredSlice(
        tensor.format,
        _read_codes(checkpoint, tensor, box),
        read_scales(checkpoint, tensor, (*lead, _blocks(rows, high), _blocks(columns, wide))),
        shape=tuple(map(len, box)),
        block=tensor.block,
        offset=(rows.start % high, columns.start % wide),
        global_scale=read_global_scale(checkpoint, tensor),
        is_transposed=tensor.is_transposed,
    )


def read_scales(checkpoint: Checkpoint, tensor: QuantisedTensor, box: Box) -> Tensor:
    """Scales of a box of blocks, in the dtype of the file.

    Raises:
        CheckpointError: one is not finite.
    """
    stored = checkpoint.entry(tensor.scales)
    if len(stored.shape) == len(tensor.grid):
        scales = checkpoint.read_box(tensor.scales, box)
    else:  # without dimensions of one, and small
        scales = checkpoint.read_box(tensor.scales, [range(size) for size in stored.shape]).reshape(tensor.grid)
        scales = scales[within(box, tuple(map(range, tensor.grid)))]
    if not torch.isfinite(factors(scales)).all():
        raise CheckpointError(f"tensor {tensor.scales} in {stored.file} has a scale that is not finite; {_AGAIN}")
    return scales


def read_global_scale(checkpoint: Checkpoint, tensor: QuantisedTensor) -> float:
    """Factor of all scales of a tensor.

    Raises:
        CheckpointError: it is not finite.
    """
    if not tensor.global_scale:
        return 1.0
    stored = checkpoint.entry(tensor.global_scale)
    value = float(checkpoint.read_box(tensor.global_scale, [range(size) for size in stored.shape]))
    if not math.isfinite(value) or (tensor.divides and value == 0):
        raise CheckpointError(
            f"tensor {tensor.global_scale} in {stored.file} is {value}, which is not a valid scale; {_AGAIN}"
        )
    return 1 / value if tensor.divides else value


_AGAIN = "the file is damaged, download it again"


def _read_codes(checkpoint: Checkpoint, tensor: QuantisedTensor, box: Box) -> Tensor:
    """Read the codes of a slice (`StoredSlice.codes`)."""
    wanted = codes_box(checkpoint, tensor, box)
    codes = checkpoint.read_box(tensor.codes, wanted)
    if tensor.format.per_byte == 1:
        return codes
    codes = codes.contiguous().view(torch.uint8)  # eight codes of an I32 lie in it from the lowest byte on
    codes = codes.flatten(-2) if len(wanted) > len(box) else codes
    first, last = box[-1].start // 2, -(-box[-1].stop // 2)
    skipped = _code_bytes(tensor, has_blocks=len(wanted) > len(box)) * wanted[len(box) - 1].start
    return codes[..., first - skipped : last - skipped]


def codes_box(checkpoint: Checkpoint, tensor: QuantisedTensor, box: Box) -> Box:
    """The box of the codes' tensor for a box of elements."""
    *lead, rows, columns = box
    if tensor.format.per_byte == 1:
        return box
    # In gpt-oss, the bytes of a block are a separate dimension.
    has_blocks = len(checkpoint.entry(tensor.codes).shape) > len(box)
    size = _code_bytes(tensor, has_blocks=has_blocks)
    wholes = range(columns.start // 2 // size, -(-columns.stop // 2 // size))
    return (*lead, rows, wholes, *([range(size)] if has_blocks else []))


def _code_bytes(tensor: QuantisedTensor, *, has_blocks: bool) -> int:
    """Granularity of reads, in bytes."""
    return 16 if has_blocks else 4 if tensor.format is Format.INT4 else 1


def _blocks(run: Sequence[int], size: int) -> range:
    """Blocks that a range overlaps."""
    return range(run[0] // size, run[-1] // size + 1) if run else range(0)
