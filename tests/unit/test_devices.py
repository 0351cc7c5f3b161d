"""GPUs that cannot be used, and ranks that meet on them: what is said, without a GPU."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from raycache.errors import ConfigError, RankLostError
from raycache.parallel.context import Store, connect, group_handles
from raycache.parallel.devices import Peer, explain_no_cuda, introduce, require_gpus
from raycache.parallel.sharding import Split

HOST = "127.0.0.1"


def met(peers: list[Peer], *, store: Store, timeout_s: float = 20) -> list[list[Peer] | Exception]:
    """What each of those who come learns of the others; all ranks up to 2 are expected."""

    def come(me: Peer) -> list[Peer] | Exception:
        tcp = TCPStore(*store.address, is_master=False, timeout=timedelta(seconds=timeout_s))
        try:
            return introduce(me, range(3), store=PrefixStore("1/world", tcp), group="world")
        except (ConfigError, RankLostError) as error:
            return error

    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(come, peers))


def test_members_learn_who_the_others_are() -> None:
    peers = [Peer(rank, f"10.0.0.{rank}", f"GPU-{rank}") for rank in range(3)]
    assert met(peers, store=Store(HOST)) == [[*peers[1:]], [peers[0], peers[2]], peers[:2]]


def test_two_ranks_on_one_gpu_are_named_on_every_rank() -> None:
    peers = [Peer(0, "a", "GPU-5"), Peer(1, "b", "GPU-6"), Peer(2, "a", "GPU-5")]
    found = met(peers, store=Store(HOST))
    assert all(isinstance(error, ConfigError) for error in found)
    assert len({str(error) for error in found}) == 1
    assert "rank 0 on a and rank 2 on a compute on the same GPU GPU-5" in str(found[0])


def test_who_does_not_come_is_named_at_the_deadline() -> None:
    begin = time.monotonic()
    found = met([Peer(0, "a", "GPU-0"), Peer(2, "a", "GPU-2")], store=Store(HOST), timeout_s=1)
    assert time.monotonic() - begin < 60
    assert [(type(error), error.rank) for error in found if isinstance(error, RankLostError)] == [
        (RankLostError, 1)
    ] * 2


class NoAnswer:
    """A group whose first collective waits for a peer."""

    def allreduce(self, tensors: list[torch.Tensor]) -> None:
        threading.Event().wait()


class Refusal:
    """A group that NCCL cannot make."""

    def allreduce(self, tensors: list[torch.Tensor]) -> None:
        raise RuntimeError("NCCL error in: x.cpp:94\nLast error:\nBootstrap : no socket interface found")


@pytest.mark.parametrize(
    ("group", "said"), [(NoAnswer(), "no answer within 1 s"), (Refusal(), "Bootstrap : no socket interface found")]
)
def test_peers_that_nccl_cannot_reach_are_named_with_what_to_set(
    group: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    handle = group_handles(Split(tp=2), backend="nccl", store=(HOST, 1), epoch=1, timeout_s=1)["tp.0"]
    begin = time.monotonic()
    with pytest.raises(RankLostError, match=rf"rank 0 \(tp.0\).* rank 1 on 10.0.0.7: {said}.*NCCL_SOCKET_IFNAME"):
        connect(group, torch.device("cpu"), handle=handle, me=0, peers=[Peer(1, "10.0.0.7", "GPU-1")])
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (
            "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver by",
            "goes up to CUDA 12.8, too old for this torch, which is built for CUDA 13.0; update the driver",
        ),
        (
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
            "there is no NVIDIA driver",
        ),
        ("No CUDA GPUs are available", "CUDA_VISIBLE_DEVICES"),
        (
            "CUDA unknown error - this may be due to\nmore",
            "CUDA does not start: CUDA unknown error - this may be due to;",
        ),
        ("", "no reason given"),
    ],
)
def test_why_cuda_does_not_start_is_said_with_what_to_do(reason: str, said: str) -> None:
    found = explain_no_cuda(reason, cuda="13.0")
    assert said in found and "\n" not in found


@pytest.mark.skipif("torch.version.cuda is not None")
def test_a_torch_without_cuda_is_told_as_such() -> None:
    with pytest.raises(ConfigError, match=r"^2 GPUs requested.*built without CUDA.*--device cpu$"):
        require_gpus(2)
