"""Computes how many pages fit into a rank's memory."""

from __future__ import annotations

import bisect
import os
import sys
from dataclasses import replace

import psutil
import torch

from raycache.config import Config, parse_bytes
from raycache.deployment.deployment import Deployment
from raycache.deployment.memory_use import MemoryUse, human_bytes
from raycache.errors import ConfigError
from raycache.parallel.context import ParallelContext

_MOST_PAGES = 2**31 - 1
_CPU_SHARE = 0.2
_CUDA_SHARE = 0.9


def usable_cpus() -> int:
    """Cores available to this process; in a container possibly fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pages_that_fit(
    deployment: Deployment, *, ctx: ParallelContext, ranks_on_node: int, use: MemoryUse | None = None
) -> int:
    """Pages that fit beside a rank's weights, including the states and windows that go with them.

    Args:
        deployment: its num_pages overrides kv_memory. "auto" uses the memory left, or a share of free memory, but no
            more than a full batch of the longest sequences needs.
        ranks_on_node: ranks that share the node's memory (cpu only).
        use: memory use of the GPU after loading weights and trying the largest step; None if not measured.
    Raises:
        ConfigError: not one page fits, or the requested pages do not fit.
    """
    config, most = deployment.config, _MOST_PAGES
    if config.num_pages != "auto":
        memory, pages = pool_bytes(deployment, num_pages=config.num_pages, ctx=ctx), config.num_pages
    else:
        if config.kv_memory != "auto":
            memory = parse_bytes("kv_memory", config.kv_memory)
        else:
            memory = auto_bytes(ctx.device, ranks_on_node) if use is None else max(use.left, 0)
            most = config.max_running * -(-deployment.max_model_len // config.page_size)
        pages = min(pages_within(deployment, ctx=ctx, memory=memory), most)
    if pages < 1:
        raise ConfigError(_why_no_page(deployment, ctx=ctx, memory=memory, use=use))
    if use is not None and memory > use.most:
        raise ConfigError(_why_too_much(config, rank=ctx.rank, memory=memory, use=use))
    return pages


def _why_too_much(config: Config, *, rank: int, memory: int, use: MemoryUse) -> str:
    setting = f"num_pages={config.num_pages}" if config.num_pages != "auto" else f"kv_memory={config.kv_memory}"
    left = f"{human_bytes(use.left)} are left" if use.left > 0 else "nothing is left"
    return (
        f"{setting} takes {human_bytes(memory)} of {use.device} of rank {rank}, {left}, {use}; use a smaller "
        f"{setting.split('=')[0]}, max_step_tokens or max_model_len, or more ranks"
    )


def _why_no_page(deployment: Deployment, *, ctx: ParallelContext, memory: int, use: MemoryUse | None) -> str:
    config = deployment.config

    def least(max_running: int) -> int:
        smaller = replace(deployment, config=replace(config, max_running=max_running))
        return pool_bytes(smaller, num_pages=1, ctx=ctx)

    text = (
        f"kv_memory={config.kv_memory}, {memory} bytes on this rank, holds no page; one, with what "
        f"max_running={config.max_running} requests are guaranteed beside it, takes {least(config.max_running)}; "
    )
    if use is not None and config.kv_memory == "auto":
        text += f"{use.device} has {use}; use more ranks, a smaller max_step_tokens or max_model_len"
    else:
        text += "raise kv_memory"
    # With half of the memory left for pages and restore points.
    fitting = bisect.bisect_right(range(1, config.max_running), memory // 2, key=least)
    return f"{text}, or use max_running={fitting}" if fitting else text


def pages_within(deployment: Deployment, *, ctx: ParallelContext, memory: int) -> int:
    """Number of pages that fit into `memory` bytes of a rank."""

    def is_too_much(num_pages: int) -> bool:
        return pool_bytes(deployment, num_pages=num_pages, ctx=ctx) > memory

    return bisect.bisect_left(range(_MOST_PAGES), True, lo=1, key=is_too_much) - 1


def pool_bytes(deployment: Deployment, *, num_pages: int, ctx: ParallelContext) -> int:
    """Bytes of a rank's whole pool with `num_pages` pages."""
    sizes = deployment.pool_sizes(num_pages)
    return sum(
        (sizes[part.space] + deployment.num_spare_states(part)) * deployment.unit_bytes(part, ctx.split, ctx.coords)
        for part in deployment.components
    )


def auto_bytes(device: torch.device, ranks_on_node: int) -> int:
    """Bytes that "auto" uses of a rank's free memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    return int(psutil.virtual_memory().available * _CPU_SHARE / ranks_on_node)
