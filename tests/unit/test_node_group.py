"""The control group of a gang on one node, in threads: long messages, members that hang, leave or never come."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from raycache.errors import RankLostError
from raycache.parallel import node_group
from raycache.parallel.collectives import Group
from raycache.parallel.context import DECIDER, GroupHandle, Store, build_group, group_handles
from raycache.parallel.node_group import NodeGroup
from raycache.parallel.sharding import Split

CPU = torch.device("cpu")
HOST = "127.0.0.1"
LONG = 1 << 21
"""Bytes, several times as many as a socket takes."""
T = TypeVar("T")


@pytest.fixture
def store() -> Store:
    return Store(HOST)


def handle_of(store: Store, *, size: int = 2, timeout_s: float = 20.0) -> GroupHandle:
    return group_handles(
        Split(tp=size), backend="gloo", store=store.address, epoch=1, timeout_s=timeout_s, is_on_one_node=True
    )["control"]


def join(handle: GroupHandle, member: int) -> Group:
    return build_group(handle, member=member, epoch=1, host=HOST, device=CPU)


def together(handle: GroupHandle, work: Callable[[Group, int], T]) -> list[T]:
    """Let the decider and all ranks do the same work, each in its own thread."""

    def member(rank: int) -> T:
        group = join(handle, rank)
        assert isinstance(group, NodeGroup)
        try:
            return work(group, rank)
        finally:
            group.close()

    with ThreadPoolExecutor(len(handle.members)) as pool:
        return list(pool.map(member, handle.members))


def numbers(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (LONG,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_messages_of_any_length_keep_their_order(store: Store) -> None:
    lengths = [1, 0, LONG, 3, LONG, 16 * 1024]

    def work(group: Group, rank: int) -> bool:
        if rank == DECIDER:
            sent = [group.ibroadcast(numbers(i)[:length], root=0) for i, length in enumerate(lengths)]
            for i, length in enumerate(lengths):
                for source in (1, 2):
                    found = group.recv(torch.zeros(length, dtype=torch.uint8), source=source)
                    assert torch.equal(found, numbers(10 * source + i)[:length])
            for each in sent:
                each()
            return all(each.is_done() for each in sent)
        for i, length in enumerate(lengths):
            found = group.broadcast(torch.zeros(length, dtype=torch.uint8), root=0)
            assert torch.equal(found, numbers(i)[:length])
            group.send(numbers(10 * (rank + 1) + i)[:length], to=0)
        return True

    assert together(handle_of(store), work) == [True] * 3


def test_a_rank_that_takes_nothing_keeps_no_long_message_from_another(store: Store) -> None:
    has_all = threading.Event()

    def work(group: Group, rank: int) -> None:
        if rank == DECIDER:
            sent = [group.ibroadcast(numbers(i), root=0) for i in range(4)]
            group.recv(torch.zeros(1), source=1)
            has_all.set()
            for each in sent:
                each()
            return
        if rank == 1:
            assert has_all.wait(30)
        for i in range(4):
            assert torch.equal(group.broadcast(torch.zeros(LONG, dtype=torch.uint8), root=0), numbers(i))
        if rank == 0:
            group.send(torch.zeros(1), to=0)

    together(handle_of(store), work)


def test_a_message_that_has_not_come_is_no_reason_to_wait(store: Store) -> None:
    has_looked = threading.Event()

    def work(group: Group, rank: int) -> None:
        tensor = torch.zeros(1)
        if rank == DECIDER:
            assert has_looked.wait(30)
            group.ibroadcast(tensor + 7, root=0)()
            return
        started = group.ibroadcast(tensor, root=0)
        assert not started.is_done()
        has_looked.set()
        while not started.is_done():
            time.sleep(0.001)
        assert tensor.item() == 7

    together(handle_of(store, size=1), work)


@pytest.mark.parametrize("leaver", [DECIDER, 1])
def test_a_member_that_leaves_is_missed_at_once(store: Store, leaver: int) -> None:
    def work(group: Group, rank: int) -> float:
        if rank == leaver or (leaver == 1 and rank == 0):
            if rank == 0:
                time.sleep(3)  # alive, and silent
            return 0.0
        start = time.monotonic()
        with pytest.raises(RankLostError, match="a peer is gone or late"):
            if rank == DECIDER:
                # It waits for one, while the other leaves.
                waits = [group.irecv(torch.zeros(1), source=source) for source in (1, 2)]
                waits[0]()
            else:
                group.broadcast(torch.zeros(1), root=0)
        return time.monotonic() - start

    assert max(together(handle_of(store), work)) < 2


@pytest.mark.parametrize("is_sender", [False, True])
def test_a_member_that_is_silent_is_lost_at_the_deadline(store: Store, is_sender: bool) -> None:
    is_over = threading.Event()

    def work(group: Group, rank: int) -> float:
        if rank != DECIDER:
            assert is_over.wait(30)
            return 1.0
        start = time.monotonic()
        with pytest.raises(RankLostError, match="not done within 1 s"):
            if is_sender:
                group.ibroadcast(numbers(0), root=0)()
            else:
                group.recv(torch.zeros(1), source=1)
        is_over.set()
        return time.monotonic() - start

    assert 0.9 < together(handle_of(store, size=1, timeout_s=1.0), work)[0] < 10


@pytest.mark.parametrize("missing", [DECIDER, 1])
def test_a_member_that_does_not_come_is_missed_at_the_deadline(store: Store, missing: int) -> None:
    handle = handle_of(store, timeout_s=1.0)

    def member(rank: int) -> None:
        with pytest.raises(RankLostError, match="did not form within 1 s"):
            join(handle, rank)

    start = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(member, [rank for rank in handle.members if rank != missing]))
    assert time.monotonic() - start < 30


def test_a_rank_that_leaves_before_it_has_joined_is_missed_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(path: str, index: int, *, timeout_s: float) -> socket.socket:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(f"\0{path}")
        raise ConnectionResetError("gone")

    handle, begin_s = handle_of(store, size=1), time.monotonic()
    monkeypatch.setattr(node_group, "_visit", leave)

    def member(rank: int) -> None:
        with pytest.raises(RankLostError):
            join(handle, rank)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(member, handle.members))
    assert time.monotonic() - begin_s < 10  # of a deadline of 20


def test_a_decider_whose_meeting_point_is_closed_waits_for_nobody(store: Store) -> None:
    handle = handle_of(store, timeout_s=60.0)

    def decide() -> None:
        with pytest.raises(RankLostError, match="did not form"):
            join(handle, DECIDER)

    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(decide)
        time.sleep(0.5)
        store.close()
        joining.result(30)
    assert time.monotonic() - start < 20


def test_processes_of_other_users_are_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_group.os, "getuid", lambda: 12_345_678)

    def member(rank: int) -> None:
        with pytest.raises(RankLostError, match="did not form: a process of user|did not form"):
            join(handle, rank)

    handle = handle_of(store, size=1)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(member, handle.members))


def test_only_a_broadcast_reaches_all(store: Store) -> None:
    def work(group: Group, rank: int) -> None:
        for collective in (group.all_reduce, group.all_gather, group.all_to_all):
            with pytest.raises(AssertionError):
                collective(torch.ones(2))

    together(handle_of(store), work)


def test_only_gangs_of_one_node_have_one() -> None:
    def backends(is_on_one_node: bool) -> dict[str, str]:
        handles = group_handles(
            Split(cp=2), backend="nccl", store=(HOST, 1), epoch=1, timeout_s=1, is_on_one_node=is_on_one_node
        )
        return {name: handle.backend for name, handle in handles.items() if handle.kind in ("control", "cp")}

    assert backends(True) == {"control": "unix", "cp.0": "nccl"}
    assert backends(False) == {"control": "gloo", "cp.0": "nccl"}
