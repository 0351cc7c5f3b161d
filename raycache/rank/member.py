"""What connects a rank to its gang: its device, its process groups and its progress board."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from raycache.config import Config
from raycache.deployment.memory_use import MemoryUse
from raycache.observe.phases import Phases
from raycache.parallel.board import AckBoard, Lane
from raycache.parallel.context import GroupHandle, ParallelContext
from raycache.parallel.devices import require_gpus
from raycache.parallel.relay import BoardSender, send_board

SWITCH_S = 0.00005


@dataclass(frozen=True)
class RankSpec:
    """Where a rank runs. Plain data.

    Attributes:
        rank: world rank.
        host: address of its node, reachable from the other ranks.
        device: such as "cpu" or "cuda:0".
        ranks_on_node: ranks that share the node's memory and cores.
        num_threads: CPU threads; 0: torch's default.
    """

    rank: int
    host: str
    device: str
    ranks_on_node: int
    num_threads: int = 0


@dataclass(frozen=True)
class Invitation:
    """What a rank needs to join a gang. Plain data.

    Attributes:
        config: settings, identical on all ranks.
        handles: rendezvous of the gang's process groups.
        epoch: the gang's epoch; members of another epoch are rejected.
        board: progress board of this rank's node; its lowest rank forwards it to a decider on another node.
    """

    config: Config
    spec: RankSpec
    handles: Mapping[str, GroupHandle]
    epoch: int
    board: Path


@dataclass(frozen=True)
class Member:
    """A rank that is connected to all others of its gang.

    Attributes:
        ctx: coordinates and process groups.
        board: where it posts its progress.
        sender: forwards the board to the decider; only on the lowest rank of each other node.
        use: memory use of its GPU; None on a CPU.
        phases: seconds of its start, from when it has joined.
    """

    spec: RankSpec
    ctx: ParallelContext
    board: AckBoard
    sender: BoardSender | None = None
    use: MemoryUse | None = None
    phases: Phases = field(default_factory=Phases)

    def post(self, lane: Lane, value: int) -> None:
        """Post a value on this rank's line of the board."""
        self.board.post(self.spec.rank, lane, value)

    def post_loaded(self, loaded: int, total: int) -> None:
        """Post loading progress, in bytes or layers."""
        self.post(Lane.LOADED, loaded)
        self.post(Lane.TO_LOAD, total)

    def note(self, purpose: str) -> None:
        """Attribute time, and GPU memory allocated, since the last note to `purpose`."""
        if self.use is not None:
            self.use.note(purpose)
        self.phases.end(purpose)


def threads_of(config: Config, *, cpus: int, ranks_on_node: int) -> int:
    """CPU threads of a rank: those of the settings, or its share of a node's `cpus`."""
    return max(1, cpus // ranks_on_node) if config.cpu_threads == "auto" else config.cpu_threads


def join(invitation: Invitation) -> Member:
    """Join a gang.

    Raises:
        RankLostError: another rank did not join in time, or belongs to another epoch.
        ConfigError: the GPU does not exist.
    """
    spec, handles, config = invitation.spec, invitation.handles, invitation.config
    device = torch.device(spec.device)
    use = _take(device, num_threads=spec.num_threads)
    board = AckBoard(invitation.board, num_ranks=config.world_size)
    rank, host, epoch = spec.rank, spec.host, invitation.epoch
    sender = send_board(board, handles, rank=rank, epoch=epoch, host=host)
    ctx = ParallelContext.join(
        config.split,
        rank=rank,
        host=host,
        device=device,
        handles=handles,
        epoch=epoch,
        has_peer_memory=config.peer_memory,
    )
    member = Member(spec, ctx, board, sender, use)
    member.note("groups")
    member.post(Lane.JOINED, 1)
    return member


def alone(*, device: str = "cpu") -> Member:
    """Make the only member of a gang of one rank, in the decider's process.

    Raises:
        ConfigError: the GPU does not exist.
    """
    use = _take(torch.device(device), num_threads=0)
    board = AckBoard.create(1)
    board.unlink()  # no other process reads it
    spec = RankSpec(rank=0, host="127.0.0.1", device=device, ranks_on_node=1)
    return Member(spec, ParallelContext.single(torch.device(device)), board, use=use)


def _take(device: torch.device, *, num_threads: int) -> MemoryUse | None:
    """Prepare this process to compute on a device; returns the memory use of a GPU."""
    if num_threads:
        torch.set_num_threads(num_threads)
    if device.type != "cuda":
        return None
    # Threads that move pages launch many short operations. With Python's default switch interval of 5 ms, each would
    # wait for the thread that launches the step.
    sys.setswitchinterval(SWITCH_S)
    require_gpus((device.index or 0) + 1)
    torch.cuda.set_device(device)
    return MemoryUse.of(device)
