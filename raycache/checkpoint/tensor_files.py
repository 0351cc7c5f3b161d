"""Safetensors files of a model directory, read slice by slice.

    8 bytes   N, little endian
    N bytes   JSON: tensor name -> dtype, shape, data_offsets [begin, end) after the header
    ...       the data

All headers are read and checked when a checkpoint is opened, so that incomplete downloads are rejected before any
weight is loaded. A rank reads only the bytes of its own slices.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from raycache.checkpoint.file_reads import OpenFile
from raycache.checkpoint.read_ahead import Read, ReadAhead
from raycache.errors import CheckpointError

if TYPE_CHECKING:
    from raycache.checkpoint.stored_slice import StoredSlice

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OUTLINE = ".outline"
"""File that marks a directory whose weights are headers without data (see hub_outline.py)."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LFS_POINTER = b"version https://git-lfs"
_READ = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
}
"""Dtypes of plain tensors; token ids may be I64."""

_CODES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
}
"""Dtypes of the parts of quantised tensors (see layout.py)."""

_DTYPES = _READ | _CODES


class WeightSource(Protocol):
    """Where a model gets its weights from."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def read(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Read a tensor, or a slice of it along one axis.

        Args:
            name: as in the Hugging Face checkpoint.
            shape: required shape of the whole tensor.
            axis: of the slice, or None for the whole tensor.
            start, stop: the slice; None means shape[axis].
        Returns:
            In the stored dtype, on the CPU or a device of the source; may be modified if it owns all of its storage.
            Quantised tensors are dequantised, in the dtype and on the device of the source.
        Raises:
            CheckpointError: there is no such tensor, or it has another shape.
        """
        ...

    def stored(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> StoredSlice | None:
        """Read the codes and scales of a slice of a quantised tensor; None for a plain one. Arguments as for `read`."""
        ...


@dataclass(frozen=True)
class Stored:
    """Location of a tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size of its data, 0 for unknown dtypes."""
        return math.prod(self.shape) * (_DTYPES[self.dtype].itemsize if self.dtype in _DTYPES else 0)


class Checkpoint:
    """The weights of a model directory, in one or many safetensors files.

    Args:
        model_dir: has model.safetensors, or model.safetensors.index.json and the files that it lists.
    Raises:
        CheckpointError: a file is missing, truncated, a git-lfs pointer, of another format, or contradicts the index.
    """

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self._tensors = _scan(model_dir)
        self._open: dict[Path, OpenFile] = {}
        self._read: set[str] = set()
        self._ahead: ReadAhead | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in {stored.file for stored in self._tensors.values()})

    @property
    def has_numbers(self) -> bool:
        """Whether the files have data, and not just headers."""
        return not (self.model_dir / OUTLINE).exists()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def read(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        self.check(name, shape)
        return self.read_box(name, _box(shape, axis, start, stop))

    def stored(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> None:
        """Return None: tensors are unquantised."""
        self.check(name, shape)

    def read_box(self, name: str, box: Sequence[range]) -> Tensor:
        """Read a range of each dimension of a tensor that exists and whose dtype torch supports; see `read`."""
        self._read.add(name)
        read = self.box(name, box)
        return read.now() if self._ahead is None else self._ahead.take(read)

    def planned(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> Read:
        """The part of a file that `read` reads with these arguments; raises like `read`."""
        self.check(name, shape)
        return self.box(name, _box(shape, axis, start, stop))

    def box(self, name: str, box: Sequence[range]) -> Read:
        """The part of a file that `read_box` reads with these arguments."""
        stored = self.entry(name)
        if stored.file not in self._open:
            self._open[stored.file] = OpenFile(stored.file)
        return Read(self._open[stored.file], stored.offset, _DTYPES[stored.dtype], stored.shape, tuple(box))

    @contextmanager
    def reading_ahead(self, ahead: ReadAhead) -> Iterator[None]:
        """Within the block, take tensors from `ahead`."""
        with ahead:
            self._ahead = ahead
            try:
                yield
            finally:
                self._ahead = None

    def find(self, name: str) -> Stored | None:
        """Location of a tensor, None if there is no such tensor."""
        return self._tensors.get(name)

    def entry(self, name: str) -> Stored:
        """Location of an existing tensor."""
        return self._tensors[name]

    def check(self, name: str, shape: Sequence[int]) -> Stored:
        """Return the location of a plain tensor of this shape.

        Raises:
            CheckpointError: it is missing, or has another shape or dtype.
        """
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self.model_dir} has no tensor {name}; it is not a whole model of its model_type")
        if stored.shape != tuple(shape):
            raise CheckpointError(
                f"tensor {name} in {stored.file} has shape {list(stored.shape)}, config.json wants {list(shape)}; "
                f"config.json and weights are not of the same model"
            )
        if stored.dtype not in _READ:
            raise CheckpointError(
                f"tensor {name} in {stored.file} is {stored.dtype}, which config.json and hf_quant_config.json do not "
                "explain; download them again, or use a checkpoint in BF16, F16 or F32"
            )
        return stored

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._tensors)

    def unread(self) -> list[str]:
        """Names of tensors that were never read, sorted."""
        return sorted(self._tensors.keys() - self._read)


def _box(shape: Sequence[int], axis: int | None, start: int, stop: int | None) -> list[range]:
    box = [range(size) for size in shape]
    if axis is not None:
        box[axis] = box[axis][start:stop]
    return box


def _scan(model_dir: Path) -> dict[str, Stored]:
    index = model_dir / INDEX
    if (model_dir / SINGLE).is_file():
        return _read_header(model_dir / SINGLE)
    if not index.is_file():
        raise CheckpointError(_why_no_weights(model_dir))
    weight_map = read_index(index)
    _require_files(index, set(weight_map.values()))
    tensors: dict[str, Stored] = {}
    for name in sorted(set(weight_map.values())):
        tensors |= _read_header(model_dir / name)
    for tensor, name in weight_map.items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise CheckpointError(f"{index} says that {name} holds tensor {tensor}, it does not; download both again")
    return tensors


def read_index(index: Path) -> dict[str, str]:
    """Read an index: tensor name -> name of its file in the same directory.

    Raises:
        CheckpointError: it is not an index of safetensors files.
    """
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise CheckpointError(f"{index} is not a safetensors index ({cause!r}); download it again") from cause
    # A name with a directory could refer to any file of the machine.
    if any(Path(file).name != file for file in names.values()) or not names:
        raise CheckpointError(f"{index} must name files beside it, at least one; download it again")
    return names


def _require_files(index: Path, names: set[str]) -> None:
    missing = sorted(file for file in names if not (index.parent / file).is_file())
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {len(missing)} of {len(names)} weight files: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}; download them"
        )


def _read_header(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(len(_LFS_POINTER))
        if head == _LFS_POINTER:
            raise CheckpointError(f"{path} is a git-lfs pointer, not the weights; run `git lfs pull` in {path.parent}")
        file.seek(0)
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size >= _LENGTH_BYTES and length > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} is not a safetensors file; download it again")
        if size < _LENGTH_BYTES + length:
            raise CheckpointError(_cut_short(path, size, f"at least {_LENGTH_BYTES + length}"))
        header = file.read(length)
    try:
        rows = {name: row for name, row in json.loads(header).items() if name != "__metadata__"}
        tensors = {name: _read_row(path, row, first=_LENGTH_BYTES + length) for name, row in rows.items()}
        end = _check_places(tensors, {name: tuple(row["data_offsets"]) for name, row in rows.items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise CheckpointError(f"{path} has a damaged header ({cause!r}); download it again") from cause
    if size != _LENGTH_BYTES + length + end:
        raise CheckpointError(_cut_short(path, size, str(_LENGTH_BYTES + length + end)))
    return tensors


def _read_row(path: Path, row: Any, *, first: int) -> Stored:
    begin, _ = row["data_offsets"]
    return Stored(path, str(row["dtype"]), tuple(row["shape"]), first + begin)


def _check_places(tensors: dict[str, Stored], places: dict[str, tuple[int, ...]]) -> int:
    """Check that tensors are consecutive and have the sizes of their shapes; returns the end of the last one.

    Raises:
        ValueError: they do not.
    """
    end = 0
    for name in sorted(places, key=places.__getitem__):
        stored, (start, stop) = tensors[name], places[name]
        if any(type(number) is not int or number < 0 for number in (start, stop, *stored.shape)):
            raise ValueError(f"shape and data_offsets of {name} must be positive integers or zero")
        if start != end or stop < start:
            raise ValueError(f"data_offsets of {name} are {start} and {stop}, the tensor before it ends at {end}")
        if stored.dtype in _DTYPES and stop - start != stored.num_bytes:
            raise ValueError(f"{name} has {stop - start} bytes, its shape says {stored.num_bytes}")
        end = stop
    return end


def _cut_short(path: Path, size: int, expected: str) -> str:
    return f"{path} has {size} bytes, its header says {expected}; the download is incomplete or damaged, do it again"


def _why_no_weights(model_dir: Path) -> str:
    if not model_dir.is_dir():
        return f"{model_dir} is not a directory; download the model and give its directory"
    return why_no_weights(str(model_dir), sorted(path.name for path in model_dir.iterdir()))


def why_no_weights(model: str, names: Sequence[str]) -> str:
    """Error message for a model without readable safetensors files; `model` is its directory or name."""
    if any(name.endswith(".safetensors") for name in names):
        return f"{model} has safetensors files but neither {SINGLE} nor {INDEX}; download {INDEX}"
    for suffix, kind in ((".bin", "pickled PyTorch"), (".gguf", "GGUF"), (".pth", "pickled PyTorch")):
        if any(name.endswith(suffix) for name in names):
            return f"{model} has only {kind} weights (*{suffix}), which are not read; convert them to {SINGLE}"
    return f"{model} has no weights; expected {SINGLE}, or {INDEX} and the files that it names"


_SAMPLE_BYTES = 4096


def has_tensor(directory: Path, name: str) -> bool:
    """Whether a model directory has a tensor of this name; False if it has no weights at all."""
    try:
        return Checkpoint(directory).has(name)
    except CheckpointError:
        return False


def weights_fingerprint(directory: Path) -> str:
    """What tells two checkpoints apart: config, names, shapes, and the first bytes of every tensor.

    Reading all bytes would take as long as loading. Training changes every tensor that it changes at its begin, too; a
    file that was edited by hand elsewhere is not noticed. Files that are not read do not count.

    Args:
        directory: of the model.
    Returns:
        Hexadecimal digits, 32 of them.
    """
    message = sha256()
    weights = [SINGLE]
    if (directory / INDEX).is_file() and not (directory / SINGLE).is_file():
        weights = list(set(read_index(directory / INDEX).values()))
    found = [path for path in (directory / name for name in weights) if path.is_file()]
    for path in sorted([directory / "config.json", *found]):
        with path.open("rb") as file:
            if path.suffix == ".json":
                message.update(file.read())
                continue
            (length,) = struct.unpack("<Q", file.read(8))
            header = file.read(length)
            message.update(header)
            entries = (entry for name, entry in json.loads(header).items() if name != "__metadata__")
            for begin, end in sorted(tuple(entry["data_offsets"]) for entry in entries):
                file.seek(8 + length + begin)
                message.update(file.read(min(_SAMPLE_BYTES, end - begin)))
    return message.hexdigest()[:32]
