"""Ranks of one host that exchange tensors through peer memory, for the tests of such exchanges."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch

from raycache.config import Config
from raycache.gang.processes import RankProcess, meet_here
from raycache.parallel import peer_group
from raycache.parallel.context import ParallelContext
from raycache.rank.member import Invitation

Work = Callable[[ParallelContext], Any]


def num_ranks() -> int:
    return min(torch.cuda.device_count(), 4)


def each_rank(work: Work, *, timeout_s: float = 60.0, sees_one: bool = False, **split: int) -> list[Any]:
    """What a function returns on every rank, each in a process of its own.

    Args:
        work: a function of a module, or a partial of one.
        sees_one: whether each process sees its own GPU only, as under Ray.
        split: into `num_ranks()` ranks.
    """
    config = Config(model="none", dummy_weights=True, rank_timeout_s=timeout_s, **split)  # type: ignore[arg-type]
    meeting, invitations = meet_here(config, device_type="cuda")
    ranks = [RankProcess(run_rank, invitation) for invitation in invitations]
    try:
        for rank in ranks:
            rank.send((work, sees_one))
        return [rank.receive() for rank in ranks]
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
        meeting.board.unlink()


def run_rank(connection: Connection, invitation: Invitation) -> None:
    work, sees_one = connection.recv()
    handles = {name: handle for name, handle in invitation.handles.items() if handle.kind != "control"}
    spec, device = invitation.spec, torch.device(invitation.spec.device)
    if sees_one:
        os.environ["CUDA_VISIBLE_DEVICES"], device = str(device.index), torch.device("cuda:0")
    torch.cuda.set_device(device)
    # A start measures whether NCCL is faster, which depends on who else uses the GPUs; here it never is.
    with (
        mock.patch.object(peer_group, "_measure", lambda *_: peer_group._SIZES[-1]),
        mock.patch.object(peer_group, "_measure_two_shots", lambda *_: peer_group._LARGE_SIZES[0]),
    ):
        ctx = ParallelContext.join(
            invitation.config.split,
            rank=spec.rank,
            host=spec.host,
            device=device,
            handles=handles,
            epoch=1,
            has_peer_memory=True,
        )
    connection.send(work(ctx))
    connection.recv()
