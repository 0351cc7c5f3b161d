"""What a rank reports when its GPU fails: a lost peer if a kernel waited for one in vain, else its own fault."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from raycache.errors import ConfigError, RankLostError
from raycache.parallel.board import AckBoard, Lane
from raycache.parallel.collectives import TorchGroup
from raycache.parallel.context import DECIDER, GroupHandle, ParallelContext, Store, build_group
from raycache.parallel.sharding import Split
from raycache.rank.member import Member, RankSpec
from raycache.rank.run import run
from raycache.wire.control import broadcast_plan
from raycache.wire.plan import StepPlan

CPU = torch.device("cpu")
HOST = "127.0.0.1"
STEP = 3
TRAP = "unspecified launch failure"
HINT = "\nSearch for `cudaErrorLaunchFailure' in https://docs.nvidia.com/cuda"


class FailingRank:
    """A rank of which every step fails."""

    def __init__(self, ctx: ParallelContext, error: Exception) -> None:
        self.ctx, self._error = ctx, error

    def launch(self, plan: StepPlan) -> NoReturn:
        raise self._error

    def close(self) -> None: ...


def run_step(error: Exception, board: AckBoard, *, transport: str) -> Exception:
    """Send rank 0 of two a plan on which it fails; returns what it raises."""
    store = Store(HOST)
    handle = GroupHandle("control", "control", (DECIDER, 0), "gloo", *store.address, 1, 20.0)

    def decide() -> None:
        control = build_group(handle, member=DECIDER, epoch=1, host=HOST, device=CPU)
        broadcast_plan(StepPlan(STEP), control)()

    def rank() -> Exception:
        control = build_group(handle, member=0, epoch=1, host=HOST, device=CPU)
        tp = TorchGroup(None, rank=0, size=2, transport=transport)
        ctx = ParallelContext(Split(tp=2), 0, CPU, tp=tp, control=control)
        spec = RankSpec(rank=0, host=HOST, device="cpu", ranks_on_node=2)
        failing: Any = FailingRank(ctx, error)
        with pytest.raises(Exception) as caught:
            run(failing, Member(spec, ctx, board))
        return caught.value

    with ThreadPoolExecutor(2) as pool:
        deciding, running = pool.submit(decide), pool.submit(rank)
        deciding.result(30)
        return running.result(30)


@pytest.fixture
def board(tmp_path: Path) -> AckBoard:
    """The board of two ranks that have joined."""
    made = AckBoard.create(2, directory=tmp_path)
    for rank in (0, 1):
        made.post(rank, Lane.JOINED, 1)
    return made


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(f"CUDA error: {TRAP}{HINT}"),
        RuntimeError(f"Triton Error [CUDA]: {TRAP}"),
        RuntimeError(f"NCCL error: unhandled cuda error; Cuda failure 719 '{TRAP}'"),
    ],
    ids=["torch", "Triton", "NCCL"],
)
def test_a_rank_whose_kernel_waited_in_vain_has_lost_a_peer(error: Exception, board: AckBoard) -> None:
    raised = run_step(error, board, transport="peer memory")
    assert isinstance(raised, RankLostError) and "timed out waiting for a peer" in raised.cause
    assert raised.step == STEP
    assert board.lines[0, Lane.LOST] == STEP and not board.lines[0, Lane.FAILED]
    assert board.suspects(STEP) == [1], "the peer that is silent"


@pytest.mark.parametrize(
    ("error", "transport", "expected"),
    [
        (torch.AcceleratorError(f"CUDA error: {TRAP}{HINT}"), "NCCL", torch.AcceleratorError),
        (
            torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
            "peer memory",
            torch.AcceleratorError,
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "peer memory", ConfigError),
        (AssertionError("no launch failure"), "peer memory", AssertionError),
    ],
    ids=["launch failure without peer memory", "illegal address", "out of memory", "assertion"],
)
def test_a_rank_that_fails_by_itself_says_so(
    error: Exception, transport: str, expected: type[Exception], board: AckBoard
) -> None:
    assert isinstance(run_step(error, board, transport=transport), expected)
    assert board.lines[0, Lane.FAILED] == STEP and not board.lines[0, Lane.LOST]
    assert board.suspects(STEP) == [0]
