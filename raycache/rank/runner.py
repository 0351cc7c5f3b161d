"""The life of a rank in a gang: join, load, build, run. The same under Ray and in plain processes.

join   build the process groups from the handles
load   read this rank's slices of the weights; says how many pages would fit beside them
build  make the pool, with the number of pages that all ranks have agreed on
run    execute plans until the last one
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from raycache.attention.base import NotRecordableError
from raycache.config import Config
from raycache.deployment.memory_plan import (
    cache_format,
    num_spare_states,
    pages_that_fit,
    pool_sizes,
    resolve_dtype,
    served_model,
)
from raycache.deployment.memory_use import MemoryUse, refusing_out_of_memory
from raycache.errors import RankLostError
from raycache.host.service import open_arena
from raycache.memory.component import STATE, Reuse
from raycache.memory.device import DevicePool, unit_bytes
from raycache.memory.mover import LaneName, Mover
from raycache.models.base import Model, ModelConfig, components
from raycache.models.drafts.base import DraftModel
from raycache.parallel.board import AckBoard, Lane
from raycache.parallel.context import GroupHandle, ParallelContext
from raycache.parallel.devices import require_gpus
from raycache.parallel.relay import BoardSender, send_board
from raycache.rank.answer import PendingAnswer
from raycache.rank.backend import choose_backend
from raycache.rank.graphs import DecodeGraphs, batch_sizes
from raycache.rank.guesser import Guesser
from raycache.rank.last_tokens import LastTokens
from raycache.rank.loading import load_weights, read_threads
from raycache.rank.peak import measure_peak
from raycache.rank.rank import Rank
from raycache.wire.control import receive_plan, result_ranks, send_result
from raycache.wire.plan import StepPlan

_log = logging.getLogger(__name__)

SWITCH_S = 0.0002
STAGING_BYTES = 512 << 20
"""Of a GPU, kept for page moves until their buffers and checksums are made, beside four units: four buffers of 32 MiB,
or of a unit where that is wider, and sums of up to 320 MiB."""


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
        self._sender: BoardSender | None = None
        self._model: Model | None = None
        self._draft: DraftModel | None = None
        self._rank: Rank | None = None
        self._step = 0
        self._is_answering = False
        self._untold: deque[tuple[StepPlan, PendingAnswer]] = deque()
        if seat.num_threads:
            torch.set_num_threads(seat.num_threads)
        self._use: MemoryUse | None = None
        if self._device.type == "cuda":
            # The threads of page moves give the device little pieces of work all the time; in Python's own time slices
            # of 5 ms each of them would wait for the thread that launches the step.
            sys.setswitchinterval(SWITCH_S)
            require_gpus((self._device.index or 0) + 1)
            torch.cuda.set_device(self._device)
            self._use = MemoryUse.of(self._device)

    def join(self, handles: Mapping[str, GroupHandle], *, epoch: int, board: Path) -> None:
        """Become a member of the gang.

        Args:
            handles: all groups of the gang.
            epoch: of the gang.
            board: of this rank's node; the lowest rank of a node passes it on to the decider, if that is elsewhere.
        Raises:
            RankLostError: a member did not come in time, or is of another epoch.
        """
        split = self._config.split
        rank, host = self._seat.rank, self._seat.host
        self._board = AckBoard(board, num_ranks=split.world_size)
        self._sender = send_board(self._board, handles, rank=rank, epoch=epoch, host=host)
        self._ctx = ParallelContext.join(split, rank=rank, host=host, device=self._device, handles=handles, epoch=epoch)
        self._is_answering = rank in result_ranks(split)
        self._board.post(rank, Lane.JOINED, 1)

    def load(self) -> int:
        """Read this rank's weights.

        Returns:
            Pages that fit into this rank's memory.
        Raises:
            CheckpointError: the model's directory is damaged.
            ConfigError: not even one sequence fits.
        """
        config = served_model(self._config)
        self._note("groups")
        self._backend = choose_backend(self._config, config, self._device, self._dtype)
        with refusing_out_of_memory(self._device, doing="loading weights"):
            self._model, self._draft = load_weights(
                self._config,
                config,
                self._ctx,
                self._dtype,
                num_threads=read_threads(ranks_on_node=self._seat.ranks_on_node),
                on_progress=self._on_progress,
            )
        self._note("weights")
        if self._use is not None:
            sizes, draft_sizes = self._graph_sizes
            num_graphs = len(sizes) + bool(draft_sizes) * len(sizes) + len(draft_sizes) if self._has_graphs else 0
            measure_peak(self._config, self._new_rank(config, num_pages=0), use=self._use, num_graphs=num_graphs)
            if self._config.has_host_tier:
                self._use.keep("staging", self._staging_bytes(config))
        return pages_that_fit(
            self._config,
            config,
            ctx=self._ctx,
            dtype=self._dtype,
            ranks_on_node=self._seat.ranks_on_node,
            use=self._use,
        )

    @property
    def _has_graphs(self) -> bool:
        return self._config.cuda_graphs and self._backend.capabilities.can_capture and self._config.pp == 1

    def _note(self, purpose: str) -> None:
        if self._use is not None:
            self._use.note(purpose)

    def build(self, num_pages: int, arena: Path | None = None) -> Rank:
        """Make the pool and the executor.

        Args:
            num_pages: the same on all ranks.
            arena: file of this node's host tier, or None.
        """
        config = served_model(self._config)
        self._rank = rank = self._new_rank(config, num_pages=num_pages)
        self._note("pages")
        if arena is not None:
            with refusing_out_of_memory(self._device, doing="making the buffers of page moves"):
                rank.mover = self._new_mover(rank.pool, arena)
        if self._config.plans_ahead(device_type=self._device.type):
            rank.last = LastTokens(self._config.max_running, self._ctx)
        self._note("staging")
        if self._has_graphs:
            self._record(rank)
        if self._use is not None:
            self._use.note("graphs")
            for purpose in ("graphs", "staging"):
                self._use.keep(purpose, 0)
            _log.info("memory of %s: %s", self._device, self._use)
            self._use.check()
        return rank

    def _staging_bytes(self, config: ModelConfig) -> int:
        """Most that page moves take of a GPU."""
        parts = components(config, cache_format(self._config, dtype=self._dtype))
        place = {"num_layers": config.num_layers, "page_size": self._config.page_size}
        units = Counter[str]()
        for part in parts:
            units[part.space] += unit_bytes(part, **place, split=self._ctx.split, at=self._ctx.coords)
        return STAGING_BYTES + 4 * max(units.values())

    def _new_rank(self, config: ModelConfig, *, num_pages: int) -> Rank:
        """With a pool of so many pages; 0 for one with a single unit of everything, to try steps with."""
        assert self._model is not None, "load comes first"
        fmt = cache_format(self._config, dtype=self._dtype)
        sizes = pool_sizes(self._config, config, num_pages=max(num_pages, 1), fmt=fmt)
        parts = components(config, fmt)
        drafts = [part for part in parts if part.is_draft]
        pool = DevicePool(
            parts,
            num_layers=config.num_layers,
            sizes=sizes if num_pages else dict.fromkeys(sizes, 1),
            page_size=self._config.page_size,
            ctx=self._ctx,
            has_scratch=self._has_graphs,
            num_spare_states=max((num_spare_states(self._config, part) for part in drafts), default=0),
        )
        rank = Rank(
            ctx=self._ctx, config=config, model=self._model, pool=pool, backend=self._backend, dtype=self._dtype
        )
        if self._draft is not None:
            rank.guesser = Guesser(
                self._draft,
                pool=pool,
                windows={part.space: part.window for part in drafts if part.reuse is not Reuse.STATE_HERE},
                backend=self._backend,
                ctx=self._ctx,
                dtype=self._dtype,
                has_states=any(part.reuse is Reuse.STATE_HERE for part in drafts),
                may_lag=not self._draft.num_features
                and all(part.reuse is Reuse.EVERY_PAGE for part in drafts)
                and self._device.type == "cpu"
                and self._config.overlap != "on",
            )
        return rank

    @property
    def _graph_sizes(self) -> tuple[list[int], list[int]]:
        """Batches to record: of steps, a row for each token; and of passes of a draft, a row for each request."""
        cp, most = self._ctx.cp.size, self._config.max_running
        tokens = most * (1 + self._config.most_drafts) if cp == 1 else most
        return batch_sizes(tokens, cp=cp), batch_sizes(most, cp=cp) if self._draft is not None else []

    def _record(self, rank: Rank) -> None:
        """Record decode steps as CUDA graphs, if the model's layers can be."""
        records = () if rank.config.draft is None else rank.config.draft.recorded
        graphs = DecodeGraphs(
            rank.layers,
            pool=rank.pool,
            views=rank.pool,
            backend=rank.backend,
            ctx=self._ctx,
            last=rank.last,
            records=records,
            has_states=STATE in rank.pool.sizes,  # the draft's, too: it follows
        )
        start_s = time.monotonic()
        sizes, draft_sizes = self._graph_sizes
        try:
            graphs.record(sizes)
            num_bytes = graphs.num_bytes
            if rank.guesser is not None:
                num_bytes += rank.guesser.record(draft_sizes, target=graphs, target_sizes=sizes)
            rank.graphs = graphs
        except NotRecordableError as cause:
            _log.warning("decode steps are not recorded as CUDA graphs, and take longer: %s", cause)
            return
        _log.info(
            "recorded decode steps of %s rows as CUDA graphs in %.1f s, %.0f MiB",
            "/".join(map(str, sizes)),
            time.monotonic() - start_s,
            num_bytes / 2**20,
        )

    def _new_mover(self, pool: DevicePool, path: Path) -> Mover:
        arena, board, rank = open_arena(path), self._board, self._seat.rank
        assert board is not None, "join comes first"
        assert rank in arena.layout.ranks, f"{path} is the arena of ranks {arena.layout.ranks}, not of rank {rank}"

        def post(lane: LaneName, number: int, has_failed: bool) -> None:
            board.post(rank, Lane.LOAD_US, int(1e6 * mover.load_s))
            board.post(rank, Lane.SAVE_US, int(1e6 * mover.save_s))
            board.post_moves(rank, lane, number, has_failed)

        mover = Mover(pool, arena, arena.layout, rank=rank, post=post)
        return mover

    def run(self) -> None:
        """Execute plans until the last one, or until the decider is gone.

        Raises:
            RankLostError: the decider or a peer is gone or late.
        """
        assert self._rank is not None and self._board is not None, "join, load and build come first"
        rank, has_lost = self._seat.rank, True
        try:
            self._execute_plans(self._rank)
            has_lost = False
        except RankLostError as cause:
            self._board.post(rank, Lane.LOST, max(self._step, 1))
            raise RankLostError(rank, str(self._ctx.coords), self._step, cause.cause) from cause
        except BaseException:
            self._board.post(rank, Lane.FAILED, max(self._step, 1))
            _log.exception("rank %d (%s) failed at step %d", rank, self._ctx.coords, self._step)
            raise
        finally:
            # Whoever waits for this rank fails now instead of at its deadline.
            self._ctx.close()
            self.close()
            if self._sender is not None:
                self._sender.close(has_lost=has_lost)

    def _execute_plans(self, rank: Rank) -> None:
        while True:
            plan = receive_plan(self._ctx.control, meanwhile=self._tell_ready)
            self._step = plan.step
            with refusing_out_of_memory(self._device, doing=f"running step {plan.step}"):
                answer = rank.start(plan)
            self._untold.append((plan, answer))
            self._tell_ready()
            if plan.is_last:
                return

    def _tell_ready(self) -> bool:
        """Answer the steps that the device is done with, in their order; whether some are left."""
        assert self._board is not None, "join comes first"
        while self._untold and self._untold[0][1].is_ready():
            plan, answer = self._untold.popleft()
            if self._is_answering and not plan.is_last:
                send_result(plan, answer.answer(), self._ctx.control)
            self._board.post(self._seat.rank, Lane.STEP, plan.step)
        return bool(self._untold)

    def close(self) -> None:
        """Let go of the host tier; for a rank that does not `run`."""
        if self._rank is not None and self._rank.mover is not None:
            self._rank.mover.close()

    def _on_progress(self, loaded: int, total: int) -> None:
        if self._board is not None:
            self._board.post(self._seat.rank, Lane.LOADED, loaded)
            self._board.post(self._seat.rank, Lane.TO_LOAD, total)
