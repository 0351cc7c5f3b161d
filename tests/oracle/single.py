"""Teacher-forced logits of one rank in this process, without a scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from raycache.attention.torch_ref import TorchBackend
from raycache.memory.component import FULL, CacheFormat
from raycache.memory.device import DevicePool
from raycache.models.base import components, load_model, read_config
from raycache.parallel.context import ParallelContext
from raycache.rank.rank import Rank
from raycache.types import SamplingParams
from raycache.wire.plan import Admit, Row, StepPlan
from tests.oracle.weights import open_weights

PAGE_SIZE = 8


def single_rank(model_dir: Path, *, num_pages: int = 64, dtype: torch.dtype = torch.float32, fp8: bool = False) -> Rank:
    """A rank that holds the whole model, with two state slots and `num_pages` pages of every kind."""
    config = read_config(model_dir)
    ctx = ParallelContext.single(torch.device("cpu"))
    source = open_weights(model_dir, dtype=dtype, device=ctx.device)
    model = load_model(config, source, ctx, dtype, on_progress=lambda done, total: None)
    parts = components(config, CacheFormat(str(dtype).removeprefix("torch."), has_fp8_latent=fp8))
    sizes = {FULL: num_pages, **{part.space: num_pages for part in parts if part.window}, "state": 2}
    pool = DevicePool(parts, num_layers=config.num_layers, sizes=sizes, page_size=PAGE_SIZE, ctx=ctx)
    return Rank(ctx=ctx, config=config, model=model, pool=pool, backend=TorchBackend(), dtype=dtype)


def single_rank_logits(
    model_dir: Path, ids: Sequence[int], *, cuts: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> NDArray[np.float32]:
    """Logits after every token, [T, V].

    Args:
        model_dir: of the model.
        ids: the sequence.
        cuts: positions at which a new step begins; none computes all of it at once.
        dtype: of weights, activations and cache.
    """
    rank = single_rank(model_dir, num_pages=-(-len(ids) // PAGE_SIZE), dtype=dtype)
    return forced_logits(rank, ids, cuts=cuts)


def forced_logits(rank: Rank, ids: Sequence[int], *, cuts: Sequence[int] = ()) -> NDArray[np.float32]:
    """The same of a new rank, which keeps the sequence in its first pages, token i in slot i."""
    bounds = [0, *cuts, len(ids)]
    found, known = [], 0
    for step, (start, stop) in enumerate(itertools.pairwise(bounds), start=1):
        pages = list(range(known, -(-stop // PAGE_SIZE)))
        known += len(pages)
        row = Row(
            slot=0,
            start=start,
            tokens=np.asarray(ids[start:stop], np.int32).tobytes(),
            new_pages={space: pages for space in rank.pool.windows},
            output_position=0,
            targets=np.asarray(ids[start + 1 : stop], np.int32).tobytes(),
            # Read and written in turn, as after a restore point.
            read_state=-1 if start == 0 else step % 2,
            write_state=(step + 1) % 2,
        )
        admits = [Admit(0, {}, SamplingParams(temperature=0), seed=0)] if start == 0 else []
        logits = rank.forward(StepPlan(step, [row], admits, num_top=0))
        assert logits is not None
        found.append(logits.numpy())
    return np.concatenate(found)
