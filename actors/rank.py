"""A rank as a Ray actor: a thin coat around `RankRunner`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from raycache.checkpoint.hub_models import located
from raycache.config import Config
from raycache.host.directory import Lease
from raycache.observe import logs
from raycache.parallel.board import AckBoard
from raycache.parallel.context import GroupHandle
from raycache.parallel.interfaces import link
from raycache.rank.runner import RankRunner, Seat

_log = logging.getLogger(__name__)


class RankActor:
    """One rank. Its calls come in this order: where, new_board on some, join, load, build, run; see `RankRunner`.

    Args:
        config: of the service.
        rank: world rank.
        epoch: of its gang.
        replica: whose rank it is.
    """

    def __init__(self, config: Config, rank: int, *, epoch: int, replica: str) -> None:
        logs.set_up(config.log_format, rank=rank, epoch=epoch, replica=replica)
        self._config = config
        self._of = f"replica {replica}, epoch {epoch}"
        self._number = rank
        self._runner: RankRunner | None = None
        self._lease: Lease | None = None
        self._own_board: AckBoard | None = None

    def __repr__(self) -> str:
        """What the Ray dashboard and logs call it."""
        split = self._config.split
        return f"rank {self._number} ({split.coords(self._number)}), {self._of}"

    def where(self) -> dict[str, Any]:
        """Node, address that peers reach this rank by, and GPUs.

        Raises:
            ConfigError: the interface that is set is not there.
        """
        context = ray.get_runtime_context()
        mine = link(self._config.interface, node_address=ray.util.get_node_ip_address())
        if mine.nccl_interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", mine.nccl_interface)
        return {"node": context.get_node_id(), "host": mine.host, "link": mine, "gpus": ray.get_gpu_ids()}

    def new_board(self) -> Path:
        """Make the ack board of this rank's node, which it leads; returns where the node's ranks find it."""
        split = self._config.split
        self._own_board = AckBoard.create(split.world_size)
        return self._own_board.share()

    def join(self, seat: Seat, handles: Mapping[str, GroupHandle], epoch: int, board: Path) -> None:
        """Become a member of the gang; see `RankRunner.join`."""
        self._runner = RankRunner(located(self._config), seat)
        self._runner.join(handles, epoch=epoch, board=board)

    def load(self) -> int:
        """Read the weights; pages that fit."""
        if self._own_board is not None:
            self._own_board.unshare()  # all ranks have joined
        return self._started().load()

    def build(self, num_pages: int, arena: Path | None) -> None:
        """Make the pool, and map the arena."""
        if arena is not None:
            # Until this process ends, however it ends: no other gang may use the slabs before.
            self._lease = Lease(arena.parent, "ranks")
        self._started().build(num_pages, arena)

    def run(self) -> None:
        """Execute plans until the last one."""
        _log.info("rank %d runs plans", self._number)
        self._started().run()

    def _started(self) -> RankRunner:
        assert self._runner is not None, "join comes first"
        return self._runner
