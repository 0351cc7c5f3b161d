"""Reads a rank's weights: plans all reads first, so that threads can read ahead."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch

from raycache.checkpoint.config_file import DraftKind
from raycache.checkpoint.dummy import QuantisedDummyWeights
from raycache.checkpoint.dummy_weights import DummyWeights
from raycache.checkpoint.quantisation import read_quantisation
from raycache.checkpoint.read_ahead import MAX_THREADS, ReadAhead
from raycache.checkpoint.read_plan import ReadPlan
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.checkpoint.weights import CheckpointWeights
from raycache.deployment.deployment import Deployment
from raycache.deployment.memory_plan import usable_cpus
from raycache.deployment.memory_use import human_bytes
from raycache.models.base import Model, load_model
from raycache.models.drafts.base import DraftModel
from raycache.models.drafts.loading import load_draft
from raycache.parallel.context import ParallelContext

_log = logging.getLogger(__name__)

Loaded = tuple[Model, DraftModel | None]


def load_weights(
    deployment: Deployment, ctx: ParallelContext, *, num_threads: int, on_progress: Callable[[int, int], None]
) -> Loaded:
    """Read a rank's share of a model and, on the last stage, of its draft model.

    Args:
        num_threads: threads that read files.
        on_progress: called with (bytes read, total bytes of the rank); with random weights (layers made, total layers).
    Raises:
        CheckpointError: a tensor is missing, has another shape, or cannot be read.
    """
    model, dtype = deployment.model, deployment.dtype
    if deployment.config.dummy_weights:
        random = _random_weights(deployment, ctx)
        made = load_model(model, random, ctx, dtype, on_progress=on_progress)
        if model.draft is None or not ctx.is_last_stage:
            return made, None
        return made, load_draft(model, random, ctx, dtype, target=made, target_source=random)
    return _Loading(deployment, ctx, num_threads=num_threads, on_progress=on_progress).load()


def read_threads(*, ranks_on_node: int) -> int:
    """Reader threads per rank of a node; they mostly wait for I/O."""
    return min(MAX_THREADS, max(4, usable_cpus() // ranks_on_node))


class _Loading:
    """One run of `load_weights`."""

    def __init__(
        self,
        deployment: Deployment,
        ctx: ParallelContext,
        *,
        num_threads: int,
        on_progress: Callable[[int, int], None],
    ) -> None:
        model = deployment.model
        self._deployment, self._model, self._ctx, self._dtype = deployment, model, ctx, deployment.dtype
        self._num_threads, self._on_progress = num_threads, on_progress
        self._source = self._draft_source = self._open(Path(deployment.config.model))
        self._draft = model.draft if ctx.is_last_stage else None
        if self._draft is not None and self._draft.kind is not DraftKind.LAYER:
            self._draft_source = self._open(self._draft.directory)

    def load(self) -> Loaded:
        """Plan all reads, then read."""
        begin_s, draft = time.monotonic(), None
        plan, draft_plan = self._plans()
        total = plan.num_bytes + draft_plan.num_bytes
        with self._reading_ahead(self._source, plan, before=0, total=total):
            made = load_model(self._model, self._source, self._ctx, self._dtype, on_progress=_ignore)
        if self._draft is not None:
            with self._reading_ahead(self._draft_source, draft_plan, before=plan.num_bytes, total=total):
                sources = {"source": self._draft_source, "target_source": self._source}
                draft = load_draft(self._model, ctx=self._ctx, dtype=self._dtype, target=made, **sources)
        _log.info("read %s of weights in %.1f s", human_bytes(total), time.monotonic() - begin_s)
        return made, draft

    def _plans(self) -> tuple[ReadPlan, ReadPlan]:
        """Read plans of the model and of its draft."""
        plan, draft_plan = ReadPlan(self._source), ReadPlan(self._draft_source)
        nowhere = replace(self._ctx, device=torch.device("meta"))
        target = load_model(self._model, plan, nowhere, self._dtype, on_progress=_ignore)
        if self._draft is not None:
            beside = draft_plan if self._draft_source is self._source else ReadPlan(self._source)
            sources = {"source": draft_plan, "target_source": beside}
            load_draft(self._model, ctx=nowhere, dtype=self._dtype, target=target, **sources)
        return plan, draft_plan

    def _reading_ahead(
        self, source: CheckpointWeights, plan: ReadPlan, *, before: int, total: int
    ) -> AbstractContextManager[None]:
        return source.reading_ahead(
            ReadAhead(
                plan.reads,
                device=self._ctx.device,
                num_threads=self._num_threads,
                on_bytes=lambda done, _: self._on_progress(before + done, total),
            )
        )

    def _open(self, directory: Path) -> CheckpointWeights:
        quantisation, device = read_quantisation(directory), self._ctx.device
        if quantisation is None:
            return CheckpointWeights(Checkpoint(directory), None, dtype=self._dtype, device=device)
        form = self._deployment.weights_form(quantisation)
        return CheckpointWeights(Checkpoint(directory), quantisation, dtype=form.dtype, device=device, kept=form.stored)


def _random_weights(deployment: Deployment, ctx: ParallelContext) -> DummyWeights:
    """A source of random weights, quantised like those of the checkpoint if they stay quantised on the device."""
    quantisation = read_quantisation(Path(deployment.config.model))
    if quantisation is None:
        return DummyWeights(ctx.device, deployment.dtype)
    kept = deployment.weights_form(quantisation).stored
    return QuantisedDummyWeights(ctx.device, deployment.dtype, quantisation, kept=kept)


def _ignore(done: int, total: int) -> None:
    """Ignore progress in layers: it is reported in bytes."""
