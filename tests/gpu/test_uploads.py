"""Small copies between the host and a GPU: every size and dtype, beside long copies, and memory that is still used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raycache.memory.streams import CopyEngine, cuda_major
from raycache.parallel.uploads import Uploads, download, upload, uploaded

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


def test_arrays_travel_together() -> None:
    """Of several types and sizes, some of them empty; the third does not fit beside the others."""
    uploads = Uploads(DEVICE, room=4096)
    arrays = [
        np.arange(5),
        np.arange(6, dtype=np.int32).reshape(3, 2)[:, ::-1],
        np.random.default_rng(0).standard_normal(5000),
        np.zeros((0, 2), np.int64),
        np.array([1, 0, 1], np.uint8),
    ]
    for _ in range(3):
        sent = [uploads.add(array) for array in arrays]
        uploads.send()
        for array, tensor in zip(arrays, sent, strict=True):
            assert tensor.is_cuda
            assert tensor.is_contiguous()
            assert not tensor.numel() or tensor.data_ptr() % 256 == 0
            np.testing.assert_array_equal(tensor.cpu().numpy(), array, strict=True)
    uploads.send()
