"""The life of a rank in a gang: join, load, build, run. The same under Ray and in plain processes.

join   build the process groups from the handles
load   read this rank's slices of the weights; says how many pages would fit beside them
build  make the pool, with the number of pages that all ranks have agreed on
run    execute plans until the last one
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from raycache.attention.torch_ref import TorchBackend
from raycache.config import Config
from raycache.engine.control import answering_ranks, receive_plan, send_answer
from raycache.engine.host_service import open_arena
from raycache.engine.memory_plan import cache_format, pages_that_fit, pool_sizes, resolve_dtype
from raycache.engine.rank import Rank
from raycache.errors import RankLostError
from raycache.memory.device import DevicePool
from raycache.memory.mover import LaneName, Mover
from raycache.models.base import Model, components, load_model, read_config
from raycache.models.checkpoint import Checkpoint
from raycache.parallel.board import AckBoard, Lane
from raycache.parallel.context import GroupHandle, ParallelContext
from raycache.parallel.sharding import Split

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seat:
    """Where a rank sits; plain data.

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


class RankRunner:
    """One rank's life.

    Args:
        config: of the service.
        seat: of this rank.
        board: where it says how far it is, if it does not join a gang.
    """

    def __init__(self, config: Config, seat: Seat, *, board: AckBoard | None = None) -> None:
        self._config = config
        self._seat = seat
        self._device = torch.device(seat.device)
        self._dtype = resolve_dtype(config, device_type=self._device.type)
        self._ctx = ParallelContext.single(self._device)
        self._board = board
        self._model: Model | None = None
        self._rank: Rank | None = None
        if seat.num_threads:
            torch.set_num_threads(seat.num_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def join(self, handles: Mapping[str, GroupHandle], *, epoch: int, board: Path | None) -> None:
        """Become a member of the gang.

        Args:
            handles: all groups of the gang.
            epoch: of the gang.
            board: of the decider, or None on another node than its: a board is memory of one node.
        Raises:
            RankLostError: a member did not come in time, or is of another epoch.
        """
        split = Split(tp=self._config.tp, pp=self._config.pp, cp=self._config.cp)
        rank = self._seat.rank
        if board is None:
            self._board = AckBoard.create(split.world_size)
            self._board.unlink()
        else:
            self._board = AckBoard(board, num_ranks=split.world_size)
        self._ctx = ParallelContext.join(
            split, rank=rank, host=self._seat.host, device=self._device, handles=handles, epoch=epoch
        )
        self._board.post(rank, Lane.JOINED, 1)

    def load(self) -> int:
        """Read this rank's weights.

        Returns:
            Pages that fit into this rank's memory.
        Raises:
            CheckpointError: the model's directory is damaged.
            ConfigError: not even one sequence fits.
        """
        config = read_config(Path(self._config.model))
        self._model = load_model(
            config, Checkpoint(Path(self._config.model)), self._ctx, dtype=self._dtype, on_progress=self._on_progress
        )
        return pages_that_fit(
            self._config, config, ctx=self._ctx, dtype=self._dtype, ranks_on_node=self._seat.ranks_on_node
        )

    def build(self, num_pages: int, arena: Path | None = None) -> Rank:
        """Make the pool and the executor.

        Args:
            num_pages: the same on all ranks.
            arena: file of this node's host tier, or None.
        """
        assert self._model is not None, "load comes first"
        config = read_config(Path(self._config.model))
        fmt = cache_format(self._config, dtype=self._dtype)
        pool = DevicePool(
            components(config, fmt),
            num_layers=config.num_layers,
            sizes=pool_sizes(self._config, config, num_pages=num_pages, fmt=fmt),
            page_size=self._config.page_size,
            ctx=self._ctx,
        )
        self._rank = Rank(
            ctx=self._ctx,
            config=config,
            model=self._model,
            pool=pool,
            backend=TorchBackend(),
            dtype=self._dtype,
            mover=None if arena is None else self._new_mover(pool, arena),
        )
        return self._rank

    def _new_mover(self, pool: DevicePool, path: Path) -> Mover:
        arena, board, rank = open_arena(path), self._board, self._seat.rank
        assert board is not None, "join comes first"

        def post(lane: LaneName, number: int, has_failed: bool) -> None:
            board.post(rank, Lane.LOAD_US, int(1e6 * mover.load_s))
            board.post_moves(rank, lane, number, has_failed)

        mover = Mover(pool, arena, arena.layout, rank=rank, post=post)
        return mover

    def run(self) -> None:
        """Execute plans until the last one, or until the decider is gone.

        Raises:
            RankLostError: the decider or a peer is gone or late.
        """
        assert self._rank is not None and self._board is not None, "join, load and build come first"
        rank, answers = self._seat.rank, self._seat.rank in answering_ranks(self._ctx.split)
        step = 0
        try:
            while True:
                plan = receive_plan(self._ctx.control)
                step = plan.step
                answer = self._rank.execute(plan)
                if answers and not plan.is_last:
                    send_answer(plan, answer, self._ctx.control)
                self._board.post(rank, Lane.STEP, step)
                if plan.is_last:
                    return
        except RankLostError as cause:
            self._board.post(rank, Lane.LOST, max(step, 1))
            raise RankLostError(rank, str(self._ctx.coords), step, cause.cause) from cause
        except BaseException:
            self._board.post(rank, Lane.FAILED, max(step, 1))
            _log.exception("rank %d (%s) failed at step %d", rank, self._ctx.coords, step)
            raise
        finally:
            # Whoever waits for this rank fails now instead of at its deadline.
            self._ctx.close()
            self.close()

    def close(self) -> None:
        """Let go of the host tier; for a rank that does not `run`."""
        if self._rank is not None and self._rank.mover is not None:
            self._rank.mover.close()

    def _on_progress(self, loaded: int, total: int) -> None:
        if self._board is not None:
            self._board.post(self._seat.rank, Lane.LOADED, loaded * 1000 // total)
