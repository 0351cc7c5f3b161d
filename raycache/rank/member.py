"""A rank among the others: the device that it takes, the groups that it joins, and the board that it posts to."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from raycache.config import Config
from raycache.deployment.memory_use import MemoryUse
from raycache.parallel.board import AckBoard, Lane
from raycache.parallel.context import GroupHandle, ParallelContext
from raycache.parallel.devices import require_gpus
from raycache.parallel.relay import BoardSender, send_board

SWITCH_S = 0.0002


@dataclass(frozen=True)
class RankSpec:
    """Where a rank runs; plain data.

    Attributes:
        rank: world rank.
        host: address of its node that the other ranks can reach.
        device: such as "cpu" or "cuda:0".
        ranks_on_node: ranks that share the node's memory and cores.
        num_threads: CPU threads that it may use; 0 leaves torch's choice.
    """

    rank: int
    host: str
    device: str
    ranks_on_node: int
    num_threads: int = 0


@dataclass(frozen=True)
class Invitation:
    """What a rank needs to become a member of a gang; plain data.

    Attributes:
        config: of the service, as all ranks have it.
        spec: of this rank.
        handles: all groups of the gang.
        epoch: of the gang.
        board: of this rank's node; the lowest rank of a node passes it on to the decider, if that is elsewhere.
    """

    config: Config
    spec: RankSpec
    handles: Mapping[str, GroupHandle]
    epoch: int
    board: Path


@dataclass(frozen=True)
class Member:
    """A rank that can reach all others of its gang.

    Attributes:
        spec: of the rank.
        ctx: its groups.
        board: where it says how far it is.
        sender: passes the board on, if this rank leads a node other than the decider's.
        use: memory of its GPU; None on a CPU.
    """

    spec: RankSpec
    ctx: ParallelContext
    board: AckBoard
    sender: BoardSender | None = None
    use: MemoryUse | None = None

    def post(self, lane: Lane, value: int) -> None:
        """Set a number of this rank's line."""
        self.board.post(self.spec.rank, lane, value)

    def post_loaded(self, loaded: int, total: int) -> None:
        """Say how much of the weights is read."""
        self.post(Lane.LOADED, loaded)
        self.post(Lane.TO_LOAD, total)

    def note(self, purpose: str) -> None:
        """What the GPU's memory has been taken for since the last note."""
        if self.use is not None:
            self.use.note(purpose)


def join(invitation: Invitation) -> Member:
    """Become a member of a gang.

    Raises:
        RankLostError: another member did not come in time, or is of another epoch.
        ConfigError: there is no such GPU.
    """
    spec, handles, split = invitation.spec, invitation.handles, invitation.config.split
    device = torch.device(spec.device)
    use = _take(device, num_threads=spec.num_threads)
    board = AckBoard(invitation.board, num_ranks=split.world_size)
    rank, host, epoch = spec.rank, spec.host, invitation.epoch
    sender = send_board(board, handles, rank=rank, epoch=epoch, host=host)
    ctx = ParallelContext.join(split, rank=rank, host=host, device=device, handles=handles, epoch=epoch)
    member = Member(spec, ctx, board, sender, use)
    member.note("groups")
    member.post(Lane.JOINED, 1)
    return member


def alone(*, device: str = "cpu") -> Member:
    """The only rank of a gang, in the decider's own process.

    Raises:
        ConfigError: there is no such GPU.
    """
    use = _take(torch.device(device), num_threads=0)
    board = AckBoard.create(1)
    board.unlink()  # nobody else looks at it
    spec = RankSpec(rank=0, host="127.0.0.1", device=device, ranks_on_node=1)
    return Member(spec, ParallelContext.single(torch.device(device)), board, use=use)


def _take(device: torch.device, *, num_threads: int) -> MemoryUse | None:
    """Make this process ready to compute on a device."""
    if num_threads:
        torch.set_num_threads(num_threads)
    if device.type != "cuda":
        return None
    # The threads of page moves give the device little pieces of work all the time; in Python's own time slices of 5 ms
    # each of them would wait for the thread that launches the step.
    sys.setswitchinterval(SWITCH_S)
    require_gpus((device.index or 0) + 1)
    torch.cuda.set_device(device)
    return MemoryUse.of(device)
