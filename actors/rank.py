"""A rank as a Ray actor: the steps of raycache/rank as remote calls.

The engine imports this module to create the actor; torch and what needs it are imported in the rank's process alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from actors.located import located
from actors.seat import Seat
from raycache.config import Config
from raycache.garbage import freeze_startup_objects, importing
from raycache.host.directory import Lease
from raycache.observe import logs
from raycache.parallel.interfaces import link

if TYPE_CHECKING:
    from raycache.parallel.board import AckBoard
    from raycache.rank.build import LoadedRank
    from raycache.rank.member import Invitation, Member
    from raycache.rank.rank import Rank

_log = logging.getLogger(__name__)
_LEAVE_S = 60.0
"""How long to wait for the end of the process that was this rank before."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a rank.

    Attributes:
        ids: Ray's.
        visible: value of CUDA_VISIBLE_DEVICES; None where it is not set.
    """

    ids: Sequence[int | str] = ()
    visible: str | None = None

    @classmethod
    def of_this_actor(cls) -> Gpus:
        """Those that Ray gave this process."""
        return cls(tuple(ray.get_gpu_ids()), os.environ.get("CUDA_VISIBLE_DEVICES"))

    def use(self) -> None:
        """Show them to this process, which must not have looked for GPUs before."""
        if self.visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible


class RankActor:
    """One rank. Call order: where, new_board (on one rank per node), join, load, build, run.

    Args:
        rank: world rank.
        epoch: of its gang.
        replica: name of the replica.
        gpus: of the running rank that this one stands by for, and that has them as long as it runs. None: Ray gives it
            its own.
    """

    def __init__(self, config: Config, rank: int, *, epoch: int, replica: str, gpus: Gpus | None = None) -> None:
        logs.set_up_actor(config.log_format, rank=rank, epoch=epoch, replica=replica)
        self._config = config
        self._of = f"replica {replica}, epoch {epoch}"
        self._number = rank
        self._member: Member | None = None
        self._loaded: LoadedRank | None = None
        self._rank: Rank | None = None
        self._lease: Lease | None = None
        self._own_board: AckBoard | None = None
        self._seat: Seat | None = None
        if gpus is not None:
            gpus.use()
        self._gpus = Gpus.of_this_actor() if gpus is None else gpus
        self._import()

    def __repr__(self) -> str:
        """Name in the Ray dashboard and in logs."""
        split = self._config.split
        return f"rank {self._number} ({split.coords(self._number)}), {self._of}"

    def where(self, seat: str) -> dict[str, Any]:
        """Return the node, the address for peers, the GPUs and their model, and how long the seat was not free.

        Args:
            seat: name of this rank's seat. A process that still computes as this rank is ended.
        Raises:
            ConfigError: the configured interface does not exist, a GPU cannot be used, or a process of another user has
                the seat.
            RankLostError: the seat is still taken.
        """
        self._seat = Seat(seat, timeout_s=_LEAVE_S)
        context = ray.get_runtime_context()
        mine = link(self._config.interface, node_address=ray.util.get_node_ip_address())
        if mine.nccl_interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", mine.nccl_interface)
        gpu = None
        if self._gpus.ids:
            import torch

            from raycache.parallel.devices import GpuModel, require_gpus

            require_gpus(1)
            gpu = GpuModel.of(torch.device("cuda:0"))
        return {
            "node": context.get_node_id(),
            "host": mine.host,
            "link": mine,
            "gpus": self._gpus,
            "gpu": gpu,
            "waited_s": self._seat.waited_s,
        }

    def new_board(self) -> Path:
        """Create the ack board of this rank's node; returns the path by which the node's ranks open it."""
        from raycache.parallel.board import AckBoard

        split = self._config.split
        self._own_board = AckBoard.create(split.world_size)
        return self._own_board.share()

    def join(self, invitation: Invitation) -> tuple[str, ...]:
        """Join the gang; returns the transports of small tensors between the ranks of this stage."""
        from raycache.rank.member import join

        self._config = located(invitation.config)
        self._member = join(replace(invitation, config=self._config))
        return self._member.ctx.transports

    def load(self, reserved: Mapping[str, int] | None, *, peer_memory: bool) -> tuple[int, Mapping[str, int]]:
        """Load the weights; returns the number of pages that fit beside them, and what is reserved in GPU memory.

        Args:
            reserved: by this rank in the gang before; None: measure it.
            peer_memory: whether all ranks of the gang use it.
        """
        from raycache.deployment.deployment import Deployment, served_model
        from raycache.rank.build import load

        assert self._member is not None, "join comes first"
        if self._own_board is not None:
            self._own_board.unshare()  # all ranks have joined
        device_type = self._member.ctx.device.type
        self._config = replace(self._config, peer_memory=peer_memory)
        self._loaded = load(Deployment(self._config, served_model(self._config), device_type), self._member)
        return self._loaded.measure(reserved), self._loaded.reserved

    def build(
        self, num_pages: int, arena: Path | None, longest_piece: int | None, *, warms_up: bool
    ) -> tuple[dict[str, float], int | None]:
        """Allocate the page pool and map the arena.

        Args:
            longest_piece: that of this rank in the gang before; None: find out.
            warms_up: whether to run steps of all kinds first.
        Returns:
            The seconds of this rank's start by phase; and tokens of the longest step that is recorded in pieces, None
            if none can be.
        """
        if arena is not None:
            # Held until this process ends, in whatever way: no other gang may use the slabs before.
            self._lease = Lease(arena.parent, "ranks")
        assert self._loaded is not None and self._member is not None, "load comes first"
        self._rank = self._loaded.build(num_pages, arena, warms_up=warms_up, longest_piece=longest_piece)
        pieces = self._rank.pieces
        return self._member.phases.seconds, None if pieces is None else pieces.longest

    def run(self) -> None:
        """Execute plans until the last one."""
        from raycache.rank.run import run

        assert self._rank is not None and self._member is not None, "build comes first"
        freeze_startup_objects()
        _log.info("rank %d is ready for plans", self._number)
        run(self._rank, self._member)

    def _import(self) -> None:
        """Import what the calls need, while the engine does the same and reads the model.

        The libraries of kernels take longest, and go on while ranks join their groups. If that fails, `load` imports
        them again, and says why.
        """
        with importing():
            import_module("raycache.rank.run")
            backend = import_module("raycache.rank.backend")
            import_module("raycache.rank.build")
        if self._gpus.ids and self._config.attention != "torch":
            ThreadPoolExecutor(1).submit(backend.import_kernels)
