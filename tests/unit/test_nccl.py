"""NCCL's functions as they are called, with a library that adds on the CPU; groups with and without them."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from raycache.errors import RankLostError
from raycache.parallel import nccl
from raycache.parallel.collectives import TorchGroup
from raycache.parallel.nccl import Nccl, nccl_of

SIZE, COMMUNICATOR, STREAM = 3, 1 << 40, 1 << 41
C_TYPES = {4: ctypes.c_int64, 7: ctypes.c_float, 8: ctypes.c_double}
"""Numbers of nccl.h."""


class Library:
    """Members that all give the same."""

    code = 0

    def __init__(self) -> None:
        self.ncclAllReduce: Any = self._function(self._sum)
        self.ncclAllGather: Any = self._function(self._gather)
        self.ncclGetErrorString: Any = self._function(lambda code: b"unhandled system error")

    def _function(self, work: Any) -> Any:
        return type("Function", (), {"__call__": staticmethod(work)})()

    def _sum(self, source: int, to: int, count: int, kind: int, operation: int, communicator: int, stream: int) -> int:
        assert (operation, communicator, stream) == (0, COMMUNICATOR, STREAM)
        numbers = [(C_TYPES[kind] * count).from_address(address) for address in (source, to)]
        numbers[1][:] = [SIZE * number for number in numbers[0]]
        return self.code

    def _gather(self, source: int, to: int, count: int, kind: int, communicator: int, stream: int) -> int:
        assert (kind, communicator, stream) == (1, COMMUNICATOR, STREAM)
        ctypes.memmove(to, SIZE * ctypes.string_at(source, count), SIZE * count)
        return self.code


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr(nccl, "_stream", lambda tensor: STREAM)
    return Library()


def group_of(library: Library, backend: Any = None) -> TorchGroup:
    return TorchGroup(backend, rank=0, size=SIZE, transport="NCCL", nccl=Nccl(library, COMMUNICATOR))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_sums_and_gathers_of_whole_tensors(library: Library, dtype: torch.dtype) -> None:
    group, tensor = group_of(library), torch.arange(35).view(5, 7).to(dtype)
    strided = tensor.T.contiguous().T
    assert torch.equal(group.all_gather(strided), tensor.expand(SIZE, 5, 7))
    summed = tensor.clone()
    assert group.all_reduce(summed) is summed
    assert torch.equal(summed, SIZE * tensor)


def test_what_it_does_not_take_goes_through_torch(library: Library) -> None:
    backend = MagicMock()
    group = group_of(library, backend)
    group.all_reduce(torch.zeros(4, dtype=torch.bool))
    group.all_reduce(torch.zeros(4, 3).T)
    assert [name for name, _, _ in backend.method_calls] == ["allreduce", "allreduce"]


def test_an_error_is_a_lost_peer(library: Library) -> None:
    library.code = 2
    for collective in (group_of(library).all_reduce, group_of(library).all_gather):
        with pytest.raises(RankLostError, match="unhandled system error"):
            collective(torch.zeros(2))


@pytest.mark.parametrize("backend", [SimpleNamespace(), SimpleNamespace(_comm_ptr=lambda: 0)], ids=["old", "apart"])
def test_torch_without_a_communicator_or_library_is_used_as_it_is(backend: Any) -> None:
    assert nccl_of(backend) is None


BACKEND = SimpleNamespace(_comm_ptr=lambda: COMMUNICATOR)


def test_a_library_that_torch_has_not_loaded_is_not_used() -> None:
    assert nccl_of(BACKEND) is None


@pytest.mark.parametrize(
    ("loaded", "setting", "is_used"), [(22809, "0", True), (22809, "", True), (22808, "0", False), (22809, "1", False)]
)
def test_only_the_library_of_torch_is_called(
    loaded: int, setting: str, is_used: bool, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(into: Any) -> int:
        into._obj.value = loaded
        return 0

    modes = []
    library.ncclGetVersion = version  # type: ignore[attr-defined]
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: modes.append(mode) or library)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", setting)
    assert (nccl_of(BACKEND) is not None) == is_used
    assert all(mode & os.RTLD_NOLOAD for mode in modes), "another one would be loaded"
