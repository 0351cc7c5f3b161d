"""Small copies between the host and a GPU: every size and dtype, beside long copies, and memory that is still used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raycache.attention.flashinfer_replans import StaticRows, StaticTable
from raycache.attention.flashinfer_tables import Table
from raycache.attention.layout import StepLayout
from raycache.memory.streams import CopyEngine, cuda_major
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.parallel.uploads import Uploads, download, upload, uploaded
from raycache.step.inputs import build_inputs
from raycache.wire.plan import Row, StepPlan

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
DTYPES = [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.uint8, torch.bool]
LONG = 200_000_000  # cycles, a tenth of a second


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (1023,), (1025,), (70_001,)], ids=str)
def test_numbers_come_there_and_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numbers = torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)
    there = uploaded(numbers, DEVICE)
    assert there.is_cuda and torch.equal(there.cpu(), numbers)
    back, copied = download(there)
    copied.synchronize()
    assert torch.equal(back, numbers)


def test_a_part_of_a_buffer_is_copied_at_any_offset_and_nothing_beside_it() -> None:
    host = torch.arange(5000).pin_memory()
    there = torch.full((5000,), -1, device=DEVICE)
    upload(host[3:4000], there[3:4000])
    wanted = torch.cat([torch.full((3,), -1), torch.arange(3, 4000), torch.full((1000,), -1)])
    assert torch.equal(there.cpu(), wanted)


def test_memory_is_not_reused_before_the_device_has_read_it() -> None:
    torch.cuda._sleep(LONG)
    there = [uploaded(torch.full((1000,), number), DEVICE) for number in range(50)]
    assert [int(numbers.max()) for numbers in there] == [int(numbers.min()) for numbers in there] == list(range(50))


def test_a_table_of_one_step_is_copied_even_if_it_is_dropped() -> None:
    torch.cuda._sleep(LONG)
    found = []
    for number in range(20):
        lens = np.full(64, number, np.int32)
        starts = np.arange(65, dtype=np.int32)
        table = StaticTable(StaticRows(64, 64), DEVICE)
        table.fill(Table(slice(0, 64), starts, starts, np.full(64, number, np.int32), lens, page_len=16))
        table.keep()
        found.append((table.lens, table.ids[:64]))
        del table
    torch.cuda.synchronize()
    assert [{*lens.tolist(), *ids.tolist()} for lens, ids in found] == [{number} for number in range(20)]


def test_results_that_nobody_waits_for_do_not_overwrite_others() -> None:
    torch.cuda._sleep(LONG)
    for _ in range(50):
        download(torch.full((1000,), -1, device=DEVICE))
    inputs = [torch.full((1000,), number).pin_memory() for number in range(50)]
    torch.cuda.synchronize()
    assert [int(numbers.min()) for numbers in inputs] == list(range(50))


@pytest.mark.parametrize("to_device", [True, False], ids=["load", "save"])
def test_small_copies_do_not_wait_for_long_ones(to_device: bool) -> None:
    """The long ones take a third of a second."""
    host = torch.zeros(1 << 28, dtype=torch.uint8).pin_memory()
    on_device = torch.zeros(1 << 28, dtype=torch.uint8, device=DEVICE)
    small, first = torch.arange(100_000), uploaded(torch.arange(100), DEVICE)
    moving, stepping = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    to, source = (on_device, host) if to_device else (host, on_device)
    one = np.array([[to.data_ptr()], [source.data_ptr()], [1 << 28]], np.uint64)
    for _ in range(64):
        CopyEngine(has_batches=cuda_major() >= 13).copy(one, moving)
    end = moving.record_event()
    with torch.cuda.stream(stepping):
        there = uploaded(small, DEVICE)
        back, copied = download(first)
    copied.synchronize()
    assert not end.query()
    assert torch.equal(there.cpu(), small) and torch.equal(back, torch.arange(100))


def test_arrays_travel_together_behind_a_busy_stream() -> None:
    """Pinned memory is not used again before the copy has read it."""
    arrays = [np.arange(5), np.arange(6, dtype=np.int32).reshape(3, 2), np.zeros((0, 2)), np.array([1, 0], np.uint8)]
    for _ in range(3):
        torch.cuda._sleep(LONG)
        uploads = Uploads(DEVICE, room=4096)
        sent = [uploads.add(array) for array in arrays]
        uploads.send()
        del uploads
        for _ in range(8):
            torch.empty(512, dtype=torch.int64, pin_memory=True).fill_(-1)
        for array, tensor in zip(arrays, sent, strict=True):
            assert tensor.is_cuda
            assert not tensor.numel() or tensor.data_ptr() % 256 == 0
            np.testing.assert_array_equal(tensor.cpu().numpy(), array, strict=True)


@pytest.mark.parametrize("lengths", [[1] * 3, [8192], [8150, *[1] * 10], [64, 500, 31, 2]])
def test_the_tables_of_recurrent_layers_are_one_copy_each(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    def counted(host: torch.Tensor, to: torch.Tensor) -> None:
        copies.append(host.nbytes)
        upload(host, to)

    from raycache.attention.recurrent_kernels import SHORT, KernelRecurrence  # Triton is there only with a GPU

    rows = [Row(i, 0, bytes(4 * length), output_position=length - 1, write_state=i) for i, length in enumerate(lengths)]
    ctx = ParallelContext(Split(), 0, DEVICE)
    inputs = build_inputs(StepPlan(0, rows), {i: {} for i in range(len(rows))}, page_size=16, windows={}, ctx=ctx)
    layout = StepLayout(inputs)
    monkeypatch.setattr("raycache.parallel.uploads.upload", counted)
    plan = KernelRecurrence(layout)
    assert len(copies) == 1, copies
    if max(lengths) > SHORT:
        assert plan._delta is not None
        assert len(copies) == 2, copies
