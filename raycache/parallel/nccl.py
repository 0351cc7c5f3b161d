"""NCCL's own functions, on a communicator that torch has made.

A sum by torch's process group takes 0.23 ms of CPU time on a server's core, as it has a stream and events of its own
and a record for torch's watchdog. A layer under tp has two sums, so that launching a step of some thousand tokens could
take longer than the step. NCCL itself is called like a kernel, on the current stream.

As in a CUDA graph, such calls wait for other members without a limit of their own. The decider notices that a rank does
not answer, and kills the gang.
"""

from __future__ import annotations

import ctypes
import logging
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
    """NCCL's functions for a ProcessGroupNCCL whose members are connected; None if torch has NCCL built in."""
    try:
        communicator = backend._comm_ptr()
        if communicator:
            return Nccl(ctypes.CDLL(_LIBRARY), communicator)
        reason = "no communicator"
    except (AttributeError, OSError, RuntimeError) as cause:
        reason = str(cause)
    _log.info("NCCL is called by torch's process groups, which takes more CPU time: %s", reason)
    return None


def _stream(tensor: Tensor) -> int:
    stream: int = torch.cuda.current_stream(tensor.device).cuda_stream
    return stream
