"""Copies to and from pinned memory in calls of the CUDA runtime, which is played by memory on the host."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from raycache.memory import streams
from raycache.memory.streams import CopyEngine

STREAM = cast(torch.cuda.Stream, SimpleNamespace(cuda_stream=7))


class Runtime:
    """Copies at once.

    Attributes:
        counts: copies of each call.
        orders: when each call's sources may be read, as CUDA numbers them.
        fails_at: number of the call that fails, from 1; 0 for none.
    """

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.orders: list[int] = []
        self.fails_at = 0

    def cudaMemcpyBatchAsync(
        self, to: Any, source: Any, num_bytes: Any, count: Any, attributes: Any, *more: Any
    ) -> int:
        columns = [
            np.ctypeslib.as_array(ctypes.cast(each, ctypes.POINTER(ctypes.c_uint64)), (count.value,))
            for each in (to, source, num_bytes)
        ]
        for one in zip(*(column.tolist() for column in columns), strict=True):
            ctypes.memmove(*one)
        self.counts.append(count.value)
        self.orders.append(attributes[0])
        assert more[-1].value == STREAM.cuda_stream
        return self._code()

    def cudaMemcpyAsync(self, to: Any, source: Any, num_bytes: Any, kind: int, stream: Any) -> int:
        ctypes.memmove(to.value, source.value, num_bytes.value)
        self.counts.append(1)
        return self._code()

    def _code(self) -> int:
        return 719 if len(self.counts) == self.fails_at else 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    monkeypatch.setattr(streams.ctypes, "CDLL", lambda name: found)
    return found


@pytest.mark.parametrize("count", [0, 1, 512, 513, 2295])
@pytest.mark.parametrize("has_batches", [True, False])
def test_any_number_of_copies_arrives_in_calls_of_few(has_batches: bool, count: int, runtime: Runtime) -> None:
    generator = np.random.default_rng(count)
    source = generator.integers(0, 256, 16 * count + 16, dtype=np.uint8)
    to, places = np.zeros_like(source), 16 * generator.permutation(count)
    lengths = generator.integers(1, 17, count)
    copies = np.stack([to.ctypes.data + places, source.ctypes.data + places, lengths]).astype(np.uint64)
    CopyEngine(has_batches=has_batches).copy(copies, STREAM, is_early=count % 2 == 1)
    wanted = np.zeros_like(to)
    for place, length in zip(places.tolist(), lengths.tolist(), strict=True):
        wanted[place : place + length] = source[place : place + length]
    assert np.array_equal(to, wanted)
    assert sum(runtime.counts) == count and max(runtime.counts, default=0) <= (512 if has_batches else 1)
    assert set(runtime.orders) <= {3 if count % 2 else 1}


@pytest.mark.parametrize("has_batches", [True, False])
def test_an_error_of_any_call_is_reported(has_batches: bool, runtime: Runtime) -> None:
    some = np.zeros(16, np.uint8)
    copies = np.full((3, 600), some.ctypes.data, np.uint64)
    copies[2] = 16
    runtime.fails_at = 2
    with pytest.raises(RuntimeError, match=r"CUDA rejected copies to or from the host \(error 719\)"):
        CopyEngine(has_batches=has_batches).copy(copies, STREAM)
    assert len(runtime.counts) == 2
