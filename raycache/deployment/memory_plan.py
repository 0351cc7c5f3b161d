"""How many pages the memory of a rank holds."""

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
    """Cores that this process may use, which in a container are fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pages_that_fit(
    deployment: Deployment, *, ctx: ParallelContext, ranks_on_node: int, use: MemoryUse | None = None
) -> int:
    """Pages of the sequence that a rank can hold beside its weights, with what else its components need.

    Args:
        deployment: num_pages wins over kv_memory; "auto" takes what is left, or a share of what is free, but not more
            than a full batch of the longest sequences needs.
        ctx: of the rank.
        ranks_on_node: among which a node's memory is divided (cpu only).
        use: of a GPU on which the weights are and the largest step was tried; None where nothing was measured.
    Raises:
        ConfigError: it holds no page, or what is wanted is more than what is left.
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
    # With half of the memory for pages and restore points.
    fitting = bisect.bisect_right(range(1, config.max_running), memory // 2, key=least)
    return f"{text}, or use max_running={fitting}" if fitting else text


def pages_within(deployment: Deployment, *, ctx: ParallelContext, memory: int) -> int:
    """Pages of the sequence for which `memory` bytes of a rank suffice; 0 if not even for one."""

    def is_too_much(num_pages: int) -> bool:
        return pool_bytes(deployment, num_pages=num_pages, ctx=ctx) > memory

    return bisect.bisect_left(range(_MOST_PAGES), True, lo=1, key=is_too_much) - 1


def pool_bytes(deployment: Deployment, *, num_pages: int, ctx: ParallelContext) -> int:
    """Bytes of a rank's whole pool with so many pages of the sequence."""
    sizes = deployment.pool_sizes(num_pages)
    return sum(
        (sizes[part.space] + deployment.num_spare_states(part)) * deployment.unit_bytes(part, ctx.split, ctx.coords)
        for part in deployment.components
    )


def auto_bytes(device: torch.device, ranks_on_node: int) -> int:
    """What "auto" takes of a rank's memory that is free now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    return int(psutil.virtual_memory().available * _CPU_SHARE / ranks_on_node)
