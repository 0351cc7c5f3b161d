"""What ranks post on another node's board reaches the decider's, until the leader there ends, dies or falls silent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from raycache.errors import RankLostError
from raycache.parallel.board import AckBoard, Lane
from raycache.parallel.context import GroupHandle, Store, group_handles
from raycache.parallel.relay import BoardReceiver, leaders, receive_boards, send_board
from raycache.parallel.sharding import Split

HOST = "127.0.0.1"
NODES = (0, 0, 1, 1)
LEADER = 2
WAIT_S = 20.0  # longer than a busy machine takes


@pytest.fixture
def boards(tmp_path: Path) -> tuple[AckBoard, AckBoard]:
    """Of the decider's node and of the other one."""
    return AckBoard.create(4, directory=tmp_path), AckBoard.create(4, directory=tmp_path)


def handles_of(store: Store, *, timeout_s: float = WAIT_S) -> dict[str, GroupHandle]:
    split = Split(tp=4)
    found = group_handles(
        split, backend="gloo", store=store.address, epoch=1, timeout_s=timeout_s, leaders=leaders(NODES, here=0)
    )
    return {name: handle for name, handle in found.items() if handle.kind == "boards"}


def eventually(holds: Callable[[], bool], *, within_s: float = WAIT_S) -> float:
    """Wait until it holds; seconds that it took."""
    start_s = time.monotonic()
    while not holds():
        assert time.monotonic() - start_s < within_s, "it never holds"
        time.sleep(0.002)
    return time.monotonic() - start_s


def lead(connection: Connection, path: Path, handles: Mapping[str, GroupHandle]) -> None:
    """A leader in a process of its own: sends until it is told whether the gang is lost."""
    connection.send("up")
    sender = send_board(AckBoard(path, num_ranks=4), handles, rank=LEADER, epoch=1, host=HOST)
    assert sender is not None
    connection.send("joined")
    sender.close(has_lost=connection.recv())


@dataclass
class Relay:
    """Both ends."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    receiver: BoardReceiver


@contextmanager
def relay(boards: tuple[AckBoard, AckBoard], *, timeout_s: float = WAIT_S) -> Iterator[Relay]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["raycache.parallel.relay"])
    ours, theirs = context.Pipe()
    store = Store(HOST)
    handles = handles_of(store, timeout_s=timeout_s)
    process = context.Process(target=lead, args=(theirs, boards[1].path, handles), daemon=True)
    process.start()
    try:
        assert ours.poll(6 * WAIT_S) and ours.recv() == "up"
        (receiver,) = receive_boards(boards[0], handles, nodes=NODES, epoch=1, host=HOST)
        assert ours.poll(WAIT_S) and ours.recv() == "joined"
        yield Relay(process, ours, receiver)
    finally:
        process.kill()
        process.join()
        store.close()


def test_the_lowest_rank_of_every_other_node_leads_it() -> None:
    assert leaders(["a", "b", "b", "c", "a", "c"], here="a") == [1, 3]
    assert leaders(["a", "b", "b", "c", "a", "c"], here="nobody is here") == [0, 1, 3]
    assert leaders([0, 0], here=0) == []


def test_numbers_of_another_node_arrive_and_those_of_this_one_stay(boards: tuple[AckBoard, AckBoard]) -> None:
    ours, theirs = boards
    with relay(boards) as ends:
        ours.post(0, Lane.STEP, 7)
        theirs.post(0, Lane.STEP, 1)  # nobody of rank 0 is there
        theirs.post(2, Lane.LOADED, 1000)
        theirs.post(3, Lane.STEP, 2**62)
        eventually(lambda: ours.lines[3, Lane.STEP] == 2**62)
        expected = np.zeros((4, len(Lane)), np.int64)
        expected[0, Lane.STEP], expected[2, Lane.LOADED], expected[3, Lane.STEP] = 7, 1000, 2**62
        np.testing.assert_array_equal(ours.lines, expected)
        # The last word comes with the end, however late it was posted.
        theirs.post(2, Lane.STEP, 9)
        ends.connection.send(False)
        eventually(lambda: ends.receiver.is_over)
        assert ours.lines[2, Lane.STEP] == 9


def test_no_failed_move_is_covered_by_a_watermark_that_comes_before_it(boards: tuple[AckBoard, AckBoard]) -> None:
    ours, theirs = boards
    for rank in (0, 1):
        ours.post_moves(rank, "load", 2**40, False)
    is_over = threading.Event()

    def move() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            for rank in (2, 3):
                theirs.post_moves(rank, "load", number, True)

    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    mover = threading.Thread(target=move)
    try:
        with relay(boards):
            mover.start()
            seen = set()
            end_s = time.monotonic() + 1.5
            while time.monotonic() < end_s or len(seen) < 20:
                acks = ours.acks()
                assert acks.bad_load >= acks.loads, "all loads up to there have failed"
                seen.add(acks.loads)
                assert time.monotonic() < end_s + WAIT_S
    finally:
        is_over.set()
        mover.join()
        sys.setswitchinterval(switch_s)


def test_a_leader_that_is_killed_leaves_its_lines_as_they_were(boards: tuple[AckBoard, AckBoard]) -> None:
    ours, theirs = boards
    with relay(boards) as ends:
        theirs.post(3, Lane.STEP, 5)
        eventually(lambda: ours.lines[3, Lane.STEP] == 5)
        ends.process.kill()
        eventually(lambda: ends.receiver.is_over, within_s=WAIT_S / 2)
        theirs.post(3, Lane.STEP, 6)
        time.sleep(0.05)
        assert ours.lines[3, Lane.STEP] == 5


@pytest.mark.long
def test_a_leader_that_is_frozen_is_given_up_at_the_deadline_and_not_before(boards: tuple[AckBoard, AckBoard]) -> None:
    timeout_s = 4.0
    with relay(boards, timeout_s=timeout_s) as ends:
        # Silent ranks are no silent leader: its signs of life come.
        time.sleep(1.2 * timeout_s)
        assert not ends.receiver.is_over
        assert ends.process.pid is not None
        os.kill(ends.process.pid, signal.SIGSTOP)
        taken_s = eventually(lambda: ends.receiver.is_over, within_s=timeout_s + WAIT_S)
        assert taken_s > timeout_s / 2


def test_a_closed_receiver_takes_nothing_and_ends_with_the_leader(boards: tuple[AckBoard, AckBoard]) -> None:
    ours, theirs = boards
    with relay(boards) as ends:
        theirs.post(2, Lane.STEP, 1)
        eventually(lambda: ours.lines[2, Lane.STEP] == 1)
        ends.receiver.close()
        theirs.post(2, Lane.STEP, 2)
        ends.connection.send(False)
        eventually(lambda: ends.receiver.is_over)
        assert ours.lines[2, Lane.STEP] == 1


def test_a_leader_that_lost_the_gang_waits_for_its_neighbours_to_say_so(boards: tuple[AckBoard, AckBoard]) -> None:
    ours, theirs = boards
    with relay(boards) as ends:
        for rank in (2, 3):
            theirs.post(rank, Lane.JOINED, 1)
        theirs.post(2, Lane.LOST, 4)
        ends.connection.send(True)
        time.sleep(0.05)
        theirs.post(3, Lane.LOST, 4)
        eventually(lambda: ends.receiver.is_over)
        assert ours.lines[3, Lane.LOST] == 4


def test_a_handle_of_another_epoch_is_refused(boards: tuple[AckBoard, AckBoard]) -> None:
    store = Store(HOST)
    old = {name: replace(handle, epoch=0) for name, handle in handles_of(store).items()}
    with pytest.raises(RankLostError, match="epoch 0 refused"):
        send_board(boards[1], old, rank=LEADER, epoch=1, host=HOST)
    with pytest.raises(RankLostError, match="epoch 0 refused"):
        receive_boards(boards[0], old, nodes=NODES, epoch=1, host=HOST)
    assert send_board(boards[1], old, rank=3, epoch=1, host=HOST) is None, "who leads nothing joins nothing"
