"""When large tensors are summed in two shots: only if all members can, get right sums, and are faster."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from raycache.parallel import peer_group
from raycache.parallel.collectives import TorchGroup
from raycache.parallel.context import GroupHandle, Store, build_group
from raycache.parallel.peer_group import PeerGroup

CPU = torch.device("cpu")
HOST = "127.0.0.1"
SIZES = (1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14)
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}

Found = tuple[bool, int]
"""Whether there are sums in two shots, and the size from which on they are used."""


class Sums:
    """Sums in two shots, by gloo."""

    def __init__(self, group: TorchGroup, *, is_wrong: bool = False) -> None:
        self._group, self._is_wrong = group, is_wrong

    def sum(self, x: Tensor) -> None:
        x.copy_(self._group.all_reduce(x.float()))
        if self._is_wrong:
            x[-1] += 1


def on_two_members(
    monkeypatch: pytest.MonkeyPatch, new_sums: Callable[[TorchGroup], Any], ours_s: Callable[[int], float]
) -> list[Found]:
    """What two members decide.

    Args:
        ours_s: bytes -> seconds of a sum in two shots, where others take one.
    """

    def seconds(run: Callable[[], Any], *of: Any, **more: Any) -> float:
        return ours_s(run.args[0].nbytes) if isinstance(run, partial) else 1.0

    monkeypatch.setattr(peer_group, "_LARGE_SIZES", SIZES)
    monkeypatch.setattr(peer_group, "graph_seconds", seconds)
    monkeypatch.setattr(
        peer_group, "_two_shot", lambda: SimpleNamespace(TwoShotSums=lambda memory: new_sums(memory.group))
    )
    meeting = Store(HOST)
    handle = GroupHandle("tp.0", "tp", (0, 1), "gloo", *meeting.address, 1, 20.0)

    def member(rank: int) -> Found:
        group = build_group(handle, member=rank, epoch=1, host=HOST, device=CPU)
        assert isinstance(group, TorchGroup)
        try:
            memory: Any = SimpleNamespace(rank=rank, size=2, limit_ns=20e9, device=CPU, group=group)
            peers = PeerGroup(group._backend, memory, most_bytes=1 << 11, nccl=None)
            peer_group._add_two_shot_sums(group, peers, CPU)
            return peers.two_shot is not None, peers.least_two_shot
        finally:
            group.close()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(member, (0, 1)))


@pytest.mark.parametrize(
    ("slow", "least"),
    [
        ((), SIZES[0]),
        (SIZES[:2], SIZES[2]),
        (SIZES[2:3], SIZES[0]),
        (SIZES[4:], SIZES[0]),
        (SIZES[2:4], SIZES[4]),
        (SIZES[3:], 0),
        (SIZES, 0),
    ],
)
def test_they_are_used_from_the_size_on_at_which_they_are_faster(
    slow: tuple[int, ...], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = on_two_members(monkeypatch, Sums, lambda size: 2.0 if size in slow else 0.5)
    assert found == [(least > 0, max(least, 1))] * 2


@pytest.mark.parametrize("problem", ["no memory", "wrong"])
def test_if_they_fail_on_one_member_none_uses_them(
    problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def new_sums(group: TorchGroup) -> Sums:
        if problem == "no memory" and group.rank == 1:
            raise RuntimeError("no memory")
        return Sums(group, is_wrong=problem == "wrong" and group.rank == 1)

    caplog.set_level(logging.WARNING)
    assert on_two_members(monkeypatch, new_sums, lambda size: 0.5) == [(False, 1)] * 2
    said = [record.getMessage() for record in caplog.records if "summed through NCCL" in record.getMessage()]
    assert len(said) == 2
    assert any(problem in text for text in said)


@pytest.mark.parametrize(
    ("num_bytes", "dtype", "has_two_shot", "way"),
    [
        (0, torch.bfloat16, True, "NCCL"),
        (1 << 10, torch.bfloat16, True, "at once"),
        (1 << 11, torch.bfloat16, True, "two shots"),
        (1 << 20, torch.float32, True, "two shots"),
        (1 << 20, torch.int64, True, "NCCL"),
        (1 << 10, torch.int64, True, "NCCL"),
        (1 << 11, torch.bfloat16, False, "at once"),
        (1 << 13, torch.bfloat16, False, "NCCL"),
    ],
)
def test_a_sum_goes_one_way(
    num_bytes: int, dtype: torch.dtype, has_two_shot: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    went: list[str] = []
    monkeypatch.setattr(TorchGroup, "all_reduce", lambda self, tensor: went.append("NCCL") or tensor)
    kernels = SimpleNamespace(DTYPES=DTYPES, sum_parts=lambda tensor, memory: went.append("at once"))
    monkeypatch.setattr(peer_group, "_kernels", lambda: kernels)
    memory: Any = SimpleNamespace(rank=0, size=2)
    peers = PeerGroup(None, memory, most_bytes=1 << 12, nccl=None)
    if has_two_shot:
        peers.two_shot, peers.least_two_shot = SimpleNamespace(sum=lambda tensor: went.append("two shots")), 1 << 11  # type: ignore[assignment]
    peers.all_reduce(torch.zeros(num_bytes // dtype.itemsize, dtype=dtype))
    assert went == [way]
