"""Finds the tensors of a checkpoint that make up a quantised tensor.

    format            codes                                     scales
    FP8               X.weight F8_E4M3 [O, I]                   X.weight_scale_inv, X.weight_scale or X.scale
    MXFP4 (gpt-oss)   X_blocks U8 [E, O, I / 32, 16]            X_scales U8 [E, O, I / 32]; X is [E, I, O]
    MXFP4             X.weight_packed, X.weight U8 [O, I / 2]   X.weight_scale, X.scale [O, I / 32]
    NVFP4 (ModelOpt)  X.weight U8 [O, I / 2]                    X.weight_scale [O, I / 16] times X.weight_scale_2
    NVFP4             X.weight_packed U8 [O, I / 2]             X.weight_scale [O, I / 16] over X.weight_global_scale
    INT4              X.weight_packed I32 [O, I / 8]            X.weight_scale [O, I / group]

O are output and I input features. Stacked tensors of experts have an additional leading dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from raycache.checkpoint.quantisation import Quantisation, Scheme
from raycache.checkpoint.stored_slice import Format
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError

_FLOAT_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_CODE_TYPES = {
    Format.FP8_BLOCK: ("F8_E4M3",),
    Format.FP8_TENSOR: ("F8_E4M3",),
    Format.FP8_CHANNEL: ("F8_E4M3",),
    Format.MXFP4: ("U8", "I8"),
    Format.NVFP4: ("U8",),
    Format.INT4: ("I32",),
}
_SCALE_TYPES = {
    Format.FP8_BLOCK: _FLOAT_SCALES,
    Format.FP8_TENSOR: _FLOAT_SCALES,
    Format.FP8_CHANNEL: _FLOAT_SCALES,
    Format.MXFP4: ("U8", "F8_E8M0"),
    Format.NVFP4: ("F8_E4M3",),
    Format.INT4: _FLOAT_SCALES[:3],
}
_FP8 = (Format.FP8_BLOCK, Format.FP8_TENSOR, Format.FP8_CHANNEL)
_FP4 = (Format.NVFP4, Format.MXFP4)


@dataclass(frozen=True)
class QuantisedTensor:
    """A tensor that is stored as codes and scales.

    Attributes:
        format: of the codes.
        shape: [*lead, R, C] as stored.
        block: rows and columns that share a scale.
        codes, scales: names of their tensors.
        global_scale: name of the scale of the whole tensor, or "".
        divides: the scales are divided by the global one instead of multiplied.
        is_transposed: whether the model sees it as [*lead, C, R].
    """

    format: Format
    shape: tuple[int, ...]
    block: tuple[int, int]
    codes: str
    scales: str
    global_scale: str = ""
    divides: bool = False
    is_transposed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that it consists of."""
        return tuple(filter(None, (self.codes, self.scales, self.global_scale)))

    @property
    def grid(self) -> tuple[int, ...]:
        """[*lead, rows of blocks, columns of blocks]."""
        rows, columns = (-(-size // block) for size, block in zip(self.shape[-2:], self.block, strict=True))
        return (*self.shape[:-2], rows, columns)


class Layouts:
    """Finds out how tensors of a checkpoint are stored, from its headers; `quantisation` is None for plain weights."""

    def __init__(self, checkpoint: Checkpoint, quantisation: Quantisation | None) -> None:
        self._checkpoint = checkpoint
        self._quantisation = quantisation
        self._known: dict[tuple[str, tuple[int, ...]], QuantisedTensor | None] = {}

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name, plain or as codes."""
        return self._checkpoint.has(name) or self._signature(name) is not None

    def find(self, name: str, shape: Sequence[int]) -> QuantisedTensor | None:
        """How a tensor is stored; None if it is plain or missing.

        Args:
            name: of the tensor in the model.
            shape: required shape.
        Raises:
            CheckpointError: scales are missing, or codes or scales do not have the type and shape of a format in the
                config.
        """
        if self._quantisation is None:
            return None
        key = name, tuple(shape)  # models ask for a tensor several times
        if key not in self._known:
            self._known[key] = self._find(*key, self._quantisation)
        return self._known[key]

    def _find(self, name: str, shape: tuple[int, ...], said: Quantisation) -> QuantisedTensor | None:
        found = self._signature(name)
        if found is None or len(shape) < 2:
            return None
        codes, formats = found
        wrong = []
        for scheme in said.schemes:
            if scheme.format not in formats:
                continue
            tensor = self._described(scheme, name, shape, codes)
            misfit = self._misfit(tensor)
            if not misfit:
                self._refuse_order_and_zero_points(name)
                return tensor
            wrong.append(misfit)
        if wrong:
            raise CheckpointError(f"{self._checkpoint.model_dir}: {wrong[0]}; download it again")
        raise CheckpointError(
            f"tensor {codes} of {self._checkpoint.model_dir} is {' or '.join(one.value for one in formats)}, of which "
            f"{said.path.name} says nothing (quant_method {said.method}); config and weights are not of the same model"
        )

    def _signature(self, name: str) -> tuple[str, tuple[Format, ...]] | None:
        """(name of its codes, formats with such names and types)."""
        base = name.removesuffix(".weight")
        if any(self._checkpoint.has(name + suffix) for suffix in ("_blocks", "_scales")):
            return f"{name}_blocks", (Format.MXFP4,)
        packed = self._checkpoint.find(f"{base}.weight_packed")
        if packed is not None:
            return f"{base}.weight_packed", (Format.INT4,) if packed.dtype == "I32" else _FP4
        stored = self._checkpoint.find(name)
        match "" if stored is None else stored.dtype:
            case "F8_E4M3":
                return name, _FP8
            case "U8" | "I8":
                return name, _FP4
        return None

    def _described(self, scheme: Scheme, name: str, shape: tuple[int, ...], codes: str) -> QuantisedTensor:
        """How `name` would be stored under a scheme."""
        base, form = name.removesuffix(".weight"), scheme.format
        is_stacked = codes == f"{name}_blocks"
        if is_stacked:
            shape = (*shape[:-2], *shape[:-3:-1])
        rows, columns = (size or whole for size, whole in zip(scheme.block, shape[-2:], strict=True))
        scales = f"{name}_scales" if is_stacked else self._scales(name, base, form)
        tensor = QuantisedTensor(form, shape, (rows, columns), codes, scales, is_transposed=is_stacked)
        if form is not Format.NVFP4:
            return tensor
        divisor = f"{base}.weight_global_scale"
        divides = self._checkpoint.has(divisor)
        return replace(tensor, global_scale=divisor if divides else f"{base}.weight_scale_2", divides=divides)

    def _scales(self, name: str, base: str, form: Format) -> str:
        """The name of a matrix's scales."""
        usual = f"{name}_scale_inv" if form is Format.FP8_BLOCK else f"{name}_scale"
        names = (usual, f"{name}_scale_inv", f"{name}_scale", f"{base}.scale")
        return next(filter(self._checkpoint.has, names), usual)

    def _misfit(self, tensor: QuantisedTensor) -> str:
        """Which part of a tensor is missing, or has the wrong type or shape for its format; empty if none."""
        parts = [
            (tensor.codes, _CODE_TYPES[tensor.format], _code_shapes(tensor)),
            (tensor.scales, _SCALE_TYPES[tensor.format], _scale_shapes(tensor)),
        ]
        if tensor.global_scale:
            parts.append((tensor.global_scale, ("F32",), ((), (1,))))
        for name, types, shapes in parts:
            stored = self._checkpoint.find(name)
            if stored is None:
                return f"no tensor {name}, which {tensor.format.value} weights need"
            if stored.dtype not in types or stored.shape not in shapes:
                wanted = " or ".join(str(list(shape)) for shape in shapes)
                return (
                    f"tensor {name} in {stored.file.name} is {stored.dtype} {list(stored.shape)}, "
                    f"{tensor.format.value} wants {' or '.join(types)} {wanted}"
                )
        return ""

    def _refuse_order_and_zero_points(self, name: str) -> None:
        for suffix in ("_g_idx", "_zero_point"):
            if self._checkpoint.has(name + suffix):
                raise CheckpointError(
                    f"{self._checkpoint.model_dir} has a tensor {name}{suffix}; reordered columns and zero points are "
                    "not supported, use a variant of the model without"
                )


def _code_shapes(tensor: QuantisedTensor) -> tuple[tuple[int, ...], ...]:
    *lead, columns = tensor.shape
    match tensor.format:
        case Format.INT4:
            return ((*lead, -(-columns // 8)),)
        case Format.MXFP4 if tensor.is_transposed:
            return ((*lead, columns // 32, 16),)
        case Format.MXFP4 | Format.NVFP4:
            return ((*lead, columns // 2),)
    return (tensor.shape,)


def _scale_shapes(tensor: QuantisedTensor) -> tuple[tuple[int, ...], ...]:
    """The grid, also without dimensions of size one."""
    grid = tensor.grid
    if tensor.format is Format.FP8_TENSOR:
        return (grid, (), (1,)) if math.prod(grid) == 1 else (grid,)
    return (grid, grid[:-1]) if tensor.format is Format.FP8_CHANNEL else (grid,)
