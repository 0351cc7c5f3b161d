"""A rank as a Ray actor: a thin coat around `RankRunner`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from raycache.config import Config
from raycache.engine.host_directory import Lease
from raycache.engine.runner import RankRunner, Seat
from raycache.parallel.context import GroupHandle
from raycache.parallel.sharding import Split


class RankActor:
    """One rank. Its calls come in the order of `RankRunner`: where, join, load, build, run.

    Args:
        config: of the service.
        rank: world rank.
    """

    def __init__(self, config: Config, rank: int) -> None:
        self._config = config
        self._number = rank
        self._runner: RankRunner | None = None
        self._lease: Lease | None = None

    def __repr__(self) -> str:
        """What the Ray dashboard and logs call it."""
        split = Split(tp=self._config.tp, pp=self._config.pp, cp=self._config.cp)
        return f"rank {self._number} ({split.coords(self._number)})"

    def where(self) -> dict[str, Any]:
        """Node, address and process of this rank."""
        context = ray.get_runtime_context()
        return {"node": context.get_node_id(), "host": ray.util.get_node_ip_address(), "gpus": ray.get_gpu_ids()}

    def join(self, seat: Seat, handles: Mapping[str, GroupHandle], epoch: int, board: Path | None) -> None:
        """Become a member of the gang; see `RankRunner.join`."""
        self._runner = RankRunner(self._config, seat)
        self._runner.join(handles, epoch=epoch, board=board)

    def load(self) -> int:
        """Read the weights; pages that fit."""
        return self._started().load()

    def build(self, num_pages: int, arena: Path | None) -> None:
        """Make the pool, and map the arena."""
        if arena is not None:
            # Until this process ends, however it ends: no other gang may use the slabs before.
            self._lease = Lease(arena.parent, "ranks")
        self._started().build(num_pages, arena)

    def run(self) -> None:
        """Execute plans until the last one."""
        self._started().run()

    def _started(self) -> RankRunner:
        assert self._runner is not None, "join comes first"
        return self._runner
