"""Builds a rank in three phases.

load      read this rank's share of the weights
measure   compute how many pages fit beside them
build     allocate the pool, with the number of pages that all ranks agreed on, record CUDA graphs, and warm up
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from raycache.attention.base import AttentionBackend, NotRecordableError
from raycache.deployment.decode_split import decode_obstacle
from raycache.deployment.deployment import Deployment
from raycache.deployment.memory_plan import pages_that_fit
from raycache.deployment.memory_use import refusing_out_of_memory
from raycache.host.service import open_arena
from raycache.layers.cp_split import CpSplit
from raycache.memory.carriers import STAGING_BYTES
from raycache.memory.component import STATE, Reuse
from raycache.memory.device import DevicePool
from raycache.memory.mover import LaneName, Mover
from raycache.models.base import Model, for_warm_up
from raycache.models.drafts.base import DraftModel
from raycache.parallel.board import Lane
from raycache.parallel.lost_peers import logging_errors_of_gpu, reporting_lost_peers
from raycache.rank.backend import choose_backend
from raycache.rank.compilations import warn_of_compilers
from raycache.rank.drafter import Drafter, DraftGraphs
from raycache.rank.graphs import DecodeGraphs, GraphLayers, batch_sizes, stage_layers
from raycache.rank.last_tokens import LastTokens
from raycache.rank.loading import load_weights, read_threads
from raycache.rank.member import Member
from raycache.rank.peak import measure_peak, run_largest
from raycache.rank.pieces import RecordedPieces, piece_sizes
from raycache.rank.rank import Rank
from raycache.rank.recorder import CudaRecorder
from raycache.rank.short_steps import ShortGraphs, short_sizes
from raycache.rank.stage_link import received_widths
from raycache.rank.warm_up import shortened, warm_up

_log = logging.getLogger(__name__)

LEAST_PIECE = 8
"""Tokens of the shortest step that is recorded in pieces, where decode batches are recorded as a whole."""

_STATE_CALLS = 4
"""Most calls of a recurrent layer: a convolution of queries, keys and values each, and a scan."""


def load(deployment: Deployment, member: Member) -> LoadedRank:
    """Read a rank's weights.

    Raises:
        CheckpointError: the model's directory is damaged.
        ConfigError: the weights do not fit into GPU memory.
    """
    device = member.ctx.device
    member.phases.skip()
    backend = choose_backend(deployment, device)
    member.phases.end("attention")
    with refusing_out_of_memory(device, doing="loading weights"):
        model, draft = load_weights(
            deployment,
            member.ctx,
            num_threads=read_threads(ranks_on_node=member.spec.ranks_on_node),
            on_progress=member.post_loaded,
        )
    member.note("weights")
    return LoadedRank(deployment, member, model, draft, backend)


@dataclass(frozen=True)
class LoadedRank:
    """A rank whose weights are loaded.

    Attributes:
        model: this rank's share.
        draft: this rank's share of the draft model; None without one, and before the last stage.
    """

    deployment: Deployment
    member: Member
    model: Model
    draft: DraftModel | None
    backend: AttentionBackend

    def measure(self, reserved: Mapping[str, int] | None = None) -> int:
        """Compute how many pages fit into memory. Collective on GPUs, where all ranks run the largest steps.

        Args:
            reserved: purpose -> bytes, as `reserved` was for a rank like this one; None: measure them.
        Raises:
            ConfigError: not even one sequence fits.
        """
        deployment, use = self.deployment, self.member.use
        if use is not None:
            sizes, draft_sizes = self._graph_sizes
            num_graphs = len(sizes) + bool(draft_sizes) * len(sizes) + len(draft_sizes) if self._has_graphs else 0
            num_short = len(self._short_sizes) if self._has_graphs else 0
            pool = self._new_pool(dict.fromkeys(deployment.pool_sizes(1), 1))
            trial = self._new_rank(pool, drafter=self._new_drafter(pool))
            with reporting_lost_peers(self.member.ctx):
                run_largest(deployment, trial if reserved is None else shortened(trial), use=use)
                if reserved is None:
                    measure_peak(
                        deployment,
                        trial,
                        use=use,
                        num_graphs=num_graphs,
                        num_short=num_short,
                        num_pieces=self._most_pieces,
                    )
            if deployment.config.has_host_tier:
                use.keep("staging", self._staging_bytes)
            for purpose, num_bytes in (reserved or {}).items():
                use.keep(purpose, num_bytes)
        ranks_on_node = self.member.spec.ranks_on_node
        self.member.phases.end("kernels")
        return pages_that_fit(deployment, ctx=self.member.ctx, ranks_on_node=ranks_on_node, use=use)

    @property
    def reserved(self) -> Mapping[str, int]:
        """Purpose -> bytes of GPU memory that `measure` has reserved beside the pages; empty on a CPU."""
        return {} if self.member.use is None else dict(self.member.use.kept)

    def build(
        self, num_pages: int, arena: Path | None = None, *, warms_up: bool = True, longest_piece: int | None = None
    ) -> Rank:
        """Allocate the pool and everything that uses it.

        Args:
            num_pages: the same on all ranks.
            arena: file of this node's host tier, if there is one.
            warms_up: whether to run steps of all kinds first, so that no request waits for a compiler.
            longest_piece: `RecordedPieces.longest` of this stage's ranks before; None: find out.
        """
        member, mover = self.member, None
        member.phases.skip()
        pool = self._new_pool(self.deployment.pool_sizes(num_pages))
        member.note("pages")
        if arena is not None:
            with refusing_out_of_memory(member.ctx.device, doing="allocating buffers for page moves"):
                mover = _new_mover(member, pool, arena)
        try:
            with reporting_lost_peers(member.ctx):
                rank = self._build_around(pool, mover, longest_piece)
                if warms_up:
                    warm_up(rank, self.deployment, batch_sizes=self._graph_sizes[0] if self._has_graphs else ())
        except BaseException:  # an interrupt, too: the host tier would stay pinned in this process
            with logging_errors_of_gpu(True):
                if mover is not None:
                    mover.close()
            raise
        member.phases.end("warm-up")
        if member.ctx.device.type == "cuda":
            rank.at_close = warn_of_compilers()
        return rank

    def _build_around(self, pool: DevicePool, mover: Mover | None, longest_piece: int | None) -> Rank:
        member, last, graphs, draft_graphs, short_steps, pieces = self.member, None, None, None, None, None
        if self.deployment.plans_ahead:
            config = self.deployment.config
            most_drafts = config.most_drafts * config.has_draft_model
            last = LastTokens(config.max_running, member.ctx, most_drafts=most_drafts)
        member.note("staging")
        if self._has_graphs:
            gc.collect()  # once: it takes 0.2 s
            graphs, draft_graphs = self._record(pool, last)
            if graphs is None:
                gc.collect()  # what was recorded in part
            short_steps = self._record_short_steps(pool, last)
            if self._short_sizes and short_steps is None:
                gc.collect()
            pieces = self._record_pieces(pool, least=1 if graphs is None else LEAST_PIECE, longest=longest_piece)
        member.note("graphs")
        if (use := member.use) is not None:
            for purpose in ("graphs", "staging"):
                use.keep(purpose, 0)
            _log.info("memory use of %s: %s", member.ctx.device, use)
            use.check()
        rank = self._new_rank(
            pool, mover=mover, last=last, graphs=graphs, drafter=self._new_drafter(pool, draft_graphs)
        )
        rank.pieces, rank.short_steps = pieces, short_steps
        return rank

    def _new_pool(self, sizes: dict[str, int]) -> DevicePool:
        deployment = self.deployment
        return DevicePool(
            deployment.components,
            num_layers=deployment.model.num_layers,
            sizes=sizes,
            page_size=deployment.config.page_size,
            ctx=self.member.ctx,
            has_scratch=self._has_graphs,
            num_spare_states=max(map(deployment.num_spare_states, deployment.components), default=0),
        )

    def _new_rank(
        self,
        pool: DevicePool,
        *,
        mover: Mover | None = None,
        last: LastTokens | None = None,
        graphs: DecodeGraphs | None = None,
        drafter: Drafter | None = None,
    ) -> Rank:
        return Rank(
            ctx=self.member.ctx,
            config=self.deployment.model,
            model=self.model,
            pool=pool,
            backend=self.backend,
            dtype=self.deployment.dtype,
            mover=mover,
            last=last,
            graphs=graphs,
            drafter=drafter,
            decode_model=self._decode_model,
        )

    @cached_property
    def _decode_model(self) -> Model | None:
        """The model with weights split over cp, for decode steps; None without cp, or where it cannot be split."""
        ctx = self.member.ctx
        if ctx.cp.size == 1 or decode_obstacle(self.deployment):
            return None
        return self.model.over_cp(CpSplit.of(ctx))

    @cached_property
    def _decode_draft(self) -> DraftModel | None:
        """The same of the draft model."""
        if self.draft is None or self._decode_model is None:
            return None
        return self.draft.over_cp(CpSplit.of(self.member.ctx))

    def _new_drafter(self, pool: DevicePool, graphs: DraftGraphs | None = None) -> Drafter | None:
        if self.draft is None:
            return None
        parts = [part for part in self.deployment.components if part.is_draft]
        return Drafter(
            self.draft,
            self._decode_draft,
            pool=pool,
            windows={part.space: part.window for part in parts if part.reuse is not Reuse.STATE_HERE},
            backend=self.backend,
            ctx=self.member.ctx,
            has_states=self._has_draft_states,
            may_lag=not self.draft.num_features
            and all(part.reuse is Reuse.EVERY_PAGE for part in parts)
            and self.member.ctx.device.type == "cpu"
            and self.deployment.config.overlap != "on",
            graphs=graphs,
        )

    def _record(self, pool: DevicePool, last: LastTokens | None) -> tuple[DecodeGraphs | None, DraftGraphs | None]:
        """Record decode steps as CUDA graphs, if the model's layers support it."""
        ctx, model = self.member.ctx, self._decode_model or self.model
        widths = received_widths(self.deployment.model, ctx)
        layers = GraphLayers(
            stage_layers(model, widths=widths, is_last=ctx.is_last_stage),
            pool,
            trial=stage_layers(for_warm_up(model, ctx), widths=widths, is_last=ctx.is_last_stage),
            records=self._records,
            hidden=self._no_rows(sum(widths)),
            has_all_tokens=self._decode_model is not None,
            has_states=STATE in pool.sizes,  # of any stage, or of the draft model: all run the same rows
            longest=1 + self.deployment.config.most_drafts,
        )
        start_s, recorder = time.monotonic(), CudaRecorder(pool.device)
        sizes, draft_sizes = self._graph_sizes
        draft_graphs = None
        try:
            graphs = DecodeGraphs(
                layers,
                sizes=sizes,
                pool=pool,
                backend=self.backend,
                ctx=ctx,
                recorder=recorder,
                last=last,
            )
            if self.draft is not None:
                draft_graphs = DraftGraphs.record(
                    self._decode_draft or self.draft,
                    sizes=draft_sizes,
                    pool=pool,
                    backend=self.backend,
                    target=graphs,
                    has_states=self._has_draft_states,
                    dtype=self.deployment.dtype,
                    new_recorder=partial(CudaRecorder, pool.device),
                )
        except NotRecordableError as cause:
            _log.warning("decode steps run without CUDA graphs and are slower: %s", cause)
            return None, None
        _log.info(
            "recorded decode steps of %s rows as CUDA graphs in %.1f s, %.0f MiB",
            "/".join(map(str, sizes)),
            time.monotonic() - start_s,
            recorder.num_bytes / 2**20,
        )
        return graphs, draft_graphs

    def _record_short_steps(self, pool: DevicePool, last: LastTokens | None) -> ShortGraphs | None:
        """Record steps of few tokens, if the model's layers support it."""
        ctx, sizes, start_s = self.member.ctx, self._short_sizes, time.monotonic()
        if not sizes:
            return None
        widths, recorder = received_widths(self.deployment.model, ctx), CudaRecorder(pool.device)
        layers = GraphLayers(
            stage_layers(self.model, widths=widths, is_last=ctx.is_last_stage),
            pool,
            hidden=self._no_rows(sum(widths)),
            trial=stage_layers(for_warm_up(self.model, ctx), widths=widths, is_last=ctx.is_last_stage),
        )
        try:
            graphs = ShortGraphs(
                layers, sizes=sizes, pool=pool, backend=self.backend, ctx=ctx, recorder=recorder, last=last
            )
        except NotRecordableError as cause:
            _log.info("short steps are recorded in pieces only: %s", cause)
            return None
        _log.info(
            "recorded steps of at most %d tokens as CUDA graphs in %.1f s, %.0f MiB",
            sizes[-1],
            time.monotonic() - start_s,
            recorder.num_bytes / 2**20,
        )
        return graphs

    def _record_pieces(self, pool: DevicePool, *, least: int, longest: int | None) -> RecordedPieces | None:
        """Record pieces of short steps that are no decode batches, if the model's layers support it."""
        deployment, ctx, start_s = self.deployment, self.member.ctx, time.monotonic()
        widths, recorder = received_widths(deployment.model, ctx), CudaRecorder(pool.device)
        try:
            pieces = RecordedPieces(
                self.model,
                sizes=piece_sizes(deployment.max_step_tokens, least=least, longest=longest),
                pool=pool,
                backend=self.backend,
                ctx=ctx,
                hidden=self._no_rows(sum(widths[:1])),
                records=self._records,
                recorder=recorder,
            )
        except NotRecordableError as cause:
            _log.warning("short steps run without CUDA graphs and are slower: %s", cause)
            return None
        _log.info(
            "recorded steps of at most %d tokens as %d pieces in %.1f s, %.0f MiB",
            pieces.longest,
            pieces.num_graphs,
            time.monotonic() - start_s,
            recorder.num_bytes / 2**20,
        )
        return pieces

    @property
    def _records(self) -> tuple[int, ...]:
        draft = self.deployment.model.draft
        return () if draft is None else draft.recorded

    def _no_rows(self, width: int) -> Tensor | None:
        """[0, width], like what the stage before sends; None where it sends nothing."""
        return torch.empty((0, width), dtype=self.deployment.dtype, device=self.member.ctx.device) if width else None

    @property
    def _has_graphs(self) -> bool:
        return self.deployment.config.cuda_graphs and self.backend.capabilities.can_capture

    @property
    def _most_pieces(self) -> int:
        """Upper bound of the graphs of pieces: one per call of attention, and one behind the last."""
        if not self._has_graphs:
            return 0
        parts = self.deployment.components
        calls = sum(len(part.layers) * (_STATE_CALLS if part.reuse is Reuse.STATE_HERE else 1) for part in parts)
        return len(piece_sizes(self.deployment.max_step_tokens, least=1).tokens) * (calls + 1)

    @property
    def _has_draft_states(self) -> bool:
        return any(part.is_draft and part.reuse is Reuse.STATE_HERE for part in self.deployment.components)

    @property
    def _graph_sizes(self) -> tuple[list[int], list[int]]:
        """Batch sizes to record: of steps, with one row per token; of draft passes, with one row per request."""
        config, most = self.deployment.config, self.deployment.config.max_running
        # Without weights split over cp, cp ranks divide the rows.
        multiple = 1 if self._decode_model is not None else self.member.ctx.cp.size
        tokens = most * (1 + config.most_drafts) if multiple == 1 else most
        drafts = batch_sizes(most, multiple_of=multiple) if self.draft is not None else []
        return batch_sizes(tokens, multiple_of=multiple), drafts

    @property
    def _short_sizes(self) -> list[int]:
        """Numbers of tokens of short steps to record as a whole."""
        is_alone = self.member.ctx.cp.size == 1 and self.draft is None and self.deployment.model.draft is None
        if not is_alone or any(part.reuse is Reuse.STATE_HERE for part in self.deployment.components):
            return []
        return short_sizes(self.deployment.max_step_tokens)

    @property
    def _staging_bytes(self) -> int:
        """Upper bound of the GPU memory that page moves allocate."""
        units, ctx = Counter[str](), self.member.ctx
        for part in self.deployment.components:
            units[part.space] += self.deployment.unit_bytes(part, ctx.split, ctx.coords)
        return STAGING_BYTES + 4 * max(units.values())  # a buffer holds a unit, even if that is larger


def _new_mover(member: Member, pool: DevicePool, path: Path) -> Mover:
    arena, rank = open_arena(path), member.spec.rank
    assert rank in arena.layout.ranks, f"{path} is the arena of ranks {arena.layout.ranks}, not of rank {rank}"

    def post(lane: LaneName, number: int, has_failed: bool) -> None:
        member.post(Lane.LOAD_US, int(1e6 * mover.load_s))
        member.post(Lane.SAVE_US, int(1e6 * mover.save_s))
        member.board.post_moves(rank, lane, number, has_failed)

    mover = Mover(pool, arena, arena.layout, rank=rank, post=post)
    return mover
