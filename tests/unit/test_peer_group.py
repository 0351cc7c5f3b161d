"""Groups with peer memory where there is none, and tensors on their way through it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # missing from its stubs

from raycache.parallel.collectives import TorchGroup
from raycache.parallel.context import GroupHandle, Store, build_group
from raycache.parallel.peer_group import _aligned, _unpadded, with_peers

CPU = torch.device("cpu")
HOST = "127.0.0.1"


def test_members_without_peer_memory_keep_their_group_and_say_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    meeting = Store(HOST)
    handle = GroupHandle("tp.0", "tp", (0, 1), "gloo", *meeting.address, 1, 20.0)
    shared = HashStore()
    shared.set_timeout(timedelta(seconds=20))

    def member(rank: int) -> tuple[bool, float]:
        group = build_group(handle, member=rank, epoch=1, host=HOST, device=CPU)
        assert isinstance(group, TorchGroup)
        try:
            store = PrefixStore("peers", shared)
            found = with_peers(group, None, name=f"peers.{rank}", store=store, device=CPU, limit_s=20.0)
            return found is group, float(found.all_reduce(torch.tensor([1.0 + rank])))
        finally:
            group.close()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(member, (0, 1))) == [(True, 3.0)] * 2
    said = [
        record.getMessage() for record in caplog.records if "exchanges all tensors through NCCL" in record.getMessage()
    ]
    assert len(said) == 2
    assert all(text.rpartition("NCCL: ")[2] for text in said)


@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (2, 8), (4, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("offset", [0, 1])
def test_tensors_of_any_size_and_place_come_out_as_they_went_in(
    shape: tuple[int, ...], dtype: torch.dtype, offset: int
) -> None:
    numbers = torch.arange(1000).to(dtype)
    whole = numbers[offset : offset + torch.Size(shape).numel()].view(shape)
    for tensor in (whole, whole.transpose(0, -1)):
        own = _aligned(tensor)
        assert own.is_contiguous()
        assert own.nbytes % 16 == own.data_ptr() % 16 == 0
        if own.shape == tensor.shape:
            assert torch.equal(own, tensor)
        else:
            every = torch.stack([own, own])
            assert torch.equal(_unpadded(every, tensor), torch.stack([tensor, tensor]))
