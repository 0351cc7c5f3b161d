"""How settings that say "auto" come out for a model on a rank: number type, pages, context length."""

from __future__ import annotations

import bisect
import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from raycache.config import Config, parse_bytes
from raycache.deployment.memory_use import MemoryUse, human_bytes
from raycache.errors import ConfigError
from raycache.memory.component import FULL, CacheFormat, Component, Reuse, window_pages
from raycache.memory.device import unit_bytes
from raycache.models.base import ModelConfig, components, read_config
from raycache.models.drafts.loading import read_models
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Coords, Split

_MOST_PAGES = 2**31 - 1
_TOKENS_PER_POINT = 1024
_CPU_SHARE = 0.2
_CUDA_SHARE = 0.9
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(config: Config, *, device_type: str) -> torch.dtype:
    """Of weights and cache. Without a wish: the checkpoint's on cuda, float32 on cpu, which has no fast half types.

    Raises:
        ConfigError: the checkpoint's type is not one of ours.
    """
    name = config.dtype
    if name == "auto":
        name = read_config(Path(config.model)).dtype if device_type == "cuda" else "float32"
    if name not in _DTYPES:
        raise ConfigError(
            f"dtype {name!r} of {config.model} is not supported; use --dtype with one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def served_model(config: Config) -> ModelConfig:
    """The model to serve, with the one that guesses for it.

    Raises:
        CheckpointError: a directory is none, or holds what is not supported.
        ConfigError: the one cannot guess for the other.
    """
    return read_models(Path(config.model), config.draft if config.has_draft_model else "none")


def usable_cpus() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def step_tokens(config: Config, *, device_type: str) -> int:
    """Token budget of a step."""
    if config.max_step_tokens == "auto":
        return 8192 if device_type == "cuda" else 512
    return config.max_step_tokens


def cache_format(config: Config, *, dtype: torch.dtype) -> CacheFormat:
    """How rows are stored.

    Args:
        config: of the service.
        dtype: of the activations.
    """
    return CacheFormat(str(dtype).removeprefix("torch."), has_fp8_latent=config.kv_dtype == "fp8")


def pool_sizes(config: Config, model: ModelConfig, *, num_pages: int, fmt: CacheFormat) -> dict[str, int]:
    """Pages or slots of every component space, so that every running request finds what it needs.

    A running request holds two states (the one that it goes on from, and the one at the last page boundary), one more
    per drafted token, and the window's pages twice over (those before a row, and those after it). Restore points share
    the rest. Their number
    grows with the pages of the sequence, by no more than that they take as much memory.

    Args:
        config: of the service.
        model: to serve.
        num_pages: of the sequence.
        fmt: of the rows.
    """
    parts = components(model, fmt)
    num_layers, page_size = model.num_layers, config.page_size

    def whole_bytes(part: Component) -> int:
        return unit_bytes(part, num_layers=num_layers, page_size=page_size, split=Split(), at=Coords(0, 0, 0))

    windows = {part.space: window_pages(part.window, config.page_size) for part in parts}
    token_bytes = sum(whole_bytes(part) for part in parts if part.space == FULL) / page_size
    point_bytes = sum(whole_bytes(part) * max(1, windows[part.space]) for part in parts if part.space != FULL)
    tokens_per_point = max(_TOKENS_PER_POINT, point_bytes / max(token_bytes, 1))
    points = config.restore_points
    if points == "auto":
        points = 1 + int(num_pages * config.page_size / tokens_per_point)
    if not config.prefix_cache:
        points = 0
    sizes = {FULL: num_pages}
    for part in parts:
        if part.reuse is Reuse.STATE_HERE:
            sizes[part.space] = (2 + config.most_drafts) * config.max_running + points
        if part.reuse is Reuse.LAST_WINDOW:
            sizes[part.space] = (2 * config.max_running + points) * windows[part.space]
    return sizes


def pages_that_fit(
    config: Config,
    model: ModelConfig,
    *,
    ctx: ParallelContext,
    dtype: torch.dtype,
    ranks_on_node: int,
    use: MemoryUse | None = None,
) -> int:
    """Pages of the sequence that a rank can hold beside its weights, with what else its components need.

    Args:
        config: num_pages wins over kv_memory; "auto" takes what is left, or a share of what is free, but not more than
            a full batch of the longest sequences needs.
        model: to serve.
        ctx: of the rank.
        dtype: of the activations.
        ranks_on_node: among which a node's memory is divided (cpu only).
        use: of a GPU on which the weights are and the largest step was tried; None where nothing was measured.
    Raises:
        ConfigError: it holds no page, or what is wanted is more than what is left.
    """
    fmt = cache_format(config, dtype=dtype)
    most = _MOST_PAGES
    if config.num_pages != "auto":
        memory, pages = pool_bytes(config, model, num_pages=config.num_pages, fmt=fmt, ctx=ctx), config.num_pages
    else:
        if config.kv_memory != "auto":
            memory = parse_bytes("kv_memory", config.kv_memory)
        else:
            memory = auto_bytes(ctx.device, ranks_on_node) if use is None else max(use.left, 0)
            most = config.max_running * -(-context_len(config, model) // config.page_size)
        pages = min(pages_within(config, model, ctx=ctx, dtype=dtype, memory=memory), most)
    if pages < 1:
        raise ConfigError(_why_no_page(config, model, fmt=fmt, ctx=ctx, memory=memory, use=use))
    if use is not None and memory > use.most:
        raise ConfigError(_why_too_much(config, rank=ctx.rank, memory=memory, use=use))
    return pages


def _why_too_much(config: Config, *, rank: int, memory: int, use: MemoryUse) -> str:
    wish = f"num_pages={config.num_pages}" if config.num_pages != "auto" else f"kv_memory={config.kv_memory}"
    left = f"{human_bytes(use.left)} are left" if use.left > 0 else "nothing is left"
    return (
        f"{wish} takes {human_bytes(memory)} of {use.device} of rank {rank}, {left}, {use}; use a smaller "
        f"{wish.split('=')[0]}, max_step_tokens or max_model_len, or more ranks"
    )


def _why_no_page(
    config: Config, model: ModelConfig, *, fmt: CacheFormat, ctx: ParallelContext, memory: int, use: MemoryUse | None
) -> str:
    def least(max_running: int) -> int:
        return pool_bytes(replace(config, max_running=max_running), model, num_pages=1, fmt=fmt, ctx=ctx)

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


def pages_within(config: Config, model: ModelConfig, *, ctx: ParallelContext, dtype: torch.dtype, memory: int) -> int:
    """Pages of the sequence for which `memory` bytes of a rank suffice; 0 if not even for one."""
    fmt = cache_format(config, dtype=dtype)

    def is_too_much(num_pages: int) -> bool:
        return pool_bytes(config, model, num_pages=num_pages, fmt=fmt, ctx=ctx) > memory

    return bisect.bisect_left(range(_MOST_PAGES), True, lo=1, key=is_too_much) - 1


def pool_bytes(config: Config, model: ModelConfig, *, num_pages: int, fmt: CacheFormat, ctx: ParallelContext) -> int:
    """Bytes of a rank's whole pool with so many pages of the sequence."""
    sizes = pool_sizes(config, model, num_pages=num_pages, fmt=fmt)
    return sum(
        (sizes[part.space] + num_spare_states(config, part))
        * unit_bytes(part, num_layers=model.num_layers, page_size=config.page_size, split=ctx.split, at=ctx.coords)
        for part in components(model, fmt)
    )


def num_spare_states(config: Config, part: Component) -> int:
    """Slots of states that a draft passes through while it guesses: one per running request."""
    return config.max_running if part.is_draft and part.reuse is Reuse.STATE_HERE else 0


def context_len(config: Config, model: ModelConfig) -> int:
    """Most tokens of prompt and output together, as far as the model and the setting go.

    Raises:
        ConfigError: the setting is above what the model was made for.
    """
    if config.max_model_len == "auto":
        return model.max_position_embeddings
    if config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is above the model's {model.max_position_embeddings} positions; "
            "use a smaller one, or a model with rope scaling in its config.json"
        )
    return config.max_model_len


def auto_bytes(device: torch.device, ranks_on_node: int) -> int:
    """What "auto" takes of a rank's memory that is free now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    return int(psutil.virtual_memory().available * _CPU_SHARE / ranks_on_node)
