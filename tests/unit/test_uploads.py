"""Small copies where there is no GPU; with one, see tests/gpu/test_uploads.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.parallel.uploads import Uploads, upload, uploaded
from raycache.step.inputs import build_inputs
from raycache.wire.plan import Row, StepPlan


def test_a_tensor_for_the_cpu_stays_where_it_is() -> None:
    numbers = torch.arange(5)
    assert uploaded(numbers, torch.device("cpu")) is numbers


def test_a_buffer_on_the_cpu_is_filled() -> None:
    to = torch.zeros(5, dtype=torch.int64)
    upload(torch.arange(5), to)
    assert to.tolist() == [0, 1, 2, 3, 4]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy."""
    found: list[int] = []

    def counted(host: torch.Tensor, to: torch.Tensor) -> None:
        found.append(host.nbytes)
        upload(host, to)

    monkeypatch.setattr("raycache.parallel.uploads.upload", counted)
    return found


def test_arrays_are_copied_together_as_far_as_there_is_room(copies: list[int]) -> None:
    uploads = Uploads(torch.device("cpu"), room=4096)
    arrays = [np.arange(5), np.arange(6, dtype=np.int32).reshape(3, 2)[:, ::-1], np.empty((0, 2)), np.arange(2900.0)]
    sent = [uploads.add(array) for array in arrays]
    assert copies == [512]  # what was there when the last array came, which has a copy of its own
    sent.append(uploads.integers([1, 2]))
    uploads.send()
    uploads.send()
    assert copies == [512, 23200, 256]
    for array, tensor in zip([*arrays, np.array([1, 2])], sent, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array, strict=True)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("lengths", [[1], [8192], [8150, *[1] * 10], [3] * 40])
def test_the_inputs_of_a_step_are_one_copy(lengths: list[int], cp: int, copies: list[int]) -> None:
    rows = [
        Row(i, 0, np.arange(length, dtype=np.int32).tobytes(), output_position=length - 1, write_state=i)
        for i, length in enumerate(lengths)
    ]
    pages = {
        i: {space: np.arange(-(-length // 16), dtype=np.int32) for space in "ab"} for i, length in enumerate(lengths)
    }
    for rank in range(cp):
        ctx = ParallelContext(Split(cp=cp), rank, torch.device("cpu"), cp=Group(rank=rank, size=cp))
        inputs = build_inputs(StepPlan(0, rows), pages, page_size=16, windows={"a": 0, "b": 32}, ctx=ctx)
        assert len(copies) == 1, copies
        copies.clear()
        assert inputs.positions.tolist() == [
            at for row in inputs.rows for run in row.runs or [[0] * len(row.local)] for at in run
        ]
