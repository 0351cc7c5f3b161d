"""Memory of a rank's weights, computed from config.json and the headers of the weight files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from launch.table import human_bytes
from raycache.checkpoint.counted import CountedWeights
from raycache.checkpoint.layout import Layouts
from raycache.checkpoint.quantisation import Quantisation, read_quantisation
from raycache.checkpoint.stored_slice import Format
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.deployment.deployment import Deployment
from raycache.models.base import load_model
from raycache.models.drafts.loading import load_draft
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class HeldWeights:
    """Weights per rank of the largest pipeline stage.

    Attributes:
        num_bytes: by the format in memory: a quantisation format or a dtype.
        formats: quantisation formats in the checkpoint, the most frequent first.
    """

    num_bytes: Mapping[str, int]
    formats: tuple[Format, ...]

    @property
    def total(self) -> int:
        """Total size in bytes."""
        return sum(self.num_bytes.values())

    def __str__(self) -> str:
        """Format the sizes, by format in memory."""
        parts = [f"{human_bytes(size)} in {kind}" for kind, size in sorted(self.num_bytes.items()) if size]
        return f"about {' + '.join(parts)}"


def held_weights(deployment: Deployment) -> HeldWeights:
    """Compute the weights of the largest stage, without allocating them.

    Args:
        deployment: with stages, and the format of its weights.
    Raises:
        CheckpointError: the weights are damaged or do not match the model.
    """
    split, counted = deployment.config.split, []
    for stage in range(split.pp):
        rank = next(rank for rank in range(split.world_size) if split.coords(rank).pp == stage)
        at = split.coords(rank)
        ctx = ParallelContext(
            split=split,
            rank=rank,
            device=torch.device("meta"),
            tp=Group(rank=at.tp, size=split.tp),
            pp=Group(rank=at.pp, size=split.pp),
            cp=Group(rank=at.cp, size=split.cp),
        )
        counted.append(_count(deployment, ctx))
    return max(counted, key=lambda held: held.total)


def _count(deployment: Deployment, ctx: ParallelContext) -> HeldWeights:
    model = deployment.model
    own = _source(deployment, Path(deployment.config.model))
    target = load_model(replace(model, draft=None), own, ctx, torch.float32, on_progress=lambda done, total: None)
    sources = [own]
    if model.draft is not None and ctx.is_last_stage:
        theirs = _source(deployment, model.draft.directory)
        load_draft(model, theirs, ctx, torch.float32, target=target, target_source=own)
        sources.append(theirs)
    num_bytes, formats = Counter[str](), Counter[Format]()
    for one in sources:
        num_bytes.update(one.num_bytes)
        formats.update(one.formats)
    return HeldWeights(num_bytes, tuple(form for form, _ in formats.most_common()))


def _source(deployment: Deployment, directory: Path) -> CountedWeights:
    if deployment.config.dummy_weights:
        return CountedWeights(None, None, form=None, dtype=deployment.dtype)
    checkpoint, quantisation = Checkpoint(directory), read_quantisation(directory)
    form = None if quantisation is None else deployment.weights_form(quantisation)
    return CountedWeights(checkpoint, Layouts(checkpoint, quantisation), form=form, dtype=deployment.dtype)


def describe_quantisation(quantisation: Quantisation, held: HeldWeights, deployment: Deployment) -> str:
    """Describe a checkpoint's quantisation, and which of it is kept in memory."""
    formats = held.formats or tuple(dict.fromkeys(scheme.format for scheme in quantisation.schemes))
    names = (" and " if held.formats else " or ").join(form.value for form in formats)
    told = f"{names} ({quantisation.method}, {quantisation.path.name})"
    dtype, form = deployment.dtype, deployment.weights_form(quantisation)
    kept = [one.value for one in formats if one in form.stored]
    if deployment.config.dummy_weights:
        kind = f"quantised where a kernel supports the layer, but counted as {_name(dtype)}" if kept else _name(dtype)
        return f"{told}; random weights are {kind}"
    if not kept:
        return f"{told}; dequantised to {_name(form.dtype)} in memory"
    rest = f", others are dequantised to {_name(form.dtype)}" if len(kept) < len(formats) else ""
    return f"{told}; kept as {' and '.join(kept)} where a kernel supports the layer{rest}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
