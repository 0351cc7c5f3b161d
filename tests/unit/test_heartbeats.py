"""Heartbeats find ranks that hang while there is nothing to do, also those that return no results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from raycache.errors import RankLostError
from raycache.gang.executors import GangExecutor
from raycache.parallel.board import AckBoard, Lane
from raycache.parallel.collectives import Group
from raycache.parallel.context import DECIDER, Store, build_group, group_handles
from raycache.parallel.sharding import Split
from raycache.wire.control import receive_plan, send_result
from raycache.wire.plan import StepPlan

CPU = torch.device("cpu")
HOST = "127.0.0.1"
SPLIT = Split(tp=2)


def beat(folder: Path, run_rank_1: Callable[[Group, AckBoard], None], *, is_on_one_node: bool, timeout_s: float) -> int:
    """Send up to 20 heartbeats to a rank that answers, and to rank 1, which never has to; returns how many ended."""
    store, board = Store(HOST), AckBoard.create(2, directory=folder)
    board.lines[:, Lane.JOINED] = 1
    control = group_handles(
        SPLIT,
        backend="gloo",
        store=store.address,
        epoch=1,
        timeout_s=timeout_s,
        is_on_one_node=is_on_one_node,
    )["control"]

    def run(member: int) -> int:
        group = build_group(control, member=member, epoch=1, host=HOST, device=CPU)
        try:
            if member == 0:
                answer(group, board, rank=0)
            elif member == 1:
                run_rank_1(group, board)
            else:
                return decide(GangExecutor(group, split=SPLIT, board=board, timeout_s=timeout_s))
        finally:
            group.close()
        return 0

    with ThreadPoolExecutor(3) as pool:
        return next(pool.map(run, (DECIDER, 0, 1)))


def decide(executor: GangExecutor) -> int:
    for step in range(1, 21):
        plan = StepPlan(step)
        executor.submit(plan)
        try:
            executor.collect(plan)
        except RankLostError as lost:
            assert lost.rank == 1
            return step - 1
    executor.submit(StepPlan(21, is_last=True))
    executor.close()
    return 20


def answer(group: Group, board: AckBoard, *, rank: int) -> None:
    """Run plans until the last one, or until the decider is gone."""
    while True:
        try:
            plan = receive_plan(group)
            if plan.is_last:
                return
            if rank == 0:
                send_result(plan, np.zeros((0, 1), np.int64), group)
        except RankLostError:
            return
        board.post(rank, Lane.STEP, plan.step)


in_both_ways = pytest.mark.parametrize("is_on_one_node", [False, True], ids=["gloo", "Unix sockets"])


@in_both_ways
def test_ranks_that_run_heartbeats_are_kept(tmp_path: Path, is_on_one_node: bool) -> None:
    def run(group: Group, board: AckBoard) -> None:
        answer(group, board, rank=1)

    assert beat(tmp_path, run, is_on_one_node=is_on_one_node, timeout_s=20.0) == 20


@in_both_ways
def test_a_rank_that_takes_no_plan_is_lost_at_the_first_heartbeat(tmp_path: Path, is_on_one_node: bool) -> None:
    is_over, begin_s = threading.Event(), time.monotonic()

    def hang(group: Group, board: AckBoard) -> None:
        is_over.wait(8)

    try:
        assert beat(tmp_path, hang, is_on_one_node=is_on_one_node, timeout_s=2.0) == 0
    finally:
        is_over.set()
    assert time.monotonic() - begin_s > 2
