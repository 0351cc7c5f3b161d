"""Whether the weights of decode steps are split over cp (layers/cp_split.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from raycache.checkpoint.config_file import DraftKind
from raycache.checkpoint.quantisation import read_quantisation
from raycache.deployment.deployment import Deployment
from raycache.layers.cp_split import CpSplit, NotSplitError
from raycache.layers.weights import ShardedWeights
from raycache.models.base import ModelConfig, family_of
from raycache.models.drafts.loading import load_draft
from raycache.models.layer_sizes import AskedShapes, layer_sizes
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.peer_group import PEER_MEMORY
from raycache.parallel.sharding import Split

_LEAST_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
"""Device type -> bytes of a layer's weights that a rank must be spared for the split to pay: what is read in the time
of a layer's exchanges, 21 us on GPUs. See docs/adr/0019-cp-decode.md."""
_LEAST_BYTES_OF_NCCL = 180 << 20
"""The same without peer memory, where four exchanges take some 60 us."""


def with_transports(deployment: Deployment, transports: Iterable[Sequence[str]]) -> Deployment:
    """Turn peer memory off unless all ranks use it for all small tensors, as all must decide alike.

    Args:
        transports: of each rank, as its groups have been built (`ParallelContext.transports`).
    """
    has_all = all(tuple(each) == (PEER_MEMORY,) for each in transports)
    return replace(deployment, config=replace(deployment.config, peer_memory=has_all))


def decode_obstacle(deployment: Deployment) -> str:
    """Why every cp rank reads all weights of its tp rank in decode steps; "" if it reads its share of them.

    Args:
        deployment: as `with_transports` has returned it, the same on all ranks.
    """
    config = deployment.config
    if config.decode_split == "off":
        return "decode_split=off"
    if _stay_quantised(deployment, Path(config.model)):
        return "they stay quantised on the device"
    draft = deployment.model.draft
    if draft is not None and draft.kind is not DraftKind.LAYER and _stay_quantised(deployment, draft.directory):
        return "those of the draft model stay quantised on the device"
    least = _LEAST_BYTES[deployment.device_type]
    if deployment.device_type == "cuda" and not config.peer_memory:
        least = _LEAST_BYTES_OF_NCCL
    if config.decode_split == "auto" and (spared := _spared_bytes(deployment)) < least:
        return (
            f"a rank would read {spared / 1e6:,.0f} MB per layer less, and the exchanges of a layer take as long as "
            f"{least / 1e6:,.0f} MB; decode_split=on tries it"
        )
    return model_obstacle(deployment.model, tp=config.tp, cp=config.cp, device_type=deployment.device_type)


def model_obstacle(model: ModelConfig, *, tp: int, cp: int, device_type: str = "cpu") -> str:
    """Why the weights of a model and its draft model cannot be split over tp x cp, or ""."""
    meta, nothing = torch.device("meta"), AskedShapes()
    # Where tp does not divide a size, the first ranks have one more.
    for rank in sorted({0, tp - 1}):
        ctx = ParallelContext(Split(tp=tp, cp=cp), rank, meta, tp=Group(rank=rank, size=tp), cp=Group(size=cp))
        split, whose = CpSplit.of(ctx, device_type=device_type), ""
        made = family_of(model).load(
            model, ShardedWeights(nothing, ctx, torch.float32), on_progress=lambda done, total: None
        )
        try:
            made.over_cp(split)
            if model.draft is not None:
                whose = "the draft model: "
                draft = load_draft(model, nothing, ctx, torch.float32, target=made, target_source=nothing)
                draft.over_cp(split)
        except NotSplitError as cause:
            return f"{whose}{cause}"
    return ""


def _stay_quantised(deployment: Deployment, directory: Path) -> bool:
    """Whether weights of a checkpoint stay quantised on the device."""
    quantisation = read_quantisation(directory)
    return quantisation is not None and bool(deployment.weights_form(quantisation).stored)


def _spared_bytes(deployment: Deployment) -> float:
    """Bytes of an average layer that a rank need not read for a token."""
    config, layers = deployment.config, layer_sizes(deployment.model).read.layers
    mean = sum(layers) / len(layers) * deployment.dtype.itemsize / config.tp
    return mean * (1 - 1 / config.cp)
