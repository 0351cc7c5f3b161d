"""Estimates the memory of a model on this machine without loading its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import torch

from raycache.config import Config
from raycache.deployment.deployment import Deployment
from raycache.deployment.memory_plan import auto_bytes, pages_that_fit, pages_within, pool_bytes
from raycache.memory.component import FULL
from raycache.models.base import ModelConfig
from raycache.models.layer_sizes import layer_sizes
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext

_MANY_PAGES = 1 << 16


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of the fullest rank, assuming that all ranks run on this machine.

    Attributes:
        weight_bytes: estimated size of its weights.
        page_bytes: size of one page on this rank, without restore points.
        cache_bytes: size of all its pools.
        slots: window or state space -> (number of pages or slots, bytes of each).
        num_pages: pages that fit on every rank.
        page_size: tokens per page.
        free_bytes: currently free device memory, divided by the ranks that share it.
    """

    weight_bytes: int
    page_bytes: int
    cache_bytes: int
    slots: Mapping[str, tuple[int, int]]
    num_pages: int
    page_size: int
    free_bytes: int

    @property
    def num_tokens(self) -> int:
        """Capacity of the whole cache in tokens."""
        return self.num_pages * self.page_size

    @property
    def is_too_large(self) -> bool:
        """Whether weights and cache exceed the free memory."""
        return self.weight_bytes + self.cache_bytes > self.free_bytes


def device_type(config: Config) -> str:
    """The device type of ranks on this machine: "cpu" or "cuda"."""
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def plan_memory(deployment: Deployment, *, weight_bytes: int) -> MemoryPlan:
    """Estimate the memory of the fullest rank.

    Args:
        deployment: with stages, and a split accepted by `check_split`.
        weight_bytes: size of that rank's weights.
    Raises:
        ConfigError: not even one page fits.
    """
    config, where = deployment.config, deployment.device_type
    sharing = config.world_size if where == "cpu" else 1
    free = _free_bytes(where) // sharing
    contexts = _contexts(config, where=where)

    def cache_bytes(ctx: ParallelContext, num_pages: int) -> int:
        return pool_bytes(deployment, num_pages=num_pages, ctx=ctx)

    fullest = max(contexts, key=lambda ctx: cache_bytes(ctx, _MANY_PAGES))
    pages = pages_that_fit(deployment, ctx=fullest, ranks_on_node=sharing)
    if config.num_pages == "auto" and config.kv_memory == "auto":
        # "auto" is a fraction of the memory free after loading the weights, which are not loaded here.
        memory = int(auto_bytes(torch.device(where), sharing) * max(0.0, 1 - weight_bytes / free))
        pages = min(pages, pages_within(deployment, ctx=fullest, memory=memory))
    sizes = deployment.pool_sizes(pages)
    units: Counter[str] = Counter()
    for part in deployment.components:
        units[part.space] += deployment.unit_bytes(part, fullest.split, fullest.coords)
    slots = {space: (sizes[space], size) for space, size in units.items() if space != FULL}
    return MemoryPlan(weight_bytes, units[FULL], cache_bytes(fullest, pages), slots, pages, config.page_size, free)


def stage_weights(config: Config, model: ModelConfig) -> tuple[int, ...]:
    """Number of parameters of each pipeline stage.

    Args:
        config: with stages.
    """
    return layer_sizes(model).held.of_stages(config.stages or (model.num_layers,))


def _contexts(config: Config, *, where: str) -> list[ParallelContext]:
    """Contexts of all ranks, with groups that cannot communicate."""
    split = config.split
    places = [split.coords(rank) for rank in range(split.world_size)]
    return [
        ParallelContext(
            split=split,
            rank=rank,
            device=torch.device(where),
            tp=Group(rank=at.tp, size=split.tp),
            pp=Group(rank=at.pp, size=split.pp),
            cp=Group(rank=at.cp, size=split.cp),
        )
        for rank, at in enumerate(places)
    ]


def _free_bytes(where: str) -> int:
    if where == "cuda":
        return min(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))
    return int(psutil.virtual_memory().available)
