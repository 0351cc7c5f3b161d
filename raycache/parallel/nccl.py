"""NCCL's own functions, on a communicator that torch has made.

A sum by torch's process group has a stream and events of its own and a record for torch's watchdog, which take more CPU
time than the launch of a kernel. A layer under tp has two sums, so that launching a step of some thousand tokens could
take longer than the step. NCCL itself is called like a kernel, on the current stream.

As in a CUDA graph, such calls wait for other members without a limit of their own. While a model is served, the decider
notices that ranks do not answer and replaces them; a start is ended when a rank's process is, or by its timeout.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

_LIBRARY = "libnccl.so.2"
_SUM = 0  # ncclSum
_BYTES = 1  # ncclUint8
_TYPES = {
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""ncclDataType_t of dtypes that are summed."""


class Nccl:
    """A member's side of a communicator. Tensors are on the current device, and contiguous.

    Args:
        library: NCCL's, as torch has loaded it.
        communicator: address of the ncclComm_t, which must not be destroyed before the last call.
    """

    def __init__(self, library: Any, communicator: int) -> None:
        size, number, address = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        self._all_reduce, self._all_gather = library.ncclAllReduce, library.ncclAllGather
        self._all_reduce.argtypes = [address, address, size, number, number, address, address]
        self._all_gather.argtypes = [address, address, size, number, address, address]
        self._error = library.ncclGetErrorString
        self._error.restype = ctypes.c_char_p
        self._communicator = communicator

    def can_sum(self, tensor: Tensor) -> bool:
        """Whether `all_reduce` takes it."""
        return tensor.dtype in _TYPES and tensor.is_contiguous()

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over members, in place.

        Raises:
            RuntimeError: NCCL rejects it.
        """
        data, count, kind = tensor.data_ptr(), tensor.numel(), _TYPES[tensor.dtype]
        self._check(self._all_reduce(data, data, count, kind, _SUM, self._communicator, _stream(tensor)))

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """[...] of each member -> [size, ...].

        Raises:
            RuntimeError: NCCL rejects it.
        """
        source, to = tensor.data_ptr(), out.data_ptr()
        self._check(self._all_gather(source, to, tensor.nbytes, _BYTES, self._communicator, _stream(tensor)))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"NCCL: {self._error(code).decode()}")


def nccl_of(backend: Any) -> Nccl | None:
    """NCCL's functions for a ProcessGroupNCCL whose members are connected; None if torch's NCCL cannot be called."""
    try:
        if communicator := backend._comm_ptr():
            return Nccl(_loaded_library(), communicator)
        reason = "no communicator"
    except (AttributeError, OSError, RuntimeError) as cause:
        reason = str(cause)
    _log.info("NCCL is called by torch's process groups, which takes more CPU time: %s", reason)
    return None


def _loaded_library() -> Any:
    """The library that torch has loaded.

    Raises:
        OSError: there is none; NCCL is built into torch.
        RuntimeError: it is another one, or its calls may return before they have begun.
    """
    if os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING", "0") not in ("", "0"):
        raise RuntimeError("TORCH_NCCL_USE_COMM_NONBLOCKING is set")
    library, found = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD), ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(found))
    major, minor, patch, *_ = torch.cuda.nccl.version()
    if found.value != 10_000 * major + 100 * minor + patch:
        raise RuntimeError(f"torch has NCCL {major}.{minor}.{patch}, {_LIBRARY} is {found.value}")
    return library


def _stream(tensor: Tensor) -> int:
    stream: int = torch.cuda.current_stream(tensor.device).cuda_stream
    return stream
